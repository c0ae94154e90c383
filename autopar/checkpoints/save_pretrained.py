"""Writing folders as Hugging Face's `from_pretrained` reads them.

No rank holds the model: one tensor is whole at a time, which rank 0 adds to a file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.pretrained import INDEX, WEIGHTS, need_safetensors
from autopar.checkpoints.safetensors_file import (
    TensorKind,
    append,
    begin_file,
    split_files,
)
from autopar.checkpoints.state import kinds_of, tied_names, whole_tensors
from autopar.runtime.agreement.fail_together import on_first

if TYPE_CHECKING:
    from autopar.held_state import HeldState


def save_pretrained(
    step: HeldState,
    folder: str | Path,
    tokenizer: Any = None,
    shard_bytes: int = 50 * 10**9,
) -> Path:
    """Write a folder of safetensors; see `HeldState.save_pretrained`."""
    need_safetensors()
    final, comm = Path(folder), step.comm
    tied = tied_names(step)
    kinds = {name: kind for name, kind in kinds_of(step).items() if name not in tied}
    if any(".base_layer." in name for name in kinds):
        raise CheckpointError(
            "the model has adapters of peft, whose names from_pretrained does not know",
            fix="state = step.state_dict(rank0_only=True) on all ranks, and on rank 0 "
            "model.load_state_dict(state) and model.save_pretrained(folder), by peft",
        )
    files = _named(split_files(kinds, shard_bytes))

    def begin() -> TemporaryDirectory[str]:
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointError(
                f"'{final}' is there already", fix="give a folder that is empty or new"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent)

    def publish(here: Path) -> None:
        if len(files) > 1:
            (here / INDEX).write_text(_index(files))
        for one in (*step.configs, *([] if tokenizer is None else [tokenizer])):
            one.save_pretrained(here)
        final.mkdir(exist_ok=True)
        for file in sorted(here.iterdir(), key=lambda f: f.name == INDEX):
            file.replace(final / file.name)

    scratch: list[TemporaryDirectory[str]] = []
    on_first(comm, lambda: scratch.append(begin()))
    here = Path(scratch[0].name) if scratch else final
    try:
        for file, own in files.items():
            _write(step, here / file, own)
        on_first(comm, lambda: publish(here))
    finally:
        for one in scratch:
            one.cleanup()
    return final


def _write(step: HeldState, path: Path, kinds: Mapping[str, TensorKind]) -> None:
    """All ranks give what they have of a file's tensors, which rank 0 writes."""
    on_first(step.comm, lambda: begin_file(path, kinds))
    for _, whole in whole_tensors(step, kinds, rank0_only=True):
        on_first(step.comm, partial(append, path, whole))
        del whole  # before the next one is there


def _named(
    files: Sequence[Mapping[str, TensorKind]],
) -> dict[str, Mapping[str, TensorKind]]:
    """Files by the names that from_pretrained looks for."""
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {
        f"model-{i:05}-of-{len(files):05}.safetensors": own
        for i, own in enumerate(files, 1)
    }


def _index(files: Mapping[str, Mapping[str, TensorKind]]) -> str:
    """The index of the files as JSON: the file of each tensor."""
    total = sum(kind.bytes for own in files.values() for kind in own.values())
    table = {name: file for file, own in files.items() for name in own}
    index = {"metadata": {"total_size": total}, "weight_map": table}
    return json.dumps(index, indent=2) + "\n"


def configs_of(model: nn.Module) -> tuple[Any, ...]:
    """The configurations of a Hugging Face model; none of other models."""
    configs = []
    for name in ("config", "generation_config"):
        own: Any = getattr(model, name, None)
        if callable(getattr(own, "save_pretrained", None)):
            config = copy.deepcopy(own)
            if name == "config":
                config.architectures = [type(model).__name__]
            configs.append(config)
    return tuple(configs)
