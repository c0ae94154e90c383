"""Ops that look up by index: rows of a table, scores of labels, what is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..graph import Node, Value
from ..ops import extents, shrunk
from ..ops.cotangents import Cotangents
from ..ops.notation import letters
from ..ops.op import Op, OutCotangents, Place


def gathered(node: Node) -> str:
    """gather, scatter: each index points along one dim, in a row of its own."""
    x, _, *source = node.operands
    d = node.arg("dim") % len(x.shape)
    takes = "gather" in node.op
    here, there = letters(len(x.shape)), letters(len(x.shape))
    for i, c in enumerate(letters(len(x.shape))):
        if i == d:
            here[i], there[i] = f"{c}!", f"{c}in" if takes else f"{c}in!"
        elif len({v.shape[i] for v in node.operands}) > 1:
            here[i], there[i] = f"{c}!", f"{c}in!"
    left = [here, *[there] * (1 + len(source))]
    out = there if takes else here
    return f"{', '.join(map(' '.join, left))} -> {' '.join(out)}"


# --- Formulas ---------------------------------------------------------------------


def local(index: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Indices into a shard that begins at `start`, and which of them are in it."""
    index = index - start
    inside = (index >= 0) & (index < rows)
    return index.where(inside, 0), inside


def pick(x: Tensor, index: Tensor, ignored: int | None = None) -> Tensor:
    """x[..., index]: x [..., v], index [...] -> [...]; 0 where the index is outside.

    ignored: the one index outside that is no error.
    """
    return pick_from(0, x, index)


def pick_from(start: int, x: Tensor, index: Tensor, *_: int | None) -> Tensor:
    """x [..., v], index [...] -> [...]: the picked element, 0 if it is not in this
    shard. start: the shard's first index."""
    index, inside = local(index, start, x.shape[-1])
    return x.gather(-1, index[..., None])[..., 0].where(inside, 0)


def embedding_from(start: int, table: Tensor, index: Tensor, *_: int) -> Tensor:
    """table [v, d], index [...] -> [..., d]: 0 for rows that are not in this shard.
    start: the shard's first row."""
    index, inside = local(index, start, table.shape[0])
    return table[index].where(inside[..., None], 0)


def choose(x: Tensor, k: int, *_: int) -> Tensor:
    """The places of the k largest scores: x [..., n] -> int64 [..., k]."""
    return x.topk(k).indices


# --- On a rank --------------------------------------------------------------------


def padding_of(node: Node) -> int | None:
    """The row of a table whose gradient is 0, if there is one."""
    padding: int = node.arg("padding_idx")
    return padding if padding >= 0 else None


def look_up(at: Place, node: Node, local: Node) -> Node:
    """An embedding whose rows are split is looked up by global index."""
    table = node.operands[0]
    axes = at.axes_of(table, 0)
    if not axes:
        return local
    args = (*local.operands, table.shape[0], axes, padding_of(node))
    return replace(local, op="comm.lookup", args=args)


def pick_on_rank(at: Place, node: Node, local: Node) -> Node:
    """Becomes `comm.pick`, which knows the dim's whole extent and its axes."""
    x, ignored = node.operands[0], node.arg("ignored")
    axes = at.axes_of(x, len(x.shape) - 1)
    args = (*local.operands, ignored, x.shape[-1], axes)
    return replace(local, op="comm.pick", args=args)


def choose_on_rank(at: Place, node: Node, local: Node) -> Node:
    """Lets a replay tell what is chosen, by global position."""
    x = node.operands[0]
    position = tuple(at.position(x, dim) for dim in range(len(x.shape) - 1))
    return replace(local, op="comm.choose", args=(*local.args, position))


# --- Derivatives ------------------------------------------------------------------


