"""choose_schedule: the plan's schedule, or one made for what the stages really take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from passes.cost import Seconds
from passes.fit_schedule import fit_schedule
from passes.footprint import Footprint
from passes.make_schedule import make_schedule
from passes.plan import AUTO, Plan
from passes.schedule import Schedule, add_communication


def choose_schedule(
    plan: Plan,
    seconds: Sequence[Seconds],
    footprints: Sequence[Footprint],
    rest: Callable[[int, Sequence[int]], int],
    send: float,
) -> Schedule:
    """The schedule of a plan, with its messages.

    seconds, footprints: of one microbatch on each stage. rest: pipeline rank, and the
    rank of each stage -> bytes on it that are no activations. send: seconds of a
    message. Raises ScheduleError.
    """
    if plan.schedule != AUTO:
        return named_schedule(plan)

    def limits(placement: Sequence[int]) -> list[float]:
        ranks = range(plan.mesh.axis_size("pp"))
        return [(plan.memory or math.inf) - rest(rank, placement) for rank in ranks]

    args = plan.microbatches, plan.mesh.axis_size("pp"), plan.stages_per_rank
    fitted = fit_schedule(*args, seconds, footprints, limits, send)
    return add_communication(fitted.schedule)


def named_schedule(plan: Plan) -> Schedule:
    """The schedule that a plan names, with its messages. Raises ScheduleError."""
    ranks = plan.mesh.axis_size("pp")
    made = make_schedule(plan.schedule, ranks, plan.microbatches, plan.stages_per_rank)
    return add_communication(made)


def splits_backward(plan: Plan) -> bool:
    """Whether backwards run in halves; those of a schedule that is made do."""
    return plan.schedule == AUTO or named_schedule(plan).splits_backward
