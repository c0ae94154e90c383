"""batch_samples: what a loop does to each sample is done to all of them at once.

    torch.stack([cross_entropy(x, y) for x, y in zip(logits, labels)]).mean()

Written so, neither microbatches nor ranks can share samples out: each is a part of the
graph. Where the parts are alike, and what they come to is put side by side again, or
added up, one of them goes over all samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from ...graph import Graph, Node, Value
from ...ops.op import op_of
from ...ops.random import awaits_number
from ...rewrite import Rewriter
from ..normalize.add_dim import Unlike, add_dim
from ..normalize.join_samples import join_samples, samples_of

SMALL = 64  # elements of constants that are compared


@dataclass(frozen=True)
class One:
    """A value that is computed of one of n samples. kind: a number, the same for what
    is computed alike of others. index: of the sample."""

    kind: int
    index: int
    n: int


@dataclass(frozen=True)
class Several:
    """What is made of values of samples. ones: their names, in order. dim: the one
    along which they are side by side; None: they are added up. start: what they are
    added to."""

    ones: tuple[str, ...]
    dim: int | None
    start: tuple[Value, ...] = ()


def batch_samples(graph: Graph, literals: Mapping[str, torch.Tensor]) -> Graph:
    """Rewrites alike computations of each sample, if nothing else is done to one."""
    if not any(True for node in graph.nodes for _ in samples_of(node)):
        return graph
    walk = _Walk(graph, literals)
    if not walk.joins:
        return graph
    rewriter = Rewriter(graph, literals)
    batch = _Batch(rewriter, walk)
    joined = dict.fromkeys(("aten.stack", "aten.cat", "aten.add"), batch.join)
    try:
        made = rewriter.run(joined)
    except Unlike:
        return graph
    if _Walk(made, literals).ones:
        return graph
    return join_samples(made, literals)


class _Walk:
    """Follows samples through a graph. ones: of each value of one, how it was made.
    makers: of each kind, a node and which result of it. sources: of each kind that is
    cut, from what, and the shape of one. joins: what is made of all samples, by
    name."""

    def __init__(self, graph: Graph, literals: Mapping[str, torch.Tensor]) -> None:
        self.ones: dict[str, One] = {}
        self.makers: dict[int, tuple[Node, int]] = {}
        self.sources: dict[int, tuple[Value, tuple[int, ...]]] = {}
        self.joins: dict[str, Several] = {}
        self._parts: dict[str, Several] = {}
        self._numbers: dict[Hashable, int] = {}
        self._alike: dict[str, int] = {}  # of what is computed of no sample alone
        self._addends: dict[str, tuple[Value, ...]] = {}
        self._samples = {v.shape[0] for v in graph.inputs if v.shape} - {1}
        self._computed = {v.name for v in graph.inputs}
        for name, x in literals.items():
            if x.numel() <= SMALL:
                key = x.dtype, tuple(x.shape), str(x.tolist())
                self._alike[name] = self._number("constant", key)
        for node in graph.nodes:
            self._follow(node)

    def _follow(self, node: Node) -> None:
        own = [self.ones[v.name] for v in node.operands if v.name in self.ones]
        parts = any(v.name in self._parts for v in node.operands)
        if not self._computed.isdisjoint(v.name for v in node.operands):
            self._computed.update(v.name for v in node.results)
        if own and not parts and len({(one.index, one.n) for one in own}) == 1:
            self._go_on(node, own[0])
        elif own or parts:
            self._join(node)
        elif not self._begin(node) and not awaits_number(node):
            for place, v in enumerate(node.outs):
                if v is not None:
                    self._alike[v.name] = self._number(place, self._described(node))

    def _begin(self, node: Node) -> bool:
        """Notes what is one sample of all."""
        began = False
        for v, index in samples_of(node):
            x = node.operands[0]
            if x.name in self._computed and x.shape[0] in self._samples:
                kind = self._number("of", x.name, v.shape)
                self.ones[v.name] = One(kind, index, x.shape[0])
                self.sources[kind], began = (x, v.shape), True
        return began

    def _go_on(self, node: Node, first: One) -> None:
        described = self._described(node)
        for place, v in enumerate(node.outs):
            if v is not None:
                kind = self._number(place, described)
                self.makers.setdefault(kind, (node, place))
                self.ones[v.name] = One(kind, first.index, first.n)
        if _is_sum(node):
            self._addends[node.out.name] = node.operands
        elif _rounds(node) and (addends := self._addends.get(node.operands[0].name)):
            self._addends[node.out.name] = addends

    def _described(self, node: Node) -> Hashable:
        """The node, but for which sample it is of."""

        def text(x: object) -> Hashable:
            if isinstance(x, Value):
                if (one := self.ones.get(x.name)) is not None:
                    return "one", one.kind
                return "all", self._alike.get(x.name, x.name)
            if isinstance(x, tuple | list):
                return tuple(map(text, x))
            return type(x).__name__, str(x)

        kwargs = tuple((key, text(x)) for key, x in node.kwargs.items())
        return node.op, text(node.args), kwargs

    def _join(self, node: Node) -> None:
        """Notes what is made of several samples, once of all and in order."""
        made: Several | None = None
        if _rounds(node):
            made = self._parts.get(node.operands[0].name)
            made = None if made is None or made.dim is not None else made
        elif _is_sum(node):
            made = self._sum(node)
        elif node.name in ("aten.stack", "aten.cat"):
            made = self._side_by_side(node)
        if made is None:
            return
        if self._is_complete(made):
            self.joins[node.out.name] = made
        else:
            self._parts[node.out.name] = made

    def _side_by_side(self, node: Node) -> Several | None:
        dim = int(node.arg("dim")) % len(node.out.shape)
        ones: list[str] = []
        for v in node.operands:
            part = self._parts.get(v.name)
            if part is not None and part.dim == dim and node.name == "aten.cat":
                ones += part.ones
            elif v.name in self.ones:
                ones.append(v.name)
            else:
                return None
        return Several(tuple(ones), dim)

    def _sum(self, node: Node) -> Several | None:
        ones: list[str] = []
        start: list[Value] = []
        for v in node.operands:
            part = self._parts.get(v.name)
            if part is not None and part.dim is None:
                ones += part.ones
                start += part.start
            elif v.name in self.ones:
                ones.append(v.name)
            elif part is None:
                start.append(v)
            else:
                return None
        made = Several(tuple(ones), None, tuple(start))
        while not self._is_complete(made) and (one := self._apart(made)):
            addends = self._addends[one]
            rest = tuple(name for name in made.ones if name != one)
            others = tuple(v for v in addends if v.name not in self.ones)
            ones_of = tuple(v.name for v in addends if v.name in self.ones)
            made = Several(rest + ones_of, None, made.start + others)
        return made

    def _apart(self, made: Several) -> str | None:
        """A sum of one sample that no other has: as of the first, where it begins."""
        kinds = [self.ones[name].kind for name in made.ones]
        for name in made.ones:
            if name in self._addends and kinds.count(self.ones[name].kind) == 1:
                return name
        return None

    def _is_complete(self, made: Several) -> bool:
        ones = [self.ones[name] for name in made.ones]
        indices: dict[int, list[int]] = {}
        for one in ones:
            indices.setdefault(one.kind, []).append(one.index)
        every = [*range(ones[0].n)]
        if made.dim is not None:  # all of one kind, and then all of the next
            return [one.index for one in ones] == every * len(indices) and [
                one.kind for one in ones
            ] == [kind for kind in indices for _ in every]
        return all(sorted(own) == every for own in indices.values())

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _is_sum(node: Node) -> bool:
    """Whether a node adds two tensors of its result's shape."""
    if node.name != "aten.add" or node.kwargs or len(node.operands) != 2:
        return False
    return {v.shape for v in node.operands} == {node.out.shape}


