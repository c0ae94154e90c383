"""Layers in a row of which not all are alike, as one loop: each layer is an iteration,
which does without the nodes of other kinds of layers.

A row begins where the node stands that each layer has once, of these where fewest
values are handed on. Rows of different kinds are laid side by side: what several have
is one statement, the rest is under the condition that a layer is of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Any

from ..emit.loop import Item, Loop, Row
from ..emit.loop_ends import keys_of
from ..emit.loop_rows import loop_of_all
from ..graph import LAYER, Node

KINDS = 16  # of rows, at most
KEPT = 3  # statements that keep and take what some iterations have


@dataclass(frozen=True)
class LayerLoop:
    """A loop over layers, and the nodes before and after it."""

    before: Sequence[Node]
    loop: Loop
    after: Sequence[Node]

    @property
    def items(self) -> list[Item]:
        return [*self.before, self.loop, *self.after]


def layers_as_loop(nodes: Sequence[Node]) -> LayerLoop | None:
    """The layers of a list as one loop; None if they are no loop."""
    keys = keys_of(nodes)
    cuts = _find_cuts(nodes, keys)
    if len(cuts) < 2:
        return None
    layers, begins = [*cuts], [*cuts.values()]
    end = _end_of_last(nodes, keys, begins, layers[-1])
    spans = [*pairwise([*begins, end])]
    rows = _side_by_side(nodes, keys, spans)
    if rows is None:
        return None
    ways = []
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        stop = len(rows) - last
        if stop - first < 2:
            continue
        loop = loop_of_all(rows[first:stop], None, layers[first:stop])
        if loop is not None:
            before, after = nodes[: spans[first][0]], nodes[spans[stop - 1][1] :]
            ways.append(LayerLoop(before, loop, after))
    return min(ways, key=lambda way: statements(way.items), default=None)


def statements(items: Sequence[Item]) -> int:
    """Estimates the number of statements that items take, with the conditions of nodes,
    and what iterations with the same nodes keep and take."""
    count = 0
    for item in items:
        count += 1
        if isinstance(item, Loop):
            times = [item.times(o) for o in range(len(item.body))]
            turns = sum(a != b for a, b in pairwise([times[0], *times]))
            count += len(item.body) + turns + KEPT * len({*times})
    return count


# --- where rows begin ---------------------------------------------------------------


def _find_cuts(nodes: Sequence[Node], keys: Sequence[Any]) -> dict[int, int]:
    """Number of a layer -> where its row begins, in order; {} if there are no rows."""
    places: dict[Any, list[tuple[int, int]]] = {}
    first: dict[str, dict[int, int]] = {}
    for i, node in enumerate(nodes):
        match = LAYER.search(node.location.module)
        if match is not None:
            n = int(match[1])
            places.setdefault(keys[i], []).append((n, i))
            path = node.location.module[: match.start()]
            first.setdefault(path, {}).setdefault(n, i)
    crossing = _crossing(nodes)
    several = [*places.values()]
    for begins in first.values():
        several.append([(n, _lowest(crossing, i)) for n, i in begins.items()])
    several = [own for own in several if len(own) > 1 and _in_order(own)]
    longest = max(map(len, several), default=0)
    return min(
        (dict(own) for own in several if len(own) == longest),
        key=lambda own: sum(crossing[i] for i in own.values()),
        default={},
    )


def _lowest(crossing: Sequence[int], i: int) -> int:
    """The next position with the fewest values across it: sums over what is read of a
    layer may belong to the next one."""
    while i + 2 < len(crossing) and crossing[i + 1] < crossing[i]:
        i += 1
    return i


def _in_order(places: Sequence[tuple[int, int]]) -> bool:
    """Whether layers stand one after the other, or from the last on."""
    steps = {b[0] - a[0] for a, b in pairwise(places)}
    return steps in ({1}, {-1}) and all(a[1] < b[1] for a, b in pairwise(places))


def _crossing(nodes: Sequence[Node]) -> list[int]:
    """How many values are made before each node, and read there or later."""
    made = {v.name: i for i, node in enumerate(nodes) for v in node.results}
    last = {v.name: i for i, node in enumerate(nodes) for v in node.operands}
    change = [0] * (len(nodes) + 1)
    for name, i in made.items():
        if name in last:
            change[i + 1] += 1
            change[last[name] + 1] -= 1
    return list(accumulate(change))


def _end_of_last(
    nodes: Sequence[Node], keys: Sequence[Any], begins: Sequence[int], layer: int
) -> int:
    """The end of the last layer's row: after its own nodes, or as in the other rows."""
    *others, (begin, end) = pairwise([*begins, len(nodes)])
    known = {keys[i] for first, after in others for i in range(first, after)}
    for i in range(end - 1, begin, -1):
        match = LAYER.search(nodes[i].location.module)
        if keys[i] in known or (match is not None and int(match[1]) == layer):
            return i + 1
    return begin + 1


# --- rows side by side --------------------------------------------------------------


def _side_by_side(
    nodes: Sequence[Node], keys: Sequence[Any], spans: Sequence[tuple[int, int]]
) -> list[Row] | None:
    """The rows, with None for nodes that only others have; None if there are too many
    kinds."""
    own = [tuple(keys[begin:end]) for begin, end in spans]
    kinds = sorted({*own}, key=lambda kind: (-own.count(kind), own.index(kind)))
    if len(kinds) > KINDS:
        return None
    whole: list[_Place] = []
    rows_of: dict[Any, list[_Place]] = {}
    for kind in kinds:
        whole, rows_of[kind] = _merged(whole, kind)
    order = {place: o for o, place in enumerate(whole)}
    rows = []
    for (begin, _), kind in zip(spans, own, strict=True):
        row: list[Node | None] = [None] * len(whole)
        for i, place in enumerate(rows_of[kind]):
            row[order[place]] = nodes[begin + i]
        rows.append(tuple(row))
    return rows


@dataclass(eq=False)
class _Place:
    """A place in rows that may hold a node of this kind."""

    key: Any


def _merged(
    whole: Sequence[_Place], kind: Sequence[Any]
) -> tuple[list[_Place], list[_Place]]:
    """(the places of both in order, with what they have in common once; those of the
    nodes of one kind of row)."""
    keys = [place.key for place in whole]
    matcher = SequenceMatcher(None, keys, kind, autojunk=False)
    both, own = list[_Place](), list[_Place]()
    for how, begin, end, first, after in matcher.get_opcodes():
        both += whole[begin:end]
        if how == "equal":
            own += whole[begin:end]
        else:
            more = [_Place(key) for key in kind[first:after]]
            both += more
            own += more
    return both, own
