"""The candidates of a search: every plan that devices, model and user's wishes allow.

What cannot win is left out: schedules that gain less than estimates can tell, or that
take more memory than another one without being faster.

Axes that split samples are weighed here and not by the search of op shardings, which
leaves them alone: routed experts, an op's alternative over ep, beside whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, product
from math import prod

from ..mesh import AXES, DATA, PIPELINE, SHARDED_DATA, SIZED_AXES, Mesh
from ..plan import CONTEXT_PARALLEL, RECOMPUTE
from ..price.candidate import Candidate
from ..price.cluster import Cluster
from ..ranges import RANGES
from ..schedule.make_schedule import SCHEDULES, USUAL_SCHEDULE
from ..shard.query_groups import Groups, with_groups

ALIKE = 0.05  # estimates that differ by less do not say which is faster
ORDER = tuple(name for name, axis in AXES.items() if axis.searched)


@dataclass(frozen=True)
class Space:
    """What a search may choose from.

    global_batch: samples of a step. runs: of layers in the model. sizes: that each of
    `SIZED_AXES` may have; one that is left out has 1. mesh: axes whose sizes are
    decided already. shape: sizes of axes, in order, whose meaning is not. microbatches:
    if decided; stages_per_rank: the same. has_scores: whether attention is spelled out
    in the model.
    context_parallel: see `contexts`. groups: see `passes.shard.query_groups`.
    """

    cluster: Cluster
    global_batch: int
    runs: int
    sizes: Mapping[str, tuple[int, ...]]
    mesh: Mesh | None = None
    shape: tuple[int, ...] = ()
    microbatches: int | None = None
    schedule: tuple[str, ...] = field(default_factory=lambda: searched())
    stages_per_rank: tuple[int, ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    has_scores: bool = True
    context_parallel: tuple[str, ...] = tuple(CONTEXT_PARALLEL)
    groups: Groups = frozenset()


def searched() -> tuple[str, ...]:
    """The named schedules that may be faster than others."""
    return tuple(name for name, named in SCHEDULES.items() if named.gains)


def candidates(space: Space) -> Iterator[Candidate]:
    """Every combination, but for the layers of each stage."""
    for mesh in meshes(space):
        for samples, microbatches in _microbatches(space, mesh):
            decided = (mesh, samples, microbatches)
            choices = product(
                _pipelines(space, mesh, microbatches),
                contexts(space, mesh)[:1],
                space.zero,
                _policies(space, mesh),
            )
            for (schedule, per_rank), context, zero, recompute in choices:
                candidate = Candidate(
                    *decided, schedule, per_rank, zero, recompute, (), context
                )
                if zero == candidate.shares and (zero or not mesh.needs_zero):
                    yield candidate


def _policies(space: Space, mesh: Mesh) -> tuple[str, ...]:
    """The policies of recomputation to try: without attention scores and gathered
    values, selective is the same as elementwise."""
    both = {"elementwise", "selective"} <= {*space.recompute}
    inner = (a for a, n in mesh.stage_axes if n > 1)
    if not both or space.has_scores or not all(AXES[a].splits_samples for a in inner):
        return space.recompute
    return tuple(policy for policy in space.recompute if policy != "selective")


def contexts(space: Space, mesh: Mesh) -> tuple[str, ...]:
    """How attention may work on cp. Candidates have the first, as the others make but
    a small difference; it is found out for the best of them."""
    return space.context_parallel if mesh.context_ranks > 1 else ("gather",)


def _microbatches(space: Space, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """(samples, microbatches) of one data parallel rank."""
    own, rest = divmod(space.global_batch, mesh.sample_ranks)
    for samples in () if rest else _divisors(own):
        if own // samples not in RANGES["microbatches"]:
            continue
        if space.microbatches in (None, own // samples):
            yield samples, own // samples


def meshes(space: Space) -> Iterator[Mesh]:
    """Yields all meshes of the devices; ranks that share heads of keys are qp."""
    for mesh in _meshes(space):
        yield with_groups(mesh, space.groups)


def _meshes(space: Space) -> Iterator[Mesh]:
    """Yields the decided mesh as it was written, else all ways."""
    if space.shape:
        yield from _meanings(space)
        return
    if space.mesh and space.mesh.size == space.cluster.devices:
        yield Mesh(tuple((a, n) for a, n in space.mesh.axes if n > 1))
        return
    fixed = dict(space.mesh.axes) if space.mesh else {}
    for inner in product(*(_sizes(space, a, fixed) for a in SIZED_AXES)):
        rest, left = divmod(space.cluster.devices, prod(inner))
        sizes = dict(zip(SIZED_AXES, inner, strict=True))
        for pp in () if left else _divisors(rest):
            for fsdp in _sharing(space, pp, rest // pp, prod(inner), fixed):
                sizes |= {PIPELINE: pp, DATA: rest // pp // fsdp, SHARDED_DATA: fsdp}
                if pp <= space.runs and all(sizes[a] == n for a, n in fixed.items()):
                    yield Mesh(
                        tuple((a, sizes[a]) for a in AXES if sizes.get(a, 1) > 1)
                    )


def _sharing(
    space: Space, pp: int, ranks: int, inner: int, fixed: dict[str, int]
) -> Iterator[int]:
    """Sizes of fsdp: 1, and what shares within nodes and replicates between them (Zhao
    2023, section 3.2.2). It saves messages between nodes most where all of a model's
    layers are on each rank: with pipelines it is tried for the best, see `hybrids`.

    ranks: of dp and fsdp together; inner: inside of both.
    """
    if SHARDED_DATA in fixed:
        yield from (n for n in (fixed[SHARDED_DATA],) if ranks % n == 0)
        return
    yield 1
    if pp == 1 and DATA not in fixed:
        yield from _near(space, ranks, inner)


def _near(space: Space, ranks: int, inner: int) -> Iterator[int]:
    """Yields how many of the ranks are on a node, if several are on each of several."""
    near, left = divmod(space.cluster.levels[0].devices if ranks > 1 else 1, inner)
    if not left and 1 < near < ranks and ranks % near == 0:
        yield near


def hybrids(space: Space, mesh: Mesh) -> Iterator[Mesh]:
    """A mesh with pipelines, with dp as what shares within nodes and what replicates
    between them, unless dp or fsdp is decided."""
    both = {DATA, SHARDED_DATA}
    wished = space.shape or (space.mesh and both & dict(space.mesh.axes).keys())
    sizes = dict(mesh.axes)
    if wished or SHARDED_DATA in sizes or not {PIPELINE, DATA} <= sizes.keys():
        return
    dp = sizes[DATA]
    for near in _near(space, dp, mesh.size // sizes[PIPELINE] // dp):
        parts = {DATA: ((DATA, dp // near), (SHARDED_DATA, near))}
        yield Mesh(tuple(x for a, n in mesh.axes for x in parts.get(a, ((a, n),))))


def _sizes(space: Space, axis: str, fixed: dict[str, int]) -> tuple[int, ...]:
    return (fixed[axis],) if axis in fixed else space.sizes.get(axis, (1,))


def _meanings(space: Space) -> Iterator[Mesh]:
    """The meshes that a shape can mean; neighbouring axes of one name are one."""
    distinct: dict[Mesh, None] = {}
    if prod(space.shape) != space.cluster.devices:
        return
    for names in product(ORDER, repeat=len(space.shape)):
        runs = groupby(zip(names, space.shape, strict=True), key=lambda x: x[0])
        axes = [(name, prod(size for _, size in run)) for name, run in runs]
        if len({name for name, _ in axes}) < len(axes):
            continue
        mesh = Mesh(tuple((a, n) for a, n in axes if n > 1))
        inner = all(mesh.axis_size(a) in _sizes(space, a, {}) for a in SIZED_AXES)
        if inner and mesh.pipeline_ranks <= space.runs:
            distinct[mesh] = None
    yield from distinct


def _pipelines(
    space: Space, mesh: Mesh, microbatches: int
) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank)."""
    ranks = mesh.pipeline_ranks
    if ranks == 1:
        if 1 in (space.stages_per_rank or (1,)):
            yield USUAL_SCHEDULE, 1
        return
    for schedule in space.schedule:
        if len(space.schedule) > 1 and not _may_gain(schedule, ranks, microbatches):
            continue
        for v in _stages_per_rank(space, schedule):
            if ranks * v <= space.runs:
                yield schedule, v


def _stages_per_rank(space: Space, schedule: str) -> tuple[int, ...]:
    """The numbers of stages a rank to try: the decided one, or those that the schedule
    allows: one, two, or any from two on."""
    named = SCHEDULES.get(schedule)
    tried = named.stages_per_rank if named else (1,)
    decided = space.stages_per_rank or tried
    several = len(tried) > 1
    return tuple(v for v in decided if v in tried or (several and v > 1))


def _may_gain(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether a schedule may be faster than 1F1B, by as much as estimates can tell.

    1F1B is idle for p - 1 of m + p - 1 turns.
    """
    if schedule == USUAL_SCHEDULE:
        return True
    gains = SCHEDULES[schedule].gains
    may = gains is not None and gains(ranks, microbatches)
    return may and ranks - 1 > ALIKE * microbatches


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, number + 1) if number % i == 0)