def _rounds(node: Node) -> bool:
    """Whether a node casts to another precision, as a total that is added to in place
    is, each time."""
    if op_of(node).elements != "cast":
        return False
    return all(v.dtype.is_floating_point for v in (*node.operands, node.out))


class _Batch:
    """Emits what is made of all samples."""

    def __init__(self, rewriter: Rewriter, walk: _Walk) -> None:
        self.rewriter, self.walk = rewriter, walk
        self._made: dict[int, Value] = {}

    def join(self, rewriter: Rewriter, node: Node) -> Value | None:
        """What takes the place of a node that joins all samples. Raises: Unlike."""
        made = self.walk.joins.get(node.out.name)
        if made is None:
            return None
        ones = [self.walk.ones[name] for name in made.ones]
        kinds = dict.fromkeys(one.kind for one in ones)
        values = [self._of_all(kind, ones[0].n) for kind in kinds]
        rewriter.where = node.location
        if made.dim is not None:
            x, before = values[0], 1
            if len(values) > 1:
                x, before = rewriter.emit("aten.stack.default", tuple(values), 0), 2
            rank, last = len(x.shape), before + made.dim
            order = (*range(before, last), *range(before), *range(last, rank))
            if made.dim:
                x = rewriter.emit("aten.permute.default", x, order)
            return rewriter.reshape(x, node.out.shape)
        sums = [rewriter.emit("aten.sum.dim_IntList", x, (0,)) for x in values]
        start = [rewriter.replaced.get(v.name, v) for v in made.start]
        total, *others = (self._cast(x, node.out) for x in (*start, *sums))
        for other in others:
            total = rewriter.emit("aten.add.Tensor", total, other)
        return total

    def _cast(self, x: Value, like: Value) -> Value:
        if x.dtype == like.dtype:
            return x
        return self.rewriter.emit("aten.to.dtype", x, like.dtype)

    def _of_all(self, kind: int, n: int) -> Value:
        """What is computed so of all samples, side by side along the first dim."""
        if kind in self._made:
            return self._made[kind]
        if (source := self.walk.sources.get(kind)) is not None:
            x, shape = source
            x = self.rewriter.replaced.get(x.name, x)
            self._made[kind] = self.rewriter.reshape(x, (n, *shape))
            return self._made[kind]
        node, place = self.walk.makers[kind]
        several = {
            v.name: self._of_all(self.walk.ones[v.name].kind, n)
            for v in node.operands
            if v.name in self.walk.ones
        }
        self.rewriter.where = node.location
        outs = add_dim(self.rewriter, node, several, n)
        made = outs[place]
        assert made is not None, "it is read"
        self._made[kind] = made
        return made
