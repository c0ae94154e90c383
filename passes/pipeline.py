"""The whole way from a captured model to a program, pass by pass."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod

from .assemble import assemble
from .capture.lower_precision import lower_precision
from .capture.normalize.normalize import normalize
from .capture.rows.input_ranges import find_input_ranges
from .dims.name_dims import Named, name_dims
from .emit_modules import emit_modules
from .errors import AutoparError, BatchError, CaptureError
from .layers import NotAlike
from .mesh import TIME
from .plan import Plan
from .price.cluster import PLAIN, Cluster
from .price.op_costs import OpCosts
from .program import Program
from .schedule_stages import schedule_stages
from .search.choose_recompute import choose_recompute
from .shard.cut_weights import cut_weights
from .shard.few_layers import few_layers
from .shard.insert_collectives import Lowered, insert_collectives
from .shard.propagate import propagate
from .shard.query_groups import group_remark, split_groups
from .shard.remarks import find_remarks
from .shard.separable import reads_whole
from .shard.sort_rows import sort_rows
from .shard.split_updates import split_updates, with_results
from .stage.split_stages import split_stages
from .traced import Traced
from .watch import Watch


def compile_program(
    traced: Traced,
    plan: Plan,
    cluster: Cluster | Callable[[Lowered], Cluster] = PLAIN,
    watch: Watch = lambda name, made: None,
    even: bool = True,
) -> Program:
    """Run every pass after `trace`.

    cluster: by whose seconds stages are cut, scheduled and recomputed; or a function
    that measures it for the lowered graph.
    watch: called with each pass's name and what it made, which prints.
    even: whether to refuse a batch of which some ranks would have more than others.
    """
    check_sources(traced)
    _ = plan.splits_backward  # what cannot run is refused before the work begins
    watch("trace", traced)
    ranges = find_input_ranges(traced.graph)
    args = traced, plan, watch, even
    lowered, remarks = lower_few(*args) or lower(*args)
    cluster = cluster if isinstance(cluster, Cluster) else cluster(lowered)
    staged = split_stages(lowered, OpCosts(lowered, cluster))
    watch("split_stages", staged)
    staged = choose_recompute(staged, cluster)
    emitted = emit_modules(staged, watch)
    scheduled = schedule_stages(staged, [one.first for one in emitted], cluster)
    watch("schedule_stages", scheduled)
    remarks = (*traced.remarks, *remarks)
    return assemble(staged, emitted, scheduled, ranges, remarks)


def lower_few(
    traced: Traced, plan: Plan, watch: Watch, even: bool = True
) -> tuple[Lowered, tuple[str, ...]] | None:
    """Does what `lower` does, but lowers each repeated layer once; None if that
    fails."""
    few = few_layers(traced, plan)
    if few is None:
        return None
    watch("few_layers", few.traced)
    try:
        lowered, remarks = lower(few.traced, plan, watch, even)
        whole = few.whole(lowered, traced)
    except (AutoparError, NotAlike):
        return None  # what is wrong is said of all layers
    watch("repeat_layers", whole)
    return whole, remarks


def lower(
    traced: Traced, plan: Plan, watch: Watch, even: bool = True
) -> tuple[Lowered, tuple[str, ...]]:
    """Lowers what the model computes to what all ranks do; also returns remarks for the
    user."""
    traced = lower_precision(traced, tables=bool(plan.parameter_axes))
    if traced.autocast:
        watch("lower_precision", traced)
    normal = with_results(normalize(traced, plan.loss_chunks))
    watch("normalize", normal)
    named = name_dims(normal)
    watch("name_dims", named)
    check_batch(named, plan, even)
    whole, named = named, split_updates(named)
    if named is not whole:
        watch("split_updates", named)
    asked, plan = plan, split_groups(named, plan)
    sharded = propagate(named, plan)
    watch("propagate", sharded)
    uncut, sharded = sharded, cut_weights(sharded)
    if sharded is not uncut:
        watch("cut_weights", sharded)
    lowered = insert_collectives(sharded)
    watch("insert_collectives", lowered)
    ordered = sort_rows(lowered)
    if ordered is not lowered:
        watch("sort_rows", ordered)
    remarks = (*group_remark(named, asked, plan), *find_remarks(sharded))
    return ordered, remarks


def check_sources(traced: Traced) -> None:
    """Raises CaptureError if there are no parameters, or nothing to compute with
    them."""
    if not traced.graph.params:
        raise CaptureError(
            "the model computes with no parameters",
            fix="let its modules be attributes of it, or of an nn.ModuleList, so that "
            "model.parameters() has theirs",
        )
    for v in traced.graph.inputs:
        if 0 in v.shape:
            raise BatchError(
                f"the batch field '{v.name}' is empty: {v.type}",
                fix="give an example of a batch as the steps will have it",
            )


def check_batch(named: Named, plan: Plan, even: bool) -> None:
    """Every microbatch must get a whole, equal part of the batch; and every rank."""
    axes = [a for a in plan.data_axes if even and a != TIME]
    parts = plan.microbatches * prod(map(plan.size, axes))
    for v in named.graph.inputs:
        first = named.dims[v.name][0] if v.shape else ()
        split = [d for d in first if d.name == "batch"]
        if not split or split[0].size % parts == 0:
            continue
        ranks, together = parts // plan.microbatches, v.shape[0] // split[0].size
        if together > 1 and reads_whole(named, split[0]):
            continue  # no batch is large enough: `propagate` names what reads it whole
        in_groups = f", of which {together} go together," if together > 1 else ""
        fix = f"use a batch that {parts * together} divides"
        if split[0].size % ranks == 0:
            most = gcd(split[0].size // ranks, plan.microbatches)
            fix = f"use microbatches={most}, or {fix.removeprefix('use ')}"
        raise BatchError(
            f"the batch of {v.shape[0]} samples ('{v.name}'){in_groups} does not "
            f"divide into {plan.microbatches} microbatches on {ranks} data parallel "
            "ranks",
            fix=fix,
        )
