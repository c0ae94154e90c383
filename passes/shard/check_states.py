"""check_states: on each axis, what an op makes and what it is made of fit together.

A value has one state on an axis, and so has its gradient (`passes.shard.sharding`). An
op's derivative is linear in the gradients of its results: it gives back a pending sum
if these are pending sums, and what is whole and the same on all ranks if these are. It
cannot do with some of each. So on an axis that splits nothing of an op, all that flows
through it is R, or all is V. Where the axis does split the op, each rank has its own
part of the work, and sends back its own part of a gradient: no operand is R.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from math import prod

from ..dims.name_dims import Dims
from ..graph import Graph, InvalidGraph, Node, Value
from ..ops.experts import ROUTED
from ..plan import Plan
from ..shard.collectives import axes_of
from ..shard.resharding import MAX, TABLE, P, R, S, V, kind
from ..shard.sharding import Sharding

# op -> (the state of its operand on its axes, that of its result).
STEPS: dict[str, set[tuple[str, str]]] = {}
for _ends, (_op, _) in TABLE.items():
    STEPS.setdefault(f"comm.{_op}", set()).add(_ends)


def check_states(
    graph: Graph,
    shardings: Mapping[str, Sharding],
    axes: Sequence[str],
    flows: Collection[str],
) -> None:
    """Asserts that the states of every op's operands and results fit together.

    shardings: of each value, as it is made and as it is read. flows: names of the
    values that gradients flow through; of others each rank may do as it likes.
    """
    checked: set[Hashable] = set()  # layers that are alike share shardings
    for node in graph.nodes:
        if node.op in ROUTED:
            continue  # rows that are split on the axis before and after
        lies = [(id(shardings[v.name]), v.name in flows) for v in _values(node)]
        moved = axes_of(node) if node.op in STEPS else ()
        alike = node.op, moved, len(node.operands), *lies
        if alike in checked:
            continue
        checked.add(alike)
        for axis in axes:
            if problem := _problem(node, axis, shardings, flows):
                raise AssertionError(f"{node}: {problem} on axis '{axis}'")


def check_shardings(
    graph: Graph,
    dims: Mapping[str, Dims],
    shardings: Mapping[str, Sharding],
    plan: Plan,
) -> None:
    """Checks that every value has a sharding, which fits its dims and the plan's axes.

    Raises: InvalidGraph.
    """
    checked: set[Hashable] = set()  # layers that are alike share dims and shardings
    for v in (*graph.sources, *(v for node in graph.nodes for v in node.results)):
        own, lies = dims[v.name], shardings[v.name]
        if (alike := (v.shape, id(own), id(lies))) not in checked:
            checked.add(alike)
            check_sharding(v, own, lies, plan)


def check_sharding(v: Value, dims: Dims, lies: Sharding, plan: Plan) -> None:
    """Checks one value's. Raises: InvalidGraph."""
    shape = tuple(prod(d.size for d in factors) for factors in dims)
    if shape != v.shape:
        raise InvalidGraph(f"{v} is {v.type}, and its dims are {shape}")
    if [len(own) for own in lies.slots] != [len(own) for own in dims]:
        raise InvalidGraph(f"{v} has other dims than its sharding {lies.slots}")
    split = [axis for own in lies.slots for axes in own for axis in axes]
    used = [*split, *(axis for axis, _ in lies.pending), *lies.varying]
    if len(set(split)) < len(split) or not set(used) <= set(plan.axes):
        raise InvalidGraph(f"{v} {lies.exact_text(dims)}, on axes {plan.axes}")


def _problem(
    node: Node, axis: str, shardings: Mapping[str, Sharding], flows: Collection[str]
) -> str | None:
    """The fault of a node on one axis, if it has one."""
    has = {v.name: kind(shardings[v.name].state(axis)) for v in _values(node)}
    before = [has[v.name] for v in node.operands if v.name in flows]
    after = [has[v.name] for v in node.results if v.name in flows]
    if node.op in STEPS and axis in axes_of(node):
        if after and (before[0], after[0]) not in STEPS[node.op]:
            return f"a move from {before[0]} to {after[0]}"
    elif set(has.values()) & {S, P, MAX}:
        if after and R in before:
            return "it is split, and an operand is used as if it were not"
        if set(after) & {R, V}:
            return "it is split, and a result is as if it were not"
    elif after and len({*before, *after}) > 1:
        return f"what is made is {'/'.join(after)} of what is {'/'.join(before)}"
    return None


def _values(node: Node) -> Iterator[Value]:
    yield from node.operands
    yield from node.results
