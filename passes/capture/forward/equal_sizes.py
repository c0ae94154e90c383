"""Two numbers of rows that torch asks to be equal: `F.mse_loss(x[mask], y[mask])`.

Each is a number that is known only when a program runs, so torch cannot tell. They are
taken to be equal, as a call that goes on has them; and programs are refused where it is
not one mask that chooses the rows of both, see `passes.capture.rows.chosen_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a function of torch, called again for each two sizes of its tensors
    that it asks to be equal."""
    told: set[str] = set()
    while True:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            pair = _asked(error, (*args, *kwargs.values()))
            if pair is None or str(pair) in told:
                raise
        told.add(str(pair))
        torch._check(pair[0] == pair[1])


def _asked(error: RuntimeError, operands: Iterable[Any]) -> tuple[Any, Any] | None:
    """The two sizes of operands of which an error says that it must know if they are
    equal."""
    question: Any = getattr(error, "cond", None)  # of GuardOnDataDependentSymNode
    if getattr(question, "rel_op", "") not in ("==", "!="):
        return None
    tensors = [x for x in operands if isinstance(x, Tensor)]
    with torch._C.DisableTorchFunction():  # as `has_shape` does
        sizes = [n for x in tensors for n in x.shape if isinstance(n, torch.SymInt)]
    known = {n.node.expr: n for n in sizes}
    one, other = (known.get(side) for side in question.args)
    return None if one is None or other is None else (one, other)
