"""A checkpoint's contents, as a table."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.open_checkpoint import held_by
from autopar.passes.program import dtype_name
from autopar.reports.tables import Table
from autopar.units import size


def checkpoint_data(directory: str | Path) -> dict[str, Any]:
    """Reads a checkpoint, or the newest in a directory. Raises CheckpointError.

    tensors: of the model, each with the optimizer's state of it. parts: boxes that it
    was written as.
    """
    folder = files.find(directory)
    manifest = files.read_manifest(folder)
    held = held_by(folder)
    state: dict[str, list[str]] = {}
    for key in held:
        if key[:2] == ("optimizer", "state"):
            state.setdefault(str(key[2]), []).append(str(key[3]))
    tensors = {
        str(key[1]): {
            "shape": list(saved.size),
            "dtype": dtype_name(saved.properties.dtype),
            "parts": len(saved.chunks),
            "optimizer": sorted(state.get(str(key[1]), ())),
        }
        for key, saved in sorted(held.items(), key=lambda item: str(item[0]))
        if key[0] == "model" and key[1] not in manifest.aliases
    }
    bytes_on_disk = {name: (folder / name).stat().st_size for name in manifest.files}
    return {
        "path": str(folder),
        "step": manifest.step,
        "mesh": manifest.mesh,
        "autopar": manifest.autopar,
        "torch": manifest.torch,
        "aliases": dict(manifest.aliases),
        "tensors": tensors,
        "bytes": bytes_on_disk,
    }


def checkpoint_table(directory: str | Path) -> Table:
    """One row for each tensor of the model. Raises CheckpointError."""
    data = checkpoint_data(directory)
    rows = tuple(
        (
            name,
            "x".join(map(str, stored["shape"])),
            stored["dtype"],
            stored["parts"],
            " ".join(stored["optimizer"]),
        )
        for name, stored in data["tensors"].items()
    )
    elements = sum(prod(stored["shape"]) for stored in data["tensors"].values())
    written = data["bytes"]
    return Table(
        f"{data['path']}: step {data['step']}, saved on mesh '{data['mesh']}' by "
        f"torch {data['torch']}",
        ("tensor", "shape", "dtype", "parts", "optimizer's state"),
        rows,
        (
            *(f"tied: {alias} is {name}" for alias, name in data["aliases"].items()),
            f"{elements} elements; {len(written)} files, {size(sum(written.values()))}",
        ),
    )
