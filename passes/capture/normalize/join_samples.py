"""join_samples: samples that are joined to others are two batches side by side.

    logits = model(cat([chosen, rejected]))     preferences, or each sample twice
    a, b = logits[:batch], logits[batch:]

Read as stacked and seen as one dim, with samples inside of it, so that microbatches and
ranks have those of each half that belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...graph import Graph, Node, Value
from ...ops.op import op_of
from ...ops.parts import part_of, steps_in
from ...rewrite import Rewriter, Rule
from ..normalize.decompose_slices import bounds
from ..normalize.hoist_splits import cut_dim
from ..normalize.split_products import CUTS, emit_split


def join_samples(graph: Graph, literals: Mapping[str, torch.Tensor]) -> Graph:
    """Rewrites what joins samples along the first dim, and slices of what is so."""
    samples = {v.shape[0] for v in graph.inputs if v.shape}
    computed = {v.name for v in graph.inputs}  # of the batch
    joins: set[str] = set()
    halves: dict[int, int] = {}  # extents of joined samples -> of each that was joined
    for node in graph.nodes:
        if computed.isdisjoint(v.name for v in node.operands):
            continue
        computed.update(v.name for v in node.results)
        if (each := _joined(node)) in samples:
            halves[node.out.shape[0]] = each
            if node.name == "aten.cat":
                joins.add(node.out.name)
    if not halves:
        return graph
    pieces: dict[str, tuple[Value, ...]] = {}

    def join(rewriter: Rewriter, node: Node) -> Value | None:
        if node.out.name not in joins:
            return None
        beside = rewriter.emit("aten.stack.default", node.operands, 0)
        return rewriter.reshape(beside, node.out.shape)

    def cut(rewriter: Rewriter, node: Node) -> Value | None:
        x, dim, start, end, step = bounds(node, node.operands[0])
        each = 0 if dim else halves.get(x.shape[0], 0)
        if not each or step != 1 or end - start != each or start % each:
            return None
        if node.out.name not in computed:
            return None
        return of(rewriter, x, each)[start // each]

    def of(rewriter: Rewriter, x: Value, each: int) -> tuple[Value, ...]:
        if x.name not in pieces:
            pieces[x.name] = emit_split(rewriter, x, (each,) * (x.shape[0] // each), 0)
        return pieces[x.name]

    def pick(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        """Takes single samples from the batch that they are of."""
        picked, x = [*samples_of(node)], node.operands[0]
        each = halves.get(x.shape[0], 0) if picked else 0
        if not each or len(picked) < len(node.outs):
            return None
        if picked[0][0].name not in computed:
            return None
        own = of(rewriter, x, each)
        return tuple(
            rewriter.reshape(
                rewriter.emit("aten.select.int", own[i // each], 0, i % each), v.shape
            )
            for v, i in picked
        )

    def cut_or_pick(rewriter: Rewriter, node: Node) -> Any:
        return cut(rewriter, node) or pick(rewriter, node)

    rules: dict[str, Rule] = dict.fromkeys(("aten.select", "aten.unbind", *CUTS), pick)
    rules |= {"aten.cat": join, "aten.slice": cut_or_pick}
    return Rewriter(graph, literals).run(rules)


def samples_of(node: Node) -> Iterator[tuple[Value, int]]:
    """Yields what a node takes of one index of its operand's first dim, and which."""
    x = node.operands[0] if node.operands else None
    if x is None or not x.shape:
        return
    if node.name == "aten.unbind" and not cut_dim(node):
        yield from ((v, i) for i, v in enumerate(node.outs) if v is not None)
    elif node.name in CUTS and not cut_dim(node) and all(node.outs):
        if len(node.outs) == x.shape[0]:
            yield from zip(node.results, range(x.shape[0]), strict=True)
    elif op_of(node).view == "part" and not steps_in(node):
        _, dim, start, end = part_of(node) or (x, 1, 0, 0)
        if not dim and end == start + 1:
            yield node.out, start


def _joined(node: Node) -> int | None:
    """The extent of each of what a node joins along the first dim, all alike."""
    if not node.operands or not node.results:
        return None
    x, shape = node.operands[0].shape, node.results[0].shape
    if node.name == "aten.cat":
        alike = {v.shape for v in node.operands} == {x} and len(node.operands) > 1
        return x[0] if alike and node.arg("dim") % len(x) == 0 else None
    beside = len(x) > 1 and shape == (x[0] * x[1], *x[2:])
    return x[1] if node.name == "aten.reshape" and beside else None
