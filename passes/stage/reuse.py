"""reuse: write a result over an operand that nobody reads any more.

Elementwise ops and all-reduces then run in place: less memory at the peak, and no new
pages to touch. An operand's memory is free to take if it was made here, or kept for
nobody else, is not part of what is kept from here on, and no view of it is read later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ..graph import Node, Value, parameters
from ..ops.memory import IN_PLACE, find_owners, may_alias
from ..ops.op import op_of


def reuse(
    nodes: Sequence[Node],
    keep: Collection[str],
    entering: Mapping[str, str] = MappingProxyType({}),
) -> list[Node]:
    """Turn ops into their in-place form where an operand's memory is free.

    keep: names of the values that live on after the last node. entering: as of
    `own_residuals`, of values from before the first one.
    """
    owner, spread = find_owners(nodes, entering), _spread(nodes)
    sharing: dict[str, list[str]] = {}
    for name, root in owner.items():
        sharing.setdefault(root, []).append(name)
    last_read = {owner[name]: len(nodes) for name in keep if name in owner}
    for i, node in enumerate(nodes):
        for v in node.operands:
            if v.name in owner:
                root = owner[v.name]
                last_read[root] = max(last_read.get(root, i), i)
    written, made = [], {v.name: i for i, n in enumerate(nodes) for v in n.results}
    for i, node in enumerate(nodes):
        place = _free_operand(node, i, owner, last_read, spread, made)
        if place is None:
            written.append(node)
            continue
        node = _in_place(node, place)
        written.append(node)
        # The result lives in the operand's memory now: they are one.
        taken, root = owner[node.operands[0].name], owner[node.out.name]
        joining = sharing.pop(root)
        owner.update(dict.fromkeys(joining, taken))
        sharing[taken] += joining
        last_read[taken] = max(last_read[taken], last_read.pop(root, i))
    return written


def own_residuals(
    nodes: Sequence[Node], residuals: Iterable[Value], handed: Iterable[Value]
) -> dict[str, str]:
    """Residual that nodes made -> the value whose memory it may share, of those that
    the backward may write over.

    residuals: all that there are. handed: what others have of these nodes: it stays as
    it is, as does what lies elsewhere, or has one place for several elements.
    """
    owner, spread, residuals = find_owners(nodes), _spread(nodes), [*residuals]
    fixed = {owner.get(v.name) for v in handed}
    fixed |= {owner.get(v.name) for v in residuals if v.name in spread}
    owned = {v.name: owner[v.name] for v in residuals if v.name in owner}
    return {name: root for name, root in owned.items() if root not in fixed}


def _spread(nodes: Sequence[Node]) -> set[str]:
    """Views in which one place in memory stands for several elements."""
    aliases: set[str] = set()
    for node in nodes:
        if op_of(node).view == "copies" or (
            aliases
            and may_alias(node)
            and not aliases.isdisjoint([v.name for v in node.operands])
        ):
            aliases.update(v.name for v in node.results)
    return aliases


def _free_operand(
    node: Node,
    i: int,
    owner: dict[str, str],
    last_read: dict[str, int],
    spread: set[str],
    made: Mapping[str, int],
) -> Value | None:
    """The operand whose memory the node's result can take. Of two the one made last: so
    the layer that adds to what a stage receives, which stays, is as the others are."""
    if node.op == "comm.all_reduce":
        candidates = node.operands[:1]
    elif node.op in IN_PLACE and not node.kwargs:
        candidates = node.operands[: 2 if op_of(node).commutes else 1]
    else:
        return None
    out = node.out
    for v in sorted(candidates, key=lambda v: made.get(v.name, -1), reverse=True):
        root = owner.get(v.name)
        alone = [o.name for o in node.operands if owner.get(o.name) == root]
        if root is None or last_read[root] != i or alone != [v.name]:
            continue
        if v.name in spread:
            continue
        if v.shape == out.shape and v.dtype == out.dtype:
            return v
    return None


def _in_place(node: Node, into: Value) -> Node:
    if node.op == "comm.all_reduce":
        return replace(node, kwargs={**node.kwargs, "inplace": True})
    if node.operands[0] != into:
        first, second, *_ = parameters(node.op)
        node = node.with_args(**{first: into, second: node.operands[0]})
    return replace(node, op=IN_PLACE[node.op])
