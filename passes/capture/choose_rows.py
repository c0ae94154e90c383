"""What an export says of rows that the data choose, with as many as there may be."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..builder import Builder
from ..capture.chosen_rows import CHOOSES, rows_of
from ..capture.values_read import has_shape
from ..graph import Location, Node, Value


class ChosenRows:
    """Sizes that are not known before a program runs -> how many rows stand for them,
    which `keep_all_rows` sorts out."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.sizes: dict[str, int] = {}
        # A mask, and its size, as a mask may be written to -> what chooses its rows.
        self.chosen: dict[tuple[str, str], tuple[Value, ...]] = {}

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
        if name == "aten.nonzero.default":
            places = self._positions(args[0], fake.shape[0], where)
            columns = [
                self._emit("aten.unsqueeze.default", p, 1, where) for p in places
            ]
            if len(columns) == 1:
                return columns[0]
            shape = (columns[0].shape[0], len(columns))
            return self.builder.emit(
                "aten.cat.default", (tuple(columns), 1), shape, torch.int64, where
            )
        if name == "aten.masked_select.default" and args[0].shape == args[1].shape:
            args, name = (args[0], (args[1],)), "aten.index.Tensor"
        if name == "aten.index.Tensor" and not has_shape(fake):
            return self._by_mask(node, args, where)
        return None

    def _by_mask(self, node: fx.Node, args: tuple, where: Location) -> Any:
        """`x[..., mask]`."""
        x, indices = args
        masks = [i for i in indices if i is not None]
        if len(masks) != 1 or masks[0].dtype != torch.bool:
            return None
        (mask,), first = masks, indices.index(masks[0])
        fake = node.meta["val"]
        places = self._positions(mask, fake.shape[first], where)
        shape = self.shape(fake)
        if shape is None:
            return None
        args = (x, (*indices[:first], *places))
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
        self.sizes[str(size)] = outs[0].shape[0]
        return outs

    def _emit(self, op: str, x: Value, dim: int, where: Location) -> Value:
        shape = (*x.shape[:dim], 1, *x.shape[dim:])
        return self.builder.emit(op, (x, dim), shape, x.dtype, where)
