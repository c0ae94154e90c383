"""The planner: what a model's layers cost, and the best plan for a cluster.

The model is captured with three of its layers only (`autopar.capture.shorten`), so that
time and memory do not grow with its depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from autopar.capture.capture_model import capture_model, kinds_of_layers
from autopar.capture.shorten import of_few_layers
from autopar.gc_paused import gc_paused
from autopar.models.batches import with_samples
from autopar.options import make_plan
from autopar.passes.capture.lower_precision import lower_precision
from autopar.passes.capture.normalize.chunk_loss import NotInChunks
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import Named, name_dims
from autopar.passes.errors import LossNotSeparable, StageError
from autopar.passes.layers import Layers
from autopar.passes.mesh import AXES, SIZED_AXES, Axis, Mesh
from autopar.passes.plan import NARROW, Plan, PlanError
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.price_layers import (
    Cut,
    LayerPrices,
    Prices,
    Way,
    cut_layers,
    price_cut,
)
from autopar.passes.recompute.recompute import squares
from autopar.passes.search.candidates import Space
from autopar.passes.search.choose_op_shardings import OpenPlan
from autopar.passes.search.search import Ranking, Watch, search
from autopar.passes.shard.query_groups import (
    Groups,
    divides_groups,
    find_groups,
    split_groups,
)
from autopar.passes.traced import Traced
from autopar.planner.infeasible import infeasible, nothing_to_choose

LONG = 8192  # tokens of a sequence from which on it may be worth splitting
UNSETTLED = 64  # prices of layers at a time
CHUNKS = 8  # of a loss, if a plan fits with them alone
FEW_RANKS = 8  # of tp, that may be worth it over smaller nodes; of ep, all tried


@dataclass(frozen=True)
class ShortModel:
    """A model with few of its layers, its dims named. batch: samples it was traced
    with. starts: where each run of its layers begins. shared: the model as ranks
    compute it that hold shares of its parameters, see `passes.capture.lower_precision`.
    options: of `autopar.options.Options`, for all plans. again: captures it with so
    many samples, or with other options."""

    named: Named
    layers: Layers | None
    batch: int
    shared: Named
    options: Mapping[str, Any] = field(default_factory=dict)
    again: Callable[..., ShortModel] | None = None

    @property
    def runs(self) -> int:
        """How often the repeated layers stand in the whole model."""
        return self.layers.repeats if self.layers else 1

    @property
    def starts(self) -> tuple[str, ...]:
        """Paths of the layers that were captured."""
        return starts_of(self.layers) if self.layers else ("",)

    @property
    def in_float32(self) -> bool:
        """Whether parameters are."""
        return any(v.dtype == torch.float32 for v in self.named.graph.params)

    @property
    def narrow(self) -> ShortModel | None:
        """The same with "bf16-stream", if its precision is "bf16", in which layers add
        to float32; else None."""
        if self.again is None or self.options.get("precision") != "bf16":
            return None
        return self.again(precision=NARROW) if self.in_float32 else None

    @property
    def in_chunks(self) -> ShortModel | None:
        """The same with a loss by chunks, if it is not by chunks and can be."""
        if self.again is not None and self.options.get("loss_chunks", 1) == 1:
            with suppress(NotInChunks):
                return self.again(loss_chunks=CHUNKS)
        return None

    @property
    def has_attention_scores(self) -> bool:
        """Whether there is anything that selective recomputation leaves out."""
        return bool(squares(self.named.graph.nodes, self.named.dims))

    @property
    def positions(self) -> int:
        """The most tokens that one sample has."""
        lengths = [
            prod(dim.size for dim in factors)
            for dims in self.named.dims.values()
            for factors in dims
            if factors and factors[0].name == "seq"
        ]
        return max(lengths, default=1)

    def extents(self, *names: str) -> tuple[int, ...]:
        """The sizes of all dims with these names."""
        sizes = {
            dim.size
            for dims in self.named.dims.values()
            for factors in dims
            for dim in factors
            if dim.name in names
        }
        return tuple(sorted(sizes))


def starts_of(layers: Layers) -> tuple[str, ...]:
    """Paths at which the repeats begin that the model with few layers has."""
    return layers.starts[: layers.kept_repeats]


@gc_paused()
def capture_short(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    few: bool = True,
    **options: Any,
) -> ShortModel:
    """Capture a model for planning. batch: at least two samples, as an example.

    few: with a few of its layers, where these stand for all. options: see `ShortModel`.
    Raises: CaptureError, PlanError.
    """
    plan = make_plan("", **options)
    call = model, batch, loss_fn, plan.lowering

    def named_of(traced: Traced) -> Named:
        return name_dims(normalize(traced, plan.loss_chunks))

    def capture() -> tuple[Traced, Named]:
        traced = capture_model(*call)
        return traced, named_of(lower_precision(traced))

    def if_cut(layers: Layers) -> tuple[Traced, Named] | None:
        """Captures the model with few layers; None if it cannot be cut between them."""
        traced, named = capture()
        try:
            cut_layers(named, make_plan(""), starts_of(layers))
        except StageError:
            return None
        return traced, named

    layers, short = None, None
    if few:
        layers, short = of_few_layers(model, if_cut, partial(kinds_of_layers, *call))
    short = short or capture()
    traced, named = short
    shared = named
    if traced.autocast:
        shared = named_of(lower_precision(traced, tables=True))
    samples = max(v.shape[0] for v in named.graph.inputs if v.shape)

    @cache
    def again(samples: int = 0, **others: Any) -> ShortModel:
        other = with_samples(batch, samples) if samples else batch
        return capture_short(model, other, loss_fn, **{"few": few, **options, **others})

    return ShortModel(named, layers, samples, shared, options, again)


def _make_cuts(
    of: ShortModel, at_once: bool, options: Mapping[str, Any]
) -> Callable[[Mesh, int, bool, str], Cut]:
    """Cuts a model that is lowered for a mesh, of so many microbatches, whether ranks
    hold shares, and how attention works on cp; see `make_prices`."""

    @lru_cache(maxsize=8)  # candidates in a row have the same, in shares or whole
    def cut(mesh: Mesh, microbatches: int, shares: bool, context: str) -> Cut:
        how = {**options, "context_parallel": context}
        most = of.batch // mesh.sample_ranks
        if 1 < microbatches < most and not at_once:
            # Microbatches are of other sizes then, but of what is split alike.
            same = cut(mesh, most, shares, context)
            return replace(same, plan=replace(same.plan, microbatches=microbatches))
        priced = of
        if at_once and of.again and microbatches > 1:
            priced, microbatches = of.again(of.batch // microbatches), 1
        plan = make_plan(mesh, **how, microbatches=microbatches)
        named = priced.shared if shares else priced.named
        shares = shares or named is priced.shared
        return cut_layers(named, plan, of.starts, shares, of.runs > len(of.starts))

    return cut


def make_prices(
    of: ShortModel, cluster: Cluster, at_once: bool = False, **options: Any
) -> Prices:
    """Prices of layers on a cluster's devices, each way of splitting them once.

    at_once: for a model that takes samples together, so that no microbatches share them
    out: it is captured with as few as are priced. options: more of them than the short
    model has, for all plans.
    """
    usual = {**of.options, **options}

    cut = _make_cuts(of, at_once, usual)

    # What is not settled has levels of memory of each node, which take much room:
    # candidates in a row ask for a few of them.
    @lru_cache(maxsize=UNSETTLED)
    def at(way: Way) -> LayerPrices:
        """Prices of layers that are compiled for these samples."""
        microbatches = of.batch // way.mesh.sample_ranks // way.samples
        of_mesh = partial(cut, way.mesh, microbatches, way.shares, way.context_parallel)
        return price_cut(of_mesh, way.recompute, cluster.device, way.halves)

    @lru_cache(maxsize=UNSETTLED)
    def slope(way: Way) -> LayerPrices:
        """The added cost of twice the samples in a microbatch."""
        twice = at(way._replace(samples=2 * way.samples))
        return twice.combine(at(way), lambda x, y: x - y)

    @cache
    def prices(way: Way) -> LayerPrices:
        samples, shares = way.samples, way.shares and of.shared is not of.named
        # By a table costs are linear in the samples, from two on: one alone has fewer
        # nodes, and is gathered as it arrives. What is measured depends on caches: on
        # the line between the sizes next to it.
        most = of.batch // way.mesh.sample_ranks
        limit, low = samples if cluster.device.ops.timed else min(samples, 2), 1
        while 2 * low <= limit and not most % (4 * low):
            low *= 2
        one = way._replace(samples=low, shares=shares)
        costs, more = at(one), samples / low - 1
        if more > 0:
            costs = costs.combine(slope(one), lambda x, y: x.plus(y, more))
        return costs.settled()

    return prices


@gc_paused()
def find_plans(
    of: ShortModel,
    cluster: Cluster,
    global_batch: int,
    mesh: Mesh | None = None,
    watch: Watch = lambda done, total: None,
    **decided: Any,
) -> Ranking:
    """The best plans for steps of a global batch.

    mesh: axes whose sizes are given. watch: see `passes.search.search.search`. decided:
    more fields of `passes.search.candidates.Space`.
    A model that takes samples together has plans of one microbatch.
    Raises: Infeasible, PlanError, LossNotSeparable.
    """
    if global_batch < 1:
        raise PlanError(
            f"a global batch of {global_batch}", fix="give at least 1 sample"
        )
    wishes = {k: v for k, v in {**decided, "mesh": mesh}.items() if v}

    def space_of(cluster: Cluster, wishes: Mapping[str, Any]) -> Space:
        return make_space(of, cluster, global_batch, **wishes)

    space, prices = space_of(cluster, wishes), make_prices(of, cluster)
    try:
        plans = search(space, prices, watch)
    except LossNotSeparable:
        if wishes.setdefault("microbatches", 1) != 1:
            raise
        space, prices = (
            space_of(cluster, wishes),
            make_prices(of, cluster, at_once=True),
        )
        plans = search(space, prices, watch)
    if not plans.tried:
        raise nothing_to_choose(space)
    if not plans.best:

        def lighter() -> dict[str, Prices]:
            others = {
                f'precision "{NARROW}"': of.narrow,
                f"loss_chunks={CHUNKS}": of.in_chunks,
            }
            return {k: make_prices(own, cluster) for k, own in others.items() if own}

        raise infeasible(plans, prices, lighter, space, wishes, space_of)
    return plans


def make_space(
    of: ShortModel, cluster: Cluster, global_batch: int, **decided: Any
) -> Space:
    """The space of a model's search: axes as they divide its dims. decided: fields of
    the space."""
    groups = find_groups(of.named)
    fields = {
        "sizes": {
            name: tuple(_axis_sizes(AXES[name], of, cluster, global_batch, groups))
            for name in SIZED_AXES
        },
        "has_scores": of.has_attention_scores,
        **decided,
    }
    return Space(cluster, global_batch, of.runs, **fields, groups=groups)


def _axis_sizes(
    axis: Axis, of: ShortModel, cluster: Cluster, global_batch: int, groups: Groups
) -> Iterator[int]:
    """Yields the sizes that an axis may have, 1 first."""
    node = cluster.levels[0].devices if cluster.levels else 1
    yield 1
    if axis.splits_heads:
        for t in range(2, max(node, FEW_RANKS) + 1):
            divides = all(n % t == 0 for n in (*of.extents("heads"), cluster.devices))
            if divides and divides_groups(groups, t):
                yield t
    elif axis.holds_experts:
        experts = of.extents("experts")
        for e in range(2, min(FEW_RANKS, max(experts, default=1)) + 1):
            # A layer is priced with one sample of a rank and with two.
            if of.batch % (2 * e) == 0 and all(n % e == 0 for n in experts):
                yield e
    elif axis.splits_only_seq:
        yield from _context_sizes(of, cluster, global_batch, node)


def _context_sizes(
    of: ShortModel, cluster: Cluster, global_batch: int, node: int
) -> Iterator[int]:
    """Sizes beside 1, where sequences are long, or samples fewer than devices.
    Beyond a node a rank has as many tokens as are long by themselves: what its
    attention computes then takes longer than what moves."""
    if of.positions < LONG and global_batch >= cluster.devices:
        return
    most = max(node, of.positions // LONG)
    # In zigzag each rank has two pieces, of whole chunks where a model makes some.
    chunks = max(of.extents("seq"), default=1)
    powers = [2**i for i in range(1, most.bit_length()) if chunks % 2 ** (i + 1) == 0]
    yield from (n for n in powers if n <= most and cluster.devices % n == 0)


def plan_of(candidate: Candidate, of: ShortModel) -> Plan:
    """The plan that a candidate stands for; cuts go by the layers that begin there."""
    plan = make_plan(
        candidate.mesh,
        **of.options,
        context_parallel=candidate.context_parallel,
        microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        stages_per_rank=candidate.stages_per_rank,
        recompute=candidate.recompute,
        zero=candidate.zero,
    )
    starts = of.layers.starts if of.layers else ()
    ends = accumulate(candidate.layers[:-1])
    cuts = tuple(starts[end] for end in ends)
    return replace(plan, cuts=cuts, order=candidate.order)


def open_ops(
    of: ShortModel, plan: Plan, cluster: Cluster, decided: bool = False
) -> OpenPlan:
    """A plan for which it is to be decided what its axes split of each op.

    of: captured with the whole batch of a step. decided: whether attention works on cp
    as the plan says, and as no op sharding does. Raises: PlanError.
    """
    named = of.shared if plan.zero else of.named
    return OpenPlan(named, split_groups(named, plan), cluster, of.layers, decided)
