"""The folders of checkpoints: one appears whole or not at all, whenever a kill comes.

    runs/step-00000200            complete: a folder gets this name when all is on disk
    runs/step-00000300.partial    being written, or left by a killed save
    runs/step-00000200.old        replaced by another of that step; it counts if no
                                  step-00000200 is there, after a kill in between
    runs/step-00000100.deleted    being removed

Renames are atomic (POSIX), so a name that is there says which of these a folder is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.checkpoints.dcp import CheckpointError
from autopar.passes.decode import decode

FORMAT = 1
MANIFEST = "autopar.json"
STEP = re.compile(r"step-(\d{1,18})(\.old)?")
LEFT = re.compile(r"step-\d+\.(partial|deleted)")
CHUNK = 1 << 22  # bytes read in one go


@dataclass(frozen=True)
class Manifest:
    """step: how many were done. mesh: as text. aliases: of tied weights, to the name
    that is stored. files: name -> SHA-256. optimizer: its class, and the options that
    it was made with; empty if none was saved."""

    autopar: str
    torch: str
    step: int
    mesh: str
    aliases: Mapping[str, str]
    files: Mapping[str, str]
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, by number of steps, fewest first."""
    steps: dict[int, Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match:
            steps.setdefault(int(match[1]), path)  # `step-1` sorts before `step-1.old`
    return [steps[step] for step in sorted(steps)]


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the most steps in a directory; None if none is."""
    return next(reversed(complete(Path(directory))), None)


def is_checkpoint(directory: Path) -> bool:
    """Whether it is a checkpoint or has complete ones."""
    return (directory / MANIFEST).is_file() or bool(complete(directory))


def find(directory: str | Path) -> Path:
    """The checkpoint at this path, or the newest in it. Raises CheckpointError."""
    folder = Path(directory)
    newest = folder if (folder / MANIFEST).is_file() else latest(folder)
    if newest is None or LEFT.fullmatch(newest.name):
        raise CheckpointError(
            f"there is no complete checkpoint in '{folder}'",
            fix="give the directory that step.save or --save wrote to",
        )
    return newest


# --- writing -----------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """Remove what killed saves left; returns the folder to write to, not yet made."""
    directory.mkdir(parents=True, exist_ok=True)
    stay = set(complete(directory))
    for path in directory.iterdir():
        left = LEFT.fullmatch(path.name)
        if left or (STEP.fullmatch(path.name) and path not in stay):
            _remove(path)
    return directory / f"{_name(step)}.partial"


def publish(partial: Path) -> Path:
    """Give a folder, whose files are on disk, its name; returns its path then."""
    final = partial.with_suffix("")
    old = final.with_suffix(".old")
    _sync(partial)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    _sync(final.parent)
    if old.exists():
        _remove(old)
    return final


def prune(directory: Path, keep: int, saved: Path) -> None:
    """Remove all but the newest `keep` checkpoints and the one just saved."""
    for path in complete(directory)[:-keep]:
        if path != saved:
            _remove(path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a checkpoint's manifest and flushes it to disk: one that has it is
    complete."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _remove(path: Path) -> None:
    """Remove a folder; from the first moment on it is no checkpoint any more."""
    doomed = path
    if not path.name.endswith((".partial", ".deleted")):
        doomed = path.with_name(f"{path.name.removesuffix('.old')}.deleted")
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
    shutil.rmtree(doomed)


def _sync(folder: Path) -> None:
    """Put a folder's list of names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading -----------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if it is not there, damaged, or of another format."""
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise damaged(folder, f"{MANIFEST} cannot be read: it has no format")
    written = data.pop("format")
    if written != FORMAT:
        raise CheckpointError(
            f"checkpoint '{folder}' is of format {written}, but this autopar reads "
            f"format {FORMAT}",
            fix="read it with the autopar that wrote it, or a newer one",
        )
    try:
        manifest: Manifest = decode(Manifest, data, MANIFEST, CheckpointError)
    except CheckpointError as error:
        raise damaged(folder, f"{MANIFEST} cannot be read: {error.message}") from None
    for name in manifest.files:
        if Path(name).name != name:
            raise damaged(folder, f"{MANIFEST} lists '{name}', which is not of it")
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare files with their checksums. Raises CheckpointError for the first bad."""
    for name in names:
        try:
            now = checksum(folder / name)
        except OSError as error:
            raise damaged(folder, f"{name}: {error.strerror}") from error
        if now != manifest.files[name]:
            raise damaged(folder, f"{name} is not what was written")


def checksum(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def damaged(folder: Path, problem: str) -> CheckpointError:
    """The error about a damaged checkpoint; its fix names the newest complete one."""
    others = [p.name for p in complete(folder.parent) if p != folder]
    fix = f"load '{folder.parent / others[-1]}'" if others else "save it again"
    return CheckpointError(f"checkpoint '{folder}' is damaged: {problem}", fix=fix)
