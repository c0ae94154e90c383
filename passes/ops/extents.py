"""Which extents change together where ops join, repeat, cut and look up.

Of others the rule says all. Each function goes over one node of a captured graph, see
`passes.proof.extents`.
"""

from __future__ import annotations

from ..graph import Node, Value
from ..ops.op import Unite
from ..ops.parts import dim_of


def joined(at: Unite, node: Node) -> None:
    """cat: the dim's extent is the operands' sum, the other dims are alike."""
    out = node.out
    pieces = [v for v in node.operands if 0 not in v.shape]
    dim = dim_of(node, rank=len(out.shape))
    mine = at.tensors[out.name]
    for v in pieces:
        for d in range(len(out.shape)):
            if d != dim:
                at.atoms.unify(at.tensors[v.name][d], mine[d])
    at.sum(mine[dim], [(at.tensors[v.name][dim], v.shape[dim]) for v in pieces])


def split(at: Unite, node: Node) -> None:
    """Pieces of a dim: equal ones are united, and the whole is their sum."""
    x = node.operands[0]
    dim = dim_of(node)
    for v in node.results:
        for d in range(len(x.shape)):
            if d != dim:
                at.atoms.unify(at.tensors[x.name][d], at.tensors[v.name][d])
    if all(v is not None for v in node.outs):
        pieces = [(at.tensors[v.name][dim], v.shape[dim]) for v in node.results]
        at.sum(at.tensors[x.name][dim], pieces)


def grouped(at: Unite, node: Node) -> None:
    """group_norm: channels are (groups, those of each), as weight and bias are."""
    x, out, groups = node.operands[0], node.out, node.arg("num_groups")
    for here, there in zip(at.tensors[x.name], at.tensors[out.name], strict=True):
        at.atoms.unify(here, there)
    channels = at.tensors[x.name][1]
    apart = [at.atoms.fresh(n) for n in (groups, x.shape[1] // groups)]
    at.atoms.unify(channels, [atom for own in apart for atom in own])
    for v in node.operands[1:]:
        at.atoms.unify(channels, at.tensors[v.name][0])


def padded(at: Unite, node: Node) -> None:
    """pad: a dim that grows is the operand's and a constant."""
    x, y = node.operands[0], node.out
    for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)):
        left, right = at.tensors[x.name][d], at.tensors[y.name][d]
        if a == b:
            at.atoms.unify(left, right)
        elif right and left:
            at.add_sum(right, left, b - a)


def repeated(at: Unite, node: Node) -> None:
    """repeat: each dim is (copies, the operand's dim)."""
    x, y = node.operands[0], node.out
    ahead = len(y.shape) - len(x.shape)
    for d in range(len(x.shape)):
        times = y.shape[ahead + d] // max(x.shape[d], 1)
        count = at.atoms.fresh(times)
        if x.shape[d] != 1:
            at.fixed += count
        both = [*count, *at.tensors[x.name][d]]
        at.atoms.unify(at.tensors[y.name][ahead + d], both)


def indexed(at: Unite, node: Node) -> None:
    """`x[:, i, j]`: dims that are not indexed stay, those of the indices come."""
    x, indices = node.named("self indices")
    indexing = [d for d, i in enumerate(indices) if isinstance(i, Value)]
    spread = [i for i in indices if isinstance(i, Value)]
    if any(i.dtype.itemsize == 1 for i in spread):
        return
    rank = max(len(i.shape) for i in spread)
    adjacent = indexing == list(range(indexing[0], indexing[-1] + 1))
    first = indexing[0] if adjacent else 0
    out = at.tensors[node.out.name]
    sliced = [d for d in range(len(x.shape)) if d not in indexing]
    places = [p for p in range(len(out)) if not first <= p < first + rank]
    for d, p in zip(sliced, places, strict=True):
        at.atoms.unify(at.tensors[x.name][d], out[p])
    for i in spread:
        for d, n in enumerate(i.shape):
            if n != 1:
                place = first + rank - len(i.shape) + d
                at.atoms.unify(at.tensors[i.name][d], out[place])
    for d in indexing:
        at.index(indices[d], x, d)


def selected_rows(at: Unite, node: Node) -> None:
    """index_select: the index's dim stands for the dim selected along."""
    (x, index), dim = node.operands, dim_of(node)
    for d in range(len(x.shape)):
        other = at.tensors[x.name][d] if d != dim else at.tensors[index.name][0]
        at.atoms.unify(other, at.tensors[node.out.name][d])
    at.index(index, x, dim)


