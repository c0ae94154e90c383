"""A stored file with anything else in any place is refused with text, or is read.

Checksums are made anew, as by someone who edits a file and its manifest: they keep out
accidents, and what they let in is looked at all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plans import model_file, small_program

from autopar.cli import main
from autopar.plans.store import save_plan

DELETED = object()
ODD = [None, -1, 0, 1.5, 1e308, 10**30, "", "x", "\udcff", [], {}, True, [[1]], DELETED]
ODD += [float("nan"), {"a": 1}]
CASES = 40  # of each file; more of thousands for each number in SEEDS
SEEDS = [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan that is compiled, and one that is not."""
    made = tmp_path_factory.mktemp("files")
    spec = model_file(made)
    save_plan(small_program(), made / "compiled", spec)
    asked = ["--devices", "2xCPU", "--mesh", "pp=2", "--no-op-shardings"]
    assert main(["plan", spec, *asked, "-o", str(made / "planned")]) == 0
    return made


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the keys that lead to each value; of lists the first and last item."""
    yield at
    items = data.items() if isinstance(data, dict) else ()
    if isinstance(data, list):
        items = [(i, data[i]) for i in sorted({0, len(data) - 1}) if data]
    for key, value in items:
        yield from places(value, (*at, key))


def changed(text: str, at: tuple[Any, ...], value: Any) -> str:
    """The text of JSON with another value in one place."""
    top = {"top": json.loads(text)}
    within: Any = top
    for key in ("top", *at)[:-1]:
        within = within[key]
    if value is not DELETED:
        within[("top", *at)[-1]] = value
    elif at:
        del within[at[-1]]
    return json.dumps(top["top"])


@contextlib.contextmanager
def written(path: Path, text: str) -> Iterator[None]:
    """The file with this text and its checksum, for a while."""
    manifest = path.parent / "manifest.json"
    before = {p: p.read_text() for p in {path, manifest} if p.is_file()}
    path.write_text(text)
    if manifest in before and path != manifest:
        data = json.loads(before[manifest])
        data["files"][path.name] = hashlib.sha256(text.encode()).hexdigest()
        manifest.write_text(json.dumps(data))
    try:
        yield
    finally:
        for file, old in before.items():
            file.write_text(old)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("compiled/program.json", "inspect"),
        ("compiled/manifest.json", "inspect"),
        ("compiled/plan.json", "simulate"),
        ("planned/estimate.json", "explain"),
        ("planned/estimate.json", "simulate"),
    ],
)
def test_what_was_changed_is_refused_or_read(
    file: str, command: str, seed: int, folder: Path
) -> None:
    path, draw = folder / file, random.Random(seed)
    text = path.read_text()
    found = sorted(places(json.loads(text)), key=str)
    for _ in range(CASES):
        at, value = draw.choice(found), draw.choice(ODD)
        said, told = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8")
        with (
            written(path, changed(text, at, value)),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(told),
        ):
            try:
                status = main([command, str(path.parent)])
                told.flush()
            except Exception as error:
                raise AssertionError(f"{file}: {value!r} at {at}") from error
        assert status == 0 or said.getvalue().startswith("autopar: "), (at, value)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (
            ("stages", 0, "account"),
            DELETED,
            "in program.json has no 'account'",
        ),
        (("send",), 1.0, "unknown key 'send' in program.json"),
        (
            ("parameters",),
            {},
            "which is not described",
        ),
        (("schedule",), [], "does not read as"),
        (("loss_dtype",), "float33", "'float33' is no dtype"),
    ],
)
def test_what_a_program_lacks_is_named(at, value, says, folder, capsys) -> None:
    path = folder / "compiled" / "program.json"
    with written(path, changed(path.read_text(), at, value)):
        assert main(["inspect", str(path.parent)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopar: ") and says in error
