"""Tensors in what people nest: tuples, lists, mappings and dataclasses of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

# Most of what calls are made with: nothing to look into.
LEAVES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


def named_tensors(result: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (dotted path, tensor), in order; "output" is the path of one alone."""
    if isinstance(result, Tensor):
        yield path or "output", result
        return
    for name, x in zip(_names(result), _members(result), strict=True):
        yield from named_tensors(x, f"{path}.{name}" if path else str(name))


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested containers, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif type(tree) not in LEAVES:
        for x in _members(tree):
            if type(x) not in LEAVES:
                yield from tensors(x)


def _members(x: Any) -> Iterable[Any]:
    """The members of a container; none of what is no container."""
    if isinstance(x, tuple | list):
        return x
    if isinstance(x, Mapping):
        return x.values()
    return [getattr(x, name) for name in _names(x)]


def _names(x: Any) -> Iterable[Any]:
    if isinstance(x, tuple | list):
        return getattr(x, "_fields", range(len(x)))
    if isinstance(x, Mapping):
        return x.keys()
    is_record = is_dataclass(x) and not isinstance(x, type)
    return [f.name for f in fields(x)] if is_record else ()
