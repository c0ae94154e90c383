"""Tensors in what people nest: tuples, lists, mappings and dataclasses of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def named_tensors(result: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (dotted path, tensor), in order; "output" is the path of one alone."""
    if isinstance(result, Tensor):
        yield path or "output", result
        return
    if is_dataclass(result) and not isinstance(result, Mapping):
        items = [(f.name, getattr(result, f.name)) for f in fields(result)]
    elif isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", range(len(result)))
        items = list(zip(map(str, names), result, strict=True))
    else:
        return
    for name, x in items:
        yield from named_tensors(x, f"{path}.{name}" if path else str(name))


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested containers, in order."""
    return (x for _, x in named_tensors(tree))
