"""schedule_stages: what each pipeline rank does in turn, and the memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import AUTO, Plan, fit_plan
from .price.account import Account, by_rank, memory_of
from .price.candidate import Candidate
from .price.cluster import Cluster
from .price.compiled_cost import activation_budget, count_once, stage_accounts
from .price.estimate import Estimate, run_accounts
from .price.stage_seconds import StageSeconds, stage_seconds
from .program import Program
from .schedule.check_schedule import check
from .schedule.memory import RankMemory, check_memory
from .schedule.order import write_order
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
    if plan.schedule == AUTO and not plan.order:
        schedule = fit_plan(plan, seconds, footprints, limits, send)
    else:
        schedule = plan.decided_schedule()
    counted = count_once(accounts, locals, schedule.stage_to_rank)
    ranks = by_rank(counted, schedule.stage_to_rank)
    memory = tuple(map(RankMemory.of, memory_of(ranks, footprints, schedule)))
    check_memory(memory, plan.memory)
    return Scheduled(schedule, tuple(counted), took, memory)


def candidate_of(plan: Plan, schedule: Schedule, layers: Sequence[int]) -> Candidate:
    """The planner's candidate for a compiled plan. layers: of each stage."""
    return Candidate(
        plan.mesh,
        0,  # how many samples the example batch had changes nothing here
        plan.microbatches,
        plan.schedule,
        plan.stages_per_rank,
        plan.zero,
        plan.recompute,
        tuple(layers),
        order=write_order(schedule) if plan.schedule == AUTO else (),
    )


def estimate_program(program: Program, cluster: Cluster) -> Estimate:
    """The estimate of a compiled program's step, with its ops' seconds from when it was
    compiled, and the cluster's for messages and updates."""
    accounts, schedule = [stage.account for stage in program.stages], program.schedule
    layers = [len(stage.layers) for stage in program.stages]
    candidate = candidate_of(program.plan, schedule, layers)
    ranks = by_rank(accounts, schedule.stage_to_rank)
    took = [stage_seconds(a, program.mesh, cluster) for a in accounts]
    memory = memory_of(ranks, [t.footprint for t in took], schedule)
    return run_accounts(accounts, ranks, took, memory, candidate, cluster)
