"""chunk_loss: logits of some positions after those of others, so that never all are
there at once.

    logits = head(hidden)               for some of hidden's positions at a time
    loss = f(logits, labels).sum()      their sum is added to that of the others

Logits are wide: of a vocabulary of 128,256 one token has 31 times as many as a hidden
state of 4,096. Where a loss goes row by row from them to a sum, each chunk of positions
has a sum of its own, and is computed again in the backward, as if the model had a
checkpoint around it (Hsu 2024, arXiv:2410.10989, and Wijmans 2024,
arXiv:2411.09009, keep logits from memory by kernels). The product with the head is
done once more for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...checkpointed import in_checkpoint, is_checkpoint
from ...errors import AutoparError
from ...graph import Graph, Node, Value
from ...mesh import balanced
from ...ops.op import op_of
from ...ops.parts import part_of, steps_in
from ...ops.random import awaits_number
from ...ops.reductions import dims_of
from ...ops.row_dims import along, dim_after
from ...ops.rules import equation, is_pointwise
from ...rewrite import Rewriter
from ..normalize.chunk_rows import Mixed, resized
from ..normalize.split_products import LINEAR, MATMUL, emit_chunks

WHOLE = "leave loss_chunks out, and all logits are there at once"


class NotInChunks(AutoparError):
    """A loss that is not a sum over rows of logits, each by itself."""


@dataclass(frozen=True)
class Rows:
    """The dim of a value along positions. joined: with the samples, as one dim of
    both."""

    dim: int
    joined: bool = False


@dataclass
class Region:
    """What is computed of logits, position by position. samples, positions: how many.
    rows: of each value of the region, and of what it reads, the positions. inside:
    names of what it makes for each; sums: of the sums over them, which end it."""

    samples: int
    positions: int
    rows: dict[str, Rows] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)

    def count(self, rows: Rows, positions: int) -> int:
        """The extent of a dim that has so many positions."""
        return positions * (self.samples if rows.joined else 1)


def chunk_loss(
    graph: Graph, literals: Mapping[str, torch.Tensor], chunks: int
) -> Graph:
    """Cuts what is computed of the logits into chunks of positions.

    Raises: NotInChunks.
    """
    if chunks == 1:
        return graph
    problems: list[NotInChunks] = []
    for head in _find_products(graph):
        try:
            own, of_head = _cut_before(graph, literals, head)
            region = _find_region(own, of_head)
            if chunks > region.positions:
                raise NotInChunks(
                    f"loss_chunks={chunks}, but the loss is of {region.positions} "
                    "positions",
                    source=head.location.source,
                    fix=f"use loss_chunks={region.positions} or less",
                )
            return _rewritten(own, literals, region, chunks)
        except NotInChunks as problem:
            problems.append(problem)
    raise problems[0]


def _find_products(graph: Graph) -> list[Node]:
    """The products outside of layers, those first that make most, as logits are.

    Raises: NotInChunks, if there are none.
    """
    products = [
        node
        for node in graph.nodes
        if node.op in (LINEAR, MATMUL) and not node.location.layer
    ]
    if not products:
        raise NotInChunks(
            "loss_chunks: the model has no product outside of its layers that makes "
            "logits",
            fix=WHOLE,
        )
    return sorted(products, key=lambda node: -node.out.numel)


def _cut_before(
    graph: Graph, literals: Mapping[str, torch.Tensor], head: Node
) -> tuple[Graph, Node]:
    """The graph with logits of only those positions that are read, where the others are
    cut off after the product; and the product."""
    readers, x = graph.consumers(), head.out
    chain, parts = [head], set[tuple[int, int]]()
    while not parts and (own := readers.get(x.name)):
        cuts = [part_of(node) for node in own]
        if all(
            part and part[:2] == (x, 1) and part[2:] != (0, x.shape[1]) for part in cuts
        ):
            parts = {part[2:] for part in cuts if part}
        elif (
            len(own) > 1
            or len(own[0].outs) > 1
            or x in graph.outputs
            or along(own[0], _second(x)) != 1
        ):
            break
        else:
            chain.append(own[0])
            x = own[0].out
    if len(parts) != 1 or any(map(steps_in, readers[x.name])) or len(x.shape) != 3:
        return graph, head
    ((start, end),) = parts
    gone = {node.out.name for node in readers[x.name]}
    ours = {node.out.name for node in chain}
    products: list[Value | None] = []

    def change(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
        name = node.results[0].name
        if name in gone:
            return (node.operands[0],)
        if name not in ours:
            return None
        if name == head.out.name:
            hidden = node.operands[0]
            piece = rewriter.emit("aten.slice.Tensor", hidden, 1, start, end)
            node = node.substitute(lambda v: piece if v == hidden else v)
            products.extend(rewriter.keep(resized(node, 1, end - start)))
            return (*products,)
        return rewriter.keep(resized(node, 1, end - start))

    ops = {node.op for node in (*chain, *readers[x.name])}
    graph = Rewriter(graph, literals).run(dict.fromkeys(ops, change))
    return graph, next(n for n in graph.nodes if n.outs == (*products,))


def _second(x: Value) -> Callable[[Value], int | None]:
    return lambda v: 1 if v == x else None


def _find_region(graph: Graph, head: Node) -> Region:
    """Follows the logits to the sums that a loss is made of. Raises: NotInChunks."""
    samples = next((v.shape[0] for v in graph.inputs if v.shape), 1)
    hidden = head.operands[0]
    joined = len(hidden.shape) == 2
    rows = Rows(0, True) if joined else Rows(1)
    positions = hidden.shape[rows.dim] // (samples if joined else 1)
    region = Region(samples, positions)
    if region.count(rows, positions) != hidden.shape[rows.dim] or positions < 2:
        raise _refused(head, "does not make logits of each position")
    region.rows[hidden.name] = rows
    later: set[str] = set()  # what is made of sums
    for node in graph.nodes:
        of_sums = any(v.name in later for v in node.operands)
        if node is head or any(v.name in region.inside for v in node.operands):
            if of_sums:
                raise _refused(node, "takes logits, and what is made of all of them")
            _go_on(region, node)
        if of_sums or any(v.name in region.sums for v in node.results):
            later.update(v.name for v in node.results)
    if any(v.name in region.inside for v in graph.outputs):
        raise NotInChunks(
            "loss_chunks: logits, or what is made of each, are an output", fix=WHOLE
        )
    return region


def _refused(node: Node, why: str) -> NotInChunks:
    op = node.name.partition(".")[2]
    return NotInChunks(
        f"loss_chunks: '{op}' {why}", source=node.location.source, fix=WHOLE
    )


def _go_on(region: Region, node: Node) -> None:
    """Notes what is made of positions, each by itself, or their sum."""
    own = {v.name: region.rows[v.name] for v in node.operands if v.name in region.rows}
    own |= _beside(region, node, own)
    if awaits_number(node):
        raise _refused(node, "draws at random what is made of logits")
    first = own.get(node.operands[0].name)
    summed = node.name == "aten.sum" and first and first.dim in dims_of(node)
    if summed:
        region.sums.update(v.name for v in node.results)
    elif (after := _after(region, node, own)) is None:
        raise _refused(node, "mixes positions of logits, or more than adds them up")
    else:
        region.rows.update((v.name, after) for v in node.results)
        region.inside.update(v.name for v in node.results)
    region.rows.update(own)
    region.nodes[id(node)] = node


def _after(region: Region, node: Node, own: Mapping[str, Rows]) -> Rows | None:
    """Finds the dim along positions of a node's results."""
    if len({rows.joined for rows in own.values()}) != 1:
        return None
    joined = next(iter(own.values())).joined
    if op_of(node).view == "shape":
        return _after_view(region, node.operands[0], node.out, *own.values())
    dim = along(node, lambda v: own[v.name].dim if v.name in own else None)
    return None if dim is None else Rows(dim, joined)


