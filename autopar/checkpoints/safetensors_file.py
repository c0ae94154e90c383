"""A file of safetensors, written one tensor at a time.

Names, dtypes and places of all tensors come first in it, and are known before any value
is there: 8 bytes with the length of a header, the header in JSON, then values
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from autopar.checkpoints.dcp import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorKind:
    """The entry of a header for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorKind:
        return cls(tuple(x.shape), x.dtype)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(kinds: Mapping[str, TensorKind]) -> dict[str, TensorKind]:
    """The widest numbers first, so that each tensor is aligned."""
    names = sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize)
    return {name: kinds[name] for name in names}


def begin_file(path: Path, kinds: Mapping[str, TensorKind]) -> None:
    """Write the header of a new file, in whose order `append` then adds each tensor.

    Raises: OSError; CheckpointError for a dtype that such files do not have.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        if kind.dtype not in NAMES:
            raise CheckpointError(
                f"'{name}' is of {kind.dtype}, which safetensors does not have",
                fix="write a file of torch: torch.save(step.state_dict(), file)",
            )
        begin, end = end, end + kind.bytes
        row = {"shape": list(kind.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": NAMES[kind.dtype], **row}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def append(path: Path, x: Tensor) -> None:
    """Write the next tensor of a file, of any shape, on the CPU. Raises: OSError."""
    with path.open("ab") as file:
        file.write(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def split_files(
    kinds: Mapping[str, TensorKind], file_bytes: int
) -> list[dict[str, TensorKind]]:
    """The tensors of each file: at most `file_bytes`, or a single larger one."""
    files: list[dict[str, TensorKind]] = [{}]
    room = file_bytes
    for name, kind in in_file_order(kinds).items():
        if files[-1] and kind.bytes > room:
            files.append({})
            room = file_bytes
        files[-1][name] = kind
        room -= kind.bytes
    return files
