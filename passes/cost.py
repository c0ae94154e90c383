"""Costs of nodes: floating point operations and bytes; and amounts that add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from .graph import Node, Value
from .ops.op import is_view, op_of

# Backward costs twice the forward: one product for the input's gradient, one for the
# weight's (Narayanan 2021, appendix).
BACKWARD_WORK = 2.0


def flops(node: Node) -> int:
    """Floating point operations of the forward; a multiply-add counts as two."""
    count = op_of(node).flops
    if count is not None:
        return count(node)
    if is_view(node) or node.is_comm:
        return 0
    return sum(v.numel for v in node.results)


def traffic(node: Node) -> int:
    """Bytes read and written by the forward; views are free, a shard is one too."""
    if is_view(node) or node.op == "comm.shard":
        return 0
    values = {v.name: v for v in (*node.operands, *node.results)}
    return sum(v.bytes for v in values.values())


def signature(node: Node) -> str:
    """The text on which a node's cost depends: `aten.add.Tensor(f32[4,8], f32[8])`."""

    def text(arg: object) -> str:
        if isinstance(arg, tuple):
            return f"[{', '.join(map(text, arg))}]"
        return arg.type if isinstance(arg, Value) else str(arg)

    parts = [text(a) for a in node.args]
    parts += [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{node.op}({', '.join(parts)})"


NUMBERS = int, float
Own = TypeVar("Own", bound="Amounts")


class Amounts:
    """A dataclass of numbers, other such records and `Exchange`s, zero by default: two
    of them add up field by field."""

    def __add__(self: Own, other: Own) -> Own:
        return self.plus(other, 1.0)

    def __sub__(self: Own, other: Own) -> Own:
        return self.plus(other, -1.0)

    def __mul__(self: Own, times: float) -> Own:
        return type(self)().plus(self, times)

    def plus(self: Own, other: Own, times: float) -> Own:
        """The record plus `times` another one's amounts."""
        copy = object.__new__(type(self))
        amounts, others = vars(copy), vars(other)
        for name, x in vars(self).items():
            y = others[name]
            amounts[name] = x + times * y if type(x) in NUMBERS else _plus(x, y, times)
        return copy

    def changed(self: Own, **changes: Any) -> Own:
        """Does what `dataclasses.replace` does, faster: a search calls it often."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        assert len(vars(copy)) == len(vars(self)), f"no such fields: {changes.keys()}"
        return copy


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over some axes, or messages: their number, and bytes of
    all together, each of its whole tensor, see `passes.price.cluster.Link`."""

    kind: str
    axes: tuple[str, ...]
    calls: float
    bytes: float


Exchanges = tuple[Exchange, ...]


def join_exchanges(exchanges: Iterable[Exchange]) -> Exchanges:
    """One of each kind and axes, in the order in which they come; none of what cancels
    out."""
    joined: dict[tuple[str, tuple[str, ...]], Exchange] = {}
    for e in exchanges:
        key = e.kind, e.axes
        if had := joined.get(key):
            e = Exchange(*key, had.calls + e.calls, had.bytes + e.bytes)
        joined[key] = e
    return tuple(e for e in joined.values() if e.calls or e.bytes)


@dataclass(frozen=True, eq=False)
class Levels:
    """Bytes while each of some nodes runs, in several cases, [cases, nodes]: their peak
    is not linear in what each is. None of these where what is added has other nodes."""

    rows: np.ndarray

    def plus(self, other: Levels, times: float) -> Levels:
        """Adds `times` another's levels; only peaks, where the other has other
        nodes."""
        if not self.rows.size:
            return self
        x, y = self.rows, other.rows
        if x.shape != y.shape:
            x, y = (r.max(axis=1, keepdims=True) for r in (x, y))
        return Levels(x + times * y)

    @property
    def peaks(self) -> list[float]:
        """The peak of each case, in bytes."""
        most: list[float] = self.rows.max(axis=1).tolist()
        return most


NO_LEVELS = Levels(np.empty((0, 0)))


def _plus(x: Any, y: Any, times: float) -> Any:
    if isinstance(x, Amounts):
        return x.plus(y, times) if any(vars(y).values()) else x
    if isinstance(x, Levels):
        return x.plus(y, times)
    more = (Exchange(e.kind, e.axes, times * e.calls, times * e.bytes) for e in y)
    return join_exchanges((*x, *more)) if y else x


@dataclass(frozen=True)
class Seconds(Amounts):
    """Seconds of one microbatch: forward, and the two halves of the backward."""

    forward: float = 0.0
    input_half: float = 0.0
    weight_half: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_half + self.weight_half

    @property
    def total(self) -> float:
        return self.forward + self.backward


def weights_of(node: Node) -> frozenset[str]:
    """Names of the operands whose gradients can wait: weights, by their place."""
    names = op_of(node).weights
    names = names(node) if callable(names) else names
    weights = (node.arg(name) for name in names.split())
    return frozenset(v.name for v in weights if isinstance(v, Value))


class NodeCosts(Protocol):
    """Seconds of single nodes, by which stages are cut."""

    def seconds(self, node: Node) -> Seconds:
        """Seconds that one rank takes for a node and its derivative."""

    def gather(self, node: Node) -> Seconds:
        """Seconds of gathering a parameter for a microbatch, and of its gradient."""

    def send(self, size: int) -> float:
        """Seconds of a message of `size` bytes to the next stage."""
