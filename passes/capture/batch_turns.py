"""The turns of a loop over experts, each step of all of them as one: `expert_loops`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

from ..capture.choices import Match, Part, Parts, complete, extent, find_match, joined
from ..capture.chosen_rows import CHOOSES
from ..capture.join_weights import spanning
from ..capture.rewrite import Rewriter
from ..capture.rows import Rows, along
from ..capture.turn_values import Stacked, TurnsDiffer, TurnValues, Weighed
from ..graph import Graph, Node, Value
from ..ops.op import op_of
from ..ops.rules import is_pointwise

SETTING = ("aten.index_put", "aten.index_copy")
ADDING = ("aten.index_add", "aten.scatter_add")
NORMS = ("aten.layer_norm", "aten.rms_norm")


@dataclass(frozen=True)
class Places:
    """Which index each row has along a dim that goes along these parts of the
    choices."""

    parts: Parts


@dataclass(frozen=True)
class Accumulated:
    """Rows of what turns write to, and what is added to them. whole: what each turn
    reads them of. parts: of the choices, along the dims that rows are chosen of."""

    whole: tuple[Value, ...]
    parts: Parts
    added: Value | None = None


Rowwise: TypeAlias = Value | Places | Accumulated


def is_accumulated(node: Node, rows: Collection[str]) -> bool:
    """Whether a node writes rows into a tensor that is not of rows."""
    return node.name in (*SETTING, *ADDING) and node.operands[0].name not in rows


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
        self._expert: Value | None = None
        self._looked_up: dict[str, Value] = {}

    def emit(self, step: int) -> Value | None:
        """Emits what a step of all turns does; returns what takes the place of the last
        turn's result, if that is not of rows. Raises: TurnsDiffer."""
        nodes = [turn[step] for turn in self.turns]
        node = nodes[self.last]
        modules = [n.location.module for n in nodes]
        self.rewriter.where = replace(node.location, module=spanning(modules) or "")
        if node.op == CHOOSES:
            self._choose(node)
            return None
        columns = zip(*(n.operands for n in nodes), strict=True)
        operands = [self.operand(column) for column in columns]
        self.values.check_alike(nodes)
        table = dict(zip((v.name for v in node.operands), operands, strict=True))
        if is_accumulated(node, self.dims):
            return self._accumulate(node, nodes, table)
        made, dim = self._rowwise(node, nodes, table)
        (out,) = node.results
        self.rows[out.name], self.dims[out.name] = made, dim
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

    def _shape(self, v: Value, dim: int) -> tuple[int, ...]:
        """A shape with all rows in place of a turn's."""
        return (*v.shape[:dim], self.choices.numel, *v.shape[dim + 1 :])

    def spread(self, x: Value, first: int, last: int, parts: Parts) -> Value:
        """x, whose dims from first to before last go along parts of the choices, as one
        dim of rows: for each of the choices what it is there."""
        every = complete(parts, self.choices.numel)
        if every is None or math.prod(x.shape[first:last]) != extent(parts):
            raise TurnsDiffer
        lead, rest, rewriter = x.shape[:first], x.shape[last:], self.rewriter
        x = rewriter.reshape(x, (*lead, *(n for _, n in parts), *rest))
        ordered = sorted(range(len(parts)), key=lambda i: parts[i], reverse=True)
        x = self._permuted(x, first, ordered)
        here = [n if own else 1 for (_, n), own in every]
        x = rewriter.reshape(x, (*lead, *here, *rest))
        x = rewriter.expand(x, (*lead, *(n for (_, n), _ in every), *rest))
        return rewriter.reshape(x, (*lead, self.choices.numel, *rest))

    def gather(self, rows: Value, first: int, parts: Parts) -> Value:
        """Rows along the first-th dim, as dims that go along parts of the choices:
        of several rows in one place the sum."""
        every = complete(parts, self.choices.numel)
        if every is None:
            raise TurnsDiffer
        lead, rest = rows.shape[:first], rows.shape[first + 1 :]
        shape = (*lead, *(n for (_, n), _ in every), *rest)
        x = self.rewriter.reshape(rows, shape)
        gone = tuple(first + i for i, (_, own) in enumerate(every) if not own)
        if gone:
            x = self.rewriter.emit("aten.sum.dim_IntList", x, gone)
        present = [part for part, own in every if own]
        return self._permuted(x, first, [present.index(part) for part in parts])

    def _permuted(self, x: Value, first: int, order: Sequence[int]) -> Value:
        if [*order] == [*range(len(order))]:
            return x
        dims = [*range(len(x.shape))]
        dims[first : first + len(order)] = [first + i for i in order]
        return self.rewriter.emit("aten.permute.default", x, tuple(dims))

    def looked_up(self, x: Stacked) -> Value:
        """The value of each row's number: [rows, ...]."""
        name = x.value.name
        if name not in self._looked_up:
            index = "aten.index.Tensor", x.value, (self.expert,)
            self._looked_up[name] = self.rewriter.emit(*index)
        return self._looked_up[name]

    # --- what is done to rows ------------------------------------------------------

    def _rowwise(
        self, node: Node, nodes: Sequence[Node], table: dict[str, Any]
    ) -> tuple[Rowwise, int]:
        """What a node makes of rows, and the dim that goes along them."""
        if len(node.results) != 1:
            raise TurnsDiffer
        if node.name in ("aten.index", "aten.index_select"):
            return self._index(node, nodes, table)
        dim = along(node, self._rows_of)
        if dim is None:
            raise TurnsDiffer
        first = table[node.operands[0].name]
        kind = op_of(node)
        if isinstance(first, Places):
            if kind.elements in ("same", "cast") or kind.view in ("shape", "copies"):
                return first, dim
            raise TurnsDiffer
        if any(isinstance(x, Accumulated) for x in table.values()):
            return self._added(node, table), dim
        if isinstance(product := self._product(node, table), Value):
            return product, dim
        if node.name in NORMS:
            return self._norm(node, table), dim
        return self._same(node, table, dim), dim

    def _rows_of(self, v: Value) -> Rows | None:
        dim = self.dims.get(v.name)
        return None if dim is None else Rows(v, "", "", (v.shape[dim],), dim)

    def _places(
        self, indices: Sequence[Value], table: dict[str, Any]
    ) -> tuple[Parts, int]:
        """The parts of the choices along the dims that are indexed, by places or by a
        mask; and how many dims these are."""
        parts: list[Part] = []
        count = 0
        for index in indices:
            own = table[index.name]
            if isinstance(own, Match):
                parts += [part for dim in own.dims for part in dim]
                count += len(own.dims)
            elif isinstance(own, Places):
                parts += own.parts
                count += 1
            else:
                raise TurnsDiffer
        return tuple(parts), count

    def _index(
        self, node: Node, nodes: Sequence[Node], table: dict[str, Any]
    ) -> tuple[Rowwise, int]:
        """`x[rows]`, `x[rows, place]`."""
        x = node.operands[0]
        if node.name == "aten.index":
            first, indices = _contiguous(node.arg("indices"))
        else:
            first, indices = int(node.arg("dim")) % len(x.shape), [node.arg("index")]
        parts, count = self._places(indices, table)
        last, source = first + count, table[x.name]
        if isinstance(source, Accumulated):
            if first:
                raise TurnsDiffer
            return replace(source, parts=parts), 0
        if isinstance(source, Weighed):
            if joined([p for own in source.dims for p in own]) != joined(parts):
                raise TurnsDiffer
            every = tuple(p for own in source.whole for p in own)
            spread = self.spread(source.value, 0, len(source.value.shape), every)
            return self.rewriter.reshape(spread, self._shape(node.out, first)), first
        if isinstance(source, Stacked):
            return self._of_each(source.value, first, last, parts), first
        if not isinstance(source, Value) or x.name in self.rows:
            raise TurnsDiffer
        return self.spread(source, first, last, parts), first

    def _of_each(self, x: Value, first: int, last: int, parts: Parts) -> Value:
        """Rows of each turn's value [turns, ...], where that is one number a row."""
        spread = self.spread(x, first + 1, last + 1, parts)
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
        y = self._same(plain, {x.name: table[x.name]}, self.dims[x.name])
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

    def _same(self, node: Node, table: dict[str, Any], dim: int) -> Value:
        """The node on all rows."""
        now: dict[str, Value] = {}
        for v in node.operands:
            x = table[v.name]
            if isinstance(x, Stacked) and is_pointwise(node):
                rank = len(node.out.shape) - dim
                like = replace(node.out, shape=self._shape(node.out, dim)[-rank:])
                if len(v.shape) >= rank:
                    raise TurnsDiffer
                x = self._row(x, like)
            if not isinstance(x, Value):
                raise TurnsDiffer
            now[v.name] = x
        shape = self._shape(node.out, dim)
        if op_of(node).view == "shape":
            return self.rewriter.reshape(now[node.operands[0].name], shape)
        made = node.substitute(lambda v: now[v.name])
        made = replace(made, outs=(replace(node.out, shape=shape),))
        made = replace(made, location=self.rewriter.where)
        if (sizes := op_of(node).sizes) is not None:
            made = sizes(made)
        (out,) = self.rewriter.keep(made)
        assert out is not None
        return out

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
        first, parts, written, adds = self._write(node, table)
        rows: Any = written
        if isinstance(written, Accumulated):
            if written.whole != tuple(wholes) or written.parts != parts or adds:
                raise TurnsDiffer
            rows, adds = written.added, True
        if not isinstance(rows, Value):
            raise TurnsDiffer
        every = complete(parts, self.choices.numel)
        if not adds and (every is None or not all(own for _, own in every)):
            raise TurnsDiffer  # what a later turn writes replaces what was there
        made = self.gather(rows, first, parts)
        made = self.rewriter.reshape(made, node.out.shape)
        start = self.values.now(wholes[self.order[0]])
        if not adds or self.rewriter.producer(start, "aten.zeros", "aten.zeros_like"):
            return made
        return self.rewriter.emit("aten.add.Tensor", start, made)

    def _write(
        self, node: Node, table: dict[str, Any]
    ) -> tuple[int, Parts, Rowwise, bool]:
        """What a node writes: the dim of the rows, the parts of the choices that it
        goes along, the rows, and whether they are added."""
        whole = node.operands[0]
        if node.name == "aten.index_put":
            first, indices = _contiguous(node.arg("indices"))
            rows, adds = node.arg("values"), bool(node.arg("accumulate"))
            if first:
                raise TurnsDiffer
        else:
            source = "source" if node.arg("src") is None else "src"
            first, index, rows = node.named(f"dim index {source}")
            first, indices = int(first) % len(whole.shape), [index]
            adds = node.name in ADDING
            if (
                node.arg("alpha") not in (None, 1)
                or rows.shape[first + 1 :] != (whole.shape[first + 1 :])
            ):
                raise TurnsDiffer
            if len(index.shape) > 1 and index.shape != rows.shape:
                raise TurnsDiffer
        parts, count = self._places(indices, table)
        if self.dims.get(rows.name) != first or rows.dtype != whole.dtype:
            raise TurnsDiffer
        if math.prod(whole.shape[first : first + count]) != extent(parts):
            raise TurnsDiffer
        if rows.shape[first + 1 :] != whole.shape[first + count :]:
            raise TurnsDiffer
        return first, parts, table[rows.name], adds


def _contiguous(indices: Sequence[Value | None]) -> tuple[int, list[Value]]:
    """The dim of the first index, and all of them. Raises: TurnsDiffer, where a dim
    between is not indexed."""
    present = [d for d, index in enumerate(indices) if index is not None]
    if present != [*range(present[0], present[-1] + 1)]:
        raise TurnsDiffer
    return present[0], [i for i in indices if i is not None]
