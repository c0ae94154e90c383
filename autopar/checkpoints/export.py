"""A checkpoint as one plain file: for `torch.load`, or safetensors for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.dcp import CheckpointError, Piece, State, read_alone
from autopar.checkpoints.open_checkpoint import held_by

SUFFIXES = (".pt", ".safetensors")


def export(
    directory: str | Path, output: Path, averages: bool = False
) -> tuple[Path, int]:
    """Write the model's tensors of a checkpoint, in its own names and dtypes.

    directory: a checkpoint, or a directory of which the newest is taken. A `.pt` file
    has tied weights under all their names; safetensors has them once, as Hugging Face
    saves them. Returns the checkpoint's path, and the number of tensors written. The
    whole model has to fit in memory. Raises: CheckpointError.
    """
    if output.suffix not in SUFFIXES:
        raise CheckpointError(
            f"unknown kind of file '{output}'",
            fix=f"let its name end in {' or '.join(SUFFIXES)}",
        )
    if output.suffix == ".safetensors" and find_spec("safetensors") is None:
        raise CheckpointError(
            "safetensors is not installed", fix="pip install 'autopar[hf]'"
        )
    folder = files.find(directory)
    manifest = files.read_manifest(folder)
    files.check_files(folder, manifest, manifest.files)
    tensors = model_tensors(folder, manifest.aliases, averages)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent) as scratch:
            written = Path(scratch) / output.name
            _write(tensors, manifest.aliases, written)
            written.replace(output)
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{output}': {error.strerror or error}",
            fix="give a path that can be written, on a disk with room",
        ) from error
    return folder, len(tensors)


def model_tensors(
    folder: Path, aliases: Mapping[str, str], averages: bool = False
) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores for the model, by name; tied ones once.

    averages: those of parameters in their place, in the parameters' dtypes.
    Raises: CheckpointError.
    """
    held = held_by(folder)
    averaged = {str(key[1]) for key in held if key[0] == "ema"} if averages else set()
    if averages and not averaged:
        raise CheckpointError(
            f"checkpoint '{folder}' has no averages of the weights",
            fix="train with --ema 0.999, or leave the averages out",
        )
    state: State = {}
    for key, saved in held.items():
        at = "ema" if key[1:] and key[1] in averaged else "model"
        if key[0] == at and key[1] not in aliases:
            empty = torch.empty(saved.size, dtype=saved.properties.dtype)
            state[key] = [Piece.whole(empty)]
    read_alone(folder, state)
    return {
        str(k[1]): v[0].values.to(held["model", k[1]].properties.dtype)
        for k, v in state.items()
        if isinstance(v, list)
    }


def _write(tensors: dict[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    if path.suffix == ".pt":
        tied = {alias: tensors[name] for alias, name in aliases.items()}
        torch.save({**tensors, **tied}, path)
    else:
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"format": "pt"})