def d_embedding(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """Adds rows of dy into the table's gradient."""
    table, ids = node.operands[:2]
    args = (dys[0], ids, padding_of(node))
    cts.accumulate(table, "autopar.embedding_grad_", node, *args)
    return [None, None]


def d_lookup(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """Adds rows of dy into the gradient of this rank's rows."""
    table, *args = node.named("table ids rows axes padding")
    return [cts.to_weight(table, "comm.lookup_grad_", node, dys[0], *args), None]


def d_pick(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """Adds dy in place at the picked elements."""
    x, index, extent, axes = node.named("x index extent axes")
    cts.add_in_place(x, "comm.pick_backward_add_", node, dys[0], index, extent, axes)
    return [None, None]


def _along(name: str, heeds: str, examples: str, **declared: Any) -> Op:
    """Declares an op that looks up by an index along one dim."""
    looks_up: Any = {"looks_up": "self index dim", "finite": "kept"}
    return Op(
        f"aten.{name}",
        heeds,
        gathered,
        examples,
        extents=extents.along,
        **looks_up,
        **declared,
    )


OPS = (
    Op(
        "aten.embedding",
        "weight indices padding_idx",
        "v@ e, ... -> ... e",
        "default(x(a, d), ints(b, c))",
        extents=extents.looked_up,
        shrunk=shrunk.embedding,
        weights="weight",
        on_rank=look_up,
        on_shard=embedding_from,
        derivative=d_embedding,
        traced_if=lambda cts, node: not cts.is_param(node.operands[0]),
        finite="kept",
        looks_up="weight indices 0",
        selects=True,
    ),
    Op(
        "comm.lookup", "table ids rows axes padding", derivative=d_lookup, called_with=4
    ),
    Op(
        "autopar.pick",
        "x index ignored",
        "... k@, ... -> ...",
        "(x(b, c, a), ints(b, c))",
        on_rank=pick_on_rank,
        formula=pick,
        on_shard=pick_from,
    ),
    Op("comm.pick", "x index ignored extent axes", derivative=d_pick),
    Op("aten.embedding_bag", looks_up="weight indices 0"),
    Op("aten.take", selects=True),
    Op("aten.take_along_dim", "self indices dim", looks_up="self indices dim"),
    Op(
        "aten.index_add",
        "self dim index source alpha",
        looks_up="self index dim",
        autocast="equal",
    ),
    Op("aten.index_copy", "self dim index source", autocast="equal"),
    Op("aten.masked_scatter", "self mask source", autocast="equal"),
    *(Op(f"aten.{n}", autocast="equal") for n in ("index_reduce", "scatter_reduce")),
    Op("autopar.embedding_grad_", "into dy ids padding"),
    Op("comm.lookup_grad_", "into dy ids rows axes padding"),
    Op("comm.pick_backward_add_", "into dy index extent axes"),
    Op("comm.choose", "x k number position"),
    Op(
        "autopar.choose",
        "x k number",
        "... n! -> ... k!",
        "(x(a, b, c), 2)",
        on_rank=choose_on_rank,
        formula=choose,
    ),
    Op(
        "aten.one_hot",
        "self num_classes",
        "... -> ... n!",
        "default(ints(b, c), d)",
        extents=extents.counted,
        sizes=lambda node: node.with_args(num_classes=node.out.shape[-1]),
        finite="kept",
    ),
    _along(
        "gather",
        "self dim index",
        "default(x(a, b, c), -1, ints(a, b, d)); default(x(b, c), 1, ints(b, d)); "
        "default(x(b, c, d), 0, ints(a, c, d)); default(x(c, d), 1, ints(b, d))",
        selects=True,
    ),
    _along(
        "scatter",
        "self dim index src value reduce",
        "value(x(b, d), 1, ints(b, c), -99.0); src(x(b, d), 1, ints(b, a), x(b, a))",
        autocast="equal",
        values="replaced",
    ),
    _along(
        "scatter_add",
        "self dim index src",
        "default(x(c, d), 0, ints(a, d), x(a, d))",
        autocast="equal",
    ),
)
