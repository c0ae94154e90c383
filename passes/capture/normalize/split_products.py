"""split_products: one product of several weights in one becomes a product of each.

    q, k, v = linear(x, w).split([32, 16, 16], -1)      fused projections
    linear(cat([y, z], -1), w)                          fused outputs

The pieces of a dim that is cut unevenly are dims of their own: heads of q are not those
of k. As one weight none of them could be split over ranks; so the weight is cut, and
each piece has a product of its own. Even pieces stay in one product: their dim is,
without loss, (which piece, place in it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...graph import Graph, Node, Value
from ...ops.op import OPS
from ...ops.views import cut
from ...rewrite import Rewriter, Rule
from ..normalize.decompose_slices import bounds

LINEAR, MATMUL, ADD = "aten.linear.default", "aten.matmul.default", "aten.add.Tensor"
CUTS = {name for name, op in OPS.items() if op.rule is cut}
JOINED = 3  # pieces at most that are not joined before a product: an output for each


@dataclass(frozen=True)
class Cut:
    """Pieces of x along a dim, of these sizes, in order, that make up all of it and are
    all its uses; None where nothing reads a piece, as what pads a vocabulary.

    product: what made x (linear or matmul, of w [n,k] or [k,n]), if nothing else reads
    its result. bias [n]: what was added to it.
    """

    x: Value
    dim: int
    sizes: tuple[int, ...]
    pieces: tuple[Value | None, ...]
    product: Node
    bias: Value | None

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1 and None not in self.pieces


def split_products(rewriter: Rewriter) -> Graph:
    """Rewrite the rewriter's graph."""
    graph = rewriter.graph
    cuts = {v.name: cut for cut in find_cuts(graph) for v in cut.pieces if v}
    uses = {name: len(nodes) for name, nodes in graph.consumers().items()}
    made: dict[str, Value] = {}

    def cut_up(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
        cut = next((cuts[v.name] for v in node.results if v.name in cuts), None)
        if cut is None or (cut.even and node.name in CUTS):
            return None
        if node.results[0].name not in made:
            take = _even_pieces if cut.even else _products
            pieces = zip(cut.pieces, take(rewriter, cut), strict=True)
            made.update((v.name, piece) for v, piece in pieces if v and piece)
        return tuple(made[v.name] if v else None for v in node.outs)

    def joined(rewriter: Rewriter, node: Node) -> Value | None:
        cat = rewriter.producer(node.operands[0], "aten.cat")
        if cat is None or uses.get(cat.out.name, 0) != 1:
            return None
        return _sum_of_products(rewriter, node, cat)

    rules: dict[str, Rule] = {"aten.slice": cut_up, **dict.fromkeys(CUTS, cut_up)}
    return rewriter.run({**rules, LINEAR: joined, MATMUL: joined})


def find_cuts(graph: Graph) -> Iterator[Cut]:
    """Finds the products whose results are only cut into pieces."""
    producers, consumers = graph.producers(), graph.consumers()
    for name, readers in consumers.items():
        split = _pieces(readers)
        if split is None or any(v.name == name for v in graph.outputs):
            continue
        x, dim, sizes, pieces = split
        source, inner = x, math.prod(x.shape[dim:])
        bias: Value | None = None
        while len(consumers[source.name]) == 1 or source is x:
            node = producers.get(source.name)
            if node is None or (source.shape[-1] != inner and source is not x):
                break
            if node.op in (LINEAR, MATMUL) and len(node.operands[1].shape) == 2:
                shared = None in pieces and _is_shared(node, producers, consumers)
                if source.shape[-1] == inner and not shared:
                    yield Cut(x, dim, sizes, pieces, node, bias)
                break
            if node.op == ADD and bias is None and not node.kwargs:
                sides = [v for v in node.operands if v.shape == (inner,)]
                others = [v for v in node.operands if v.shape == source.shape]
                if len(sides) != 1 or len(others) != 1:
                    break
                bias, source = sides[0], others[0]
            elif node.op == "aten.reshape.default" and bias is None:
                source = node.operands[0]
            else:
                break


def _is_shared(
    product: Node, producers: dict[str, Node], consumers: dict[str, list[Node]]
) -> bool:
    """Whether a product's weight has other readers: an embedding, which looks up rows
    of all of it."""
    weight: Value | None = product.operands[1]
    while weight is not None:
        if len(consumers[weight.name]) > 1:
            return True
        maker = producers.get(weight.name)
        weight = maker.operands[0] if maker and maker.operands else None
    return False


def _pieces(
    readers: list[Node],
) -> tuple[Value, int, tuple[int, ...], tuple[Value | None, ...]] | None:
    """x, a dim, and sizes and values of the pieces along it, if all of x's readers cut
    it up along it."""
    if not readers:
        return None
    first = readers[0]
    x = first.operands[0]
    if len(readers) == 1 and first.name in CUTS:
        dim = int(first.arg("dim")) % len(x.shape)
        pieces = first.results
        sizes = tuple(v.shape[dim] for v in pieces)
        return (x, dim, sizes, pieces) if len(pieces) > 1 else None
    if any(node.op != "aten.slice.Tensor" for node in readers):
        return None
    cuts = sorted((bounds(node, x)[1:], node.out.name, node.out) for node in readers)
    dims = {dim for (dim, *_), _, _ in cuts}
    if len(dims) != 1:
        return None
    (dim,) = dims
    ordered: list[tuple[int, Value | None]] = []
    place = 0
    for (_, start, end, step), _, piece in cuts:
        if start < place or end <= start or step != 1:
            return None
        if start > place:
            ordered.append((start - place, None))
        ordered.append((end - start, piece))
        place = end
    if place < x.shape[dim]:
        ordered.append((x.shape[dim] - place, None))
    return x, dim, tuple(n for n, _ in ordered), tuple(v for _, v in ordered)


def _even_pieces(rewriter: Rewriter, cut: Cut) -> tuple[Value, ...]:
    x = rewriter.replaced.get(cut.x.name, cut.x)
    return emit_split(rewriter, x, cut.sizes, cut.dim)


def _products(rewriter: Rewriter, cut: Cut) -> tuple[Value | None, ...]:
    """Multiplies each piece by its rows of the weight, and adds its share of the
    bias."""
    x, w = (rewriter.replaced.get(v.name, v) for v in cut.product.operands[:2])
    inner = math.prod(cut.x.shape[cut.dim + 1 :])
    sizes, op = tuple(n * inner for n in cut.sizes), cut.product.op
    weights = emit_split(rewriter, w, sizes, int(op == MATMUL))
    biases: tuple[Value | None, ...] = (None,) * len(sizes)
    if cut.bias is not None:
        bias = rewriter.replaced.get(cut.bias.name, cut.bias)
        biases = emit_split(rewriter, bias, sizes, 0)
    products: list[Value | None] = []
    for piece, weight, share in zip(cut.pieces, weights, biases, strict=True):
        if piece is None:
            products.append(None)
            continue
        place = cut.product.location
        y = rewriter.emit(op, x, weight, where=place)
        if share is not None:
            y = rewriter.emit(ADD, y, share, where=place)
        products.append(rewriter.reshape(y, piece.shape))
    return tuple(products)


def _sum_of_products(rewriter: Rewriter, node: Node, cat: Node) -> Value | None:
    """The product of joined pieces: the sum of each piece's, by its columns of w."""
    w, rank = node.operands[1], len(cat.out.shape)
    along = cat.arg("dim") % rank
    pieces = cat.operands
    if along != rank - 1 or len(w.shape) != 2 or len(pieces) > JOINED:
        return None
    sizes = tuple(v.shape[-1] for v in pieces)
    weights = emit_split(rewriter, w, sizes, int(node.op == LINEAR))
    total: Value | None = None
    for piece, weight in zip(pieces, weights, strict=True):
        y = rewriter.like(node, node.op, piece, weight)
        total = y if total is None else rewriter.like(node, ADD, total, y)
    return total


def emit_split(
    rewriter: Rewriter, x: Value, sizes: tuple[int, ...], dim: int
) -> tuple[Value, ...]:
    """The pieces of x along a dim, of these extents; of a matrix that is turned, those
    of the matrix, turned."""
    turned = rewriter.producer(x, "aten.t", "aten.numpy_T", "aten.transpose")
    if turned is not None and len(x.shape) == 2:
        pieces = emit_split(rewriter, turned.operands[0], sizes, 1 - dim)
        return tuple(rewriter.again(turned, self=piece) for piece in pieces)
    shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in sizes]
    outs = tuple(Value("piece", shape, x.dtype) for shape in shapes)
    op, args = "aten.split_with_sizes.default", (x, sizes, dim)
    return tuple(filter(None, rewriter.keep(Node(op, args, {}, outs, rewriter.where))))


def emit_chunks(
    rewriter: Rewriter, x: Value, sizes: tuple[int, ...], dim: int
) -> tuple[Value, ...]:
    """Parts of x along a dim, whichever, of these extents: even ones have every so
    manieth each, so that ranks which hold some of x have as much of each part."""
    if len({*sizes}) > 1:
        return emit_split(rewriter, x, sizes, dim)
    before, after = (*x.shape[:dim], sizes[0]), x.shape[dim + 1 :]
    rows = rewriter.reshape(x, (*before, len(sizes), *after))
    outs = tuple(Value("piece", (*before, *after), x.dtype) for _ in sizes)
    unbind = Node("aten.unbind.int", (rows, dim + 1), {}, outs, rewriter.where)
    return tuple(filter(None, rewriter.keep(unbind)))
