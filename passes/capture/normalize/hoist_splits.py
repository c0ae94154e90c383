"""hoist_splits: what is cut into pieces after some steps is cut before them.

    x = silu(conv1d(linear(y, w).transpose(1, 2), c))     each channel by itself
    q, k, v = x.split([32, 16, 16], 1)

What goes channel by channel does so for each piece: q is what its channels of the
product and of the filters make. So a split moves up to where the channels come from, a
product (which `split_products` cuts in turn) or the pieces that were joined before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...graph import Graph, Node, Value
from ...ops.op import op_of
from ...ops.rules import equation
from ...rewrite import Rewriter, Rule
from ..normalize.split_products import CUTS, LINEAR, MATMUL, emit_split


@dataclass(frozen=True)
class Hoist:
    """steps: (node, dim of its result that is cut), from last to first. source: the
    value that is cut above them, or values that were joined. dim: of source."""

    steps: tuple[tuple[Node, int], ...]
    source: Value | tuple[Value, ...]
    dim: int


def hoist_splits(rewriter: Rewriter) -> Graph:
    """Rewrite the rewriter's graph."""
    graph = rewriter.graph
    producers = graph.producers()
    uses = {name: len(nodes) for name, nodes in graph.consumers().items()}
    uses.update(dict.fromkeys((v.name for v in graph.outputs), 2))
    hoists = {}
    for node in graph.nodes:
        if node.name in CUTS and all(node.outs):
            hoist = _find(node, producers, uses)
            if hoist is not None:
                hoists[node.results[0].name] = hoist

    if not hoists:
        return graph

    def split(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
        hoist = hoists.get(node.results[0].name)
        return None if hoist is None else _hoist(rewriter, node, hoist)

    rules: dict[str, Rule] = dict.fromkeys(CUTS, split)
    return rewriter.run(rules)


def cut_dim(node: Node) -> int:
    """The dim that a split cuts."""
    return int(node.arg("dim")) % len(node.operands[0].shape)


def _find(node: Node, producers: dict[str, Node], uses: dict[str, int]) -> Hoist | None:
    """How far up a split may move, if it comes to where channels come from."""
    x, dim = node.operands[0], cut_dim(node)
    sizes = tuple(v.shape[dim] for v in node.results)
    uneven = len(set(sizes)) > 1
    steps: list[tuple[Node, int]] = []
    while uses.get(x.name) == 1 and (maker := producers.get(x.name)) is not None:
        kind = maker.name
        if kind == "aten.cat":
            along = maker.arg("dim") % len(x.shape)
            alike = tuple(v.shape[dim] for v in maker.operands) == sizes
            return (
                Hoist(tuple(steps), maker.operands, dim)
                if along == dim and alike
                else None
            )
        if _begins(maker, x, dim):
            return Hoist(tuple(steps), x, dim) if steps and uneven else None
        before = _before(maker, dim)
        if before is None:
            return None
        steps.append((maker, dim))
        dim, x = before, _main(maker)
    return None


def _begins(maker: Node, x: Value, dim: int) -> bool:
    """Whether what a node makes, x, can be cut along a dim with all that made it: of a
    product, heads of a product, and pieces of such a piece."""
    if maker.op in (LINEAR, MATMUL) and len(maker.operands[1].shape) == 2:
        return dim == len(x.shape) - 1
    if maker.name == "aten.reshape":
        return prod(x.shape[dim:]) == maker.operands[0].shape[-1]
    return maker.name in CUTS and dim == cut_dim(maker)


def _main(node: Node) -> Value:
    """The operand that a step goes over channel by channel."""
    return max(node.operands, key=lambda v: (v.numel, len(v.shape)))


def _before(node: Node, dim: int) -> int | None:
    """The dim of the main operand that becomes `dim` of the result, if its indices are
    independent and need one step; else None. Dropout's numbers, an op of ours, go by
    place."""
    steps = node.is_aten and not op_of(node).is_product
    if not steps or not node.operands or len(node.outs) > 1:
        return None
    main = _main(node)
    before = _along(node, dim, main)
    alike = before is not None and main.shape[before] == node.out.shape[dim]
    return before if alike else None


def _along(node: Node, dim: int, v: Value) -> int | None:
    """The dim of an operand that is a dim of the result, by the op's rule."""
    rule = equation(node)
    if rule is None:
        return None
    letters = rule.outs[0][dim]
    dims = rule.operands[node.operands.index(v)]
    apart = letters in dims and all(rule.roles[c] == "map" for c in letters)
    return dims.index(letters) if apart else None


def _hoist(rewriter: Rewriter, split: Node, hoist: Hoist) -> tuple[Value | None, ...]:
    sizes = [v.shape[cut_dim(split)] for v in split.results]

    def now(v: Value) -> Value:
        return rewriter.replaced.get(v.name, v)

    if isinstance(hoist.source, Value):
        pieces = emit_split(rewriter, now(hoist.source), tuple(sizes), hoist.dim)
    else:
        pieces = tuple(now(v) for v in hoist.source)
    for node, dim in reversed(hoist.steps):
        pieces = _each(rewriter, node, dim, pieces, sizes)
    return pieces


def _each(
    rewriter: Rewriter,
    node: Node,
    dim: int,
    pieces: Sequence[Value],
    sizes: Sequence[int],
) -> tuple[Value, ...]:
    """A step of each piece, with its share of what has a value for each channel."""
    main, whole, sizes_of = _main(node), node.out.shape[dim], op_of(node).sizes
    shares: dict[str, Sequence[Value]] = {main.name: pieces}
    for v in node.operands:
        if v.name in shares:
            continue
        own = _along(node, dim, v)
        now = rewriter.replaced.get(v.name, v)
        if own is not None and v.shape[own] == whole > 1:
            cut = emit_split(rewriter, now, tuple(sizes), own)
        else:
            cut = (now,) * len(sizes)
        shares[v.name] = cut
    outs = []
    for i, size in enumerate(sizes):
        shape = (*node.out.shape[:dim], size, *node.out.shape[dim + 1 :])

        def share(v: Value, i: int = i) -> Value:
            return shares[v.name][i]

        out = rewriter.builder.value("piece", shape, node.out.dtype)
        made = replace(node.substitute(share), outs=(out,))
        made = sizes_of(made) if sizes_of else made
        rewriter.builder.nodes.append(made)
        rewriter.made[out.name] = made
        outs.append(out)
    return tuple(outs)
