"""A candidate of a search: the decisions that one plan differs by from another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..mesh import Mesh
from ..plan import AUTO
from ..schedule.make_schedule import SCHEDULES, place_stages
from ..schedule.order import place_order


@dataclass(frozen=True)
class Candidate:
    """Decisions of a plan, without what follows from them.

    layers: runs of layers in each of the pipeline's stages, in order. samples: in a
    microbatch of one data parallel rank. context_parallel: how attention works on an
    axis cp, see `passes.plan.CONTEXT_PARALLEL`. labelled: whether its ops have
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
    labelled: bool = False
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`pp=8,tp=4, 48 microbatches of 1, interleaved x4, zero 1, recompute full`."""
        schedule = self.schedule
        if self.stages_per_rank > 1:
            schedule += f" x{self.stages_per_rank}"
        pipeline = f", {schedule}" if self.mesh.axis_size("pp") > 1 else ""
        zero = f", zero {self.zero}" if self.zero else ""
        context = f", {self.context_parallel}" if self.mesh.axis_size("cp") > 1 else ""
        again = f", recompute {self.recompute}" if self.recompute != "none" else ""
        plural = "es" if self.microbatches > 1 else ""
        return (
            f"{str(self.mesh) or 'one device'}, {self.microbatches} microbatch{plural} "
            f"of {self.samples}{context}{pipeline}{zero}{again}"
            f"{', labels' if self.labelled else ''}"
        )

    @property
    def shares(self) -> int:
        """The stage of ZeRO; 0 if there is no other rank to share with."""
        return self.zero if self.alike > 1 else 0

    @cached_property
    def alike(self) -> int:
        """The ranks that share out what is not of experts: with those of ep."""
        return self.data_parallel * self.mesh.axis_size("ep")

    @cached_property
    def sharing(self) -> str:
        """The axis of samples that ZeRO shares out over: beside fsdp, dp replicates."""
        return "fsdp" if self.mesh.axis_size("fsdp") > 1 else "dp"

    @cached_property
    def data_parallel(self) -> int:
        """The ranks that share out parameters with ZeRO, those of experts too: which
        would hold the same."""
        return self.mesh.axis_size(self.sharing) * self.mesh.axis_size("cp")

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        ranks = self.mesh.axis_size("pp")
        if self.order:
            return place_order(self.order)
        return place_stages(self.schedule, ranks, self.stages_per_rank)

    @property
    def halves(self) -> bool:
        """Whether its backwards are split."""
        return self.schedule == AUTO or SCHEDULES[self.schedule].halves
