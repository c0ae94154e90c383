"""find_extents: which extents of a captured graph are the same, and how others follow.

`name_dims` asks which dims flow through the ops of a normal graph. Here the graph is as
it was captured, and the question is only which extents a change of size must change
together: dims are united as there, and where an op cuts a dim up or joins pieces, the
whole is the sum of its segments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import torch

from ..atoms import Atoms
from ..capture.normalize.chunk_rows import find_chunks
from ..capture.rows.choices import places_along
from ..dims.name_dims import Dim, Dims, bind
from ..dims.probe import probe_equation
from ..graph import LAYER, Graph, Node, Value
from ..mesh import balanced
from ..ops.op import is_view, op_of
from ..ops.parts import comb_of, part_of, steps_in
from ..ops.reductions import dims_of, topmost
from ..ops.rules import equation, is_pointwise
from ..ops.shrunk import comparison
from ..proof.extents import MARGIN, Bound, Extent, Extents, Product, Split, Sum, size_of
from ..traced import Traced


def find_extents(
    traced: Traced,
    dims: Mapping[str, Dims] | None = None,
    splits: Mapping[Dim, Collection[Split]] | None = None,
    loss_chunks: int = 1,
) -> Extents:
    """Unite the extents of a captured graph that can only change together.

    dims: value name -> its named dims, if these are known; the values of that name that
    the graph has are the same. splits: of each of these dims the axes that split it.
    loss_chunks: see `passes.capture.normalize.chunk_loss`.
    """
    return _Search(traced.graph).run(dims or {}, splits or {}, loss_chunks)


class _Search:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.atoms = graph, Atoms()
        self.made = {v.name: node for node in graph.nodes for v in node.results}
        self.tensors: dict[str, list[list[int]]] = {}
        self.sums: list[tuple[list[int], list[list[int]], int]] = []
        self.fixed: list[int] = []
        self.most: list[tuple[list[int], list[int]]] = []
        self.windows: list[tuple[int, list[int]]] = []
        self.cuts: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.segments: dict[tuple[str, int], dict[int, list[list[int]]]] = {}

    def run(
        self,
        named: Mapping[str, Dims],
        splits: Mapping[Dim, Collection[Split]],
        loss_chunks: int,
    ) -> Extents:
        """Goes through the graph."""
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
        for name, chunks in find_chunks(self.graph):
            positions = self.tensors[self.made[name].operands[0].name][1]
            self._add_parts(positions, chunks.sizes)
        if loss_chunks > 1 and (of_loss := self._logits()) is not None:
            positions = self.tensors[of_loss.name][1]
            self._add_parts(positions, balanced(of_loss.shape[1], loss_chunks))
        return self._extents(named, splits)

    def _logits(self) -> Value | None:
        """The logits of which the loss is, if they are [samples, positions, logits]: of
        the widest values the shortest."""
        made = [v for n in self.graph.nodes for v in n.results if len(v.shape) == 3]
        widest = max((v.shape[-1] for v in made), default=0)
        own = [v for v in made if v.shape[-1] == widest]
        return min(own, key=lambda v: v.shape[1], default=None)

    def _add_parts(self, whole: list[int], sizes: Sequence[int]) -> None:
        """Notes that an extent is a sum of others, of which equal ones stay so."""
        alike = {n: self.atoms.fresh(n) for n in sizes}
        self.sum(whole, [(alike[n], n) for n in sizes])

    def _declare(self, v: Value) -> None:
        self.tensors[v.name] = [self.atoms.fresh(n) for n in v.shape]

    def _extents(
        self, named: Mapping[str, Dims], splits: Mapping[Dim, Collection[Split]]
    ) -> Extents:
        staying, splitting = self._find_staying(), self._find_splits(named, splits)

        def extent(atoms: Sequence[int]) -> Extent:
            one = len(atoms) == 1 and atoms[0] in staying
            own = tuple(sorted(splitting.get(tuple(atoms), ())))
            return Extent(prod(self.atoms.size[a] for a in atoms), one, own)

        def product(own: Iterable[int]) -> Product:
            return tuple(extent([atom]) for atom in self.atoms.leaves(own))

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
        sums += [
            Sum((n,), (dim,)) for dim in whole for n in known if n.size == size_of(dim)
        ]
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
                Bound((own,), product(dim), 1)
                for number, dim in self.windows
                for own in known
                if own.size == number
            ),
            products={product(a): extent(a) for a in splitting if len(a) > 1},
        )

    def _find_staying(self) -> set[int]:
        """Dims that count things, that are a margin, and what sums make of these: the
        last of a sum, and parts of what stays."""

        def leaves(own: Iterable[int]) -> tuple[int, ...]:
            return tuple(self.atoms.leaves(own))

        size = dict(enumerate(self.atoms.size))
        sums = [
            Sum(leaves(whole), tuple(map(leaves, parts)), constant)
            for whole, parts, constant in self.sums
        ]
        staying = {*leaves(self.fixed), *(a for a in size if size[a] <= MARGIN)}
        known = 0
        while known < len(staying):
            known = len(staying)
            for one in sums:
                free = one.factors - staying
                last = len(free) == 1 and one.decides(next(iter(free)), size)
                if last or staying.issuperset(one.whole):
                    staying |= free
        return staying

    def _find_splits(
        self, named: Mapping[str, Dims], splits: Mapping[Dim, Collection[Split]]
    ) -> Mapping[tuple[int, ...], set[Split]]:
        """Dims, or several that are split as one -> the axes that split them. Of named
        dims that no value of the graph has: all of their size."""
        splitting: dict[tuple[int, ...], set[Split]] = defaultdict(set)
        seen: set[Dim] = set()
        for name, dims in named.items():
            for own, factors in zip(self.tensors.get(name, ()), dims, strict=False):
                for atoms, dim in _pairs(self.atoms, own, factors):
                    splitting[atoms] |= {*splits.get(dim, ())}
                    seen.add(dim)
        for dim in splits.keys() - seen:
            for atom, size in enumerate(self.atoms.size):
                if size == dim.size:
                    splitting[self.atoms.root(atom),] |= {*splits[dim]}
        return splitting

    def _of_layers(
        self, factors: Mapping[str, tuple[Product, ...]]
    ) -> Iterator[Sum[Extent]]:
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
        if node.results and node.is_aten:
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

    def index(self, index: Value, x: Value, dim: int) -> None:
        """Unites what an index counts, or chooses, with a value's dim."""
        rows = self.tensors[x.name][dim]
        if self.computed.get(index.name) is False:
            for own, n in zip(self.tensors[index.name], index.shape, strict=True):
                if n == x.shape[dim] != 1:
                    self.atoms.unify(own, rows)
        if (along := places_along(index, self.made)) is None:
            return
        whole = self.tensors[along[0].name][along[1]]
        gap = along[0].shape[along[1]] - x.shape[dim]
        if not gap:
            self.atoms.unify(whole, rows)
        elif whole and rows and abs(gap) <= MARGIN:
            self.add_sum(whole, rows, gap)

    def add_sum(self, whole: list[int], part: list[int], constant: int) -> None:
        self.sums.append((whole, [part], constant))


def _names_a_number(node: Node) -> bool:
    """Whether integers are made with one that may be a row's number in a table: a token
    that masks others."""
    numbers = (x for x in node.args if isinstance(x, int))
    made = all(map(_is_index, node.results)) and is_pointwise(node)
    return made and any(x > MARGIN for x in numbers)


def _is_index(v: Value) -> bool:
    """Whether a value may look up rows of a table."""
    return v.dtype in (torch.int32, torch.int64)


def _pairs(
    atoms: Atoms, own: Iterable[int], factors: Iterable[Dim]
) -> Iterator[tuple[tuple[int, ...], Dim]]:
    """What each named factor of a dim is in atoms, as far as they come out even."""
    left = atoms.leaves(own)
    for dim in factors:
        here: list[int] = []
        while left and prod(atoms.size[a] for a in here) < dim.size:
            here.append(left.pop(0))
        if prod(atoms.size[a] for a in here) != dim.size:
            return
        if here:
            yield tuple(here), dim
