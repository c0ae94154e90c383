"""A candidate of a search: the decisions that one plan differs by from another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..mesh import AXES, Mesh
from ..plan import AUTO
from ..schedule.make_schedule import SCHEDULES, place_stages
from ..schedule.order import place_order


@dataclass(frozen=True)
class Candidate:
    """Decisions of a plan, without what follows from them.

    layers: runs of layers in each of the pipeline's stages, in order. samples: in a
    microbatch of one data parallel rank. context_parallel: how attention works on an
    axis cp, see `passes.plan.CONTEXT_PARALLEL`. has_op_shardings: whether its ops have
    shardings of their own, see `passes.search.choose_op_shardings`. order: of schedule
    "auto", what each pipeline rank does in turn, see `passes.schedule.order`; none
    until it is made.
    """

    mesh: Mesh
    samples: int
    microbatches: int
    schedule: str
    stages_per_rank: int
    zero: int
    recompute: str
    layers: tuple[int, ...]
    context_parallel: str = "gather"
    has_op_shardings: bool = False
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`pp=8,tp=4, 48 microbatches of 1, interleaved x4, zero 1, recompute full`."""
        mesh, schedule = self.mesh, self.schedule
        if self.stages_per_rank > 1:
            schedule += f" x{self.stages_per_rank}"
        pipeline = f", {schedule}" if mesh.pipeline_ranks > 1 else ""
        zero = f", zero {self.zero}" if self.zero else ""
        context = f", {self.context_parallel}" if mesh.context_ranks > 1 else ""
        again = f", recompute {self.recompute}" if self.recompute != "none" else ""
        plural = "es" if self.microbatches > 1 else ""
        return (
            f"{str(mesh) or 'one device'}, {self.microbatches} microbatch{plural} "
            f"of {self.samples}{context}{pipeline}{zero}{again}"
            f"{', op shardings' if self.has_op_shardings else ''}"
        )

    @property
    def shares(self) -> int:
        """The stage of ZeRO; 0 if there is no other rank to share with."""
        return self.zero if self.alike > 1 else 0

    @cached_property
    def alike(self) -> int:
        """The number of ranks that share out parameters other than experts'."""
        return prod(map(self.mesh.axis_size, self.mesh.sharing_axes))

    @cached_property
    def data_parallel(self) -> int:
        """The number of ranks that share out parameters of experts."""
        axes = (a for a in self.mesh.sharing_axes if not AXES[a].holds_experts)
        return prod(map(self.mesh.axis_size, axes))

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        ranks = self.mesh.pipeline_ranks
        if self.order:
            return place_order(self.order)
        return place_stages(self.schedule, ranks, self.stages_per_rank)

    @property
    def halves(self) -> bool:
        """Whether its backwards are split."""
        return self.schedule == AUTO or SCHEDULES[self.schedule].halves
