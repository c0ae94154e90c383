"""Writing folders as Hugging Face's `from_pretrained` reads them.

No rank holds the model: one file's tensors are whole at a time, on rank 0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.pretrained import INDEX, WEIGHTS, need_safetensors
from autopar.checkpoints.state import tied_names, whole_tensors
from autopar.runtime.agreement.fail_together import on_first

if TYPE_CHECKING:
    from autopar.held_state import HeldState


def save_pretrained(
    step: HeldState,
    folder: str | Path,
    tokenizer: Any = None,
    shard_bytes: int = 1 << 30,
) -> Path:
    """Write a folder of safetensors; see `HeldState.save_pretrained`."""
    need_safetensors()
    final, comm = Path(folder), step.comm

    def begin() -> TemporaryDirectory[str]:
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise CheckpointError(
                f"'{final}' is there already", fix="give a folder that is empty or new"
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent)

    scratch: list[TemporaryDirectory[str]] = []
    on_first(comm, lambda: scratch.append(begin()))
    try:
        files: dict[str, list[str]] = {}
        held: dict[str, Tensor] = {}
        sizes: dict[str, int] = {}

        def flush() -> None:
            name = f"part-{len(files)}"
            files[name] = list(held)
            on_first(comm, lambda: _write(held, Path(scratch[0].name) / name))
            held.clear()

        def publish(here: Path) -> None:
            _name(here, files, sum(sizes.values()))
            for one in (*step.configs, *([] if tokenizer is None else [tokenizer])):
                one.save_pretrained(here)
            final.mkdir(exist_ok=True)
            for file in sorted(here.iterdir(), key=lambda f: f.name == INDEX):
                file.replace(final / file.name)

        tied = tied_names(step)
        for name, whole in whole_tensors(step, rank0_only=True):
            if name in tied:
                continue
            sizes[name] = whole.nbytes
            if held and sum(sizes[n] for n in held) + whole.nbytes > shard_bytes:
                flush()
            held[name] = whole
        flush()
        on_first(comm, lambda: publish(Path(scratch[0].name)))
    finally:
        for one in scratch:
            one.cleanup()
    return final


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})


def _name(folder: Path, parts: Mapping[str, list[str]], total: int) -> None:
    """Name files as from_pretrained looks for them. parts: file -> tensors in it."""
    if len(parts) == 1:
        (folder / next(iter(parts))).rename(folder / WEIGHTS)
        return
    table: dict[str, str] = {}
    for i, (part, names) in enumerate(parts.items(), 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        (folder / part).rename(folder / file)
        table.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def configs_of(model: nn.Module) -> tuple[Any, ...]:
    """What Hugging Face's model keeps beside its weights; nothing for other models."""
    configs = []
    for name in ("config", "generation_config"):
        own: Any = getattr(model, name, None)
        if callable(getattr(own, "save_pretrained", None)):
            config = copy.deepcopy(own)
            if name == "config":
                config.architectures = [type(model).__name__]
            configs.append(config)
    return tuple(configs)
