"""loops: what repeats in a list of nodes, layer after layer, is written once.

Layers that are alike are found in the nodes themselves, not by their modules: a stretch
repeats if each of its nodes does what the one a period later does, on tensors of the
same shapes. So what runs ahead of its layer (a gather) or behind it (a scatter) is part
of the loop as well, and layers that alternate repeat in pairs. A first or last layer
that does without some of it is part of it too (`loop_ends`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ..emit.layer_rows import LayerLoop, layers_as_loop, statements
from ..emit.loop import Item, Loop
from ..emit.loop_ends import kind_of, with_ends
from ..emit.loop_rows import fitting, held, loop_of, loop_of_all
from ..graph import LAYER, Node

TURNS = 12  # layers that take turns, at most: so many of one kind may be in a period


def find_loops(nodes: Sequence[Node], tables: Collection[str] = ()) -> list[Item]:
    """The nodes in order, those that repeat by layer as loops: over equal layers, or
    over layers that differ, if that takes fewer statements. tables: names of earlier
    values that are stored by the number of a layer."""
    (items,) = find_loops_of_parts([nodes], tables)
    return items


def find_loops_of_parts(
    parts: Sequence[Sequence[Node]], tables: Collection[str] = ()
) -> list[list[Item]]:
    """The same of several lists, of which later ones read what earlier ones make: with
    as many layers an iteration in all of them, if that can be. What a loop keeps for
    each of its iterations has to be taken apart for one whose iterations are others."""
    stretches = [_loops_of_stretches(own, tables) for own in parts]
    layers = [
        layers_as_loop(own) if any(isinstance(item, Loop) for item in items) else None
        for own, items in zip(parts, stretches, strict=True)
    ]
    both = [
        (items, items if loop is None else loop.items)
        for items, loop in zip(stretches, layers, strict=True)
    ]
    each = [int(statements(b) < statements(a)) for a, b in both]
    chosen = min(
        (each, [0] * len(both), [1] * len(both)),
        key=lambda ways: _apart([own[w] for own, w in zip(both, ways, strict=True)]),
    )
    return [
        items if loop is None or not way else _with_more(loop, tables)
        for items, loop, way in zip(stretches, layers, chosen, strict=True)
    ]


def _apart(parts: Sequence[Sequence[Item]]) -> tuple[bool, int]:
    """(whether the longest loops of parts have iterations of unlike numbers of layers,
    how many statements all parts have)."""
    loops = [[item for item in items if isinstance(item, Loop)] for items in parts]
    longest = [max(own, key=lambda x: x.count * len(x.body)) for own in loops if own]
    steps = {abs(loop.index[1]) for loop in longest}
    return len(steps) > 1, sum(map(statements, parts))


def _with_more(layers: LayerLoop, tables: Collection[str]) -> list[Item]:
    """Layers as a loop, with those loops that there are before and after it."""
    before, after = (find_loops(own, tables) for own in (layers.before, layers.after))
    return [*before, layers.loop, *after]


def _loops_of_stretches(nodes: Sequence[Node], tables: Collection[str]) -> list[Item]:
    items: list[Item] = []
    start = 0
    stretches = [*_stretches(nodes), (len(nodes), 0, 0)]
    for (first, period, end), (border, _, _) in pairwise(stretches):
        begin = _turned(nodes, first, period, end)
        while begin + 2 * period <= end:
            rows = _rows(nodes, begin, period, end)
            loop = loop_of(rows)
            if loop is None or loop.count < len(rows) - 1:
                later = loop_of(rows[1:])
                if loop is None or (later is not None and later.count > loop.count):
                    begin += period
                    continue
            after = begin + loop.count * period
            ends = with_ends(nodes[start:begin], loop, nodes[after:border], tables)
            items += [*nodes[start : begin - ends.before], ends.loop]
            start = begin = after + ends.after
    return [*items, *nodes[start:]]


def without_ends(loop: Loop, first: int, last: int) -> list[Item]:
    """The loop of some of the iterations, with the others before and after it."""
    inner = loop_of_all(loop.rows[first:last])
    if inner is None:
        return [loop]
    before, after = (
        [node for row in rows for node in row if node is not None]
        for rows in (loop.rows[:first], loop.rows[last:])
    )
    return [*before, inner, *after]


# --- stretches of equal nodes -------------------------------------------------------


def _stretches(nodes: Sequence[Node]) -> list[tuple[int, int, int]]:
    """(begin, period, end) of what repeats, in order, none within another; what saves
    most is chosen first."""
    kinds: dict[Any, int] = {}
    keys = [kinds.setdefault(kind_of(n), len(kinds)) for n in nodes]
    stretches: list[tuple[int, int, int]] = []
    waiting = [(0, len(nodes))]
    while waiting:
        first, last = waiting.pop()
        best = _longest(nodes, keys, first, last)
        if best is None:
            continue
        begin, period, end = best
        stretches.append(best)
        waiting += [(first, begin), (begin + (end - begin) // period * period, last)]
    return sorted(stretches)


def _longest(
    nodes: Sequence[Node], keys: Sequence[int], first: int, last: int
) -> tuple[int, int, int] | None:
    """Returns the stretch between two places that saves most."""
    seen: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=TURNS))
    apart: Counter[int] = Counter()
    for i in range(first, last):
        apart.update(i - before for before in seen[keys[i]])
        seen[keys[i]].append(i)
    best: tuple[int, int, int] | None = None
    best_saved = 0  # nodes
    for period, times in sorted(apart.items()):
        if times < period // 4:
            continue
        for begin, end in _runs(keys, period, first, last):
            count = (end - begin) // period
            saved = (count - 1) * period
            if saved > best_saved and _by_layer(nodes, begin, period):
                best_saved = saved
                best = _aligned(nodes, begin, period, end), period, end
    return best


def _runs(
    keys: Sequence[int], period: int, first: int, last: int
) -> Iterator[tuple[int, int]]:
    """(begin, end) of the longest runs in which each is as the one a period later."""
    begin = first
    for i in range(first, last - period + 1):
        if i == last - period or keys[i] != keys[i + period]:
            if i - begin >= period:
                yield begin, i + period
            begin = i + 1


def _by_layer(nodes: Sequence[Node], begin: int, period: int) -> bool:
    """Whether a later repetition is of another layer than the first."""
    return any(
        _layers(nodes[i]) != _layers(nodes[i + period])
        for i in range(begin, begin + period)
    )


def _layers(node: Node) -> tuple[str, ...]:
    names = (v.name for v in node.operands if LAYER.search(v.name))
    return (node.location.layer, *names)


def _aligned(nodes: Sequence[Node], begin: int, period: int, end: int) -> int:
    """The first place where a layer begins, if that loses no repetition."""
    for i in range(begin, begin + (end - begin) % period + 1):
        layer = nodes[i].location.layer
        if layer and (i == 0 or nodes[i - 1].location.layer != layer):
            return i
    return begin


def _rows(
    nodes: Sequence[Node], begin: int, period: int, end: int
) -> tuple[tuple[Node, ...], ...]:
    places = range(begin, end - period + 1, period)
    return tuple(tuple(nodes[i : i + period]) for i in places)


def _turned(nodes: Sequence[Node], begin: int, period: int, end: int) -> int:
    """The begin of the rows: `begin`, or later by less than a row, so that what a row
    reads is of one layer, and made in it or the row before.

    What is gathered ahead and scattered behind runs at the edges of other layers.
    """
    places = range(begin, min(begin + period, end - 2 * period + 1))
    return min(
        places,
        key=lambda at: (not _fits(nodes, at, period, end), _strange(nodes, at, period)),
        default=begin,
    )


def _fits(nodes: Sequence[Node], at: int, period: int, end: int) -> bool:
    """Whether the first few rows are a loop, or those after the first one."""
    rows = _rows(nodes, at, period, min(end, at + 5 * period))
    return any(len(own) > 1 and fitting(own) == len(own) for own in (rows, rows[1:]))


def _strange(nodes: Sequence[Node], at: int, period: int) -> int:
    """How many nodes of a row read what other rows have not made, for another layer
    than most."""
    rows = nodes[at : at + 2 * period]
    made = {v.name for n in rows for v in n.results}
    layers = Counter(
        n.location.layer
        for n in rows[period:]
        if any(v.name not in made and not held(v) for v in n.operands)
    )
    return layers.total() - max(layers.values(), default=0)
