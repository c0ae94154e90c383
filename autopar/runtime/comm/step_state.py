"""The state of the running step, on which calls of emitted code depend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.runtime.comm.routing_replay import RoutingReplay


@dataclass
class StepState:
    """State of the step that a rank runs, which an executor keeps and hands to `Comm`.

    microbatches: of a step. zigzag: axes whose shares lie so. microbatch: the one at
    work, the coordinate on the axis "time". key: of all dropout masks of the step.
    scale: of the loss. evaluating: whether it is forward only, without dropout. masks:
    whether a step has dropout. replay: what routers are told to choose, if anything.
    on_ready: told which gradients are ready, in the last microbatch.
    """

    microbatches: int
    zigzag: frozenset[str] = frozenset()
    microbatch: int = 0
    key: int = 0
    scale: float = 1.0
    evaluating: bool = False
    masks: bool = True
    replay: RoutingReplay | None = None
    on_ready: Callable[[Sequence[Tensor]], None] | None = None
