"""A schedule made for what a candidate's stages take, within what memory is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..price.account import Account, once_a_rank, rank_memory
from ..price.candidate import Candidate
from ..price.stage_seconds import StageSeconds
from ..schedule.fit_schedule import fit_schedule
from ..schedule.order import write_order


def make_order(
    accounts: Sequence[Account],
    took: Sequence[StageSeconds],
    candidate: Candidate,
    memory: float,
) -> Candidate:
    """The candidate with an order of actions, see `passes.schedule.fit_schedule`.

    accounts, took: of each stage, of a rank of the whole mesh; backwards in halves.
    memory: bytes of a device.
    Raises ScheduleError: not even one microbatch at a time fits.
    """

    def left(placement: Sequence[int]) -> list[float]:
        ranks = once_a_rank(accounts, placement)
        return [memory - sum(rank_memory(a).values()) for a in ranks]

    fitted = fit_schedule(
        candidate.microbatches,
        candidate.mesh.pipeline_ranks,
        candidate.stages_per_rank,
        [t.halves for t in took],
        [t.footprint for t in took],
        left,
        max(t.send for t in took[:-1]),
    )
    return replace(candidate, order=write_order(fitted.schedule))
