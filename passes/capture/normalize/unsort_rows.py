"""Rows that are brought into an order, worked on row by row, and put back: done where
they were.

    order = chosen.flatten().argsort()                 # of rows by their expert
    y = grouped_mm(x[order // k], w, ends) * weight.flatten()[order, None]
    out = y[order.argsort()].view(rows, k, -1).sum(1)

Rows of one expert are together then, as one product wants them. But whoever has a part
of the rows cannot sort them all: as they were, each rank has its own. So of each value
that is `u[order]`, u is computed; where rows go back to their places, that is all that
is needed. Programs sort the rows of a rank later, see `passes.shard.sort_rows`. Where
the order is seen otherwise, as in a running sum over rows, it stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...graph import Graph, Node, Value
from ...ops.arguments import arguments
from ...ops.random import awaits_number
from ...ops.reductions import dims_of
from ...ops.row_dims import along
from ...rewrite import Rewriter
from ..normalize.recognize_experts import PRODUCTS, Lookup
from ..rows.choices import (
    REPEATED,
    counting_dim,
    find_choices,
    find_counted,
    numbers_of,
    unseen,
)
from ..rows.rows import ADDING, SETTING

Values = tuple[Value | None, ...]


@dataclass(frozen=True)
class Order:
    """The order that sorts `numbers` [n]. name: of the order, int64 [n], in the graph;
    value: in the new graph. places: 0 .. n-1, the positions before sorting."""

    name: str
    value: Value
    places: Value
    numbers: Value
    rises: bool


def unsort_rows(graph: Graph, literals: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with rows where they were, for each order that nothing else needs."""
    left: set[str] = set()
    while any(name not in left for name in filter(None, map(_order, graph.nodes))):
        unsorter = _Unsorter(graph, literals, left)
        new = unsorter.run()
        made = {v.name for node in new.nodes for v in node.results}
        still = {o.name for o in unsorter.orders.values() if o.value.name in made}
        if not still:
            return new
        left |= still
    return graph


def _order(node: Node) -> str:
    """The order into which a node brings integers, as numbers of experts; or ""."""
    order = node.outs[-1] if node.name in ("aten.sort", "aten.argsort") else None
    x = node.operands[0] if order is not None else None
    integers = x is not None and len(x.shape) == 1 and not x.dtype.is_floating_point
    return order.name if order is not None and integers else ""


