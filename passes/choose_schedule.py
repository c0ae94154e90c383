"""choose_schedule: the plan's schedule, or one made for what the stages really take."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import Seconds
from .plan import AUTO, Plan
from .schedule.fit_schedule import Limits, fit_schedule
from .schedule.footprint import Footprint
from .schedule.make_schedule import make_schedule
from .schedule.order import read_order
from .schedule.schedule import Schedule, add_communication


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
    if plan.schedule != AUTO or plan.order:
        return decided_schedule(plan)
    args = plan.microbatches, plan.mesh.pipeline_ranks, plan.stages_per_rank
    return fit_schedule(*args, seconds, footprints, limits, send).schedule


def decided_schedule(plan: Plan) -> Schedule:
    """What a plan names or lists, with its messages. Raises ScheduleError."""
    args = plan.mesh.pipeline_ranks, plan.microbatches, plan.stages_per_rank
    if plan.schedule == AUTO:
        return read_order(plan.order, *args)
    return add_communication(make_schedule(plan.schedule, *args))


def splits_backward(plan: Plan) -> bool:
    """Whether backwards run in halves; those of a schedule that is made do."""
    if plan.schedule == AUTO and not plan.order:
        return True
    return decided_schedule(plan).splits_backward
