"""What `loss.backward()` does after a step, whose gradients are there already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor, nn

from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.execute.executor import Executor
from autopar.runtime.parameters.offload import Host

LEFT = (
    "gradients that an optimizer has used are added to: call optimizer.zero_grad() or "
    "step.zero_grad(); zero_grad() of the model knows its own alone"
)
LOST = (
    "an optimizer found no gradients: they were zeroed after the step that computed "
    "them. Call optimizer.zero_grad() before the step or after the update; or "
    "loss.backward() after zero_grad(), which brings them back"
)
CALLED, UPDATED, STEPPED = (
    "it was called before",
    "an optimizer has used the gradients",
    "another step came after it",
)


class Backward:
    """Gradients of a step, until something else is done with them.

    They are those of the loss as it is. Called on a multiple of it, as loops that
    accumulate have it, they become as many times that; and they come back, where loops
    zero what was there before between forward and backward. last: of the step before.
    """

    def __init__(
        self,
        executor: Executor,
        host: Host | None,
        updates: Updates,
        last: Backward | None,
    ) -> None:
        self._executor, self._updates = ref(executor), ref(updates)
        self._host, self._step = host, executor.steps
        self._ended = ""
        # Of each parameter, its gradient as it is shown; none after an overflow.
        self._shown: Mapping[nn.Parameter, tuple[Tensor, int]] = {
            p: (p.grad, p.grad._version)
            for p in updates.parameters.values()
            if p.requires_grad and p.grad is not None
        }
        # Whether an optimizer has found none of them.
        self.is_lost = False
        alone = last is None or executor.gradients.are_alone
        self._sum: Sum = Sum() if last is None or alone else last._sum
        self._sum.without.add(self._step)

    def end(self, why: str) -> None:
        """Leaves the gradients as they are from now on. why: backward is refused."""
        if not self._ended:
            self._ended, self._shown, self._host = why, {}, None
            if (executor := self._executor()) is not None:
                executor.gradients.keep()

    def on_update(self, params: Iterable[Tensor]) -> None:
        """An optimizer updates these parameters."""
        shown = [p for p in params if p in self._shown]
        self.is_lost |= bool(shown) and all(p.grad is None for p in shown)
        self.end(UPDATED)
        if self._sum.called and self._sum.without:
            raise AutoparError(
                "an optimizer uses gradients of steps whose losses had backward(), and "
                "added to these are those of one whose loss had no backward()",
                fix="call backward() on the loss of each step, or of none; what a loop "
                "leaves out, optimizer.zero_grad() takes away before the next step; "
                "what is only looked at is step.evaluate(**batch), or what step.eval() "
                "and torch.no_grad() are around",
            )

    @torch.no_grad()
    def __call__(self, factor: Tensor | None) -> None:
        """factor: of the loss, [], None for 1. Raises: AutoparError."""
        executor, updates = self._executor(), self._updates()
        if executor is None or updates is None:
            return
        self._sum.called = True
        self._sum.without.discard(self._step)
        if factor is not None and factor.device.type == "cpu" and factor == 1:
            factor = None  # a GPU would be waited for
        if self._ended:
            if self._ended == STEPPED and factor is None:
                return  # losses of several steps, added up
            raise AutoparError(
                f"backward of a loss that a step returned: {self._ended}",
                fix="call it once, before the next step and the update; of a mean over "
                "several steps for each of them: (loss / n).backward()",
            )
        names = {id(p): name for name, p in updates.parameters.items()}
        cleared = {names[id(p)] for p in self._shown if p.grad is None}
        self._check_untouched(factor)
        if factor is not None or cleared:
            executor.gradients.multiply(factor, cleared)
            if self._host is not None:
                self._host.download()
            updates.show()
        self.end(CALLED)

    def _check_untouched(self, factor: Tensor | None) -> None:
        """Raises AutoparError where others have written into the gradients, so that no
        multiple of them is there; or zeroed or replaced them, so that none are."""
        held = [(p.grad, of) for p, of in self._shown.items() if p.grad is not None]
        replaced = any(grad is not shown for grad, (shown, _) in held)
        written = [grad for grad, (_, before) in held if grad._version != before]
        if factor is not None and (replaced or written):
            raise AutoparError(
                "backward of a multiple of a step's loss, but gradients were written "
                "to since the step",
                fix="call loss.backward() right after the step; a term with a "
                "gradient of its own has a backward of its own, after it; and "
                "gradients are set to None, or zeroed before the step",
            )
        zeroed = written and not any(g.as_subclass(Tensor).any() for g in written)
        if replaced or zeroed:
            raise AutoparError(
                "backward of a step's loss, but its gradients, which were there after "
                f"the step, were {'replaced' if replaced else 'zeroed in place'} since",
                fix="zero gradients before the step, or set them to None, as "
                "optimizer.zero_grad() does, right before loss.backward(); a term with "
                "a gradient of its own has a backward of its own, after it",
            )


@dataclass
class Sum:
    """Steps whose gradients are added up: the numbers of those whose losses had no
    backward, and whether that of one had."""

    without: set[int] = field(default_factory=set)
    called: bool = False
