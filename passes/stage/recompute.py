"""recompute: keep less from forward to backward, and compute it again there.

full       of each layer only what enters it is kept (GPipe's re-materialisation, Huang
           2019, section 2.3).
selective  the core of attention, what has a row and a column for each token, is made
           again where the model spells it out (Korthikanti 2022, section 5). A fused
           attention kernel keeps none of it anyway.

A layer is run again right before its backward begins, by the very same nodes, so that
gradients are bitwise as without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from passes.dims.name_dims import Dims
from passes.graph import Node, Value
from passes.stage.reuse import find_owners


def recompute(
    policies: Mapping[str, str],
    forward: Sequence[Node],
    backward: Sequence[Node],
    keep: Collection[str],
    dims: Mapping[str, Dims],
) -> list[Node]:
    """The backward, with nodes in it that make again what is not kept.

    policies: layer -> "none", "selective" or "full". keep: names of values that are
    kept anyway, as they leave the stage. dims: the named dims of values.
    """
    if not set(policies.values()) - {"none"}:
        return list(backward)
    dropped = _dropped(forward, keep, _chooser(policies, forward, dims))
    producers = {v.name: n for n in forward for v in n.results}
    order = {id(n): i for i, n in enumerate(forward)}
    wanted = {v.name for n in backward for v in n.operands if v.name in dropped}
    made: set[str] = set()
    found: list[Node] = []
    for node in backward:
        missing = [
            v.name for v in node.operands if v.name in dropped and v.name not in made
        ]
        for layer in dict.fromkeys(producers[name].where.layer for name in missing):
            # All that the layer's backward reads, at once.
            names = {n for n in wanted if producers[n].where.layer == layer}
            again = _closure(names - made, dropped, producers)
            found += sorted(again, key=lambda n: order[id(n)])
            made.update(v.name for n in again for v in n.results)
        found.append(node)
    return found


def _dropped(
    forward: Sequence[Node], keep: Collection[str], chosen: Callable[[str, Value], bool]
) -> set[str]:
    """Of what is chosen, the values that are read in the layer that makes them only."""
    layers = {v.name: n.where.layer for n in forward for v in n.results}
    crossing = {
        v.name
        for n in forward
        for v in n.operands
        if layers.get(v.name, n.where.layer) != n.where.layer
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


def _chooser(
    policies: Mapping[str, str], forward: Sequence[Node], dims: Mapping[str, Dims]
) -> Callable[[str, Value], bool]:
    """(layer, value) -> whether the layer's policy would rather make it again."""
    large = squares(forward, dims)

    def chosen(layer: str, v: Value) -> bool:
        policy = policies.get(layer, "none")
        return policy == "full" or (policy == "selective" and v.name in large)

    return chosen


def squares(forward: Sequence[Node], dims: Mapping[str, Dims]) -> set[str]:
    """Names of values that have the same named dim twice: scores and weights of
    attention, what else has their shape, and what shares its memory with these."""
    shapes = set()
    made = {v.name: v for n in forward for v in n.results}
    for v in made.values():
        keys = [d.key for factors in dims.get(v.name, ()) for d in factors]
        if len(set(keys)) < len(keys):
            shapes.add(v.shape)
    owners = find_owners(forward)
    storages = {owners.get(name, name) for name, v in made.items() if v.shape in shapes}
    return {name for name in made if owners.get(name, name) in storages}


def _closure(
    names: Collection[str], dropped: Collection[str], producers: Mapping[str, Node]
) -> list[Node]:
    """The forward nodes that make these values from what is kept."""
    chosen: dict[int, Node] = {}
    waiting = list(names)
    while waiting:
        node = producers[waiting.pop()]
        if id(node) not in chosen:
            chosen[id(node)] = node
            waiting += [v.name for v in node.operands if v.name in dropped]
    return list(chosen.values())
