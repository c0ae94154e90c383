"""Runs the untouched model again: in float64, and rounded otherwise.

Rounding and faults look alike in one run. But a fault stays where all is in float64,
and rounding is as large as the model's own results move when each op of it is rounded
otherwise (Monte Carlo arithmetic: Denis 2015, arXiv 1509.01347).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor, finfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.passes.ops.op import selects
from autopar.proof.chance import generator_of, uniform
from autopar.proof.differences import differences
from autopar.proof.in_double import grouped_mm, in_double, tree_in_double
from autopar.proof.ranks import StepResult

# Of roundings; more of them where fewer explain too little: a unit of ReLU that is 0
# but for rounding has a gradient or none, and some draws must have seen either.
DRAWS = (3, 8, 32)
LUCK = 4  # times more is allowed for a single number, as it may be near by luck


class ReferenceRuns:
    """Runs of one step. run: of the model, by an arithmetic; in double: given float64
    alone."""

    def __init__(self, run: Callable[[Arithmetic], StepResult]) -> None:
        self._run = run
        self._drawn: dict[bool, list[dict[str, float]]] = {False: [], True: []}

    @cached_property
    def exact(self) -> StepResult:
        """The model's results in float64."""
        with default_dtype(torch.float64):
            return self._run(Arithmetic(double=True))

    def scatter(self, double: bool, draws: int = DRAWS[0]) -> dict[str, float]:
        """The largest errors, by name, of the model's results rounded otherwise.

        They are relative to `exact`. double: in float64, else in its own precision.
        Raises ValueError where they are not finite: nothing is known then.
        """
        drawn = self._drawn[double]
        while len(drawn) < draws:
            dtype = torch.float64 if double else torch.get_default_dtype()
            with default_dtype(dtype):
                moved = self._run(Arithmetic(double, len(drawn)))
            errors = differences(moved, self.exact)
            if not all(map(isfinite, errors.values())):
                raise ValueError("rounded otherwise, the model gives no finite numbers")
            drawn.append(errors)
        return {
            name: self._luck(name) * max(one[name] for one in drawn)
            for name in drawn[0]
        }

    def _luck(self, name: str) -> float:
        known = self.exact.gradients
        return 1 + LUCK / (known[name].numel() if name in known else 1) ** 0.5


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, in which e.g. integers are divided."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Arithmetic(TorchDispatchMode):
    """Computes as asked for, below what a model sees of torch.

    double: in float64, whatever dtypes an op is given. draw: each op's results are
    moved by up to half a unit in the last place, at random; None: they are not. Those
    that were only selected stay: who compares the two finds them equal, as the
    derivative of a maximum does. So do integers, which mostly stand for what is exact:
    masks, positions.
    """

    def __init__(self, double: bool, draw: int | None = None) -> None:
        super().__init__()
        self.double = double
        self.generator = None if draw is None else generator_of(draw, "rounding")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operands, run = (args, kwargs or {}), func
        if self.double:
            if func is torch.ops.aten.lift_fresh.default:
                # A number in the model's source: programs have it as it was captured.
                x = args[0]
                return in_double(x.float() if x.dtype is torch.float64 else x)
            operands = tree_in_double(operands)
            if func is torch.ops.aten._grouped_mm.default:
                run = grouped_mm
        result = run(*operands[0], **operands[1])
        name = func.overloadpacket.__name__.removesuffix("_")
        if self.generator is None or func.is_view or selects(f"aten.{name}"):
            return result
        if func._schema.is_mutable:
            tree_map(lambda x: x.copy_(self._moved(x)) if _is_real(x) else x, result)
            return result
        return tree_map(lambda x: self._moved(x) if _is_real(x) else x, result)

    def _moved(self, x: Tensor) -> Tensor:
        assert self.generator is not None, "something is drawn"
        chance = uniform(tuple(x.shape), self.generator) - 0.5
        factors = 1.0 + finfo(x.dtype).eps * chance.to(x.device)
        moved = torch.where(x == x.round(), x.double(), x.double() * factors)
        return torch.empty_like(x).copy_(moved)  # of the same strides


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