class _Unsorter:
    """left: orders that stay, by the name that they have in the graph."""

    def __init__(
        self, graph: Graph, literals: Mapping[str, torch.Tensor], left: Collection[str]
    ) -> None:
        self.graph, self.left = graph, left
        self.rewriter = Rewriter(graph, literals)
        # By the numbers' name, and whether they rise.
        self.orders: dict[tuple[str, bool], Order] = {}
        self.before: dict[str, tuple[Value, Order]] = {}  # of u[order]: u, and that
        self.back: dict[str, Order] = {}  # what puts rows back that have an order
        self.ways = {
            **dict.fromkeys((*SETTING, *ADDING, "aten.scatter"), self.write),
            **dict.fromkeys(PRODUCTS, self.product),
            "aten.index": self.look_up,
            "aten.index_select": self.look_up,
            "aten.embedding": self.look_up,
            "aten.gather": self.look_up,
            "aten.histc": self.same_in_any_order,
        }

    def run(self) -> Graph:
        return self.rewriter.run({node.op: self.visit for node in self.graph.nodes})

    def of(self, v: Any) -> Any:
        """The value before its rows were sorted; other values as they are."""
        known = isinstance(v, Value) and v.name in self.before
        return self.before[v.name][0] if known else v

    def order_of(self, values: Iterable[Any]) -> Order | None:
        """The one order of those of the values that have an order."""
        names = [v.name for v in values if isinstance(v, Value)]
        orders = {self.before[name][1] for name in names if name in self.before}
        return orders.pop() if len(orders) == 1 else None

    def keep(self, node: Node, before: Sequence[Value | None], order: Order) -> Values:
        """The node as it is; before: its results before their rows had the order."""
        outs = self.rewriter.keep(node)
        for v, u in zip(outs, before, strict=True):
            if v is not None and u is not None:
                self.before[v.name] = u, order
        return outs

    # --- nodes ------------------------------------------------------------------------

    def visit(self, _: Rewriter, node: Node) -> Value | Values | None:
        if _order(node):
            return self.sort(node)
        if node.op in (REPEATED, "aten.searchsorted.Tensor"):
            return self.owners(node)
        order = self.order_of(node.operands)
        if order is None or awaits_number(node):
            return None
        return self.ways.get(node.name, self.row_by_row)(node, order)

    def sort(self, node: Node) -> Values:
        x, name = node.operands[0], _order(node)
        outs = self.rewriter.keep(node)
        value, rises = outs[-1], not node.arg("descending")
        assert value is not None
        if (before := self.order_of([x])) is not None:
            if rises and self.of(x) == before.places:
                self.back[value.name] = before  # the order, sorted
        elif name not in self.left:
            order = self.orders.get((x.name, rises))
            if order is None:
                places = self.rewriter.emit("aten.arange.default", *x.shape)
                order = Order(name, value, places, x, rises)
                self.orders[x.name, rises] = order
            self.before[value.name] = order.places, order
            if len(outs) > 1 and outs[0] is not None:
                self.before[outs[0].name] = x, order
        return outs

    def owners(self, node: Node) -> Values | None:
        """arange(e) repeated as often as each number is there, or which number's end
        each of arange(n) comes before: the numbers, sorted."""
        numbers, bound = None, arguments(node)
        if node.op == REPEATED:
            places, numbers = bound["self"], self.counted(bound["repeats"])
        else:
            places = bound["self"]
            if bound["right"] or bound["side"] == "right":
                numbers = self.up_to(bound["sorted_sequence"])
        if numbers is None or counting_dim(places, self.rewriter.made) != 0:
            return None
        for order in self.orders.values():
            if self.sorts(order, numbers) and order.value.shape == node.out.shape:
                return self.keep(node, [self.cast(order.numbers, node.out)], order)
        return None

    def product(self, node: Node, order: Order) -> Values | None:
        """A grouped product of rows that were sorted by group."""
        x, weight, ends, *others = arguments(node).values()
        numbers = None if ends is None else self.up_to(ends)
        if numbers is None or not self.sorts(order, numbers) or len(x.shape) != 2:
            return None
        if any(o is not None for o in others) or self.of(x) is x:
            return None
        if numbers_of(order.numbers, self.rewriter.made) != weight.shape[0]:
            return None
        lookup = Lookup(weight, order.numbers)
        return self.keep(node, [lookup.times(self.rewriter, self.of(x), side=0)], order)

    def look_up(self, node: Node, order: Order) -> Value | Values | None:
        """Rows of a table by numbers that have the order; or of rows that have it, put
        back to where they were."""
        table, places = _looked_up(node)
        if node.name == "aten.gather":
            places = [*map(self.row_of, places)]
        if self.of(table) is not table:
            back = len(places) == 1 and self.back.get(places[0].name) == order
            return self.of(table) if back else None
        rows = all(len(v.shape) == 1 and self.of(v) is not v for v in places)
        if not rows or not places:
            return self.row_by_row(node, order)
        new = self.copies(table, self.of(places[0])) if len(places) == 1 else None
        if new is None:
            (new,) = self.rewriter.keep(node.substitute(self.of))
        return self.keep(node, [new], order)

    def copies(self, x: Value, places: Value) -> Value | None:
        """x[places] of places 0 0 1 1 2 2, or 0 1 2 0 1 2: each row once or more."""
        rows, *rest = x.shape
        if (repeats := self.repeats(places, rows)) is None:
            return None
        dim, times = repeats
        one, many = [rows, *rest], [rows, *rest]
        one.insert(dim, 1)
        many.insert(dim, times)
        copied = self.rewriter.expand(self.rewriter.reshape(x, one), many)
        return self.rewriter.reshape(copied, (rows * times, *rest))

    def repeats(self, places: Value, rows: int) -> tuple[int, int] | None:
        """How often each row comes: one time behind the other, of places 0 0 1 1 2 2,
        or all rows so often, of places 0 1 2 0 1 2; None of others. And before it, the
        dim that goes along these times, 1 or 0."""
        known = self.rewriter.constant(places)
        if known is None or not known.numel() or known.numel() % rows:
            return None
        times, each = known.numel() // rows, torch.arange(known.numel())
        for dim, row in ((1, each // times), (0, each % rows)):
            if torch.equal(known, row):
                return dim, times
        return None

    def same_in_any_order(self, node: Node, _: Order) -> Values:
        return self.rewriter.keep(node.substitute(self.of))

    def write(self, node: Node, order: Order) -> Value | Values | None:
        """Rows that have the order, written to numbers that have it."""
        base, places, rows, adds = _written(node)
        if self.of(base) is not base or places is None or rows is None:
            return None
        if adds:
            return self.add(node, base, self.row_of(places), rows)
        covered = base.shape == rows.shape and base.dtype == rows.dtype
        if self.of(self.row_of(places)) != order.places or not covered:
            return None
        if self.of(rows) is not rows:
            return self.of(rows)
        if counting_dim(rows, self.rewriter.made) != 0:
            return None
        outs = self.rewriter.keep(node)
        self.back.update((v.name, order) for v in outs if v is not None)
        return outs

    def add(self, node: Node, base: Value, places: Value, rows: Value) -> Any:
        if any(self.of(v) is v for v in (places, rows)):
            return None
        repeats = self.repeats(self.of(places), base.shape[0])
        if repeats is None or rows.shape != (places.numel, *base.shape[1:]):
            return self.rewriter.keep(node.substitute(self.of))
        (dim, times), emit, shape = repeats, self.rewriter.emit, [*base.shape]
        shape.insert(dim, times)
        each = self.rewriter.reshape(self.of(rows), shape)
        return emit("aten.add.Tensor", base, emit("aten.sum.dim_IntList", each, (dim,)))

    def row_of(self, places: Value) -> Value:
        """The row numbers, where they are repeated along each row."""
        while len(places.shape) > 1:
            node = self.rewriter.producer(places, "aten.expand", "aten.reshape")
            if node is None or node.operands[0].shape[:1] != places.shape[:1]:
                break
            before = node.operands[0]
            if node.name == "aten.expand" and len(before.shape) != len(places.shape):
                break  # it goes along the last dim
            places = before
        return places

    def row_by_row(self, node: Node, order: Order) -> Values | None:
        if node.name in ("aten.sum", "aten.mean") and 0 in dims_of(node):
            return self.same_in_any_order(node, order)
        dim = along(node, lambda v: 0 if self.of(v) is not v else None)
        if dim != 0:
            return None
        return self.keep(node, self.rewriter.keep(node.substitute(self.of)), order)

    # --- numbers ----------------------------------------------------------------------

    def sorts(self, order: Order, numbers: Value) -> bool:
        """Whether the order is that of these, one behind the other."""
        return (
            order.rises
            and find_choices(order.numbers, self.rewriter.made)[0] == numbers
        )

    def up_to(self, ends: Value) -> Value | None:
        """The numbers of which `ends` says how many are at most 0, 1, 2 and so on."""
        made = self.rewriter.made
        total = made.get(unseen(ends, made).name)
        if total is None or total.name != "aten.cumsum" or len(total.out.shape) != 1:
            return None
        return self.counted(total.operands[0])

    def counted(self, counts: Value) -> Value | None:
        return find_counted(counts, self.rewriter.made)

    def cast(self, v: Value, like: Value) -> Value:
        if v.dtype == like.dtype:
            return v
        return self.rewriter.emit("aten.to.dtype", v, like.dtype)


def _looked_up(node: Node) -> tuple[Value, list[Value]]:
    """The table whose rows a node gives, and by which numbers, those of `gather` as
    often as there are columns; none of other parts, or of a row without a gradient."""
    if node.name == "aten.index":
        table, places = node.named("self indices")
        return table, [] if None in places else list(places)
    if node.name == "aten.embedding":
        table, places, padding = node.named("weight indices padding_idx")
        return table, [places] if padding is None or padding < 0 else []
    table, dim, places = node.named("self dim index")
    whole = dim in (0, -len(table.shape))
    if node.name == "aten.gather":
        whole = whole and places.shape[1:] == table.shape[1:]
    return table, [places] if whole else []


def _written(node: Node) -> tuple[Value, Value | None, Value | None, bool]:
    """A node that writes rows: (base, places, rows, whether it adds them)."""
    if node.name == "aten.index_put":
        base, places, rows = node.named("self indices values")
        one = places[0] if len(places) == 1 else None
        return base, one, rows, bool(node.arg("accumulate"))
    dim, base, places = node.named("dim self index")
    rows = node.arg("source") or node.arg("src")
    plain = dim in (0, -len(base.shape)) and node.arg("reduce") is None
    plain = plain and node.arg("alpha") in (None, 1)
    return base, places if plain else None, rows, node.name in ADDING
