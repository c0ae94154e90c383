"""shrink: a captured graph with small sizes, that is the same in all else.

Every extent of every value is replaced by its small one, every argument that says a
size or a position follows, and what constants hold is cut out of the large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..capture.trace import Traced
from ..graph import Graph, Node, Value, map_values, resolve
from ..ops.captured import RESHAPES
from ..ops.op import op_of
from ..ops.parts import part_of
from ..proof.choose_sizes import NotShrunk
from ..proof.extents import MARGIN, Extents

# Numbers of at most this size in comparisons of positions are counts, not sizes.
SMALL_NUMBER = 8


class Shrinker:
    """Rewrites a graph and tensors by a table of sizes."""

    def __init__(self, extents: Extents, sizes: Mapping[int, int]) -> None:
        self.extents, self.sizes = extents, sizes
        self.compared: dict[int, int] = {}  # with positions, and what these became

    def graph(self, traced: Traced) -> Traced:
        """The captured model with small sizes. Raises NotShrunk where an op does not
        give what the sizes say."""
        old = traced.graph
        nodes = []
        for node in old.nodes:
            new = self.node(node)
            _check(node, new)
            nodes.append(new)
        made = Graph(
            inputs=tuple(map(self.value, old.inputs)),
            params=tuple(map(self.value, old.params)),
            buffers=tuple(map(self.value, old.buffers)),
            constants=tuple(map(self.value, old.constants)),
            nodes=tuple(nodes),
            outputs=tuple(map(self.value, old.outputs)),
        ).verify()
        literals = {
            v.name: self.tensor(v.name, traced.literals[v.name]) for v in old.constants
        }
        return replace(traced, graph=made, literals=literals)

    def value(self, v: Value) -> Value:
        return Value(v.name, self.shape(v.name), v.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(
            prod(self.sizes[n] for n in factors)
            for factors in self.extents.factors[name]
        )

    def tensor(self, name: str, large: Tensor) -> Tensor:
        """The first of each factor of each dim; from the start again, where a factor is
        larger than it was."""
        factors = self.extents.factors[name]
        x = large.reshape([n for dim in factors for n in dim])
        for d, n in enumerate([n for dim in factors for n in dim]):
            x = x.index_select(d, torch.arange(self.sizes[n], device=x.device) % n)
        return x.reshape(self.shape(name)).clone()

    # --- nodes ----------------------------------------------------------------------

    def node(self, node: Node) -> Node:
        outs = tuple(None if v is None else self.value(v) for v in node.outs)
        new = Node(
            node.op,
            map_values(self.value, node.args),
            map_values(self.value, node.kwargs),
            outs,
            node.location,
        )
        if part_of(node) is not None:
            return self._cut(node, new)
        if (change := ARGUMENTS.get(node.name)) is not None:
            return change(self, node, new)
        sizes = op_of(node).sizes
        return sizes(new) if sizes else new

    def number(self, n: int) -> int:
        """A number that is compared with positions: its place among the sizes."""
        if abs(n) <= SMALL_NUMBER:
            return n
        self.compared[abs(n)] = self._place(abs(n))
        return self.compared[abs(n)] * (1 if n > 0 else -1)

    def _place(self, n: int) -> int:
        known = sorted(self.sizes)
        if n in self.sizes:
            return self.sizes[n]
        below = max((k for k in known if k < n), default=0)
        above = min((k for k in known if k > n), default=0)
        if not above:
            return self.sizes.get(below, 0) + n - below
        low, high = self.sizes.get(below, 0), self.sizes[above]
        return low + (n - below) * (high - low) // (above - below)

    def _cut(self, node: Node, new: Node) -> Node:
        slice_ = part_of(node)
        assert slice_ is not None
        x, dim, start, end = slice_
        segments = self.extents.segments[x.name, dim]

        def position(at: int) -> int:
            return sum(prod(self.sizes[n] for n in part) for part in segments[at])

        low, high = position(start), position(end)
        extent = x.shape[dim]
        small = {"start": low, "end": high, "index": low, "length": high - low}

        def follows(at: Any) -> bool:
            """Not what is left out, up to the end, or counted from it."""
            return at is not None and at < extent and not -MARGIN <= at < 0

        return new.with_args(**{n: a for n, a in small.items() if follows(node.arg(n))})


def _check(old: Node, new: Node) -> None:
    """Run the op on shapes alone."""
    if not new.op.startswith("aten.") or not new.results:
        return

    def meta(v: Value) -> Tensor:
        return torch.empty(v.shape, dtype=v.dtype, device="meta")

    node = new.substitute(meta)
    kwargs = {**node.kwargs, **({"device": "meta"} if "device" in old.kwargs else {})}
    problem = ""
    try:
        results: Any = resolve(new.op)(*node.args, **kwargs)
    except NotImplementedError:
        return  # an op that has no shapes: it is run with numbers later
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    else:
        made = (results,) if isinstance(results, Tensor) else tuple(results or ())
        for x, v in zip(made, new.outs, strict=False):
            if isinstance(x, Tensor) and v is not None and tuple(x.shape) != v.shape:
                problem = f"gives {tuple(x.shape)}"
    if problem:
        raise NotShrunk(
            f"'{new}' does not follow from small sizes ({problem})",
            source=str(old.location),
            fix="prove the plan of a smaller model of the kind, which is run as it is",
        )


# --- arguments that say sizes ---------------------------------------------------------

Change = Callable[[Shrinker, Node, Node], Node]


def _view(_: Shrinker, node: Node, new: Node) -> Node:
    """Any view is a reshape to its result's shape."""
    args = (new.operands[0], new.out.shape)
    return replace(new, op="aten.reshape.default", args=args, kwargs={})


