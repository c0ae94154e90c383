"""A first or a last layer that is like those of a loop but for some of its nodes.

What gathers ahead has nothing to gather in the last layer, and what scatters behind has
nothing yet in the first; in their place these do what leads into the loop, or out of
it. So they are iterations of the loop, in which some nodes are left out, and some are
run that the others are without.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ..emit.loop import Loop, Row, numbered
from ..emit.loop_rows import held, loop_of_all
from ..graph import LAYER, Node, Value

LEAST = 8  # nodes that are worth it
MOST = 0.5  # of the nodes of a row: what an end may be without, or have beside


@dataclass(frozen=True)
class Ends:
    """A loop with its ends, and how many nodes before and after it are in them."""

    loop: Loop
    before: int = 0
    after: int = 0


def with_ends(
    before: Sequence[Node], loop: Loop, after: Sequence[Node], tables: Collection[str]
) -> Ends:
    """The loop, with the layers just before and after it if they are like its own.
    tables: see `loop_of_all`."""
    ends = Ends(loop)
    for last in (True, False):
        end = _aligned(ends.loop, after if last else before, last)
        if end is None:
            continue
        rows, taken = end
        longer = loop_of_all(rows, tables)
        if longer is None or not _is_numbered(longer):
            continue
        taken_before, taken_after = (0, taken) if last else (taken, 0)
        ends = Ends(longer, ends.before + taken_before, ends.after + taken_after)
    return ends


def kind_of(node: Node) -> Any:
    """Equal for nodes that may be the same statement of a loop."""
    outs = tuple(None if v is None else (v.shape, v.dtype) for v in node.outs)
    return node.op, _shape((node.args, tuple(sorted(node.kwargs.items())))), outs


def _shape(tree: Any) -> Any:
    """An argument without what may differ between iterations."""
    if isinstance(tree, Value):
        name = LAYER.sub("#", tree.name) if held(tree) else ""
        return name, tree.shape, tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple([_shape(item) for item in tree])
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return type(tree)
    return tree


def _aligned(
    loop: Loop, nodes: Sequence[Node], last: bool
) -> tuple[list[Row], int] | None:
    """(rows of the loop and one more, nodes that this takes) of what comes before or
    after it; None if it is not alike. last: after it."""
    row = loop.rows[-1 if last else 0]
    period = len(row)
    window = round(period * (1 + MOST))
    own = list(nodes[:window] if last else nodes[-window:])
    if len(own) < LEAST:
        return None
    matcher = SequenceMatcher(None, keys_of(row), keys_of(own), autojunk=False)
    blocks = [b for b in matcher.get_matching_blocks() if b.size]
    matched = sum(b.size for b in blocks)
    if matched < LEAST:
        return None
    first, end = blocks[0].b, blocks[-1].b + blocks[-1].size
    begin, end = (0, end) if last else (first, len(own))
    beside, without = end - begin - matched, period - matched
    if max(beside, without) > MOST * period:
        return None
    # Positions of the row, and where among them the end has nodes of its own.
    order: list[tuple[int | None, Node | None]] = []
    at, place = 0, begin
    for block in [*blocks, None]:
        to, there = (block.a, block.b) if block else (period, end)
        order += [(o, None) for o in range(at, to)]
        order += [(None, own[b]) for b in range(place, there)]
        if block:
            order += [(block.a + i, own[block.b + i]) for i in range(block.size)]
            at, place = block.a + block.size, block.b + block.size
    rows: list[Row] = [
        tuple(None if o is None else r[o] for o, _ in order) for r in loop.rows
    ]
    more = tuple(node for _, node in order)
    return ([*rows, more] if last else [more, *rows]), end - begin


def keys_of(nodes: Sequence[Node | None]) -> list[Any]:
    """Equal for nodes that may be the same statement, of the same module of layers."""
    return [
        None if n is None else (kind_of(n), LAYER.sub("#", n.location.module))
        for n in nodes
    ]


def _is_numbered(loop: Loop) -> bool:
    """Whether all names of operands given by name have an iteration's number."""
    return all(
        numbered([v.name for v in scanned.values]) is not None
        for scanned in loop.scanned
        if all(map(held, scanned.values))
    )
