"""recompute: keep less from forward to backward, and compute it again there.

elementwise  what elementwise ops make of what is kept is made again where elementwise
             ops of the backward read it, in registers, see `elementwise_again`.
selective    so is the core of attention, what has a row and a column for each token,
             where the model spells it out (Korthikanti 2022, section 5). A fused
             attention kernel keeps none of it anyway. What ranks gather of each other
             is gathered again, and each keeps its own part (section 4.2.2).
full         of each layer only what enters it is kept (GPipe's re-materialisation,
             Huang 2019, section 2.3).

A layer is run again right before its backward begins, elementwise ops where they are
read, by the very same nodes, so that gradients are bitwise as without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property

from ..dims.name_dims import Dims
from ..graph import Node, Value
from ..ops.memory import find_owners
from ..recompute.elementwise_again import elementwise_again


def recompute(
    policies: Mapping[str, str], run: Run, keep: Collection[str]
) -> list[Node]:
    """The backward, with nodes in it that recompute what is not kept.

    policies: layer -> the name of its policy, see `POLICIES`. keep: names of values
    that are kept anyway, as they leave the stage.
    """
    forward, backward = run.forward, run.backward
    used = {*policies.values()}
    if used <= {"none"}:
        return list(backward)
    remade = {name: POLICIES[name](run) for name in {"none", *used}}

    def again_in(layer: str) -> Again:
        return remade[policies.get(layer, "none")]

    def chosen(layer: str, v: Value) -> bool:
        return v.name in again_in(layer).names

    dropped = _dropped(forward, keep, chosen)
    producers = {v.name: n for n in forward for v in n.results}
    order = {id(n): i for i, n in enumerate(forward)}
    wanted: dict[str, set[str]] = {}  # by each layer's backward
    for v in (v for n in backward for v in n.operands if v.name in dropped):
        wanted.setdefault(producers[v.name].location.layer, set()).add(v.name)
    made: set[str] = set()
    placed: list[Node] = []
    for node in backward:
        missing = [
            v.name for v in node.operands if v.name in dropped and v.name not in made
        ]
        for layer in dict.fromkeys(producers[name].location.layer for name in missing):
            alone = again_in(layer).where_read
            own = {n for n in missing if producers[n].location.layer == layer}
            needs = own & alone
            if own - alone:
                needs |= wanted[layer] - alone - made
            again = _closure(needs, dropped - made, producers)
            for one in sorted(again, key=lambda n: order[id(n)]):
                new = _only(one, {v.name for v in one.results} & dropped - made)
                made.update(v.name for v in new.results)
                placed.append(new)
        placed.append(node)
    return placed


def _only(node: Node, names: Collection[str]) -> Node:
    """The node with just those of its results: others are there as they were made."""
    outs = tuple(v if v is not None and v.name in names else None for v in node.outs)
    return replace(node, outs=outs)


def _dropped(
    forward: Sequence[Node], keep: Collection[str], chosen: Callable[[str, Value], bool]
) -> set[str]:
    """Returns the chosen values that only the layer that makes them reads."""
    layers = {v.name: n.location.layer for n in forward for v in n.results}
    crossing = {
        v.name
        for n in forward
        for v in n.operands
        if layers.get(v.name, n.location.layer) != n.location.layer
    }
    return {
        v.name
        for n in forward
        for v in n.results
        if layers[v.name]
        and v.name not in crossing
        and v.name not in keep
        and chosen(layers[v.name], v)
    }


def squares(nodes: Sequence[Node], dims: Mapping[str, Dims]) -> set[str]:
    """Names of values that have the same named dim twice, as scores and weights of
    attention do, and of what shares its memory with these.

    nodes: in global shapes. A rank's own extents say nothing: on some ranks, its rows
    may be as many as a head is wide, and all ranks must choose alike.
    """
    made = {v.name for n in nodes for v in n.results}
    owners = find_owners(nodes)
    storages = set()
    for name in made:
        keys = [d.key for factors in dims.get(name, ()) for d in factors]
        if len(set(keys)) < len(keys):
            storages.add(owners.get(name, name))
    return {name for name in made if owners.get(name, name) in storages}


def gathered(nodes: Sequence[Node]) -> set[str]:
    """Names of values gathered from other ranks, and of those in their memory."""
    made = {v.name for n in nodes if n.op == "comm.all_gather" for v in n.results}
    owners = find_owners(nodes)
    names = (v.name for n in nodes for v in n.results)
    return {name for name in names if owners.get(name, name) in made}


def add_unnamed(
    large: Collection[str], nodes: Sequence[Node], dims: Mapping[str, Dims]
) -> set[str]:
    """Adds to `large` the values without named dims, kept for backward or dropout, that
    are made from these or read with them."""
    added = set(large)
    waiting = True
    while waiting:
        new = {
            v.name
            for n in nodes
            if any(v.name in added for v in (*n.operands, *n.results))
            for v in (*n.operands, *n.results)
            if v.name not in dims
        }
        waiting = not new <= added
        added |= new
    return added


@dataclass(frozen=True)
class Run:
    """What a policy chooses from: a stage's forward and backward, in the shapes of a
    rank. whole: its nodes in global shapes, which are those of every rank. dims: the
    named dims of their values. there: names of what both can read at any time."""

    whole: Sequence[Node]
    forward: Sequence[Node]
    backward: Sequence[Node]
    dims: Mapping[str, Dims]
    there: Collection[str]

    @cached_property
    def elementwise(self) -> AbstractSet[str]:
        """Names of what costs little where elementwise ops run as one."""
        return elementwise_again(self.forward, self.backward, self.there)


@dataclass(frozen=True)
class Again:
    """Names of the values that the backward makes again: those of a layer at once,
    right before its backward begins, or each where it is read."""

    at_once: AbstractSet[str] = frozenset()
    where_read: AbstractSet[str] = frozenset()

    @property
    def names(self) -> AbstractSet[str]:
        return self.at_once | self.where_read


def none(_: Run) -> Again:
    """Keeps all."""
    return Again()


def elementwise(run: Run) -> Again:
    """What costs little where elementwise ops run as one."""
    return Again(where_read=run.elementwise)


def selective(run: Run) -> Again:
    """Recomputes elementwise ops, the core of attention, and gathered values."""
    large = add_unnamed(squares(run.whole, run.dims), run.forward, run.dims)
    large |= gathered(run.forward)
    return Again(large, run.elementwise - large)


def full(run: Run) -> Again:
    """All that a layer makes."""
    return Again({v.name for n in run.forward for v in n.results})


# By what they keep, most first.
Policy = Callable[[Run], Again]
POLICIES: dict[str, Policy] = {
    "none": none,
    "elementwise": elementwise,
    "selective": selective,
    "full": full,
}


def _closure(
    names: Collection[str], dropped: Collection[str], producers: Mapping[str, Node]
) -> list[Node]:
    """The forward nodes that compute these values from those that are kept."""
    chosen: dict[int, Node] = {}
    waiting = list(names)
    while waiting:
        node = producers[waiting.pop()]
        if id(node) not in chosen:
            chosen[id(node)] = node
            waiting += [v.name for v in node.operands if v.name in dropped]
    return list(chosen.values())
