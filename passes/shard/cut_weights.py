"""cut_weights: a weight that ranks would hold whole, though they split its pieces.

    q, k, v = split_with_sizes(w, [32, 8, 8])     q: heads/tp    k, v: whole

A weight has one sharding, and its uneven pieces have no split in common. So each piece
becomes a parameter of its own, sharded as its uses want it; its gradient is completed
as they leave it, and nothing else in the compiler knows of pieces. What they are of the
model's parameter is remembered (`Part`), for those who read and write whole ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..capture.lower_precision import CAST
from ..dims.name_dims import Dim, Dims, Factor
from ..dims.origins import find_origins
from ..graph import Graph, Node, Value
from ..ops.arguments import arguments
from ..part import Part, part_name
from ..plan import Plan
from ..shard.op_sharding import OpSharding
from ..shard.parameter_sharding import parameter_sharding, place_at_rest, varying_axes
from ..shard.propagate import Sharded
from ..shard.sharding import Sharding

SPLIT = "aten.split_with_sizes.default"


@dataclass(frozen=True)
class Cut:
    """A parameter that only splits read, all of the same sizes along one dim.

    splits: of it, or of casts of it.
    """

    weight: Value
    dim: int
    sizes: tuple[int, ...]
    casts: tuple[Node, ...]
    splits: tuple[Node, ...]


def cut_weights(sharded: Sharded) -> Sharded:
    """Make parameters of the pieces of weights that ranks hold whole, where an axis
    splits one of the pieces."""
    while True:  # as pieces may be cut too
        uses, consumers = _uses(sharded), sharded.graph.consumers()
        cuts = [
            cut
            for cut in find_cuts(sharded.graph, consumers)
            if _is_worth_it(sharded.plan, cut, [*_pieces(consumers, cut.splits)], uses)
        ]
        if not cuts:
            return sharded
        sharded = _Cutter(sharded, uses).cut(cuts)


def find_cuts(graph: Graph, consumers: Mapping[str, list[Node]]) -> Iterator[Cut]:
    """The parameters that are used in pieces only."""
    for weight in graph.params:
        readers = consumers.get(weight.name, [])
        casts = tuple(n for n in readers if n.op == CAST)
        splits = [n for n in readers if n.op != CAST]
        for cast in casts:
            splits += consumers[cast.out.name]
        kinds = {_sizes_and_dim(n) if n.op == SPLIT else None for n in splits}
        if len(kinds) == 1 and (cut := kinds.pop()) is not None:
            sizes, dim = cut
            yield Cut(weight, dim, sizes, casts, tuple(splits))


def _sizes_and_dim(split: Node) -> tuple[tuple[int, ...], int]:
    """How a split cuts its operand: extents of the pieces, and along which dim."""
    bound = arguments(split)
    return tuple(bound["split_sizes"]), bound["dim"] % len(split.operands[0].shape)


def _uses(sharded: Sharded) -> Mapping[str, list[Sharding]]:
    """Value name -> the sharding that each of its uses needs."""
    uses: dict[str, list[Sharding]] = defaultdict(list)
    for node, needs in zip(sharded.graph.nodes, sharded.needs, strict=True):
        for v, need in zip(node.operands, needs, strict=True):
            uses[v.name].append(need)
    return uses


def _is_worth_it(
    plan: Plan, cut: Cut, pieces: Sequence[Value], uses: Mapping[str, list[Sharding]]
) -> bool:
    """Whether an axis splits a piece, in all of its uses, but not what it is cut of."""
    whole = [need for node in cut.splits for need in uses[node.operands[0].name]]

    def place(axis: str, needs: Iterable[Sharding]) -> tuple[int, int] | None:
        return place_at_rest(plan, axis, (need.state(axis) for need in needs))

    return any(
        any(place(axis, uses[v.name]) for v in pieces)
        for axis in plan.axes
        if axis not in plan.data_axes and not place(axis, whole)
    )


def _pieces(
    consumers: Mapping[str, list[Node]], splits: Iterable[Node]
) -> Iterator[Value]:
    """Yields the pieces that splits, and splits of their pieces, end with."""
    for v in (v for node in splits for v in node.results):
        readers = consumers.get(v.name, [])
        if readers and all(node.op == SPLIT for node in readers):
            yield from _pieces(consumers, readers)
        else:
            yield v


class _Cutter:
    """Takes weights apart in a graph and in the tables beside it."""

    def __init__(self, sharded: Sharded, uses: Mapping[str, list[Sharding]]) -> None:
        self.sharded, self.uses = sharded, uses
        self.dims, self.states = dict(sharded.named.dims), dict(sharded.states)
        self.parts = dict(sharded.named.traced.parts)
        self.trainable = set(sharded.named.traced.trainable)
        self.replaced: dict[str, Value] = {}  # what was a result of a split
        self.params: dict[str, list[Value]] = {}
        self.casts: dict[str, list[tuple[Node, tuple[Sharding, ...]]]] = {}
        self.gone: set[str] = set()

    def cut(self, cuts: list[Cut]) -> Sharded:
        for cut in cuts:
            self.params[cut.weight.name] = [*self.pieces(cut)]
            self.gone.update(node.results[0].name for node in cut.splits)
        sharded, named = self.sharded, self.sharded.named
        nodes: list[Node] = []
        op_shardings: list[Mapping[str, OpSharding]] = []
        needs: list[tuple[Sharding, ...]] = []
        factors: list[tuple[Factor, ...]] = []
        rows = zip(
            named.graph.nodes,
            sharded.op_shardings,
            sharded.needs,
            named.factors,
            strict=True,
        )
        for node, op_sharding, need, factor in rows:
            name = node.results[0].name
            for cast, lies in self.casts.get(name, ()):
                nodes.append(cast)
                op_shardings.append(op_sharding)
                needs.append(lies)
                factors.append(())
            if name not in self.gone and name not in self.casts:
                change = node.substitute(lambda v: self.replaced.get(v.name, v))
                nodes.append(change)
                op_shardings.append(op_sharding)
                needs.append(need)
                factors.append(factor)
        params = [
            piece for v in named.graph.params for piece in self.params.get(v.name, [v])
        ]
        graph = replace(named.graph, params=tuple(params), nodes=tuple(nodes)).verify()
        trainable = frozenset(self.trainable)
        traced = replace(
            named.traced, graph=graph, trainable=trainable, parts=self.parts
        )
        origins = {**named.origins, **find_origins(graph)}
        named = replace(
            named,
            traced=traced,
            dims=self.dims,
            factors=tuple(factors),
            origins=origins,
        )
        return replace(
            sharded,
            named=named.verify(),
            op_shardings=tuple(op_shardings),
            needs=tuple(needs),
            states=self.states,
        )

    def pieces(self, cut: Cut) -> Iterator[Value]:
        """Yields each piece of a weight as a parameter, with its sharding and casts."""
        plan, place = self.sharded.plan, 0
        of = self.sharded.named.traced.part(cut.weight)
        for i, size in enumerate(cut.sizes):
            shape = [*cut.weight.shape]
            shape[cut.dim] = size
            start = [*of.start]
            start[cut.dim] += place
            place += size
            part = Part(of.source, of.shape, tuple(start))
            name = part_name(part, shape)
            piece = replace(cut.weight, name=name, shape=tuple(shape))
            results = [v for node in cut.splits if (v := node.outs[i]) is not None]
            uses = [need for v in results for need in self.uses[v.name]]
            dims = self.dims[results[0].name] if results else self.unread(cut, size)
            state = parameter_sharding(dims, uses, plan, shared=True)
            state = state.with_varying(varying_axes(state, uses, plan.axes))
            self.dims[name], self.states[name] = dims, state
            self.parts[name] = part
            if cut.weight.name in self.trainable:
                self.trainable.add(name)
            self.stand_in(cut, i, piece)
            yield piece

    def stand_in(self, cut: Cut, i: int, piece: Value) -> None:
        """Let readers of piece i have the parameter, or a cast of it as they had."""
        copies = {cast.out.name: cast for cast in cut.casts}
        for node in cut.splits:
            if (old := node.outs[i]) is None:
                continue
            cast = copies.get(node.operands[0].name)
            self.replaced[old.name] = piece
            if cast is not None:
                change = cast.substitute(lambda _: piece)
                lies = (self.states[piece.name],)
                self.casts.setdefault(cast.out.name, []).append(
                    (replace(change, outs=(old,)), lies)
                )
                self.states[old.name] = lies[0]
                del self.replaced[old.name]

    def unread(self, cut: Cut, size: int) -> Dims:
        """The dims of a piece that nothing reads."""
        dims = self.dims[cut.weight.name]
        unread = (Dim(-1, "unread", size),)
        return (*dims[: cut.dim], unread, *dims[cut.dim + 1 :])