def attention(at: Unite, node: Node) -> None:
    """Batch, heads (key heads times query groups), rows, columns and head dims of
    attention, and of a mask aligned on the right."""
    q, k, v = node.operands[:3]
    mask = node.arg("attn_mask")
    of = at.tensors
    for x in (k, v):
        for d in range(len(q.shape) - 2):
            if q.shape[d] == x.shape[d]:
                at.atoms.unify(of[q.name][d], of[x.name][d])
    if q.shape[1] != k.shape[1]:
        copies = at.atoms.fresh(q.shape[1] // k.shape[1])
        at.atoms.unify(of[q.name][1], [*of[k.name][1], *copies])
    at.atoms.unify(of[q.name][-1], of[k.name][-1])
    at.atoms.unify(of[k.name][-2], of[v.name][-2])
    out = of[node.out.name]
    for d in range(len(out) - 1):
        at.atoms.unify(of[q.name][d], out[d])
    at.atoms.unify(of[v.name][-1], out[-1])
    if isinstance(mask, Value):
        wanted = [*of[q.name][:-1], of[k.name][-2]]
        pairs = zip(of[mask.name][::-1], wanted[::-1], strict=False)
        for own, other in pairs:
            if own:
                at.atoms.unify(own, other)


def cross_entropy(at: Unite, node: Node) -> None:
    """Scores [n, classes, ...], labels [n, ...] or as the scores, weights."""
    x, target, *rest = node.operands
    of = at.tensors
    classes = 1 if len(x.shape) > 1 else 0
    dims = [d for d in range(len(x.shape)) if d != classes]
    if len(target.shape) == len(x.shape):
        dims = list(range(len(x.shape)))
    for own, d in zip(of[target.name], dims, strict=True):
        at.atoms.unify(own, of[x.name][d])
    for weight in rest:
        at.atoms.unify(of[weight.name][0], of[x.name][classes])
    if node.out.shape == target.shape:
        for own, other in zip(of[node.out.name], of[target.name], strict=True):
            at.atoms.unify(own, other)


def looked_up(at: Unite, node: Node) -> None:
    """A table that the model itself numbers the rows of, other than by position,
    has as many as it counts."""
    at.bind(node)
    table, index = node.operands[:2]
    if at.computed.get(index.name):
        at.fixed += at.tensors[table.name][0]
    at.index(index, table, 0)


def linear(at: Unite, node: Node) -> None:
    """Unites the extents of a linear layer and its bias, which its rule has not."""
    x, weight, *bias = (at.tensors[v.name] for v in node.operands)
    out = at.tensors[node.out.name]
    pairs = zip((*out, *x[-1:]), (*x[:-1], weight[0], weight[1]), strict=True)
    for own, other in pairs:
        at.atoms.unify(own, other)
    for b in bias:
        at.atoms.unify(b[0], weight[0])


def of_groups(at: Unite, node: Node) -> None:
    """_grouped_mm: rows [m,k], those of a group by its matrix of [e,k,n] -> [m,n]."""
    x, weight, *ends = (at.tensors[v.name] for v in node.operands)
    if (len(x), len(weight)) != (2, 3):
        at.align(node)
        return
    out = at.tensors[node.out.name]
    at.atoms.unify(x[0], out[0])
    at.atoms.unify(x[1], weight[1])
    at.atoms.unify(out[1], weight[2])
    for own in ends:
        at.atoms.unify(own[0], weight[0])


def convolved(at: Unite, node: Node) -> None:
    """Convolution: its length changes by a constant; the kernel's extent is fixed."""
    at.bind(node)
    at.fixed += at.tensors[node.operands[1].name][2]
    x, y = node.operands[0], node.out
    change = y.shape[2] - x.shape[2]
    left, right = at.tensors[x.name][2], at.tensors[y.name][2]
    if change == 0:
        at.atoms.unify(left, right)
    elif left and right:
        at.add_sum(right, left, change)


def aligned(at: Unite, node: Node) -> None:
    """Dims that stand at one place from the right are the same."""
    at.align(node)


def apart(at: Unite, node: Node) -> None:
    """new_zeros: of sizes that are its own; an operand tells the dtype alone."""


def along(at: Unite, node: Node) -> None:
    """gather, scatter: unites what the index counts with the dim."""
    at.bind(node)
    at.index(node.arg("index"), node.operands[0], dim_of(node))


def counted(at: Unite, node: Node) -> None:
    """histc, one_hot: unites bins with the numbers that are counted."""
    at.bind(node)
    at.index(node.operands[0], node.out, len(node.out.shape) - 1)


def pieces(at: Unite, node: Node) -> None:
    """unbind, chunk: how many pieces there are is the op's own."""
    if at.bind(node):
        x = at.tensors[node.operands[0].name][dim_of(node)]
        at.fixed += at.atoms.leaves(x)[:1]


def stacked(at: Unite, node: Node) -> None:
    """stack: the number of operands is fixed."""
    if at.bind(node):
        dim = dim_of(node, rank=len(node.out.shape))
        at.fixed += at.tensors[node.out.name][dim]


def ordered(at: Unite, node: Node) -> None:
    """sort, argsort: all there is along a dim, in an order."""
    if at.bind(node) and (x := node.operands[0]).shape:
        dim = dim_of(node)
        for v in node.results:
            at.atoms.unify(at.tensors[x.name][dim], at.tensors[v.name][dim])


def copied(at: Unite, node: Node) -> None:
    """repeat_interleave: how often is the op's own, if it is a number."""
    if at.bind(node) and isinstance(node.arg("repeats"), int):
        out = at.tensors[node.out.name][dim_of(node)]
        at.fixed += at.atoms.leaves(out)[-1:]
