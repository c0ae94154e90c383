"""Fixtures of the whole test suite."""

from __future__ import annotations

import functools
import os
import pathlib
import random
import tempfile
from collections.abc import Callable

import pytest
import torch

from passes.pipeline import check, compile_program
from passes.stage.emit import emit


def pytest_configure(config: pytest.Config) -> None:
    """No test reads what was measured for the user, nor adds to it; each verifies what
    passes make."""
    folder = tempfile.TemporaryDirectory(prefix="autopar-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    os.environ["AUTOPAR_CHECK"] = "1"
    config.add_cleanup(folder.cleanup)
    compile_program.__defaults__ = (check,)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite what goldens hold"
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emitted texts have a statement a node, which is easier to count."""
    flat = functools.partial(emit, outlined=False)
    monkeypatch.setattr("passes.pipeline.emit", flat)


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
    """`@pytest.mark.matrix(quick=4)`: of a test's many cases that many, spread evenly
    over them, are quick; the others are slow. `@pytest.mark.nightly` runs if `-m` names
    it."""
    if "nightly" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("nightly")]
        if left:
            config.hook.pytest_deselected(items=left)
            known = set(left)
            items[:] = [item for item in items if item not in known]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("matrix")
        assert marker is not None
        quick = marker.kwargs["quick"]
        stay = {round(i * (len(found) - 1) / max(1, quick - 1)) for i in range(quick)}
        for i, item in enumerate(found):
            if i not in stay:
                item.add_marker(pytest.mark.slow)
