"""Real numbers that a forward makes of those that it reads, as `total / (n.item() +
1e-8)`: of torch's expressions for them, tensors of float64 without dims."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from ...graph import Value

Emit = Callable[..., Value]  # of an op and its arguments


class UnknownNumber(Exception):
    """What an expression is made of has no tensor."""


def real_number(
    expression: Any, known: Callable[[Any], Value | None], emit: Emit
) -> Value | float:
    """The number of an expression. known: returns the tensor that has a number, None if
    there is none. emit: appends an op, whose result is of float64.
    Raises: UnknownNumber."""

    def real(part: Any) -> Value | float:
        return real_number(part, known, emit)

    def fold(op: str) -> Value | float:
        parts = [*map(real, expression.args)]  # torch puts numbers together itself
        parts.sort(key=lambda x: not isinstance(x, Value))
        return reduce(partial(emit, op), parts)

    if expression.is_number:
        return float(expression)
    match type(expression).__name__:
        case "ToFloat":
            return real(expression.args[0])
        case "Add":
            return fold("aten.add.Tensor")
        case "Mul":
            return fold("aten.mul.Tensor")
        case "FloatTrueDiv" | "IntTrueDiv":
            above, below = map(real, expression.args)
            if isinstance(above, Value):
                return emit("aten.div.Tensor", above, below)
            below = emit("aten.reciprocal.default", below)
            return emit("aten.mul.Tensor", below, above)
    if (x := known(expression)) is None:
        raise UnknownNumber
    is_real = x.dtype == torch.float64
    return x if is_real else emit("aten.to.dtype", x, torch.float64)
