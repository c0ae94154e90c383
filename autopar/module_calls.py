"""Calls of a step as loops have them of their module: fields by place, and modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.validate import BatchError

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

PLACED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def fields_in_order(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what forward takes by its place."""
    takes = inspect.signature(forward).parameters.values()
    return tuple(one.name for one in takes if one.kind in PLACED)


def by_name(
    order: Sequence[str], positional: Sequence[Any], batch: Mapping[str, Any]
) -> dict[str, Any]:
    """A batch, with names for what was given by its place. Raises: BatchError."""
    twice = [name for name in order[: len(positional)] if name in batch]
    if len(positional) > len(order) or twice:
        raise BatchError(
            f"'{twice[0]}' is given by its place, and by its name"
            if twice
            else f"{len(positional)} fields of a batch are given by their places, but "
            f"forward takes {', '.join(order) or 'none so'}",
            fix="step(**batch), or step(ids=..., labels=...): what the loss function "
            "takes beside is given by its name",
        )
    return {**dict(zip(order, positional, strict=False)), **batch}


class ModuleCalls:
    """How a step is called, as a module is.

    training: whether it is in the mode of training: as the model was when it was
    compiled, until `train` or `eval` is called.
    """

    training = True
    _compiled_training = True
    _order: tuple[str, ...] = ()

    def train(self, mode: bool = True) -> Self:
        """Turns on the mode of training, as of a module."""
        self.training = mode
        return self

    def eval(self) -> Self:
        """Turns on the mode of evaluation, in which a call under `torch.no_grad()` is
        `evaluate`."""
        return self.train(False)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context of steps whose gradients are added up, as they are without it."""
        return nullcontext()

    def _check_trains(self) -> None:
        """Raises AutoparError for a step in a mode that it was not compiled in, or
        without gradients."""
        if not torch.is_grad_enabled():
            raise AutoparError(
                "a step computes gradients, and is called under torch.no_grad()",
                fix="call step.evaluate(**batch), which computes the loss alone; or "
                "step.eval() before, as of a module, and step.train() after it",
            )
        if self.training and not self._compiled_training:
            raise AutoparError(
                "the step is in the mode of training, but was compiled of a model in "
                "eval(), without dropout",
                fix="call model.train() before autopar.compile",
            )
        if self._compiled_training and not self.training:
            raise AutoparError(
                "a step computes gradients, and is called after step.eval()",
                fix="call step.train() before; or, to evaluate, step.evaluate(**batch)",
            )
