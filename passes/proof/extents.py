"""extents: which extents of a captured graph are the same, and how others follow.

`name_dims` asks which dims flow through the ops of a normal graph. Here the graph is as
it was captured, and the question is only which extents a change of size must change
together: dims are united as there, and where an op cuts a dim up or joins pieces, the
whole is the sum of its segments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from ..atoms import Atoms
from ..capture.traced import Traced
from ..dims.name_dims import bind
from ..dims.probe import probe_equation
from ..graph import LAYER, Graph, Node, Value
from ..ops.op import is_view, op_of
from ..ops.parts import comb_of, part_of, steps_in
from ..ops.reductions import dims_of, topmost
from ..ops.rules import equation, is_pointwise
from ..ops.shrunk import comparison

# A product of extents that stay factors: `(heads head_dim)` as (12, 64).
Product = tuple[int, ...]
# Segments of at most so many elements are a shift or an overlap, and stay as they are.
MARGIN = 4


class Bound(NamedTuple):
    """A product of extents that stays at most as large as another, less the gap."""

    part: Product
    whole: Product
    gap: int = 0


@dataclass(frozen=True)
class Sum:
    """A whole extent is the sum of these, each a product of factors, and a constant."""

    whole: Product
    parts: tuple[Product, ...]
    constant: int = 0

    def __str__(self) -> str:
        parts = " + ".join("*".join(map(str, p)) for p in self.parts)
        return f"{'*'.join(map(str, self.whole))} = {parts} + {self.constant}"


@dataclass(frozen=True)
class Extents:
    """factors: value name -> for each tensor dim the extents it is a product of. sums:
    what must hold between them. fixed: extents that count things (the tensors of a
    stack), which no change of size changes. segments: (value, dim) -> the positions at
    which ops cut it -> the extents up to there, as sums of products. most: what is
    chosen is no more than there are. windows: numbers that positions are compared with,
    or shifted by, are less than there are of these."""

    factors: Mapping[str, tuple[Product, ...]]
    sums: tuple[Sum, ...]
    fixed: frozenset[int]
    segments: Mapping[tuple[str, int], Mapping[int, tuple[Product, ...]]]
    most: frozenset[Bound] = frozenset()
    windows: frozenset[Bound] = frozenset()

    @property
    def sizes(self) -> list[int]:
        """All distinct extents of factors, ascending."""
        sizes = {n for dims in self.factors.values() for d in dims for n in d}
        for cut in self.segments.values():
            sizes.update(n for parts in cut.values() for p in parts for n in p)
        return sorted(sizes)

    def products(self, split: Collection[int]) -> set[Product]:
        """Neighbouring factors of a dim that are split as one extent, of these sizes,
        which no factor has."""
        own = set(split) - {*self.sizes}
        return {
            dim[begin:end]
            for dims in self.factors.values()
            for dim in dims
            for begin in range(len(dim))
            for end in range(begin + 2, len(dim) + 1)
            if prod(dim[begin:end]) in own
        }

    def positions(self, sizes: Mapping[int, int]) -> frozenset[tuple[int, int]]:
        """Where ops cut dims, and where they do with small sizes."""
        cuts = {parts for cut in self.segments.values() for parts in cut.values()}
        return frozenset(
            (sum(map(prod, parts)), sum(prod(sizes[n] for n in p) for p in parts))
            for parts in cuts
        )


def find_extents(traced: Traced) -> Extents:
    """Unite the extents of a captured graph that can only change together."""
    return _Search(traced.graph).run()


class _Search:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.atoms = graph, Atoms()
        self.tensors: dict[str, list[list[int]]] = {}
        self.sums: list[tuple[list[int], list[list[int]], int]] = []
        self.fixed: list[int] = []
        self.most: list[tuple[list[int], list[int]]] = []
        self.windows: list[tuple[int, list[int]]] = []
        self.cuts: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.segments: dict[tuple[str, int], dict[int, list[list[int]]]] = {}

    def run(self) -> Extents:
        for v in self.graph.sources:
            self._declare(v)
        self.fixed += [a for dims in self.tensors.values() for d in dims for a in d]
        self.fixed = [a for a in self.fixed if not self.atoms.size[a]]
        for node in self.graph.nodes:
            self._find_cuts(node)
        self.computed = self._find_computed()
        for node in self.graph.nodes:
            for v in node.results:
                self._declare(v)
            for v in node.operands:
                self._cut(v)
            self._unite(node)
            if op_of(node).rule is topmost and node.operands[0].shape:
                (dim,) = dims_of(node)
                chosen, whole = node.results[0], node.operands[0]
                pair = self.tensors[chosen.name][dim], self.tensors[whole.name][dim]
                self.most.append(pair)
            if op_of(node).shrunk is comparison and type(node.arg("other")) is int:
                number, out = node.arg("other"), node.out
                dims = zip(self.tensors[out.name], out.shape, strict=True)
                self.windows += [(number, dim) for dim, n in dims if number < n]
        return self._extents()

    def _declare(self, v: Value) -> None:
        self.tensors[v.name] = [self.atoms.fresh(n) for n in v.shape]

    def _extents(self) -> Extents:
        def product(own: Iterable[int]) -> Product:
            return tuple(self.atoms.size[a] for a in self.atoms.leaves(own))

        factors = {
            name: tuple(map(product, dims)) for name, dims in self.tensors.items()
        }
        sums = [
            Sum(product(whole), tuple(map(product, parts)), constant)
            for whole, parts, constant in self.sums
        ]
        sums += self._of_layers(factors)
        most = frozenset(Bound(product(a), product(b)) for a, b in self.most)
        # Of groups of experts some are chosen, and numbers of all experts looked up.
        whole = [bound.whole for bound in sorted(most) if len(bound.whole) > 1]
        known = {n for dims in factors.values() for d in dims for n in d}
        sums += [Sum((prod(dim),), (dim,)) for dim in whole if prod(dim) in known]
        return Extents(
            factors=factors,
            sums=tuple(dict.fromkeys(sums)),
            fixed=frozenset(n for atom in self.fixed for n in product([atom])),
            segments={
                place: {
                    at: tuple(map(product, parts)) for at, parts in alternatives.items()
                }
                for place, alternatives in self.segments.items()
            },
            most=most,
            windows=frozenset(
                Bound((number,), product(dim), 1) for number, dim in self.windows
            ),
        )

    def _of_layers(self, factors: Mapping[str, tuple[Product, ...]]) -> Iterator[Sum]:
        """Layers whose parameters are alike stay alike, where one of them takes a dim
        for a product (heads that rotate) and another takes it as it is."""
        first: dict[tuple[str, tuple[int, ...]], str] = {}
        for v in self.graph.params:
            place = LAYER.sub("", v.name, count=1), v.shape
            like = factors[first.setdefault(place, v.name)]
            for own, other in zip(factors[v.name], like, strict=True):
                if own != other:
                    yield Sum(own, (other,))

    def _find_computed(self) -> dict[str, bool]:
        """Values of constants alone -> whether more was done to them than to count, to
        shift and to move; integers of others, if such or a number was written there."""
        computed = {v.name: False for v in (*self.graph.buffers, *self.graph.constants)}
        for node in self.graph.nodes:
            if all(v.name in computed for v in node.operands):
                plain = op_of(node).counts or is_view(node)
                own = not plain or any(computed[v.name] for v in node.operands)
                computed.update((v.name, own) for v in node.results)
            elif _names_a_number(node) or any(
                computed.get(v.name) for v in node.operands if _is_index(v)
            ):
                computed.update((v.name, True) for v in node.results if _is_index(v))
        return computed

    # --- where ops cut a dim up ------------------------------------------------------

    def _find_cuts(self, node: Node) -> None:
        if (part := part_of(node)) is None or comb_of(node) > 1 or steps_in(node):
            return
        x, dim, start, end = part
        self.cuts[x.name, dim] |= {start, end}

    def _cut(self, v: Value) -> None:
        """Give each segment between the cuts of a value's dims an extent of its own."""
        for dim, extent in enumerate(v.shape):
            place = (v.name, dim)
            if place not in self.cuts or place in self.segments:
                continue
            bounds = sorted({0, extent, *self.cuts[place]})
            parts: dict[int, list[list[int]]] = {0: []}
            for low, high in pairwise(bounds):
                length = high - low
                atom: list[int]
                if length == extent:
                    atom = self.tensors[v.name][dim]
                elif length <= MARGIN:
                    atom = self.atoms.fresh(length)
                    self.fixed += atom
                else:
                    atom = self.atoms.fresh(length)
                parts[high] = [*parts[low], atom]
            if len(parts) > 2:
                self.sums.append((self.tensors[v.name][dim], parts[extent], 0))
            self.segments[place] = parts

    def _segment(self, x: Value, dim: int, start: int, end: int) -> list[list[int]]:
        parts = self.segments[x.name, dim]
        return parts[end][len(parts[start]) :]

    # --- what an op unites ---------------------------------------------------------

    def _unite(self, node: Node) -> None:
        # A cut may leave nothing: of a head that rotates as a whole what does not.
        cuts = part_of(node) is not None
        results = () if cuts else node.results
        empty = any(0 in v.shape for v in (*node.operands, *results))
        if empty and node.name != "aten.cat":
            return  # as a cache that nothing is in yet
        if op_of(node).view == "shape":
            x, y = node.operands[0], node.out
            flat = [[a for d in self.tensors[v.name] for a in d] for v in (x, y)]
            self.atoms.unify(*flat)
        elif cuts:
            self._unite_cut(node)
        elif (unite := op_of(node).extents) is not None:
            unite(self, node)
        else:
            self.bind(node)

    def bind(self, node: Node) -> bool:
        """Unites what the op's rule says, or trials; whether there was one. Without
        one, `align`."""
        rule = None
        if node.results and node.op.startswith("aten."):
            rule = equation(node)
            if rule is None and node.operands:
                rule = probe_equation(node)
        if rule is None:
            self.align(node)
            return False
        bind(self.atoms, node, rule, self.tensors)
        return True

    def align(self, node: Node) -> None:
        """Unites dims of one extent that stand at one place from the right: what
        nothing better is known of. A wrong guess only keeps sizes together."""
        for out in node.results:
            for v in node.operands:
                pairs = zip(v.shape[::-1], out.shape[::-1], strict=False)
                for i, (a, b) in enumerate(pairs, start=1):
                    if a == b != 1:
                        left, right = self.tensors[v.name], self.tensors[out.name]
                        self.atoms.unify(left[-i], right[-i])

    def _unite_cut(self, node: Node) -> None:
        part = part_of(node)
        assert part is not None
        x, dim, start, end = part
        scatters = node.name.endswith("_scatter")
        small = node.operands[1] if scatters else node.out
        here, there = self.tensors[x.name], self.tensors[small.name]
        dims = [d for d in range(len(x.shape)) if d != dim]
        if (teeth := comb_of(node)) > 1:
            self.sum(here[dim], [(there[dim], small.shape[dim])] * teeth)
            places = dims
        elif steps_in(node):
            self.fixed += [*here[dim], *there[dim]]
            places = dims
        elif len(small.shape) == len(x.shape):
            inside = self._segment(x, dim, start, end)
            if len(inside) == 1:
                self.atoms.unify(inside[0], there[dim])
            elif small.shape[dim] > 1:
                self.sums.append((there[dim], inside, 0))
            places = dims
        else:
            places = list(range(len(dims)))
        for d, place in zip(dims, places, strict=True):
            self.atoms.unify(here[d], there[place])
        if scatters:
            self.align(Node(node.op, (node.operands[0],), {}, node.outs, node.location))

    def sum(self, whole: list[int], parts: list[tuple[list[int], int]]) -> None:
        """A whole is the sum of parts, each with its extent."""
        ones = sum(n for p, n in parts if n and not p)  # extents of 1 have no atom
        rest = [p for p, n in parts if n and p]
        if len(rest) == 1 and not ones:
            self.atoms.unify(whole, rest[0])
        elif whole and rest:
            self.sums.append((whole, rest, ones))

    def add_sum(self, whole: list[int], part: list[int], constant: int) -> None:
        self.sums.append((whole, [part], constant))


def _names_a_number(node: Node) -> bool:
    """Whether integers are made with one that may be a row's number in a table: a token
    that masks others."""
    numbers = (x for x in node.args if isinstance(x, int))
    made = all(map(_is_index, node.results)) and is_pointwise(node)
    return made and any(x > MARGIN for x in numbers)


def _is_index(v: Value) -> bool:
    """Whether rows of a table may be looked up by it."""
    return v.dtype in (torch.int32, torch.int64)
