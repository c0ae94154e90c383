"""Plan directories: what is written is read back, and what was touched is refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from plans import small_program

import autopar
from autopar.plans.store import PlanDirectoryError, load_plan, save_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return save_plan(small_program(), tmp_path / "plan", "gpt.py:tiny", seed=7)


def change_manifest(plan: Path, **values: object) -> None:
    path = plan / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_what_is_saved_is_loaded(plan: Path) -> None:
    stored = load_plan(plan)
    assert stored.program == small_program()
    assert (stored.model_spec, stored.seed) == ("gpt.py:tiny", 7)
    assert stored.warnings == ()


def test_each_distinct_module_is_one_file(plan: Path) -> None:
    names = {path.stem for path in (plan / "modules").iterdir()}
    assert names == set(small_program().modules)
    used = {k for s in small_program().stages for k in s.modules.values()}
    assert names == used and len(names) < small_program().mesh.size


@pytest.mark.slow
def test_a_plan_is_replaced_as_a_whole(plan: Path) -> None:
    (plan / "modules" / "abc.py").write_text("left over")
    save_plan(small_program("dp=2", 1), plan, "other.py:f")
    assert load_plan(plan).program == small_program("dp=2", 1)
    assert not (plan / "modules" / "abc.py").exists()
    assert [path.name for path in plan.parent.iterdir()] == ["plan"]


def test_a_failed_write_leaves_the_old_plan(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(OSError, match="no space"):
        save_plan(small_program("dp=2", 1), plan, "other.py:f")
    assert load_plan(plan).program == small_program()
    assert [path.name for path in plan.parent.iterdir()] == ["plan"]


def test_other_directories_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PlanDirectoryError, match="is not a plan directory"):
        save_plan(small_program(), tmp_path, "gpt.py:tiny")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("touched", "says"),
    [
        ("modules", "was changed after it was compiled\n  fix  compile it again"),
        ("plan.json", "was changed after it was compiled\n  fix  compile the edited"),
        ("program.json", "was changed after it was compiled\n  fix  compile it again"),
    ],
)
def test_what_was_changed_is_refused(plan: Path, touched: str, says: str) -> None:
    path = plan / touched
    path = next(path.iterdir()) if path.is_dir() else path
    path.write_text(path.read_text() + "\n")
    with pytest.raises(PlanDirectoryError, match=re.escape(path.name)) as caught:
        load_plan(plan)
    assert says in str(caught.value)


def test_a_changed_module_does_not_run(plan: Path, tmp_path: Path) -> None:
    module = next((plan / "modules").iterdir())
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + module.read_text())
    with pytest.raises(PlanDirectoryError):
        load_plan(plan)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("missing", ["plan.json", "program.json", "modules"])
def test_a_missing_file_is_damage(plan: Path, missing: str) -> None:
    path = plan / missing
    path = next(path.iterdir()) if path.is_dir() else path
    path.unlink()
    with pytest.raises(PlanDirectoryError, match=f"damaged: .*{path.name} is missing"):
        load_plan(plan)


def test_a_module_that_no_checksum_covers_is_not_used(plan: Path) -> None:
    files = json.loads((plan / "manifest.json").read_text())["files"]
    module = next(name for name in files if name.startswith("modules/"))
    change_manifest(plan, files={k: v for k, v in files.items() if k != module})
    with pytest.raises(PlanDirectoryError, match=f"damaged: {module} is missing"):
        load_plan(plan)


def test_a_manifest_reaches_no_other_file(plan: Path) -> None:
    (plan.parent / "outside.py").write_text("x = 1\n")
    files = json.loads((plan / "manifest.json").read_text())["files"]
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    change_manifest(plan, files={**files, "../outside.py": digest})
    with pytest.raises(PlanDirectoryError, match=r"lists '../outside.py'"):
        load_plan(plan)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", 99, "is of format 99"),
        ("autopar", "0.0.1", "was compiled by autopar 0.0.1"),
        ("files", {}, "does not list plan.json"),
        ("seed", "7", "'seed' in manifest.json"),
    ],
)
def test_other_manifests_are_refused(
    plan: Path, key: str, value: object, says: str
) -> None:
    change_manifest(plan, **{key: value})
    with pytest.raises(PlanDirectoryError, match=says):
        load_plan(plan)


def test_another_torch_is_a_warning(plan: Path) -> None:
    change_manifest(plan, torch="2.99.0")
    [warning] = load_plan(plan).warnings
    assert "2.99.0" in warning and torch.__version__ in warning


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_broken_manifest_is_damage(plan: Path, text: str) -> None:
    (plan / "manifest.json").write_text(text)
    with pytest.raises(PlanDirectoryError, match="damaged"):
        load_plan(plan)


def test_what_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(PlanDirectoryError, match="fix  make it by: autopar compile"):
        load_plan(tmp_path / "nothing")
    with pytest.raises(PlanDirectoryError, match=r"has no manifest.json"):
        load_plan(tmp_path)


def test_the_version_is_that_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{autopar.__version__}"' in text
