"""parameter_sharding: where parameters lie between uses, and how they become whole.

Data parallel ranks would all hold the same parameters, gradients and optimizer state.
With ZeRO (Rajbhandari 2020, section 5) each holds a share. To the compiler that is a
split at rest that no op wants, so a parameter is all-gathered for its ops and its
gradient comes back by reduce-scatter. The stages of ZeRO differ in when:

| zero | parameters: whole, gathered         | gradients: whole, scattered      |
|------|-------------------------------------|----------------------------------|
| 1    | during a step, before it            | during a step, at its end        |
| 2    | during a step, before it            | by block, in each backward       |
| 3    | by block, forward and backward      | by block, in each backward       |

Between steps the parameters, their gradients and what an optimizer keeps of them are
shares with all three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch

from ..capture.lower_precision import CAST
from ..dims.name_dims import Dims
from ..graph import Graph, Node, Value
from ..mesh import TIME
from ..ops.op import op_of
from ..plan import Plan
from ..shard.collectives import axes_of
from ..shard.resharding import MAX, TABLE, P, R, State, V, place_of
from ..shard.sharding import Sharding

GATHER = "comm.all_gather"
GATHERS = (GATHER, "comm.start_gather")
# What changes where a parameter lies or its precision, and nothing else.
RESHARDINGS = {
    CAST,
    *(f"comm.{op}" for ends, (op, _) in TABLE.items() if not {P, MAX} & {*ends}),
}


def split_parameter(
    dims: Dims, state: Sharding, axis: str, sizes: Mapping[str, int]
) -> Sharding:
    """Split a parameter along one of its named dims, over an axis that splits none.

    Preferred is a dim of which all ranks get as much, then the outermost, whose shards
    are gathered without a copy, then the longest. The new split is the innermost, so
    that others stay as they are when it is undone. Without a dim that has something
    for each rank the parameter stays whole.
    """
    options = []
    for d, factors in enumerate(dims):
        for i, dim in enumerate(factors):
            held = state.slots[d][i]
            parts = prod(sizes[a] for a in (*held, axis))
            if dim.size >= parts:
                options.append((dim.size % parts > 0, (d, i) > (0, 0), -dim.size, d, i))
    if not options:
        return state
    *_, d, i = min(options)
    return state.with_split((d, i), axis, [*state.slots[d][i], axis])


def parameter_sharding(
    dims: Dims, uses: Sequence[Sharding], plan: Plan, shared: bool
) -> Sharding:
    """How a parameter is sharded: as all of its uses want it; else whole, or split
    where a share for each rank is enough until it is used.

    shared: whether it is shared out over the plan's axes for that.
    """
    state, order = Sharding.whole(dims), list(plan.axes)
    sizes = plan.sizes
    for axis in order:
        place = place_at_rest(plan, axis, (use.state(axis) for use in uses))
        if place is not None:
            state = state.with_split(place, axis, order)
    for axis in plan.parameter_axes if shared else ():
        # What is split as rows in zigzag are is no share in one piece.
        as_rows = axis in plan.zigzag and any(use.place(axis) for use in uses)
        if state.place(axis) is None and not as_rows:
            state = split_parameter(dims, state, axis, sizes)
    return state


def place_at_rest(
    plan: Plan, axis: str, uses: Iterable[State]
) -> tuple[int, int] | None:
    """The (dim, factor) that an axis splits of a parameter until it is used: what all
    of its uses want split; None if they differ."""
    if axis in plan.zigzag or axis == TIME:
        return None  # a share is one piece of a parameter, and the same all along
    places = {place_of(state) for state in uses}
    return places.pop() if len(places) == 1 else None


def varying_axes(
    state: Sharding, uses: Sequence[Sharding], axes: Iterable[str]
) -> frozenset[str]:
    """The axes on which a value is V: each of its uses there is V or split, and sends
    only part of a gradient back."""
    return frozenset(
        axis
        for axis in axes
        if state.state(axis) in (R, V)
        and uses
        and all(use.state(axis) != R for use in uses)
    )


def find_casts(nodes: Iterable[Node], params: Iterable[Value]) -> dict[str, str]:
    """Copies of parameters in another precision: value name -> the parameter.

    They lie as the parameters rest, so that what is gathered is the copy.
    """
    held = {v.name for v in params}
    return {
        node.out.name: node.operands[0].name
        for node in nodes
        if node.op == CAST and node.operands[0].name in held
    }


def gradient_dtypes(
    nodes: Iterable[Node], params: Iterable[Value]
) -> dict[str, torch.dtype]:
    """The dtypes that gradients of parameters, and of gathered ones, are added up and
    reduced in: the parameters' own precision (Micikevicius 2018, section 3.1)."""
    dtypes = {v.name: v.dtype for v in params}
    for node in nodes:
        same = node.op in RESHARDINGS or op_of(node).view in ("shape", "order")
        if same and node.operands[0].name in dtypes:
            own = dtypes[node.operands[0].name]
            dtypes[node.out.name] = torch.promote_types(own, node.out.dtype)
    return dtypes


def find_made(nodes: Iterable[Node], sources: Collection[str]) -> dict[str, Node]:
    """What is made of the given values alone: value name -> its node, in order."""
    makers: dict[str, Node] = {}
    for node in nodes:
        for v in node.operands:
            if v.name not in sources and v.name not in makers:
                break
        else:
            makers |= {v.name: node for v in node.results if node.operands}
    return makers


def find_gathered(
    nodes: Iterable[Node], sources: Collection[str], whole: Collection[str] = ()
) -> dict[str, Node]:
    """The nodes that make values of parameters alone by an all-gather, those that lead
    to it, and those that follow: value name -> node.

    sources: names of parameters, buffers, and constants. whole: of those among them
    that stand for gathered values.
    """
    makers = find_made(nodes, sources)
    needed = set(whole)
    for name, node in makers.items():
        if node.op in GATHERS or any(v.name in needed for v in node.operands):
            needed.add(name)
    for name in reversed(makers):
        if name in needed:
            needed.update(v.name for v in makers[name].operands)
    return {name: node for name, node in makers.items() if name in needed}


def gather_again(
    forward: Sequence[Node],
    backward: Sequence[Node],
    sources: Collection[str],
    whole: Collection[str] = (),
) -> list[Node]:
    """The backward, with parameters gathered in it again, each before its first use,
    see `find_gathered`.

    So a gathered parameter lives from first to last use in the forward, and again in
    the backward, but not in between.
    """
    gathered = find_gathered(forward, sources, whole)
    made: set[str] = set()
    again: list[Node] = []

    def make(name: str) -> None:
        if name in gathered and name not in made:
            for v in gathered[name].operands:
                make(v.name)
            append(gathered[name])

    def append(node: Node) -> None:
        again.append(node)
        made.update(v.name for v in node.results)

    for node in backward:
        for v in node.operands:
            make(v.name)
        append(node)
    return again


def gathered_axes(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Parameter -> the axes over which it is gathered for its uses, in order."""
    origin = {v.name: v.name for v in graph.params}
    gathered: dict[str, list[str]] = {}
    for node in graph.nodes:
        name = origin.get(node.operands[0].name) if node.operands else None
        if name is None or node.op not in (GATHER, CAST, "aten.reshape.default"):
            continue
        origin[node.out.name] = name
        if node.op == GATHER:
            gathered.setdefault(name, []).extend(axes_of(node)[::-1])
    return {name: tuple(dict.fromkeys(axes)) for name, axes in gathered.items()}
