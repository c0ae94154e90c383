"""Evaluates nodes on plain tensors in one process.

Ops of our own have kernels elsewhere; their formulas say what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..graph import Node, Value, map_values, resolve
from ..ops.op import OPS, op_of

Results = tuple[Tensor | None, ...]


def evaluate(
    node: Node, operands: Sequence[Tensor], start: int | None = None
) -> Results:
    """The results of a node on the given operands, one a tensor argument.

    start: for an op that must know it, at which global index its shard begins: of a
    table that is looked up in, or of the rows of causal attention.
    """
    remaining = iter(operands)
    node = node.substitute(lambda _: next(remaining))
    if start is not None:
        on_shard = op_of(node).on_shard
        assert on_shard is not None, f"{node.op} does not know where a shard begins"
        result: Any = on_shard(start, *node.args, **node.kwargs)
    else:
        result = function_of(node.op)(*node.args, **node.kwargs)
    if isinstance(result, Tensor):
        return (result,)
    return tuple(x if isinstance(x, Tensor) else None for x in result)


def function_of(op: str) -> Callable[..., Any]:
    """torch's operator, or the formula of an op of our own."""
    own = OPS.get(op)
    function: Callable[..., Any] = own.formula if own and own.formula else resolve(op)
    return function


def results_like(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Value | None, ...]:
    """What an op's results are like, of such arguments: values without a name, of the
    shapes and dtypes that come out where it runs on tensors without data."""
    unnamed = map_values(lambda v: Value("", v.shape, v.dtype), (args, {**kwargs}))
    return _results_like(op, *unnamed[0], **unnamed[1])


@lru_cache(maxsize=4096, typed=True)  # 1 and 1.0 may give other dtypes
def _results_like(op: str, *args: Any, **kwargs: Any) -> tuple[Value | None, ...]:
    with FakeTensorMode(), torch.no_grad():
        args, kwargs = map_values(
            lambda v: torch.empty(v.shape, dtype=v.dtype), (args, kwargs)
        )
        result = function_of(op)(*args, **kwargs)
    return tuple(
        Value("", tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None
        for x in (result if isinstance(result, tuple | list) else (result,))
    )
