"""choose_schedule: the plan's schedule, or one made for what the stages really take."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from passes.cost import Seconds
from passes.plan import AUTO, Plan
from passes.schedule.fit_schedule import Limits, fit_schedule
from passes.schedule.footprint import Footprint
from passes.schedule.make_schedule import make_schedule
from passes.schedule.memory import resting
from passes.schedule.schedule import Schedule, add_communication
from passes.stage.local_stage import LocalStage


def choose_schedule(
    plan: Plan,
    seconds: Sequence[Seconds],
    footprints: Sequence[Footprint],
    limits: Limits,
    send: float,
) -> Schedule:
    """The schedule of a plan, with its messages.

    seconds, footprints: of one microbatch on each stage. limits: see `fit_schedule`.
    send: seconds of a message. Raises ScheduleError.
    """
    if plan.schedule != AUTO:
        return named_schedule(plan)
    args = plan.microbatches, plan.mesh.axis_size("pp"), plan.stages_per_rank
    return fit_schedule(*args, seconds, footprints, limits, send).schedule


def room(
    plan: Plan, locals_: Sequence[LocalStage], trainable: Collection[str]
) -> Limits:
    """What the plan's memory leaves for activations beside what rests on each rank."""

    def limits(placement: Sequence[int]) -> list[float]:
        found = []
        for rank in range(plan.mesh.axis_size("pp")):
            own = [x for x, r in zip(locals_, placement, strict=True) if r == rank]
            rest = resting(own, trainable, plan.offload).total
            found.append((plan.memory or math.inf) - rest)
        return found

    return limits


def named_schedule(plan: Plan) -> Schedule:
    """The schedule that a plan names, with its messages. Raises ScheduleError."""
    ranks = plan.mesh.axis_size("pp")
    made = make_schedule(plan.schedule, ranks, plan.microbatches, plan.stages_per_rank)
    return add_communication(made)


def splits_backward(plan: Plan) -> bool:
    """Whether backwards run in halves; those of a schedule that is made do."""
    return plan.schedule == AUTO or named_schedule(plan).splits_backward