def _after_view(region: Region, x: Value, out: Value, rows: Rows) -> Rows | None:
    dim = dim_after(x.shape, out.shape, rows.dim)
    if dim >= 0:
        return Rows(dim, rows.joined)
    both = (region.samples, region.positions)
    if rows.joined:  # samples and positions apart
        rest = x.shape[rows.dim + 1 :]
        parted = (*x.shape[: rows.dim], *both, *rest)
        dim = dim_after(parted, out.shape, rows.dim + 1)
        return Rows(dim) if dim >= 0 else None
    if rows.dim == 0 or x.shape[rows.dim - 1] != region.samples:
        return None
    merged = (*x.shape[: rows.dim - 1], both[0] * both[1], *x.shape[rows.dim + 1 :])
    dim = dim_after(merged, out.shape, rows.dim - 1)
    return Rows(dim, True) if dim >= 0 else None


def _beside(region: Region, node: Node, own: Mapping[str, Rows]) -> dict[str, Rows]:
    """Finds the dims along positions of what a node reads beside the region."""
    beside: dict[str, Rows] = {}
    rule = None if is_pointwise(node) else equation(node)
    for v in node.operands:
        if v.name in own:
            continue
        for x in (x for x in node.operands if x.name in own):
            rows = own[x.name]
            if rule is None:
                dim = rows.dim - len(x.shape) + len(v.shape)
            else:
                letters = rule.operands[node.operands.index(x)][rows.dim]
                names = rule.operands[node.operands.index(v)]
                dim = names.index(letters) if letters in names else -1
            count = region.count(rows, region.positions)
            if 0 <= dim < len(v.shape) and v.shape[dim] == count:
                beside[v.name] = replace(rows, dim=dim)
    return beside


