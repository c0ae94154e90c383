"""The record of a backward pass while it is being written.

Cotangents of a value are collected from its consumers and added when its producer is
reached. One that nobody else reads is added to in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ..builder import Builder
from ..graph import Location, Node, Value
from ..ops.op import is_view

ZEROS = "aten.zeros.default"


@dataclass
class _Collected:
    values: list[Value] = field(default_factory=list)
    adders: list[tuple[str, tuple[Any, ...], Node]] = field(default_factory=list)


class Cotangents:
    """Backward nodes of one stage, in the order in which they run."""

    def __init__(
        self,
        builder: Builder,
        differentiable: frozenset[str],
        grads: Mapping[str, Value],
        sizes: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        casts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.builder = builder
        self.nodes: list[Node] = []
        self.grads = grads
        self.sizes = sizes
        # Of the cotangents of parameters, and of what is moved of them.
        self._dtypes = dtypes
        # A parameter's copy in another precision -> the parameter.
        self._casts = casts
        # What each traced node's placeholders stand for, by its first result.
        self.bindings: dict[str, dict[str, Value]] = {}
        self._differentiable = differentiable
        self._collected: dict[str, _Collected] = {}
        self._shared: set[str] = set()

    def wanted(self, v: Value) -> bool:
        """Whether gradients flow into v."""
        return v.name in self._differentiable

    def is_param(self, v: Value) -> bool:
        """Whether the value's gradient is added up in a buffer; so is that of casts."""
        return self._casts.get(v.name, v.name) in self.grads

    def dtype(self, v: Value) -> torch.dtype:
        """Returns the dtype of the value's cotangent."""
        return self._dtypes.get(v.name, v.dtype)

    # --- writing nodes -------------------------------------------------------------

    def append(self, node: Node) -> None:
        self.nodes.append(node)

    def fresh(self, like: Value, of: str | None = None) -> Value:
        """A new backward value, the cotangent of `like` (or of `of`, typed as that)."""
        name = _named(of or like.name)
        return self.builder.value(name, like.shape, self.dtype(like))

    def residual(self, like: Value, node: Node) -> Value:
        """A new forward value that a node's traced forward makes for its backward."""
        name = f"{node.results[0].name}_kept"
        return self.builder.value(name, like.shape, like.dtype)

    def emit(
        self, op: str, like: Value, node: Node, *args: Any, **kwargs: Any
    ) -> Value:
        """`d_like = op(*args)`; the derivative of `node`."""
        out = self.fresh(like)
        new = Node(op, args, kwargs, (out,), node.location)
        self.append(new)
        if is_view(new) or op == "comm.shard":
            self._shared.add(out.name)
        return out

    def view(
        self, op: str, dy: Value | None, x: Value, node: Node, *args: Any
    ) -> Value:
        """A view of a cotangent, which is as much its own as the cotangent is."""
        assert dy is not None
        own = dy.name not in self._shared
        others = (x.shape,) if op == "aten.reshape.default" else args
        out = self.emit(op, x, node, dy, *others)
        if own:
            self._shared.discard(out.name)
        return out

    def zeros(self, like: Value, node: Node) -> Value:
        """Emits zeros like a value."""
        out = self.fresh(like)
        kwargs = {"dtype": out.dtype}
        self.append(Node(ZEROS, (like.shape,), kwargs, (out,), node.location))
        return out

    def cast(self, dy: Value, like: Value, node: Node) -> Value:
        """Undo promotion: the dtype of `dy` as a cotangent of `like` must be."""
        dtype = self.dtype(like)
        dy = self._real(dy, like, node)
        if dy.dtype == dtype:
            return dy
        out = self.builder.value(_named(like.name), dy.shape, dtype)
        args = (dy, dtype)
        self.append(Node("aten.to.dtype", args, {}, (out,), node.location))
        return out

    def _real(self, dy: Value, like: Value, node: Node) -> Value:
        """The part of a complex cotangent that a real value gets."""
        if not dy.dtype.is_complex or like.dtype.is_complex:
            return dy
        out = self.builder.value(_named(like.name), dy.shape, dy.dtype.to_real())
        self.append(Node("aten.real.default", (dy,), {}, (out,), node.location))
        return out

    def sum_to(self, like: Value, dy: Value, node: Node) -> Value:
        """Undo broadcasting: sum dy to the shape of `like`."""
        dy = self._real(dy, like, node)
        lead = len(dy.shape) - len(like.shape)
        dims = tuple(range(lead)) + tuple(
            i + lead
            for i, n in enumerate(like.shape)
            if n == 1 and dy.shape[i + lead] != 1
        )
        if not dims:  # no dims at all would be all of them
            dy = self.cast(dy, like, node)
            self.share(dy)
            return dy
        # What is added up in another type is read as it is, and never there in both.
        wide = {} if self.dtype(like) == dy.dtype else {"dtype": self.dtype(like)}
        summed = self.emit("aten.sum.dim_IntList", like, node, dy, dims, **wide)
        if lead == len(dims):
            return summed
        return self.emit("aten.reshape.default", like, node, summed, like.shape)

    def to_bias(self, b: Value, dy: Value, node: Node) -> Value | None:
        """The cotangent of a broadcast addend; for a parameter it is accumulated."""
        if not self.wanted(b):
            return None
        dy = self._real(dy, b, node)
        vector = len(b.shape) == 1 and dy.shape[-1] == b.shape[0]
        if self.is_param(b) and vector:
            self.accumulate(b, "autopar.bias_grad_", node, dy)
            return None
        return self.sum_to(b, dy, node)

    def accumulate(self, param: Value, op: str, node: Node, *args: Any) -> None:
        """Add to a parameter's gradient, in place."""
        into = self.grads[self._casts.get(param.name, param.name)]
        self.append(Node(op, (into, *args), {}, (), node.location))

    def to_weight(self, w: Value, op: str, node: Node, *args: Any) -> Value | None:
        """The cotangent of a weight, which `op(cotangent, *args)` adds to; a
        parameter's is added up."""
        if self.is_param(w):
            self.accumulate(w, op, node, *args)
            return None
        if not self.wanted(w):
            return None
        out = self.zeros(w, node)
        self.append(Node(op, (out, *args), {}, (), node.location))
        return out

    # --- collecting cotangents -----------------------------------------------------

    def share(self, dy: Value) -> None:
        """Say that a cotangent is read elsewhere too, and must not change."""
        self._shared.add(dy.name)

    def is_shared(self, dy: Value) -> bool:
        """Whether dy may not be changed in place."""
        return dy.name in self._shared

    def add(self, v: Value, dy: Value) -> None:
        """Adds one consumer's contribution to the cotangent of `v`, in place if an
        earlier one may be overwritten."""
        values = self._collected.setdefault(v.name, _Collected()).values
        values.append(dy)
        if len(values) > 1 and (own := self._pop_own(values)) is not None:
            self._add_to(own, values)
            values[:] = [own]

    def _pop_own(self, values: list[Value]) -> Value | None:
        """Takes out a contribution that nobody else reads."""
        for i, dy in enumerate(values):
            if dy.name not in self._shared and values.count(dy) == 1:
                return values.pop(i)
        return None

    def _add_to(self, own: Value, values: Sequence[Value]) -> None:
        # The sum belongs where the last of its parts is made.
        where = self.nodes[-1].location if self.nodes else Location()
        for dy in values:
            self.append(Node("autopar.add_", (own, dy), {}, (), where))

    def add_in_place(self, v: Value, op: str, node: Node, *args: Any) -> None:
        """A contribution written into the sum of the others: `op(sum, *args)`."""
        collected = self._collected.setdefault(v.name, _Collected())
        collected.adders.append((op, args, node))

    def take(self, v: Value, node: Node) -> Value | None:
        """The whole cotangent of `v`: all contributions added; None without any."""
        collected = self._collected.pop(v.name, None)
        if collected is None:
            return None
        values = list(collected.values)
        own = self._pop_own(values)
        if own is None and collected.adders and not values:
            own = self.zeros(v, node)
        if own is None and len(values) == 1 and not collected.adders:
            return values[0]
        if own is None:
            first, *values = values
            second = values.pop(0) if values else self.zeros(v, node)
            own = self.emit("aten.add.Tensor", v, node, first, second)
        self._add_to(own, values)
        for op, args, at in collected.adders:
            self.append(Node(op, (own, *args), {}, (), at.location))
        return own


def _named(name: str) -> str:
    return name if name.startswith("d_") else f"d_{name}"


def seed_of(cts: Cotangents, loss: Value, node: Node, scaled: bool) -> Value:
    """The cotangent of the loss itself: one, or the scale that a step has for it."""
    out = cts.fresh(loss)
    args, kwargs = (loss.shape,), {"dtype": loss.dtype}
    op = "comm.loss_scale" if scaled else "aten.ones.default"
    cts.append(Node(op, args, kwargs, (out,), node.location))
    return out
