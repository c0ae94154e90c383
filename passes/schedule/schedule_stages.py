"""schedule_stages: what each pipeline rank does in turn, and the memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost import Costs, Seconds
from ..schedule.check_schedule import check
from ..schedule.choose_recompute import recompute_seconds
from ..schedule.choose_schedule import activation_budget, choose_schedule
from ..schedule.footprint import Footprint, footprint
from ..schedule.memory import RankMemory, check_memory, rank_memory
from ..schedule.schedule import Schedule
from ..stage.local_stage import LocalStage
from ..stage.split_stages import Staged


@dataclass(frozen=True)
class Scheduled:
    """A schedule and what it was made for. seconds, footprints: of one microbatch on
    each stage. send: seconds of a message. memory: of each pipeline rank."""

    schedule: Schedule
    seconds: tuple[Seconds, ...]
    footprints: tuple[Footprint, ...]
    send: float
    memory: tuple[RankMemory, ...]

    def verify(self) -> object:
        """Raises: ScheduleError."""
        return check(self.schedule)

    def __str__(self) -> str:
        memory = "\n".join(f"rank {r}: {m}" for r, m in enumerate(self.memory))
        return f"{self.schedule}\n\n{memory}"


def schedule_stages(
    staged: Staged, locals: Sequence[LocalStage], costs: Costs
) -> Scheduled:
    """Choose or make the plan's schedule. locals: of the first rank of each stage.

    Raises: ScheduleError, OutOfMemory.
    """
    plan, trainable = staged.plan, staged.lowered.traced.trainable
    footprints = tuple(map(footprint, locals))
    seconds = tuple(
        stage.seconds + recompute_seconds(local)
        for stage, local in zip(staged.stages, locals, strict=True)
    )
    send = max(f.sent for f in footprints) / costs.link_bytes_per_second
    limits = activation_budget(plan, locals, trainable)
    schedule = choose_schedule(plan, seconds, footprints, limits, send)
    memory = rank_memory(schedule, locals, footprints, trainable, plan.offload)
    check_memory(memory, plan.memory)
    return Scheduled(schedule, seconds, footprints, send, memory)