# --- the graph with chunks ---------------------------------------------------------


def _rewritten(
    graph: Graph, literals: Mapping[str, torch.Tensor], region: Region, chunks: int
) -> Graph:
    nodes = [*_in_order(graph, region)]
    done: dict[str, Value] = {}

    def change(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
        if node.results[0].name not in ours:
            return None
        if not done:
            done.update(_in_chunks(rewriter, region, chunks))
        return tuple(done.get(v.name, v) if v else None for v in node.outs)

    ours = {v.name for n in region.nodes.values() for v in n.results}
    ops = {n.op for n in region.nodes.values()}
    ordered = replace(graph, nodes=tuple(nodes))
    return Rewriter(ordered, literals).run(dict.fromkeys(ops, change))


def _in_order(graph: Graph, region: Region) -> Iterator[Node]:
    """Yields all nodes, those of the region in a row."""
    after: set[str] = {v.name for n in region.nodes.values() for v in n.results}
    later: list[Node] = []
    for node in graph.nodes:
        if id(node) in region.nodes:
            continue
        if any(v.name in after for v in node.operands):
            after.update(v.name for v in node.results)
            later.append(node)
        else:
            yield node
    yield from region.nodes.values()
    yield from later


def _in_chunks(rewriter: Rewriter, region: Region, chunks: int) -> dict[str, Value]:
    """Emits the region for each chunk. Returns the sums of all, by name."""
    sizes = balanced(region.positions, chunks)
    first = _checkpoints(rewriter)
    read = {v.name: v for n in region.nodes.values() for v in n.operands}
    cut = {
        name: _pieces(rewriter, region, rewriter.replaced.get(name, v), name, sizes)
        for name, v in read.items()
        if name in region.rows and name not in region.inside
    }
    totals: dict[str, Value] = {}
    for i, positions in enumerate(sizes):
        now = {name: pieces[i] for name, pieces in cut.items()}
        for node in region.nodes.values():
            module = in_checkpoint(first + i, node.location.module)
            own = _of_chunk(region, node, now, rewriter, positions)
            now |= _named(node, rewriter.keep(own.in_module(module)))
        for name in sorted(region.sums):
            if name in totals:
                total = rewriter.emit("aten.add.Tensor", totals[name], now[name])
            totals[name] = total if name in totals else now[name]
    return totals


def _named(node: Node, outs: Sequence[Value | None]) -> dict[str, Value]:
    pairs = zip(node.outs, outs, strict=True)
    return {v.name: out for v, out in pairs if v is not None and out is not None}


def _checkpoints(rewriter: Rewriter) -> int:
    """The number of checkpoints that the model itself has."""
    layers = {node.location.layer for node in rewriter.graph.nodes}
    return sum(map(is_checkpoint, layers))


def _of_chunk(
    region: Region,
    node: Node,
    now: Mapping[str, Value],
    rewriter: Rewriter,
    positions: int,
) -> Node:
    """The node for some of the positions. Raises: NotInChunks."""

    def of_chunk(v: Value) -> Value:
        return now.get(v.name) or rewriter.replaced.get(v.name, v)

    rows = region.rows.get(node.results[0].name)
    node = node.substitute(of_chunk)
    if rows is None:
        return node
    try:
        return resized(node, rows.dim, region.count(rows, positions))
    except Mixed:
        raise _refused(node, "cannot be of some positions alone") from None


def _pieces(
    rewriter: Rewriter, region: Region, x: Value, name: str, sizes: tuple[int, ...]
) -> Sequence[Value]:
    """The positions of each chunk of what the region reads."""
    rows = region.rows[name]
    if not rows.joined:
        return emit_chunks(rewriter, x, sizes, rows.dim)
    before, after = x.shape[: rows.dim], x.shape[rows.dim + 1 :]
    apart = (*before, region.samples, region.positions, *after)
    return [
        rewriter.reshape(piece, (*before, region.samples * n, *after))
        for piece, n in zip(
            emit_chunks(rewriter, rewriter.reshape(x, apart), sizes, rows.dim + 1),
            sizes,
            strict=True,
        )
    ]
