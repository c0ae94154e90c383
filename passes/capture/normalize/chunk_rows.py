"""chunk_rows: samples and positions that are cut as one dim are cut by positions.

    for h, y in zip(hidden.flatten(0, 1).chunk(8), labels.flatten().chunk(8)):
        total += cross_entropy(head(h), y, reduction="sum")

A loss by chunks, so that not all logits are alive at once, has some samples in each of
them: neither microbatches nor ranks can share those out. But a sum over rows does not
ask which chunk a row was in. So where each chunk goes the same way, row by row, and
ends in a sum with the others, or is joined to them again, chunks have some positions of
all samples instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from ...graph import Graph, Node, Value
from ...mesh import balanced
from ...ops.evaluate import results_like
from ...ops.linearity import passes_pending_sum
from ...ops.op import op_of
from ...ops.parts import part_of, steps_in
from ...ops.random import awaits_number
from ...ops.reductions import dims_of
from ...ops.row_dims import along
from ...rewrite import Rewriter
from ..normalize.hoist_splits import cut_dim
from ..normalize.split_products import CUTS, emit_chunks, emit_split


@dataclass(frozen=True)
class Chunks:
    """A way to cut rows, which are samples times positions. ends: of each chunk."""

    samples: int
    positions: int
    ends: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Positions of each chunk, if all of them have some of all samples."""
        return tuple(balanced(self.positions, len(self.ends)))


@dataclass(frozen=True)
class Chunk:
    """A value that is computed of a chunk. index: of which. kind: a number, the same
    for what is computed alike of others. dim: the one of rows; None: a sum of them."""

    index: int
    kind: int
    dim: int | None = 0


@dataclass(frozen=True)
class Total:
    """A sum of what chunks come to, or a list of these. addends: by how they are
    computed, of which chunks."""

    addends: Mapping[int, frozenset[int]]
    is_list: bool = False


State = Chunk | Total


class Mixed(Exception):
    """What is made of chunks depends on which rows are in one."""


def chunk_rows(graph: Graph, literals: Mapping[str, torch.Tensor]) -> Graph:
    """Rewrites chunks of rows whose results do not depend on which rows these are."""
    for chunks in dict.fromkeys(chunks for _, chunks in find_chunks(graph)):
        sources = {name for name, own in find_chunks(graph) if own == chunks}
        walk = _Walk(chunks, sources)
        try:
            walk.run(graph)
            graph = _rewritten(graph, walk, literals)
        except Mixed:
            continue
    return graph


def find_chunks(graph: Graph) -> Iterator[tuple[str, Chunks]]:
    """Yields values with rows of several samples that are cut into chunks, and how."""
    samples = {v.shape[0] for v in graph.inputs if v.shape} - {1}
    producers = graph.producers()
    for name, readers in graph.consumers().items():
        view = producers.get(name)
        if view is None or op_of(view).view != "shape":
            continue
        x, y = view.operands[0].shape, view.out.shape
        if len(x) < 2 or x[0] not in samples or y != (x[0] * x[1], *x[2:]):
            continue
        parts = sorted({part for node in readers for part in _parts(node, view.out)})
        ends = tuple(end for _, end in parts)
        tiled = parts == [*pairwise((0, *ends))] and ends[-1:] == y[:1]
        if tiled and 1 < len(ends) <= x[1]:
            yield name, Chunks(x[0], x[1], ends)


def _parts(node: Node, x: Value) -> list[tuple[int, int]]:
    """Lists where the parts of x begin and end that a node takes along its first
    dim."""
    if node.name in CUTS and cut_dim(node) == 0 and all(node.outs):
        ends = accumulate((v.shape[0] for v in node.results), initial=0)
        return [*pairwise(ends)]
    part = part_of(node)
    alike = part is not None and len(node.out.shape) == len(x.shape)
    if part is None or not alike or part[:2] != (x, 0) or steps_in(node):
        return []
    return [part[2:]]


