"""schedule_stages: what each pipeline rank does in turn, and the memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .choose_schedule import choose_schedule
from .price.account import Account, by_rank, memory_of
from .price.cluster import Cluster
from .price.compiled_cost import activation_budget, count_once, stage_accounts
from .price.stage_seconds import StageSeconds, stage_seconds
from .schedule.check_schedule import check
from .schedule.memory import RankMemory, check_memory
from .schedule.schedule import Schedule
from .stage.local_stage import LocalStage
from .stage.split_stages import Staged


@dataclass(frozen=True)
class Scheduled:
    """A schedule and what it was made for. accounts, took: of one microbatch on each
    stage. memory: of each pipeline rank."""

    schedule: Schedule
    accounts: tuple[Account, ...]
    took: tuple[StageSeconds, ...]
    memory: tuple[RankMemory, ...]

    def verify(self) -> object:
        """Raises: ScheduleError."""
        return check(self.schedule)

    def __str__(self) -> str:
        memory = "\n".join(f"rank {r}: {m}" for r, m in enumerate(self.memory))
        return f"{self.schedule}\n\n{memory}"


def schedule_stages(
    staged: Staged, locals: Sequence[LocalStage], cluster: Cluster
) -> Scheduled:
    """Choose or make the plan's schedule. locals: of the first rank of each stage.

    Raises: ScheduleError, OutOfMemory.
    """
    plan = staged.plan
    accounts = stage_accounts(locals, plan, cluster)
    took = tuple(stage_seconds(a, plan.mesh, cluster) for a in accounts)
    limits = activation_budget(accounts, locals, plan.memory)
    seconds, footprints = [t.halves for t in took], [t.footprint for t in took]
    send = max((t.send for t in took[:-1]), default=0.0)
    schedule = choose_schedule(plan, seconds, footprints, limits, send)
    counted = count_once(accounts, locals, schedule.stage_to_rank)
    ranks = by_rank(counted, schedule.stage_to_rank)
    memory = tuple(map(RankMemory.of, memory_of(ranks, footprints, schedule)))
    check_memory(memory, plan.memory)
    return Scheduled(schedule, tuple(counted), took, memory)
