"""shrink: a captured graph with small sizes, that is the same in all else.

Every extent of every value is replaced by its small one, every argument that says a
size or a position follows, and what constants hold is cut out of the large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..capture.normalize.recognize_experts import PRODUCTS
from ..capture.rows.choices import places_along
from ..graph import Graph, Node, Value, map_values, resolve
from ..ops.op import is_view, op_of
from ..ops.parts import comb_of, part_of, steps_in
from ..proof.choose_sizes import NotShrunk
from ..proof.extents import MARGIN, Extent, Extents
from ..traced import Traced

# Numbers of at most this size in comparisons of positions are counts, not sizes.
SMALL_NUMBER = 8


class Shrinker:
    """Rewrites a graph and tensors by a table of sizes."""

    def __init__(
        self, extents: Extents, sizes: Mapping[Extent, int], counted: int = SMALL_NUMBER
    ) -> None:
        """counted: up to here, numbers that positions are compared with are counts."""
        self.extents, self.sizes, self.counted = extents, sizes, counted
        self.compared: dict[int, int] = {}
        self.made: dict[str, Node] = {}

    def graph(self, traced: Traced) -> Traced:
        """The captured model with small sizes. Raises NotShrunk where an op does not
        give what the sizes say."""
        old = traced.graph
        self.made = {v.name: node for node in old.nodes for v in node.results}
        nodes = []
        for node in old.nodes:
            new = self.node(node)
            self._check(node, new)
            self._check_look_ups(node, new, traced.literals)
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
        joined = {
            v.name: traced.joined[v.name][: v.shape[0]]
            for v in made.params
            if v.name in traced.joined
        }
        return replace(traced, graph=made, literals=literals, joined=joined)

    def value(self, v: Value) -> Value:
        """The value in its smaller shape."""
        return Value(v.name, self.shape(v.name), v.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """The smaller shape: products of the dims' smaller sizes."""
        return tuple(
            prod(self.sizes[n] for n in factors)
            for factors in self.extents.factors[name]
        )

    def tensor(self, name: str, large: Tensor) -> Tensor:
        """The first of each factor of each dim; from the start again, where a factor is
        larger than it was."""
        factors = self.extents.factors[name]
        every = [n for dim in factors for n in dim]
        x = large.reshape([n.size for n in every])
        for d, n in enumerate(every):
            kept = torch.arange(self.sizes[n], device=x.device) % n.size
            x = x.index_select(d, kept)
        return x.reshape(self.shape(name)).clone()

    # --- nodes ----------------------------------------------------------------------

    def node(self, node: Node) -> Node:
        """The node with the small model's shapes, and the arguments that follow."""
        outs = tuple(None if v is None else self.value(v) for v in node.outs)
        new = Node(
            node.op,
            map_values(self.value, node.args),
            map_values(self.value, node.kwargs),
            outs,
            node.location,
        )
        if part_of(node) is not None:
            whole = comb_of(node) > 1 or steps_in(node)
            return new if whole else self._cut(node, new)
        op = op_of(node)
        if op.shrunk is not None:
            return op.shrunk(self, node, new)
        return op.sizes(new) if op.sizes else new

    def number(self, n: int, node: Node) -> int:
        """A number that positions are compared with, or made by: its place among the
        sizes, those of the node first."""
        if node.operands and (last := self.choice(n, node.operands[0])) != n:
            return last
        if abs(n) <= self.counted:
            return n
        self.compared[abs(n)] = self._place(abs(n), node)
        return self.compared[abs(n)] * (1 if n > 0 else -1)

    def choice(self, n: int, x: Value) -> int:
        """A number that choices are compared with: as far from the last as it was."""
        along = places_along(x, self.made)
        if along is None or not 0 <= along[0].shape[along[1]] - n <= MARGIN:
            return n
        return n + self.shape(along[0].name)[along[1]] - along[0].shape[along[1]]

    def leading(self, name: str, dim: int, n: int) -> int:
        """The small size of the first factors of a value's dim, whose product is n."""
        large = small = 1
        for factor in self.extents.factors[name][dim]:
            if large < n:
                large, small = large * factor.size, small * self.sizes[factor]
        return small

    def trailing(self, name: str, dim: int, n: int) -> int | None:
        """The small size of a dim's last factors, if n is their product."""
        large = small = 1
        for factor in reversed(self.extents.factors[name][dim]):
            if large < n:
                large, small = large * factor.size, small * self.sizes[factor]
        return small if large == n else None

    def _place(self, n: int, node: Node) -> int:
        here = [e for dim in self.extents.factors[node.out.name] for e in dim]
        # Where several have a size, some of them stay: it is one that does not.
        places = {e.size: self.sizes[e] for e in (*sorted(self.sizes)[::-1], *here)}
        if n in places:
            return places[n]
        below = max((k for k in places if k < n), default=0)
        above = min((k for k in places if k > n), default=0)
        low = places.get(below, 0)
        if above and above - n <= MARGIN:  # the last of them
            return places[above] - (above - n)
        if not above:
            return low + n - below
        return low + (n - below) * (places[above] - low) // (above - below)

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
            """Whether a bound moves: before the end, and not counted from it."""
            return at is not None and at < extent and not -MARGIN <= at < 0

        # What is counted from the end still is, as the texts of both are compared.
        size = self.shape(x.name)[dim]
        return new.with_args(
            **{
                name: at - size if node.arg(name) < 0 else at
                for name, at in small.items()
                if follows(node.arg(name))
            }
        )

    def _check(self, old: Node, new: Node) -> None:
        """Run the op on shapes alone; but for products of groups, which want rows of 16
        bytes that no small program has."""
        if not new.is_aten or not new.results or new.name in PRODUCTS:
            return

        def meta(v: Value) -> Tensor:
            return torch.empty(v.shape, dtype=v.dtype, device="meta")

        node = new.substitute(meta)
        on_meta = {"device": "meta"} if "device" in old.kwargs else {}
        try:
            results: Any = resolve(new.op)(*node.args, **{**node.kwargs, **on_meta})
        except NotImplementedError:
            return  # an op that has no shapes: it is run with numbers later
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            every = [
                (v, d)
                for v in (*old.operands, *old.results)
                for d in range(len(v.shape))
            ]
            raise self._not_shrunk(new, str(error).partition("\n")[0], every) from None
        made = (results,) if isinstance(results, Tensor) else tuple(results or ())
        for x, v in zip(made, new.outs, strict=False):
            if isinstance(x, Tensor) and v is not None and tuple(x.shape) != v.shape:
                pairs = enumerate(zip_longest(x.shape, v.shape))
                differing = [(v, d) for d, (n, m) in pairs if n != m and m is not None]
                raise self._not_shrunk(new, f"gives {tuple(x.shape)}", differing)

    def _check_look_ups(
        self, old: Node, new: Node, literals: Mapping[str, Tensor]
    ) -> None:
        """Checks that the rows which a model looks up by constants exist."""
        for dim, at in looked_up(old):
            while (made := self.made.get(at.name)) and _is_same(made):
                at = made.operands[0]
            x = old.operands[0]
            if at.name not in literals or not at.numel:
                continue
            rows, number = self.shape(x.name)[dim], literals[at.name]
            if int(self.tensor(at.name, number).max()) >= rows:
                raise self._not_shrunk(new, "it looks up others", [(x, dim)])

    def _not_shrunk(
        self, new: Node, problem: str, dims: Iterable[tuple[Value, int]]
    ) -> NotShrunk:
        """dims: of which it might follow if they stayed as they are."""
        factors = self.extents.factors
        return NotShrunk(
            f"'{new}' does not follow from small sizes ({problem})",
            source=str(new.location),
            extents=frozenset(
                n for v, d in dims for n in factors[v.name][d] if not n.stays
            ),
        )


def _is_same(node: Node) -> bool:
    """Whether a node returns its operand: a view, a copy, or a lifted constant."""
    return is_view(node) or node.name in ("aten.lift_fresh_copy", "aten.clone")


def looked_up(node: Node) -> Iterator[tuple[int, Value]]:
    """Yields the dims of its first operand in which a node looks up rows, with their
    numbers."""
    match node.name:
        case "aten.embedding":
            yield 0, node.operands[1]
        case "aten.index_select":
            yield node.arg("dim"), node.operands[1]
        case "aten.index":
            for dim, at in enumerate(node.arg("indices")):
                if at is not None and at.dtype != torch.bool:
                    yield dim, at
