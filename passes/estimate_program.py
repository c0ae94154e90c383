"""estimate_program: the step of a compiled program on paper."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import AUTO, Plan
from .price.account import by_rank, memory_of
from .price.candidate import Candidate
from .price.cluster import Cluster
from .price.estimate import Estimate, run_accounts
from .price.stage_seconds import stage_seconds
from .program import Program
from .schedule.order import write_order
from .schedule.schedule import Schedule


def candidate_of(plan: Plan, schedule: Schedule, layers: Sequence[int]) -> Candidate:
    """What a compiled plan decides, as the planner has it. layers: of each stage."""
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
    """The step of a compiled program. What its ops take is as it was when it was
    compiled; messages and updates take what they do on the cluster."""
    accounts, schedule = [stage.account for stage in program.stages], program.schedule
    layers = [len(stage.layers) for stage in program.stages]
    candidate = candidate_of(program.plan, schedule, layers)
    ranks = by_rank(accounts, schedule.stage_to_rank)
    took = [stage_seconds(a, program.mesh, cluster) for a in accounts]
    memory = memory_of(ranks, [t.footprint for t in took], schedule)
    return run_accounts(accounts, ranks, took, memory, candidate, cluster)
