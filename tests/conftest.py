"""Fixtures of the whole test suite."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import pytest
import torch

from autopar.passes.emit.emit import emit
from autopar.passes.pipeline import compile_program
from autopar.passes.shard import documents, layout
from autopar.passes.watch import check

CHILDREN = str(pathlib.Path(__file__).parent / "children")  # what they run first


def pytest_configure(config: pytest.Config) -> None:
    """No test reads what was measured for the user, nor adds to it; each verifies what
    passes make."""
    folder = tempfile.TemporaryDirectory(prefix="autopar-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    os.environ["AUTOPAR_CHECK"] = "1"
    os.environ |= {"COLUMNS": "99", "NO_COLOR": "1"}  # as where there is no terminal
    paths = [CHILDREN, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    config.add_cleanup(folder.cleanup)
    gc.set_threshold(100_000, 50, 100)  # to look for cycles took a tenth of the time
    sys.dont_write_bytecode = False  # or each worker writes asserts of all tests anew
    # Threads that wait for a core spin: with two a worker all took twice as long.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    *others, _ = compile_program.__defaults__ or (None,)
    compile_program.__defaults__ = (*others, check)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite what goldens hold"
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.default_generator.manual_seed(0)  # torch's notes a stack for devices to come
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emitted texts have a statement a node, which is easier to count."""
    flat = functools.partial(emit, outlined=False)
    monkeypatch.setattr("autopar.passes.emit_modules.emit", flat)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention has several tiles of rows in little models."""
    monkeypatch.setattr(layout, "LEAST_ROWS", 4)
    monkeypatch.setattr(documents, "FEW", 4)
    layout.window_tiles.cache_clear()
    yield
    layout.window_tiles.cache_clear()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands fork their ranks from a server that has imported torch, in place of
    starting a torchrun, for which see `test_launch` and `test_run_model`."""
    from processes import run_commands  # whose environment `pytest_configure` makes

    def launch_by(
        flags: Sequence[str],
        command: Sequence[str],
        seconds: float | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> int:
        ranks = int(flags[flags.index("--nproc-per-node") + 1])
        ended = run_commands(ranks, command, {**os.environ, **environment})
        for _, out, errors in ended:
            print(out, end="")
            print(errors, end="", file=sys.stderr)
        return max(status for status, *_ in ended)

    monkeypatch.setattr("autopar.runtime.launch.launch.launch_by", launch_by)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): the text is that of `golden/<name>.txt`, line by line."""

    def compare(name: str, text: str) -> None:
        path = pathlib.Path(__file__).parent / "golden" / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text.splitlines() == path.read_text().splitlines(), (
            f"{path.name} differs; if the new text is right: pytest --update-golden"
        )

    return compare


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """`@pytest.mark.matrix(quick=4, daily=20)`: of a test's many cases so many, spread
    evenly over them, are quick; so many, all if it is not given, are not nightly.
    `@pytest.mark.nightly` runs if `-m` names it."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("matrix")
        assert marker is not None
        daily = _spread(of_test, marker.kwargs.get("daily", len(of_test)))
        quick = _spread(daily, marker.kwargs["quick"])
        for item in of_test:
            if item not in quick:
                item.add_marker(pytest.mark.slow)
            if item not in daily:
                item.add_marker(pytest.mark.nightly)
    if "nightly" not in config.option.markexpr:
        left = {item for item in items if item.get_closest_marker("nightly")}
        if left:
            config.hook.pytest_deselected(items=[*left])
            items[:] = [item for item in items if item not in left]


def _spread(items: list[pytest.Item], n: int) -> list[pytest.Item]:
    """n of the items, evenly; the first and the last among them."""
    last = len(items) - 1
    return [
        items[i] for i in sorted({round(k * last / max(1, n - 1)) for k in range(n)})
    ]
