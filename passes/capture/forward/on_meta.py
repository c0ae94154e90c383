"""Running on tensors of the meta device, which have shapes and no numbers."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

META = torch.device("meta")
ATEN = torch.ops.aten
ROWS = 1_000_003  # stands for how many a mask chooses: nothing else has so many
INDEXED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


class Shapes(TorchDispatchMode):
    """Lets an op run once for operands of some shapes: of layers that are alike the
    first. Checks operands that the op itself does not: it would read beyond them. Of
    what a mask chooses there are `ROWS`."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[object, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func is ATEN.nonzero.default:
            return _made((ROWS, args[0].ndim), torch.int64)
        if func is ATEN.masked_select.default:
            return _made((ROWS,), args[0].dtype)
        if func in INDEXED:
            args = (args[0], _places(args[1]), *args[2:])
        writes = func._schema.is_mutable
        if func.is_view or (writes and not _is_in_place(func)):
            return func(*args, **keywords)
        key = func, _shape(args), _shape(tuple(keywords.items()))
        if key not in self.known:
            if func is torch.ops.aten.native_layer_norm_backward.default:
                _check_layer_norm(func, *args)
            self.known[key] = func(*args, **keywords)
        if writes:
            return args[0] if func._schema.returns else None
        made = self.known[key]
        return _like(made) if isinstance(made, Tensor) else tree_map(_like, made)


def _is_in_place(func: Any) -> bool:
    """Whether an op writes into its first operand, which keeps its shape."""
    name = func.overloadpacket.__name__
    return name.endswith("_") and name not in ("resize_", "set_")


def _shape(x: Any) -> object:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple(map(_shape, x)) if isinstance(x, list | tuple) else (type(x), x)


def counts_rows(x: Any) -> bool:
    """Whether x, told of a tensor in Python, is or holds a number of chosen rows."""
    if isinstance(x, tuple | list):
        return any(map(counts_rows, x))
    return type(x) is int and x > 0 and x % ROWS == 0


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replaces masks by the places of their elements in each dim."""
    every: list[Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        dims = index.ndim if mask and index is not None else 0
        every += [_made((ROWS,), torch.int64) for _ in range(dims)] or [index]
    return every


def _like(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


def _check_layer_norm(
    func: Any,
    dy: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *_: Any,
) -> None:
    """Raises RuntimeError."""
    inner = tuple(x.shape[x.ndim - len(shape) :])
    rows = x.numel() // max(1, prod(inner))
    if (
        (dy.shape, tuple(shape)) != (x.shape, inner)
        or (mean.numel(), rstd.numel()) != (rows, rows)
        or (weight is not None and tuple(weight.shape) != inner)
    ):
        raise RuntimeError(
            f"{func} takes {dy.shape} for {x.shape}, normalized over {shape}"
        )
