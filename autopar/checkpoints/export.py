"""A checkpoint as one plain file: for `torch.load`, or safetensors for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.dcp import CheckpointError, Key, Piece, State, read_alone
from autopar.checkpoints.open_checkpoint import held_by
from autopar.checkpoints.pretrained import need_safetensors
from autopar.checkpoints.safetensors_file import (
    TensorKind,
    append,
    begin_file,
    in_file_order,
)

SUFFIXES = (".pt", ".safetensors")


def export(
    directory: str | Path, output: Path, averages: bool = False
) -> tuple[Path, int]:
    """Write the model's tensors of a checkpoint, in its own names and dtypes.

    directory: a checkpoint, or a directory of which the newest is taken. A `.pt` file
    has tied weights under all their names; safetensors has them once, as Hugging Face
    saves them, and is written a tensor at a time; for the other the whole model has to
    fit in memory. Returns the checkpoint's path, and the number of tensors written.
    Raises: CheckpointError.
    """
    if output.suffix not in SUFFIXES:
        raise CheckpointError(
            f"unknown kind of file '{output}'",
            fix=f"let its name end in {' or '.join(SUFFIXES)}",
        )
    if output.suffix == ".safetensors":
        need_safetensors()
    folder = files.find(directory)
    manifest = files.read_manifest(folder)
    files.check_files(folder, manifest, manifest.files)
    stored = _stored(folder, manifest.aliases, averages)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent) as scratch:
            written = Path(scratch) / output.name
            _write(folder, stored, manifest.aliases, written)
            written.replace(output)
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{output}': {error.strerror or error}",
            fix="give a path that can be written, on a disk with room",
        ) from error
    return folder, len(stored)


def model_tensors(
    folder: Path, aliases: Mapping[str, str], averages: bool = False
) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores for the model, by name; tied ones once.

    averages: those of parameters in their place, in the parameters' dtypes.
    Raises: CheckpointError.
    """
    return _read(folder, _stored(folder, aliases, averages))


Stored = Mapping[str, tuple[Key, TensorKind, torch.dtype]]
"""Name -> where its values are in a checkpoint, and their kind there; the model's
dtype."""


def _stored(folder: Path, aliases: Mapping[str, str], averages: bool) -> Stored:
    """The part of a checkpoint that is of the model. Raises: CheckpointError."""
    held = held_by(folder)
    averaged = {str(key[1]) for key in held if key[0] == "ema"} if averages else set()
    if averages and not averaged:
        raise CheckpointError(
            f"checkpoint '{folder}' has no averages of the weights",
            fix="train with --ema 0.999, or leave the averages out",
        )
    stored = {}
    for key, saved in held.items():
        at = "ema" if key[1:] and key[1] in averaged else "model"
        if key[0] == at and key[1] not in aliases:
            kind = TensorKind(tuple(saved.size), saved.properties.dtype)
            name = str(key[1])
            stored[name] = key, kind, held["model", name].properties.dtype
    return stored


def _read(folder: Path, stored: Stored) -> dict[str, Tensor]:
    state: State = {
        key: [Piece.whole(torch.empty(kind.shape, dtype=kind.dtype))]
        for key, kind, _ in stored.values()
    }
    read_alone(folder, state)
    pieces = {name: state[key] for name, (key, _, _) in stored.items()}
    return {
        name: held[0].values.to(stored[name][2])
        for name, held in pieces.items()
        if isinstance(held, list)
    }


def _write(folder: Path, stored: Stored, aliases: Mapping[str, str], to: Path) -> None:
    if to.suffix == ".pt":
        tensors = _read(folder, stored)
        tied = {alias: tensors[name] for alias, name in aliases.items()}
        torch.save({**tensors, **tied}, to)
        return
    kinds = {n: TensorKind(kind.shape, own) for n, (_, kind, own) in stored.items()}
    kinds = in_file_order(kinds)
    begin_file(to, kinds)
    for name in kinds:
        append(to, _read(folder, {name: stored[name]})[name])
