"""unused: what a step has made and not used up, which is nothing once it has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch import Tensor

from autopar.passes.schedule.schedule import Action
from autopar.runtime.comm.work import Work

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Unused:
    """Messages, values between stages, and losses, of a step that runs.

    arriving, leaving: by the action that begins them. outputs: (kind, stage,
    microbatch) -> tensors. losses: of microbatches, [] each. late: by stage, gradients
    that leave after the last action.
    """

    arriving: dict[Action, list[Work]] = field(default_factory=dict)
    leaving: dict[Action, list[Work]] = field(default_factory=dict)
    outputs: dict[tuple[str, int, int], tuple[Tensor, ...]] = field(
        default_factory=dict
    )
    losses: list[Tensor] = field(default_factory=list)
    late: defaultdict[int, list[Sequence[Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Cleared(Protocol):
    """Something that can drop a failed step's state."""

    def leave_nothing(self) -> None: ...


Owner = TypeVar("Owner", bound=Cleared)


def nothing_left_of_failures(
    operation: Callable[Concatenate[Owner, P], T],
) -> Callable[Concatenate[Owner, P], T]:
    """Makes an operation leave nothing where it fails: who catches the error, as of a
    batch that is bad or too large, goes on as after `loss.backward()` that was never
    called."""

    @wraps(operation)
    def whole(self: Owner, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return operation(self, *args, **kwargs)
        except BaseException:
            self.leave_nothing()
            raise

    return whole
