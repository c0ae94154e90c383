"""Rows that the data choose, as of one expert by `torch.where(chosen == e)`, computed
with the rows that were not chosen, which then count for nothing.

How many are chosen is known only when a program runs, but its shapes are fixed. What
is done row by row can be done to all: what is written back of a row that was not chosen
is what stood there, and in a sum it is 0. All else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from ...errors import CaptureError
from ...graph import Graph, Node, Value, resolve, short
from ...ops.arguments import arguments
from ...ops.finite import keeps_finite, not_finite
from ...ops.op import is_view, op_of, shows_all
from ...ops.row_dims import along, dim_after
from ...ops.rules import is_pointwise
from ...rewrite import Rewriter, Rule, broadcast_tensors, expand_as
from ..forward.values_read import WITHOUT_ROWS
from ..rows.distinct import one_at_most
from ..rows.masked_rows import moved, row_mask, set_where
from ..rows.reduce_rows import REDUCTIONS, reduced
from ..rows.rows import ADDING, CHOOSES, Rows

SEEDED = torch.Tag.nondeterministic_seeded
LOOKUPS = {"aten.gather": "index", "aten.embedding": "indices", "aten.one_hot": "self"}
EXPANDS: dict[str, Rule] = {
    **dict.fromkeys(("aten.expand_as", "aten.broadcast_to"), expand_as),
    "aten.broadcast_tensors": broadcast_tensors,
}
HARMLESS = 0.5  # of which every op gives a finite number and derivative


def slot_of(mask: Value, made: Mapping[str, Node]) -> int | None:
    """The dim of a mask along which one at most is chosen, if there is one: each place
    in the others is one row. Else each element is."""
    dims = one_at_most(mask, made) if len(mask.shape) > 1 else ()
    return max(dims) if dims else None


def rows_of(mask: Value, made: Mapping[str, Node]) -> int:
    """How many rows stand for those that a mask chooses."""
    slot = slot_of(mask, made)
    return math.prod(n for d, n in enumerate(mask.shape) if d != slot)


def keep_all_rows(
    graph: Graph, autocast: Set[str] = frozenset(), means: bool = False
) -> Graph:
    """Returns the graph without ops that choose rows. autocast: names of values that
    were made under it. means: whether those of no rows are 0. Raises: CaptureError."""
    if not any(node.op == CHOOSES for node in graph.nodes):
        return graph
    graph = Rewriter(graph, {}).run(EXPANDS)
    keeper = Keeper(graph, autocast, means)
    graph = keeper.rewriter.run({node.op: keeper.visit for node in graph.nodes})
    for v in graph.outputs:
        if rows := keeper.of(v):
            raise refusal("what comes out", rows)
    return graph


def refusal(subject: str, rows: Rows, source: str = "") -> CaptureError:
    """The error about work that mixes rows whose number depends on data."""
    return CaptureError(
        f"which rows there are depends on the values of tensors ({rows.source}), and "
        f"{subject} does more than work on each row by itself",
        source=source or rows.source,
        fix=WITHOUT_ROWS,
    )


class Keeper:
    """rows: value name -> what its rows are, of those that have chosen ones."""

    def __init__(self, graph: Graph, autocast: Set[str], means: bool = False) -> None:
        self.rewriter = Rewriter(graph, {})
        self.rows: dict[str, Rows] = {}
        self.cuts: dict[tuple[str, int, int], Value] = {}  # of a mask, `[first:end]`
        self.computed: dict[Hashable, str] = {}  # what a value is made by -> its name
        self.not_finite, self.autocast, self.means = not_finite(graph), autocast, means

    def first_name(self, mask: Value, deep: int = 4) -> str:
        """The first value that was made as this one: a mask may be written twice. deep:
        how far its making is looked into."""
        node = self.rewriter.made.get(mask.name)
        if node is None or not deep or SEEDED in resolve(node.op).tags:
            return mask.name
        known = node.substitute(lambda v: self.first_name(v, deep - 1))
        key = node.op, known.args, str(known.kwargs), node.outs.index(mask)
        return self.computed.setdefault(key, mask.name)

    def name_of(self, mask: Value) -> str:
        """What stands for a mask: for `mask.any(-1)` the mask, if of its last dim one
        is chosen at most, and for a view of a mask that mask, as both choose the same
        rows, in one order."""
        if (x := self.seen_from(mask)) is not None:
            return self.name_of(x)
        node = self.rewriter.producer(mask, "aten.any")
        if node is not None and isinstance(dim := node.arg("dim"), int):
            (x,), last = node.operands, len(node.operands[0].shape) - 1
            slot = slot_of(x, self.rewriter.made)
            if len(mask.shape) == last == slot == dim % (last + 1):
                return self.first_name(x)
        return self.first_name(mask)

    def seen_from(self, mask: Value) -> Value | None:
        """The mask that this is a view of, if rows of it are rows of that."""
        made = self.rewriter.made
        node = made.get(mask.name)
        if node is None or op_of(node).view != "shape":
            return None
        x, slot = node.operands[0], slot_of(mask, made)
        before = slot_of(x, made)
        if before is not None:
            before = dim_after(x.shape, mask.shape, before)
        return x if x.dtype == mask.dtype and before == slot else None

    def of(self, v: Any) -> Rows | None:
        """The rows chosen along a value, if any."""
        return self.rows.get(v.name) if isinstance(v, Value) else None

    def dim_of(self, v: Value) -> int | None:
        """The dim that goes along chosen rows, if any does."""
        return rows.dim if (rows := self.of(v)) else None

    def noted(self, v: Value, rows: Rows, dim: int) -> Value:
        """Notes that v has the rows along dim; returns v."""
        self.rows[v.name] = replace(rows, dim=dim, factor=None)
        return v

    def visit(self, _: Rewriter, node: Node) -> Any:
        """The rule for all nodes: what one makes of rows that were chosen."""
        if node.op == CHOOSES:
            return self.choose(node)
        chosen = [r for v in node.operands if (r := self.of(v))]
        if not chosen:
            return None
        rows = chosen[0]
        handlers = {
            "aten.index": self.index,
            "aten.index_select": self.index_select,
            "aten.index_put": self.index_put,
            **dict.fromkeys(ADDING, self.add),
            "aten.masked_scatter": self.masked_scatter,
            "aten.scatter": self.index_copy,
            "aten.index_copy": self.index_copy,
            "aten.index_fill": self.index_fill,
        }
        made: Any = None
        if not node.results:  # an assertion
            return self.rewriter.keep(node)
        if all(r.mask == rows.mask for r in chosen):
            if node.name in REDUCTIONS:
                made = REDUCTIONS[node.name](self, node, rows)
            else:
                made = handlers.get(node.name, self.follow)(node, rows)
        if made is None:
            raise refusal(f"'{short(node.op)}'", rows, str(node.location))
        return made

    def choose(self, node: Node) -> tuple[Value, ...]:
        """`torch.where(mask)`: which row it is along each dim of the mask."""
        emit, mask = self.rewriter.emit, node.operands[0]
        slot, name = slot_of(mask, self.rewriter.made), self.name_of(mask)
        if mask.dtype != torch.bool:
            mask = emit("aten.ne.Scalar", mask, 0)
        extents = tuple(n for d, n in enumerate(mask.shape) if d != slot)
        chosen = mask
        if slot is not None:
            count = emit("aten.sum.dim_IntList", mask, (slot,))
            chosen = emit("aten.gt.Scalar", count, 0)
        chosen = self.rewriter.reshape(chosen, (math.prod(extents),))
        rows = Rows(chosen, name, str(node.location), extents)
        outs, factor = [], 0
        for dim, n in enumerate(mask.shape):
            shape = [n if d == dim else 1 for d in range(len(mask.shape))]
            counted = self.rewriter.reshape(emit("aten.arange.default", n), shape)
            if dim == slot:
                counted = emit("aten.mul.Tensor", mask, counted)
                counted = emit("aten.sum.dim_IntList", counted, (dim,))
            else:
                shape = [n if d != slot else 1 for d, n in enumerate(mask.shape)]
                counted = self.rewriter.expand(counted, shape)
            out = self.rewriter.reshape(counted, (rows.count,))
            self.rows[out.name] = replace(rows, factor=None if dim == slot else factor)
            factor += dim != slot
            outs.append(out)
        return tuple(outs)

    def follow(self, node: Node, rows: Rows) -> Value | tuple | None:
        """What is done row by row is done to all of them."""
        if is_pointwise(node) and node.arg("reduction"):
            return reduced(self, node, rows)
        dim = along(node, self.dim_of)
        if dim is None:
            return None
        if (name := LOOKUPS.get(node.name)) and (r := self.of(node.arg(name))):
            # Of rows that were not chosen it may be no place at all, as a label -100.
            place = self.masked(node.arg(name), r, r.dim)
            node = node.with_args(**{name: place})
        elif not keeps_finite(node) and node.results[0].dtype != torch.bool:
            node = node.substitute(self.harmless)
        fresh = self.rewriter.keep(node)
        same = shows_all(node) or node.name == "aten.expand"
        first = self.of(node.operands[0])
        for v in filter(None, fresh):
            if v.shape[dim] != rows.count:
                return None
            same = same or (v.numel == node.operands[0].numel and is_view(node))
            factor = first.factor if first and same else None
            self.rows[v.name] = replace(rows, dim=dim, factor=factor)
        return fresh

    def counts(self, indices: Sequence[Any], shape: tuple[int, ...]) -> bool:
        """Whether indices count the rows, along dims of this shape."""
        counted = [self.of(i) for i in indices]
        return all(
            r is not None and r.factor == d and r.extents == shape
            for d, r in enumerate(counted)
        ) and len(counted) == len(shape)

    def index(self, node: Node, rows: Rows) -> Value | tuple | None:
        """`x[rows]`: all rows of x; `x[rows, place]`: the one at a place of each."""
        x, indices = source, _ = node.named("self indices")
        tensors = [i for i in indices if i is not None]
        first = indices.index(tensors[0])
        last, lead = first + len(tensors), len(tensors) - 1
        apart = self.of(x) or None in indices[first:last]
        if apart or any(not self.of(i) or len(i.shape) != 1 for i in tensors):
            return None
        emit, reshape = self.rewriter.emit, self.rewriter.reshape
        if self.counts(tensors, x.shape[first:last]):
            made = self.rewriter.producer(x, "aten.arange")
            first_two = made and (made.arg("start") or 0, made.arg("step") or 1)
            if first_two == (0, 1) and x.dtype == tensors[0].dtype:
                return tensors[0]  # the places of rows
            shape = (*x.shape[:first], rows.count, *x.shape[last:])
            seen = emit("aten.reshape.default", x, shape)
            return self.picked(seen, rows, first, x)
        if len(tensors) == 1:
            place = self.masked(tensors[0], rows, 0)
            places = (*indices[:first], place, *indices[last:])
            (out,) = self.rewriter.keep(replace(node, args=(x, places)))
            return None if out is None else self.picked(out, rows, first, x)
        if not first and lead > 1 and self.counts(tensors[:lead], x.shape[:lead]):
            x = reshape(x, (rows.count, *x.shape[lead:]))
            tensors = [emit("aten.arange.default", rows.count), tensors[-1]]
            self.rows[tensors[0].name] = replace(rows, factor=0, extents=x.shape[:1])
        if first or len(tensors) != 2:
            return None
        if self.counts(tensors[1:], x.shape[1:2]):
            tensors, x = tensors[::-1], emit("aten.transpose.int", x, 0, 1)
        if not self.counts(tensors[:1], x.shape[:1]):
            return None
        rest, place = x.shape[2:], self.counted(tensors[1], rows, x.shape[1])
        place = reshape(place, (rows.count, 1, *(1 for _ in rest)))
        place = self.rewriter.expand(place, (rows.count, 1, *rest))
        picked = emit("aten.gather.default", x, 1, place)
        return self.picked(reshape(picked, (rows.count, *rest)), rows, 0, source)

    def index_select(self, node: Node, rows: Rows) -> Value | tuple | None:
        x, dim, index = arguments(node).values()
        indices = (*[None] * (dim % len(x.shape)), index)
        return self.index(
            replace(node, op="aten.index.Tensor", args=(x, indices)), rows
        )

    def which(self, rows: Rows, x: Value, dim: int) -> Value:
        """Which rows are chosen, as a mask of x with these along a dim."""
        shape = [rows.count if d == dim else 1 for d in range(len(x.shape))]
        return self.rewriter.reshape(rows.chosen, shape)

    def masked(self, x: Value, rows: Rows, dim: int, other: float = 0) -> Value:
        """What counts of x: 0 in rows that were not chosen."""
        chosen = self.which(rows, x, dim)
        return self.rewriter.emit("aten.where.ScalarOther", chosen, x, other)

    def counted(self, place: Value, rows: Rows, n: int) -> Value:
        """Places of rows among n, those counted from the end too; 0 of others."""
        emit, place = self.rewriter.emit, self.masked(place, rows, 0)
        back = emit("aten.lt.Scalar", place, 0), emit("aten.add.Tensor", place, n)
        return emit("aten.where.self", *back, place)

    def harmless(self, x: Value) -> Value:
        """x, but for rows that were not chosen: what an op makes of these may be no
        number, nor then a gradient that is 0 times that."""
        rows = self.of(x)
        if rows is None or x.dtype == torch.bool:
            return x
        other = HARMLESS if x.dtype.is_floating_point else 1
        return self.noted(self.masked(x, rows, rows.dim, other), rows, rows.dim)

    def picked(self, x: Value, rows: Rows, dim: int, source: Value) -> Value:
        """x, rows of a source, which those that are not chosen may have gaps in."""
        out, replaced = self.noted(x, rows, dim), self.rewriter.replaced
        sources = {replaced[v].name if v in replaced else v for v in self.not_finite}
        return self.harmless(out) if source.name in sources else out

    def index_put(self, node: Node, rows: Rows) -> Value | None:
        """`y[rows] = values`, or `+=`, or `y[rows, place]`; or values of no row."""
        y, indices, values, accumulate = arguments(node).values()
        tensors = [i for i in indices if i is not None]
        by_mask = self.name_of(tensors[0]) == rows.mask
        # Rows may be those of a mask that is seen in another shape.
        shape = tensors[0].shape if by_mask else rows.extents
        lead = shape if math.prod(shape) == rows.count else rows.extents
        among = tensors[1 if by_mask else len(lead) :]
        of_rows = among if by_mask else tensors
        if self.of(y):
            return None
        if not (by_mask or accumulate) and [t.dtype for t in indices] == [torch.bool]:
            return moved(self.rewriter, y, tensors[0], values, self.of(values))
        known = all(self.of(i) and len(i.shape) == 1 for i in of_rows)
        known = known and (by_mask or self.counts(indices[: len(lead)], lead))
        if y.shape[: len(lead)] != lead or len(among) > 1 or not known:
            return None
        emit, reshape = self.rewriter.emit, self.rewriter.reshape
        rest, written = y.shape[len(lead) + len(among) :], self.of(values)
        if written:
            if written.dim or len(values.shape) != len(rest) + 1:
                return None
            values = reshape(values, (*lead, *[1] * len(among), *values.shape[1:]))
        elif len(values.shape) > len(rest):
            return None
        shape = (*lead, *(1 for _ in (*among, *rest)))
        chosen = reshape(rows.chosen, shape)
        for place in among:
            n = y.shape[len(lead)]
            place = reshape(self.counted(place, rows, n), shape)
            each = reshape(emit("aten.arange.default", n), (n, *(1 for _ in rest)))
            here = emit("aten.eq.Tensor", place, each)
            chosen = emit("aten.mul.Tensor", chosen, here)
        if accumulate:
            values = emit("aten.where.ScalarOther", chosen, values, 0)
            return emit("aten.add.Tensor", y, values)
        return emit("aten.where.self", chosen, values, y)

    def add(self, node: Node, rows: Rows) -> Value | tuple | None:
        """`y.index_add(0, rows, values)`: those of rows that were not chosen are 0."""
        named = "source" if node.arg("src") is None else "src"
        y, dim, index, values = node.named(f"self dim index {named}")
        added, dim = self.of(values), dim % len(y.shape)
        place = self.of(index)
        if self.of(y) or not added or not place or added.dim != dim:
            return None
        if place.dim != (dim if len(index.shape) > 1 else 0):
            return None
        values = self.masked(values, rows, dim)
        alpha = arguments(node).get("alpha", 1)
        whole = values.shape == y.shape and index.shape in (y.shape, (rows.count,))
        if whole and self.counts([index], y.shape[dim : dim + 1]):
            return self.rewriter.emit("aten.add.Tensor", y, values, alpha=alpha)
        return self.rewriter.keep(node.with_args(dim=dim, **{named: values}))

    def index_copy(self, node: Node, rows: Rows) -> Value | None:
        """`y.index_copy(0, rows, values)`."""
        y, dim, index, *source = arguments(node).values()
        if not source or not isinstance(source[0], Value) or node.arg("reduce"):
            return None
        values, dim = source[0], dim % len(y.shape)
        written, place = self.of(values), self.of(index)
        if self.of(y) or not written or not place or written.dim != dim:
            return None
        if values.shape != y.shape or index.shape not in (y.shape, (rows.count,)):
            return None
        if not self.counts([index], y.shape[dim : dim + 1]):
            return None
        chosen = self.which(rows, y, dim)
        return self.rewriter.emit("aten.where.self", chosen, values, y)

    def index_fill(self, node: Node, rows: Rows) -> Value | None:
        """`y.index_fill(0, rows, 1.0)`, or another number, or a tensor of one."""
        y, dim, index, value = arguments(node).values()
        dim %= len(y.shape)
        if self.of(y) or not self.counts([index], y.shape[dim : dim + 1]):
            return None
        chosen = self.which(rows, y, dim)
        kind = "Tensor" if isinstance(value, Value) else "Scalar"
        return self.rewriter.emit(f"aten.masked_fill.{kind}", y, chosen, value)

    def masked_scatter(self, node: Node, rows: Rows) -> Value | None:
        """`y.masked_scatter(mask, values)`, where whole rows are masked."""
        y, mask, values = arguments(node).values()
        mask, written = row_mask(self.rewriter, mask, y.shape), self.of(values)
        if self.of(y) or not written or written.dim:
            return None
        if self.name_of(mask) != rows.mask:
            return moved(self.rewriter, y, mask, values, written)
        if values.shape != (rows.count, *y.shape[len(mask.shape) :]):
            return None
        values = self.rewriter.reshape(values, y.shape)
        return set_where(self.rewriter, mask, values, y)