def _arange(at: Shrinker, node: Node, new: Node) -> Node:
    """As many as there are; one that begins elsewhere begins there still."""
    count = new.out.shape[0] if new.out.shape else 1
    kind = node.op.rpartition(".")[2]
    if kind == "default":
        return new.with_args(end=type(node.arg("end"))(count))
    start, step = node.arg("start"), node.arg("step") or 1
    if isinstance(start, int):
        start = at.number(start)
    return new.with_args(start=start, end=start + count * step)


def _repeat(_: Shrinker, node: Node, new: Node) -> Node:
    x, out = new.operands[0], new.out
    ahead = len(out.shape) - len(x.shape)
    padded = (*(1,) * ahead, *x.shape)
    times = tuple(n // max(m, 1) for n, m in zip(out.shape, padded, strict=True))
    return new.with_args(repeats=times)


def _embedding(_: Shrinker, node: Node, new: Node) -> Node:
    """A row for padding is as far from the end, or the beginning, as it was."""
    padding = node.arg("padding_idx")
    rows, fewer = node.operands[0].shape[0], new.operands[0].shape[0]
    if padding < fewer:
        return new
    place = max(0, fewer - (rows - padding)) if rows - padding <= fewer else fewer - 1
    return new.with_args(padding_idx=place)


def _comparison(at: Shrinker, node: Node, new: Node) -> Node:
    """Positions are compared with, or shifted by, numbers that speak of sizes."""
    x, other = node.named("self other")
    whole = isinstance(x, Value) and not x.dtype.is_floating_point
    if not whole or not isinstance(other, int) or isinstance(other, bool) or other < 0:
        return new
    return new.with_args(other=at.number(other))


def _two_sizes(_: Shrinker, node: Node, new: Node) -> Node:
    """eye: of the shape of its result."""
    sizes = dict(zip(("n", "m"), new.out.shape, strict=True))
    return new.with_args(**sizes if node.op.endswith(".m") else {"n": sizes["n"]})


ARGUMENTS: dict[str, Change] = {
    **dict.fromkeys(RESHAPES, _view),
    "aten.arange": _arange,
    "aten.repeat": _repeat,
    "aten.embedding": _embedding,
    "aten.eye": _two_sizes,
    **dict.fromkeys(
        (f"aten.{name}" for name in ("gt", "ge", "lt", "le", "sub", "add", "rsub")),
        _comparison,
    ),
}
