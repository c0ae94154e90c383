"""The plan directory: a program as files that can be read, compared and carried.

    plan/manifest.json       versions, the model, the proof, the SHA-256 of every file
    plan/plan.json           the decisions: readable, and editable for `--plan`
    plan/program.json        what follows from them: stages, parameters, schedule
    plan/modules/<key>.py    what the ranks run, each distinct text once
    plan/compiled            code that Inductor made of the modules, for one machine and
                             version: see autopar.runtime.execute.inductor
    plan/estimate.json       of a plan that `autopar plan` made: see
                             autopar.planner.planned

Nothing is pickled, and no text is taken for code before its checksum was compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.machine.cluster_file import cluster_data, cluster_from
from autopar.passes.decode import decode, parse_json
from autopar.passes.errors import AutoparError
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.passes.proof_record import Proof
from autopar.passes.read_program import read_program
from autopar.plans.plan_record import ESTIMATE, PlanRecord
from autopar.read_file import read_text
from autopar.terminal import command
from autopar.version import VERSION

FORMAT = 2  # another one where program.json has other keys
COMPILED = "compiled"
AGAIN = "compile it again"
MANIFEST, PLAN, PROGRAM = "manifest.json", "plan.json", "program.json"
LISTED = (PLAN, PROGRAM, ESTIMATE)
MODULE = re.compile(r"modules/([0-9a-f]+)\.py")


class PlanDirectoryError(AutoparError):
    """A plan directory that is not one, is damaged, was altered, or is of another
    version."""


@dataclass(frozen=True)
class Manifest:
    """manifest.json: of which versions and model a plan is, its proof, and the checksum
    of each file. cluster: of `StoredPlan`, as a cluster file."""

    format: int
    autopar: str
    torch: str
    model: str
    seed: int
    proof: Proof | None
    files: Mapping[str, str]
    cluster: dict[str, Any] | None = None


@dataclass(frozen=True)
class StoredPlan:
    """A program and what it was compiled from.

    model_spec: as `load_model` reads it. seed: of the model's weights and dropout.
    warnings: lines that the user should see. cluster: by whose prices stages were cut;
    None: this machine's.
    """

    program: Program
    model_spec: str
    seed: int
    directory: Path
    warnings: tuple[str, ...] = ()
    cluster: Cluster | None = None


def save_plan(
    program: Program,
    directory: str | Path,
    model_spec: str,
    seed: int = 0,
    record: PlanRecord | None = None,
    cluster: Cluster | None = None,
) -> Path:
    """Write the directory, all of it or nothing; a plan that is there is replaced.

    record: of the search that made the plan, if one did. cluster: see `StoredPlan`.
    Returns the directory's real path. Raises PlanDirectoryError when something that is
    no plan is in the way.
    """
    target = Path(directory).resolve()
    refuse_to_replace(target)
    files = {PLAN: program.plan.to_json(), PROGRAM: program.to_json()}
    files |= {f"modules/{key}.py": text for key, text in program.modules.items()}
    if record is not None:
        # Compiling adds the cuts to the plan, and may write it another way.
        record = replace(record, plan=checksum(files[PLAN]))
        files[ESTIMATE] = record.to_json()
    manifest = Manifest(
        FORMAT,
        VERSION,
        torch.__version__,
        model_spec,
        seed,
        program.proof,
        {name: checksum(text) for name, text in sorted(files.items())},
        cluster_data(cluster) if cluster else None,
    )
    files[MANIFEST] = json.dumps(asdict(manifest), indent=2) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        (scratch / "modules").mkdir(parents=True)
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8", newline="\n")
        _replace(target, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def load_plan(directory: str | Path) -> StoredPlan:
    """Read a plan directory. Raises PlanDirectoryError; nothing of it has run then."""
    folder = Path(directory)
    manifest = _decode_manifest(folder, _read_manifest(folder))
    texts = {
        name: _read_checked(folder, name, wanted)
        for name, wanted in manifest.files.items()
    }
    modules = {
        match[1]: text
        for name, text in texts.items()
        if (match := MODULE.fullmatch(name))
    }
    program = read_program(texts[PROGRAM], Plan.from_json(texts[PLAN]), modules)
    program = replace(program, proof=manifest.proof)
    for stage in program.stages:
        for key in stage.modules.values():
            if key not in modules:
                raise _damaged(folder, f"modules/{key}.py is missing")
    return StoredPlan(
        program,
        manifest.model,
        manifest.seed,
        folder,
        tuple(_torch_warning(folder, manifest.torch)),
        cluster_from(manifest.cluster) if manifest.cluster else None,
    )


def checksum(text: str) -> str:
    """Returns the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


