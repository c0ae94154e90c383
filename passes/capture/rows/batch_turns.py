"""The turns of a loop over experts, each step of all of them as one: `expert_loops`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...graph import Graph, Node, Value
from ...ops.op import op_of
from ...ops.row_dims import along
from ...ops.rules import is_pointwise
from ...rewrite import Rewriter
from ..rows.choice_rows import ChoiceRows
from ..rows.choices import (
    Match,
    Parts,
    are_distinct,
    complete,
    extent,
    find_match,
    joined,
)
from ..rows.join_weights import enclosing
from ..rows.rows import CHOOSES, ZEROS, is_accumulated
from ..rows.turn_values import Stacked, TurnsDiffer, TurnValues, Weighed
from ..rows.turn_writes import (
    Accumulated,
    Places,
    Rowwise,
    contiguous,
    flat,
    places_of,
    read_write,
)


class TurnBatch:
    """turns: what each number does with its rows, in order. What is made of rows has
    one for each element of the choices instead, in their order."""

    def __init__(
        self,
        rewriter: Rewriter,
        graph: Graph,
        choices: Value,
        turns: Sequence[Sequence[Node]],
    ) -> None:
        self.rewriter, self.choices, self.turns = rewriter, choices, turns
        order = {v.name: i for i, n in enumerate(graph.nodes) for v in n.results}
        first = [order[nodes[0].results[0].name] for nodes in turns]
        # In which order they run, as numbers.
        self.order = sorted(range(len(turns)), key=first.__getitem__)
        self.last = self.order[-1]
        self.layout = ChoiceRows(rewriter, choices.numel)
        self.values = TurnValues(rewriter, graph, self.last)
        self.made = self.values.made
        # Of each turn: the place of what makes a value of rows, and which result it is.
        self.steps = [
            {
                v.name: (step, node.outs.index(v))
                for step, node in enumerate(nodes)
                for v in node.results
            }
            for nodes in turns
        ]
        self.rows: dict[str, Rowwise] = {}  # by the name of the last turn's
        self.dims: dict[str, int] = {}  # of a turn's value, the dim along its rows
        self.orders: dict[str, Parts] = {}  # and what these are in order of
        self._expert: Value | None = None
        self._looked_up: dict[str, Value] = {}

    def emit(self, step: int) -> Value | None:
        """Emits what a step of all turns does; returns what takes the place of the last
        turn's result, if that is not of rows. Raises: TurnsDiffer."""
        nodes = [turn[step] for turn in self.turns]
        node = nodes[self.last]
        modules = [n.location.module for n in nodes]
        self.rewriter.where = replace(node.location, module=enclosing(modules))
        if node.op == CHOOSES:
            self._choose(node)
            return None
        self.values.check_alike(nodes)  # so they have as many operands
        columns = dict.fromkeys(zip(*(n.operands for n in nodes), strict=True))
        table = {column[self.last].name: self.operand(column) for column in columns}
        if len(table) < len(columns):  # what is one in the last turn are two in others
            raise TurnsDiffer
        self._order(table)
        if is_accumulated(node, self.dims):
            return self._accumulate(node, nodes, table)
        pieces, dim = self._rowwise(node, table)
        for out, made in zip(node.outs, pieces, strict=True):
            if out is not None:
                self.rows[out.name], self.dims[out.name] = made, dim
                self.orders[out.name] = self._order(table)
        return None

    def operand(self, values: Sequence[Value]) -> Any:
        """What turns read in one place: of rows, steady, or written to by turns."""
        last = values[self.last]
        if last.name in self.rows:
            places = {s.get(v.name) for s, v in zip(self.steps, values, strict=True)}
            if len(places) > 1:
                raise TurnsDiffer
            return self.rows[last.name]
        if self._written(values):
            return Accumulated(tuple(values), ())
        return self.values.of(values)

    # --- rows ----------------------------------------------------------------------

    @property
    def expert(self) -> Value:
        """The number of each row, int64 [rows]."""
        if self._expert is None:
            choices = self.values.now(self.choices)
            self._expert = self.rewriter.reshape(choices, (choices.numel,))
        return self._expert

    def _choose(self, node: Node) -> None:
        match = find_match(node.operands[0], self.made)
        assert match is not None, "a turn is of a number that is chosen"
        for out, parts in zip(node.results, match.dims, strict=True):
            self.rows[out.name], self.dims[out.name] = Places(parts), 0
            self.orders[out.name] = match.order

    def _order(self, table: Mapping[str, Any]) -> Parts:
        """What the rows of operands are in order of, which must be the same."""
        orders = {self.orders[name] for name in table if name in self.orders}
        orders |= {x.order for x in table.values() if isinstance(x, Match)}
        if len(orders) > 1:
            raise TurnsDiffer
        return orders.pop()

    def _shape(self, v: Value, dim: int) -> tuple[int, ...]:
        """A shape with all rows in place of a turn's."""
        return (*v.shape[:dim], self.choices.numel, *v.shape[dim + 1 :])

    def looked_up(self, x: Stacked) -> Value:
        """The value of each row's number: [rows, ...]."""
        name = x.value.name
        if name not in self._looked_up:
            emit, expert = self.rewriter.emit, self.expert
            self._looked_up[name] = (
                emit("aten.embedding.default", x.value, expert)
                if len(x.value.shape) == 2
                else emit("aten.index.Tensor", x.value, (expert,))
            )
        return self._looked_up[name]

    # --- what is done to rows ------------------------------------------------------

    def _rowwise(self, node: Node, table: dict[str, Any]) -> tuple[Sequence[Any], int]:
        """What a node makes of rows, and the dim that goes along them."""
        if len(node.outs) > 1:
            dim = along(node, self._dim_of)
            if dim is None:
                raise TurnsDiffer
            return self._same(node, table, dim), dim
        made, dim = self._one(node, table)
        return (made,), dim

    def _one(self, node: Node, table: dict[str, Any]) -> tuple[Rowwise, int]:
        """The same of a node with one result."""
        if node.name in ("aten.index", "aten.index_select"):
            return self._index(node, table)
        dim = along(node, self._dim_of)
        if dim is None:
            raise TurnsDiffer
        first = table[node.operands[0].name]
        kind = op_of(node)
        shown = kind.stays or kind.view in ("shape", "copies")
        if shown and isinstance(first, Places):
            return first, dim
        if any(isinstance(x, Accumulated) for x in table.values()):
            return self._added(node, table), dim
        if isinstance(product := self._product(node, table), Value):
            return product, dim
        if node.arg("normalized_shape") is not None:
            return self._norm(node, table), dim
        return self._same(node, table, dim)[0], dim

    def _dim_of(self, v: Value) -> int | None:
        return self.dims.get(v.name)

    def _index(self, node: Node, table: dict[str, Any]) -> tuple[Rowwise, int]:
        """`x[rows]`, `x[rows, place]`."""
        x = node.operands[0]
        if node.name == "aten.index":
            first, indices = contiguous(node.arg("indices"))
        else:
            first, indices = int(node.arg("dim")) % len(x.shape), [node.arg("index")]
        places = places_of(indices, table)
        last, parts = first + len(places), flat(places)
        if x.shape[first:last] != tuple(map(extent, places)):
            raise TurnsDiffer
        source = table[x.name]
        if isinstance(source, Accumulated):
            if first:
                raise TurnsDiffer
            return replace(source, parts=parts), 0
        if isinstance(source, Weighed):
            if joined(flat(source.dims)) != joined(parts):
                raise TurnsDiffer
            every = flat(source.whole)
            spread = self.layout.spread(source.value, 0, len(source.value.shape), every)
            return self.rewriter.reshape(spread, self._shape(node.out, first)), first
        if isinstance(source, Match):
            source = self._equal(source, first, last)
            return source, first
        if isinstance(source, Stacked):
            return self._of_each(source.value, first, last, parts), first
        if not isinstance(source, Value) or x.name in self.rows:
            raise TurnsDiffer
        return self.layout.spread(source, first, last, parts), first

    def _equal(self, match: Match, first: int, last: int) -> Value:
        """Rows of a mask: which of the choices there are the number of each."""
        if match.gone or first:
            raise TurnsDiffer
        shape = [extent(own) for own in match.dims]
        choices = self.layout.gather(self.expert, 0, flat(match.dims))
        choices = self.rewriter.reshape(choices, shape)
        rows = self.layout.spread(choices, first, last, flat(match.dims[first:last]))
        shape = [self.choices.numel, *[1] * (len(rows.shape) - 1)]
        number = self.rewriter.reshape(self.expert, shape)
        return self.rewriter.emit("aten.eq.Tensor", rows, number)

    def _counted(self, places: Places, v: Value, dim: int) -> Value:
        """Places as integers, in the shape that holds them."""
        n = extent(places.parts)
        counted = self.rewriter.emit("aten.arange.default", n, dtype=v.dtype)
        rows = self.layout.spread(counted, 0, 1, places.parts)
        shape = [self.choices.numel if d == dim else 1 for d in range(len(v.shape))]
        rows = self.rewriter.reshape(rows, shape)
        return self.rewriter.expand(rows, self._shape(v, dim))

    def _of_each(self, x: Value, first: int, last: int, parts: Parts) -> Value:
        """Rows of each turn's value [turns, ...], where that is one number a row."""
        spread = self.layout.spread(x, first + 1, last + 1, parts)
        if first or len(spread.shape) != 2:
            raise TurnsDiffer
        expert = self.rewriter.reshape(self.expert, (1, self.choices.numel))
        picked = self.rewriter.emit("aten.gather.default", spread, 0, expert)
        return self.rewriter.reshape(picked, (self.choices.numel,))

    def _product(self, node: Node, table: dict[str, Any]) -> Value | None:
        """Rows times the weight of each's expert: linear, matmul, addmm."""
        bias = None
        match node.name:
            case "aten.linear":
                x, weight, bias = node.named("input weight bias")
            case "aten.matmul" | "aten.mm":
                x, weight = node.operands
            case "aten.addmm" if not node.kwargs:
                bias, x, weight = node.operands
            case _:
                return None
        stacked, rows = table[weight.name], table[x.name]
        if not isinstance(stacked, Stacked) or not isinstance(rows, Value):
            return None
        if self.dims[x.name] or len(stacked.value.shape) != 3:
            raise TurnsDiffer
        count, (*between, k) = rows.shape[0], x.shape[1:]
        if between:
            raise TurnsDiffer
        w, emit = self.looked_up(stacked), self.rewriter.emit
        n = node.out.shape[-1]
        if node.name == "aten.linear":
            column, shape = self.rewriter.reshape(rows, (count, k, 1)), (count, n, 1)
            args = w, column
        else:
            row, shape = self.rewriter.reshape(rows, (count, 1, k)), (count, 1, n)
            args = row, w
        like = Value("", shape, node.out.dtype)
        y = emit("aten.bmm.default", *args, like=like, name=node.out.name)
        y = self.rewriter.reshape(y, (count, n))
        if bias is not None:
            like = replace(like, shape=(count, n))
            y = emit("aten.add.Tensor", y, self._row(table[bias.name], y), like=like)
        return y

    def _row(self, x: Any, like: Value) -> Value:
        """What is added to rows [rows, ..., n], or multiplied with them."""
        if not isinstance(x, Stacked):
            if not isinstance(x, Value):
                raise TurnsDiffer
            return x
        own = self.looked_up(x)
        between = len(like.shape) - len(own.shape)
        if between < 0:
            raise TurnsDiffer
        if own.dtype != like.dtype:
            own = self.rewriter.emit("aten.to.dtype", own, like.dtype)
        return self.rewriter.reshape(
            own, (own.shape[0], *[1] * between, *own.shape[1:])
        )

    def _norm(self, node: Node, table: dict[str, Any]) -> Value:
        """A norm of rows, whose weight and bias are each expert's."""
        names = [n for n in ("weight", "bias") if isinstance(node.arg(n), Value)]
        x = node.operands[0]
        plain = node.with_args(**dict.fromkeys(names))
        (y,) = self._same(plain, {x.name: table[x.name]}, self.dims[x.name])
        for name in names:
            own = self._row(table[node.arg(name).name], y)
            op = "aten.mul.Tensor" if name == "weight" else "aten.add.Tensor"
            y = self.rewriter.emit(op, y, own, like=y)
        return y

    def _added(self, node: Node, table: dict[str, Any]) -> Accumulated:
        """`y[rows] + v`."""
        if node.name != "aten.add" or node.arg("alpha") not in (None, 1):
            raise TurnsDiffer
        both = [table[v.name] for v in node.operands]
        for y, v in (both, both[::-1]):
            if isinstance(y, Accumulated) and isinstance(v, Value) and not y.added:
                return replace(y, added=v)
        raise TurnsDiffer

    def _same(self, node: Node, table: dict[str, Any], dim: int) -> tuple[Any, ...]:
        """The node on all rows: its results."""
        now: dict[str, Value] = {}
        for v in node.operands:
            x = table[v.name]
            if isinstance(x, Places):
                x = self._counted(x, v, self.dims[v.name])
            if isinstance(x, Stacked) and is_pointwise(node):
                out = node.results[0]
                rank = len(out.shape) - dim
                like = replace(out, shape=self._shape(out, dim)[-rank:])
                if len(v.shape) >= rank:
                    raise TurnsDiffer
                x = self._row(x, like)
            if not isinstance(x, Value):
                raise TurnsDiffer
            now[v.name] = x
        if op_of(node).view == "shape":
            x, shape = now[node.operands[0].name], self._shape(node.out, dim)
            return (self.rewriter.reshape(x, shape),)
        outs = tuple(v and replace(v, shape=self._shape(v, dim)) for v in node.outs)
        made = node.substitute(lambda v: now[v.name])
        made = replace(made, outs=outs, location=self.rewriter.where)
        if (sizes := op_of(node).sizes) is not None:
            made = sizes(made)
        return self.rewriter.keep(made)

    # --- what rows are written to --------------------------------------------------

    def _written(self, values: Sequence[Value]) -> bool:
        """Whether the turns before have written it."""
        pairs = ((self.steps[i], values[j]) for i, j in pairwise(self.order))
        return all(self._viewed(v).name in steps for steps, v in pairs)

    def _viewed(self, v: Value) -> Value:
        """What this is a view of, all of it and in its order."""
        while (node := self.made.get(v.name)) is not None and node.operands:
            kind = op_of(node)
            if kind.view != "shape" and kind.elements != "same":
                break
            v = node.operands[0]
        return v

    def _accumulate(
        self, node: Node, nodes: Sequence[Node], table: dict[str, Any]
    ) -> Value:
        """What turns, one after the other, make of what they write to."""
        wholes = [n.operands[0] for n in nodes]
        for before, after in pairwise(self.order):
            if self._viewed(wholes[after]) != nodes[before].out:
                raise TurnsDiffer
        first, parts, written, adds = read_write(node, table, self.dims)
        rows: Any = written
        if isinstance(written, Accumulated):
            if written.whole != tuple(wholes) or written.parts != parts or adds:
                raise TurnsDiffer
            rows, adds = written.added, True
        if not isinstance(rows, Value):
            raise TurnsDiffer
        every = complete(parts, self.choices.numel)
        if every is None:
            raise TurnsDiffer
        several = tuple(part for part, own in every if not own)
        if several and not adds:
            raise TurnsDiffer  # what a later turn writes replaces what was there
        if isinstance(written, Accumulated) and not are_distinct(
            self.choices, several, self.made
        ):
            raise TurnsDiffer  # in one turn, of two rows in a place one counts
        made = self.layout.gather(rows, first, parts)
        made = self.rewriter.reshape(made, node.out.shape)
        start = self.values.now(wholes[self.order[0]])
        if not adds or self.rewriter.producer(start, *ZEROS):
            return made
        return self.rewriter.emit("aten.add.Tensor", start, made)
