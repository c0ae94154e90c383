"""Opening a checkpoint: files are compared with their checksums, then looked into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.checkpoint_files import Manifest
from autopar.checkpoints.dcp import Key, Store, read_metadata
from autopar.checkpoints.memory import Memory
from autopar.checkpoints.optimizer_state import Group, made_with
from autopar.runtime.agreement.fail_together import on_all, on_first
from autopar.runtime.comm.comm import Comm

METADATA = ".metadata"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. store: where its values are. held: by key, what DCP knows
    of the value: a tensor's size and dtype, or nothing."""

    folder: Path
    store: Store
    manifest: Manifest
    held: Mapping[Key, Any]


def open_checkpoint(directory: str | Path, comm: Comm) -> Saved:
    """Find a checkpoint and compare its files with their checksums, each on one rank.

    All ranks must call it. Raises: CheckpointError on all ranks.
    """

    def read_first() -> tuple[Path, Manifest]:
        folder = files.find(directory)
        return folder, files.read_manifest(folder)

    folder, manifest = on_first(comm, read_first)
    mine = sorted(manifest.files)[comm.rank :: comm.mesh.size]
    on_all(comm, lambda: files.check_files(folder, manifest, mine))
    held: dict[Key, Any] = {}
    on_all(comm, lambda: held.update(held_by(folder)))
    return Saved(folder, folder, manifest, held)


def of_memory(memory: Memory, optimizer: Optimizer) -> Saved:
    """The state in memory that an optimizer like this one saved."""
    manifest = Manifest("", "", 0, "", {}, {}, made_with(optimizer))
    keyed = _keyed(read_metadata(memory))
    return Saved(Path("memory"), memory, manifest, keyed)


def _keyed(metadata: Metadata) -> dict[Key, Any]:
    keys = metadata.planner_data
    entries = metadata.state_dict_metadata.items()
    return {tuple(keys[name]): value for name, value in entries}


def held_by(folder: Path) -> dict[Key, Any]:
    """DCP's metadata of each value of a checkpoint, by key; see `Saved.held`.

    Raises: CheckpointError.
    """
    try:
        held = _keyed(read_metadata(folder))
        tensors = all(hasattr(v, "size") for k, v in held.items() if k[0] == "model")
    except Exception as error:  # a pickle can raise anything
        why = f"{type(error).__name__}: {error}"
        raise files.damaged(folder, f"{METADATA} cannot be read: {why}") from error
    if not tensors:
        raise files.damaged(folder, "what it has of the model is no tensor")
    return held


def saved_groups(folder: Path, plain: Mapping[Key, Any]) -> list[Group]:
    """Returns the optimizer's parameter groups in order: names and options of each.
    Raises CheckpointError if one lists no parameters."""
    options: dict[int, dict[str, Any]] = {}
    for key, value in plain.items():
        if key[0] == "optimizer":
            options.setdefault(int(key[2]), {})[str(key[3])] = value
    if not all(isinstance(group.get("params"), list) for group in options.values()):
        raise files.damaged(folder, "its optimizer has groups of no parameters")
    return [
        Group(tuple(group.pop("params")), group) for _, group in sorted(options.items())
    ]
