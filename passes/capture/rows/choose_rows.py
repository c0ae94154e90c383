"""What an export says of rows that the data choose, with as many as there may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ...builder import Builder
from ...graph import Graph, Location, Node, Value
from ...ops.captured import RESHAPES
from ..forward.values_read import Unknown, has_shape
from ..rows.chosen_rows import rows_of
from ..rows.real_numbers import UnknownNumber, real_number
from ..rows.rows import CHOOSES

# Of an integer that is not known and one that is, by torch's names for these.
OF_INTEGERS = {
    "Add": "aten.add.Tensor",
    "Mul": "aten.mul.Tensor",
    "Max": "aten.clamp_min.default",
    "Min": "aten.clamp_max.default",
}
# What turns a table of places round, and which dims it names then.
TURNS: dict[str, tuple] = {
    "aten.t.default": ((),),
    "aten.numpy_T.default": ((),),
    "aten.permute.default": (((1, 0),), ((-1, -2),), ((-1, 0),), ((1, -2),)),
    "aten.transpose.int": ((0, 1), (1, 0), (-1, -2), (-2, -1), (0, -1), (1, -2)),
}


class ChosenRows:
    """Sizes that are not known before a program runs -> how many rows stand for them,
    which `keep_all_rows` sorts out."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        # Sizes that are known to be no more than this, for a proof.
        self.limits: Mapping[str, int] = {}
        self.sizes: dict[str, int] = {}
        # A mask, and its size, as a mask may be written to -> what chooses its rows.
        self.chosen: dict[tuple[str, str], tuple[Value, ...]] = {}
        self.masks: dict[str, Value] = {}  # those sizes -> what chooses so many
        self.numbers: dict[str, Value] = {}  # that are read -> what has them
        self.columns: dict[str, tuple[Value, ...]] = {}  # of a table of places, its own
        self.turned: set[str] = set()  # tables that have them as rows

    def shape(self, fake: torch.Tensor) -> tuple[int, ...] | None:
        """The shape of a tensor; None if its rows are not those of a mask."""
        extents = [n if type(n) is int else self.sizes.get(str(n)) for n in fake.shape]
        known = tuple(n for n in extents if n is not None)
        return known if len(known) == len(extents) else None

    def choose(self, node: fx.Node, args: tuple, where: Location) -> Any:
        """The results of a call that chooses rows by a mask; None of another."""
        name, fake = str(node.target), node.meta.get("val")
        if name in (CHOOSES, "aten.nonzero_numpy.default") and len(args) == 1:
            return self._positions(args[0], fake[0].shape[0], where)
        if name in ("aten.nonzero.default", "aten.argwhere.default"):
            places = self._positions(args[0], fake.shape[0], where)
            columns = [
                self._emit("aten.unsqueeze.default", p, 1, where) for p in places
            ]
            if len(columns) == 1:
                return columns[0]
            shape = (columns[0].shape[0], len(columns))
            table = self.builder.emit(
                "aten.cat.default", (tuple(columns), 1), shape, torch.int64, where
            )
            self.columns[table.name] = places
            return table
        if args and isinstance(args[0], Value) and args[0].name in self.columns:
            return self._column(name, args, where)
        if name == "aten.masked_select.default" and args[0].shape == args[1].shape:
            args, name = (args[0], (args[1],)), "aten.index.Tensor"
        if name == "aten.index.Tensor" and not has_shape(fake):
            return self._by_mask(node, args, where)
        if name == "aten.slice.Tensor" and not has_shape(fake):
            return self._cut(node, args, where)
        return None

    def _column(self, name: str, args: tuple, where: Location) -> Any:
        """`table[:, 0]`, or all columns of one, also of it turned; None of another
        part."""
        table, dim, *index = args if len(args) > 1 else (*args, 0)
        columns, turned = self.columns[table.name], table.name in self.turned
        if args[1:] in TURNS.get(name, ()):
            shape = table.shape[::-1]
            new = self.builder.emit(name, args, shape, table.dtype, where)
            self.columns[new.name] = columns
            if not turned:
                self.turned.add(new.name)
            return new
        if dim % 2 == turned:
            return None
        if name == "aten.select.int":
            return columns[index[0]]
        return columns if name == "aten.unbind.int" else None

    def _cut(self, node: fx.Node, args: tuple, where: Location) -> Value | None:
        """`rows[:most]`: as many stand for some of the rows as for all; what it is, if
        it is all of them."""
        usual: tuple = (0, None, None, 1)
        x, dim, start, end, step = args + usual[len(args) - 1 :]
        size = node.args[0].meta["val"].shape[dim]
        if str(size) in self.sizes:
            self.sizes[str(node.meta["val"].shape[dim])] = x.shape[dim]
        if step != 1:
            return None
        all_of = isinstance(end, Unknown) and str(end.size) == str(size)
        least = self.limits.get(str(size))
        few = least is not None and type(end) is int and end >= least
        if not start and (all_of or few):
            return x
        # As of `min(len(rows), most)`, of which torch makes a number of its own.
        parts = getattr(end.size, "args", ()) if isinstance(end, Unknown) else ()
        most = [int(n) for n in parts if n.is_Integer]
        if len(most) == 1 and str(end.size) == f"Min({most[0]}, {size})":
            args = x, dim, start or 0, *most
            return self.builder.emit(str(node.target), args, x.shape, x.dtype, where)
        return None

    def _by_mask(self, node: fx.Node, args: tuple, where: Location) -> Any:
        """`x[..., mask]`, or `x[..., mask, place]`, the one at a place of each row."""
        x, indices = args
        tensors = [i for i in indices if i is not None]
        mask, first = tensors[0], indices.index(tensors[0])
        rest = indices[first + 1 :]
        if mask.dtype != torch.bool or rest != tuple(tensors[1:]):
            return None
        if any(i.dtype == torch.bool for i in rest):
            return None
        fake = node.meta["val"]
        places = self._positions(mask, fake.shape[first], where)
        shape = self.shape(fake)
        if shape is None:
            return None
        args = (x, (*indices[:first], *places, *rest))
        return self.builder.emit("aten.index.Tensor", args, shape, x.dtype, where)

    def _positions(self, mask: Value, size: Any, where: Location) -> tuple[Value, ...]:
        key = mask.name, str(size)
        if key not in self.chosen:
            made = {v.name: n for n in self.builder.nodes for v in n.results}
            rows = rows_of(mask, made)
            outs = tuple(
                self.builder.value("where", (rows,), torch.int64) for _ in mask.shape
            )
            self.builder.nodes.append(Node(CHOOSES, (mask,), {}, outs, where))
            self.chosen[key] = outs
        outs = self.chosen[key]
        self.sizes[str(size)], self.masks[str(size)] = outs[0].shape[0], mask
        return outs

    def note_number(
        self, number: torch.SymInt | torch.SymFloat, x: Value, where: Location
    ) -> None:
        """Notes which tensor a number was read of, as it is then."""
        emit = partial(self.builder.emit, shape=(), where=where)
        if x.numel == 1:
            seen = emit("aten.reshape.default", (x, ()), dtype=x.dtype)
            copy = emit("aten.clone.default", (seen,), dtype=x.dtype)
            wide = torch.int64
            if isinstance(number, torch.SymFloat):
                copy = emit("aten.detach.default", (copy,), dtype=x.dtype)
                wide = torch.float64
            made = emit("aten.to.dtype", (copy, wide), dtype=wide)
            self.numbers[str(number.node.expr)] = made

    def sized(
        self,
        target: torch._ops.OpOverload,
        args: tuple,
        kwargs: Mapping[str, Any],
        where: Location,
    ) -> tuple[tuple, dict[str, Any]]:
        """Arguments with rows in place of an unknown number of them, where rows are
        seen in another shape, and with their count, where a tensor is wanted."""
        kinds = {a.name: str(a.type) for a in target._schema.arguments}
        views = target._schema.name.replace("::", ".") in RESHAPES
        # Of integers, a number's type would be another one than a tensor's.
        floats = [a for a in args if isinstance(a, Value) and a.dtype.is_floating_point]
        kinds = {k: v if views or v == "Tensor" else "" for k, v in kinds.items()}
        placed = zip(args, kinds.values(), strict=False)
        known = partial(self._known, where=where, beside=floats)
        sized = tuple(known(arg, kind) for arg, kind in placed)
        return sized, {k: known(v, kinds.get(k, "")) for k, v in kwargs.items()}

    def _known(
        self, arg: Any, kind: str, where: Location, beside: Sequence[Value]
    ) -> Any:
        if isinstance(arg, tuple):
            return tuple(self._known(a, kind, where, beside) for a in arg)
        if not isinstance(arg, Unknown) or arg.size is None:
            return arg
        if kind == "List[int]":
            times, size = arg.size.as_coeff_Mul()
            rows = self.sizes.get(str(size))
            return arg if rows is None else int(times) * rows
        if kind != "Tensor":
            return arg
        if not arg.size.is_integer:
            number = self._real(arg.size, beside, where)
        else:
            number = self._count(arg.size, self.numbers if beside else {}, where)
        return arg if number is None else number

    def _real(
        self, size: Any, beside: Sequence[Value], where: Location
    ) -> Value | None:
        """A real number, as a tensor, which does not widen those that it is computed
        with; None of one that is not known."""
        wide = max((x.dtype for x in beside), key=lambda d: d.itemsize, default=None)
        if wide is None or (wide.itemsize < 4 and not all(x.shape for x in beside)):
            return None

        def emit(op: str, *args: Any) -> Value:
            return self.builder.emit(op, args, (), torch.float64, where)

        of = partial(self._count, numbers=self.numbers, where=where)
        try:
            number = real_number(size, of, emit)
        except UnknownNumber:
            return None
        assert isinstance(number, Value), "it is not known"
        dtype = wide if wide.itemsize >= 4 else torch.float32
        args = number, dtype
        return self.builder.emit("aten.to.dtype", args, (), dtype, where)

    def _count(
        self, size: Any, numbers: Mapping[str, Value], where: Location
    ) -> Value | None:
        """An integer, as a tensor: a size or a number, times another number, or with
        one added, or no less or no more than one; None of others."""

        def emit(op: str, x: Value, *args: Any) -> Value:
            return self.builder.emit(op, (x, *args), (), torch.int64, where)

        if (number := numbers.get(str(size))) is not None:
            return number
        if (mask := self.masks.get(str(size))) is not None:
            if mask.dtype != torch.bool:
                args = mask, 0
                mask = self.builder.emit(
                    "aten.ne.Scalar", args, mask.shape, torch.bool, where
                )
            return emit("aten.sum.default", mask)
        op = OF_INTEGERS.get(type(size).__name__)
        known = [int(n) for n in size.args if n.is_Integer]
        symbols = [n for n in size.args if not n.is_Integer]
        if op is None or (len(known), len(symbols)) != (1, 1):
            return None
        x = self._count(symbols[0], numbers, where)
        return None if x is None else emit(op, x, *known)

    def _emit(self, op: str, x: Value, dim: int, where: Location) -> Value:
        shape = (*x.shape[:dim], 1, *x.shape[dim:])
        return self.builder.emit(op, (x, dim), shape, x.dtype, where)


def remark_on_loops(
    graph: Graph, elsewhere: str, differing: Sequence[str] = ()
) -> tuple[str, ...]:
    """Remarks on what computes all rows several times, such as each expert of a loop.
    elsewhere: the one line that all of a loss function is said to be at. differing:
    what stands in the way of one step for all turns."""
    made = graph.producers()
    masks: dict[tuple[str, str, str], set[str]] = {}  # by where each is made, and how
    for node in graph.nodes:
        if node.op == CHOOSES and (maker := made.get(node.operands[0].name)):
            turn = node.location.source, maker.op, maker.location.source
            masks.setdefault(turn, set()).add(node.operands[0].name)
    lines = [at for (at, *_), own in masks.items() if len(own) > 1 and at != elsewhere]
    if not lines:
        return ()
    why = f" (turns differ: {', '.join(differing[:3])})" if differing else ""
    return (
        f"each turn of the loop at {', '.join(lines[:3])} computes all rows, of which "
        f"those that it does not choose count for nothing{why}; experts of one kind, "
        "each of which does the same with the rows that chose it, compute the chosen "
        "alone",
    )
