"""links: which views and casts are written where they are read, not as statements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ..capture.lower_precision import CAST
from ..emit.loop import Item
from ..emit.spell import returns_list
from ..graph import Node
from ..ops.memory import is_in_place, may_alias
from ..ops.op import is_method


def find_links(
    items: Sequence[Item],
    keep: Collection[str],
    ends: Collection[int],
    standing: Collection[str],
    when: Sequence[str] = (),
) -> set[int]:
    """Places of nodes with one reader: the next, as the tensor whose method it is, a
    chain of views and casts being one statement; or, of nothing but these, another, as
    an argument, if only such are in between, or what they view is there anyway.

    keep: names of what others than nodes read. ends: places after which something is
    let go of. standing: names of what is there anyway. when: the conditions that the
    nodes are under; "", if they are not given.

    What is read to make a tensor is let go of before that tensor is copied: by a cast,
    or by a view that cannot be one; and before it is an argument.
    """
    readers: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        for v in item.operands if isinstance(item, Node) else ():
            readers.setdefault(v.name, []).append(i)

    def reader(i: int) -> int:
        """The position of the only reader; 0 if the node cannot be written there."""
        node = items[i]
        if not isinstance(node, Node) or len(node.outs) != 1 or not node.results:
            return 0
        if not node.is_aten or is_in_place(node) or returns_list(node.op):
            return 0
        read = readers.get(node.out.name, [])
        if len(read) != 1 or node.out.name in keep:
            return 0
        return read[0] if not when or when[i] == when[read[0]] else 0

    readers_of = list(map(reader, range(len(items))))
    links = _chains(items, readers_of, ends)
    for i, node in reversed([*enumerate(items)]):
        j = readers_of[i]
        # What begins with a product, and is a statement, stays one.
        if not j or not isinstance(node, Node) or not is_method(node) or i - 1 in links:
            continue
        there = items[j]
        argument = isinstance(there, Node) and there.op != CAST and not is_method(there)
        alone = links.issuperset(range(i + 1, j))
        if argument and (alone or node.operands[0].name in standing):
            links.add(i)
    return links


def _chains(
    items: Sequence[Item], readers: Sequence[int], ends: Collection[int]
) -> set[int]:
    """The positions of items whose result is read by the next one alone."""
    links: set[int] = set()
    # Of the chain that ends here: what last made a tensor, whether it is turned, and
    # whether it is of nothing but views and casts.
    maker: int | None = None
    turned = views = False
    for i, (node, following) in enumerate(pairwise(items)):
        if readers[i] != i + 1:
            continue
        assert isinstance(node, Node) and isinstance(following, Node)
        casts, method = following.op == CAST, is_method(following)
        if i - 1 not in links:
            maker, turned = None if may_alias(node) else i, False
            views = node.op == CAST or is_method(node)
        if not (casts or method or views):
            continue
        links.add(i)
        reshapes = following.op == "aten.reshape.default"
        if casts or not method or (turned and reshapes):
            if maker is not None and maker in ends:
                links.discard(maker)
                views = True
            maker, turned = i + 1, False
        else:
            turned |= not reshapes
    return links