class _Walk:
    """Follows chunks through a graph. sources: names of what is cut. parts: of each
    part of these, the source. joined: names of what is made of all chunks side by
    side, and the dim along which they are."""

    def __init__(self, chunks: Chunks, sources: set[str]) -> None:
        self.chunks, self.sources = chunks, sources
        self.states: dict[str, State] = {}
        self.parts: dict[str, str] = {}
        self.joined: dict[str, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def run(self, graph: Graph) -> None:
        """Raises: Mixed."""
        for node in graph.nodes:
            states = [self.states.get(v.name) for v in node.operands]
            if any(states):
                self._follow(node, states)
            elif node.operands and node.operands[0].name in self.sources:
                self._begin(node, node.operands[0])
        if any(v.name in self.states for v in graph.outputs):
            raise Mixed

    def _begin(self, node: Node, source: Value) -> None:
        ends = [end for _, end in _parts(node, source)]
        for v, end in zip(node.results, ends, strict=False):
            index, kind = self.chunks.ends.index(end), self._number("of", source.name)
            self.states[v.name] = Chunk(index, kind)
            self.parts[v.name] = source.name

    def _follow(self, node: Node, states: Sequence[State | None]) -> None:
        own = [state for state in states if state is not None]
        chunks = [state for state in own if isinstance(state, Chunk)]
        sums = all(isinstance(state, Total) or state.dim is None for state in own)
        alone = len({chunk.index for chunk in chunks}) == 1 and chunks == own
        there = [state is not None for state in states]
        if awaits_number(node):
            raise Mixed
        if alone and not sums:
            self._go_on(node, states)
        elif alone and passes_pending_sum(node, there):
            self._note(node, chunks[0].index, None)
        elif sums:
            self._add(node, states)
        else:
            self._join(node, states)

    def _go_on(self, node: Node, states: Sequence[State | None]) -> None:
        """Notes what is made of rows of one chunk."""
        pairs = zip(node.operands, states, strict=True)
        own = {v.name: state for v, state in pairs if isinstance(state, Chunk)}
        first = next(iter(own.values()))
        if any(state.dim is None for state in own.values()):
            raise Mixed
        dim = along(node, lambda v: own[v.name].dim if v.name in own else None)
        summed = node.name == "aten.sum" and first.dim in dims_of(node)
        if dim is None and not summed:
            raise Mixed
        self._note(node, first.index, dim)

    def _note(self, node: Node, index: int, dim: int | None) -> None:
        for place, v in enumerate(node.outs):
            if v is not None:
                kind = self._number(place, dim, self._described(node, v, dim))
                self.states[v.name] = Chunk(index, kind, dim)

    def _described(self, node: Node, out: Value, dim: int | None) -> Hashable:
        """The node, but for which chunk it is of, and how many rows that has."""
        others = () if dim is None else (*out.shape[:dim], *out.shape[dim + 1 :])

        def text(x: object) -> Hashable:
            if isinstance(x, Value):
                state = self.states.get(x.name)
                return state.kind if isinstance(state, Chunk) else x.name
            if isinstance(x, tuple | list):
                return tuple(map(text, x))
            return type(x).__name__, str(x)

        args = node.operands if op_of(node).view == "shape" else node.args
        kwargs = tuple((key, text(x)) for key, x in node.kwargs.items())
        return node.op, text(args), kwargs, others

    def _add(self, node: Node, states: Sequence[State | None]) -> None:
        """Notes a sum of what several chunks come to: of two, or of a list."""
        lists = any(isinstance(state, Total) and state.is_list for state in states)
        listed = node.name == "aten.stack" and not lists
        added = node.name == "aten.add" and len(states) == 2 and not lists
        summed = node.name == "aten.sum" and len(states) == 1 and not node.out.shape
        if node.kwargs or not (listed or added or summed):
            raise Mixed
        total: dict[int, frozenset[int]] = {}
        every = frozenset(range(len(self.chunks.ends)))
        for v, state in zip(node.operands, states, strict=True):
            addends = {self._number("beside", v.name): every}
            if isinstance(state, Total):
                addends = dict(state.addends)
            elif state is not None:
                addends = {state.kind: frozenset([state.index])}
            for kind, indices in addends.items():
                known = total.get(kind, frozenset())
                if known & indices:
                    raise Mixed
                total[kind] = known | indices
        if listed or {*total.values()} != {every}:
            self.states[node.out.name] = Total(total, listed)

    def _join(self, node: Node, states: Sequence[State | None]) -> None:
        """Notes that chunks are side by side again, all and in order."""
        if node.name != "aten.cat":
            raise Mixed
        dim = node.arg("dim") % len(node.out.shape)
        kinds = {state.kind for state in states if isinstance(state, Chunk)}
        every = range(len(self.chunks.ends))
        if [*states] != [Chunk(i, kind, dim) for kind in kinds for i in every]:
            raise Mixed
        self.joined[node.out.name] = dim

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _rewritten(
    graph: Graph, walk: _Walk, literals: Mapping[str, torch.Tensor]
) -> Graph:
    """The graph in which chunks have some positions of all samples. Raises: Mixed,
    where an op cannot do with other numbers of rows."""
    chunks, producers = walk.chunks, graph.producers()
    pieces: dict[str, list[Value]] = {}
    # What is joined again has its positions in order.
    cut = emit_split if walk.joined else emit_chunks

    def piece(rewriter: Rewriter, v: Value) -> Value:
        name, state = walk.parts[v.name], walk.states[v.name]
        assert isinstance(state, Chunk)
        if name not in pieces:
            x = producers[name].operands[0]
            x = rewriter.replaced.get(x.name, x)
            pieces[name] = [
                rewriter.reshape(part, (part.shape[0] * part.shape[1], *part.shape[2:]))
                for part in cut(rewriter, x, chunks.sizes, 1)
            ]
        return pieces[name][state.index]

    def change(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...] | None:
        for v in node.results:
            if v.name in walk.parts:
                return tuple(piece(rewriter, part) for part in node.results)
            if v.name in walk.joined:
                return (_side_by_side(rewriter, node, walk.joined[v.name], chunks),)
            state = walk.states.get(v.name)
            if isinstance(state, Chunk) and state.dim is not None:
                rows = chunks.samples * chunks.sizes[state.index]
                return rewriter.keep(resized(node, state.dim, rows))
        return None

    ours = {*walk.states, *walk.joined}
    ops = {n.op for n in graph.nodes if any(v.name in ours for v in n.results)}
    return Rewriter(graph, literals).run(dict.fromkeys(ops, change))


def resized(node: Node, dim: int, rows: int) -> Node:
    """A node of a chunk that has another number of rows. Raises: Mixed."""

    def with_rows(v: Value) -> Value:
        return replace(v, shape=(*v.shape[:dim], rows, *v.shape[dim + 1 :]))

    outs = tuple(with_rows(v) if v else None for v in node.outs)
    if outs == node.outs:
        return node
    made, sizes_of = replace(node, outs=outs), op_of(node).sizes
    made = sizes_of(made) if sizes_of else made
    torch_makes = results_like(made.op, made.args, made.kwargs)
    for own, other in zip(outs, torch_makes, strict=True):
        if own and other and own.shape != other.shape:
            raise Mixed
    return made


def _side_by_side(rewriter: Rewriter, node: Node, dim: int, chunks: Chunks) -> Value:
    """Chunks joined, each row where its sample and position are."""

    def apart(v: Value, positions: int) -> tuple[int, ...]:
        return (*v.shape[:dim], chunks.samples, positions, *v.shape[dim + 1 :])

    parts = tuple(
        rewriter.reshape(v, apart(v, n))
        for v, n in zip(node.operands, chunks.sizes, strict=True)
    )
    like = Value("", apart(node.out, chunks.positions), node.out.dtype)
    joined = rewriter.emit("aten.cat.default", parts, dim + 1, like=like)
    return rewriter.reshape(joined, node.out.shape)