# --- writing ---------------------------------------------------------------------


def refuse_to_replace(target: Path) -> None:
    """Raises PlanDirectoryError unless it is free, or holds a plan."""
    if not target.exists():
        return
    ours = any((target / name).is_file() for name in (MANIFEST, ESTIMATE))
    if target.is_dir() and (ours or not any(target.iterdir())):
        return
    raise PlanDirectoryError(
        f"'{target}' exists and is not a plan directory",
        fix="give a name with -o that is free, or move it away",
    )


def _replace(target: Path, new: Path) -> None:
    """Put `new` in the place of `target`; a failure leaves the old one there."""
    if not target.exists():
        new.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    if (old / COMPILED).is_dir():  # functions that are the same again find theirs
        (old / COMPILED).rename(target / COMPILED)
    shutil.rmtree(old)


# --- reading ---------------------------------------------------------------------


def _read_manifest(folder: Path) -> Mapping[str, Any]:
    if folder.is_file():
        raise PlanDirectoryError(
            f"'{folder}' is a file, not a plan directory",
            fix=f"give the directory that it is in: {folder.parent}",
        )
    if not folder.is_dir():
        raise PlanDirectoryError(
            f"there is no plan directory '{folder}'",
            fix=f"make it by: autopar compile MODEL --mesh ... -o {command(folder)}",
        )
    path = folder / MANIFEST
    if not path.is_file() and (folder / ESTIMATE).is_file():
        raise PlanDirectoryError(
            f"'{folder}' is planned, but not compiled",
            fix=f"compile it: {_compile('MODEL', folder, folder)}",
        )
    if not path.is_file():
        raise PlanDirectoryError(
            f"'{folder}' is not a plan directory, or damaged: it has no {MANIFEST}",
            fix="give the directory that `autopar compile -o` wrote",
        )
    text = read_text(path, PlanDirectoryError, AGAIN)
    where = f"plan '{folder}' is damaged: {MANIFEST}"
    manifest = parse_json(text, where, PlanDirectoryError, AGAIN)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(folder, f"{MANIFEST} is not that of a plan")
    return manifest


def _decode_manifest(folder: Path, manifest: Mapping[str, Any]) -> Manifest:
    """Raises for another format or version, then for what this format must have."""
    model = manifest.get("model", "MODEL")
    again = f"compile it again: {_compile(model, folder / PLAN, folder)}"
    if manifest["format"] != FORMAT:
        raise PlanDirectoryError(
            f"plan '{folder}' is of format {manifest['format']}, but this autopar "
            f"reads format {FORMAT}",
            fix=again,
        )
    if manifest.get("autopar") != VERSION:
        raise PlanDirectoryError(
            f"plan '{folder}' was compiled by autopar {manifest.get('autopar')}, "
            f"but this is {VERSION}",
            fix=again,
        )
    where = f"{MANIFEST} of the damaged plan '{folder}'"
    decoded: Manifest = decode(Manifest, manifest, where, PlanDirectoryError, AGAIN)
    for name in (PLAN, PROGRAM):
        if name not in decoded.files:
            raise _damaged(folder, f"{MANIFEST} does not list {name}")
    for name in decoded.files:
        if name not in LISTED and not MODULE.fullmatch(name):
            raise _damaged(folder, f"{MANIFEST} lists '{name}', which no plan has")
    return decoded


def _read_checked(folder: Path, name: str, wanted: str) -> str:
    """The text of a file, if its digest is the one that was written."""
    path = folder / name
    if not path.is_file():
        raise _damaged(folder, f"{name} is missing")
    text = read_text(path, PlanDirectoryError, AGAIN)
    if checksum(text) == wanted:
        return text
    if name == PLAN:
        raise PlanDirectoryError(
            f"{path} was changed after it was compiled",
            fix=f"compile the edited decisions: {_compile('MODEL', path, folder)}",
        )
    raise PlanDirectoryError(
        f"{path} was changed after it was compiled",
        fix=f"compile it again: {_compile('MODEL', folder / PLAN, folder)}",
    )


def _compile(model: object, plan: Path, folder: Path) -> str:
    return command("autopar", "compile", model, "--plan", plan, "-o", folder)


def _torch_warning(folder: Path, compiled_with: str) -> list[str]:
    if compiled_with == torch.__version__:
        return []
    return [
        f"plan '{folder}' was compiled with torch {compiled_with}, and this is "
        f"{torch.__version__}: prove it by `{command('autopar', 'verify', folder)}`"
    ]


def _damaged(folder: Path, problem: str) -> PlanDirectoryError:
    return PlanDirectoryError(f"plan '{folder}' is damaged: {problem}", fix=AGAIN)
