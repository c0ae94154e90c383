"""Two readings of a forward, where the answer to a question is yes and where it is no,
as one graph:

    loss = total / n if n > 0 else total        answer = n > 0
                                                n' = where(answer, n, 1)
                                                loss = where(answer, total / n', total)

What both do is done once, all else for either answer. So that what is not chosen does
no harm, which is to send back 0 times what is not finite, ops that may give such
numbers are given others then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...builder import needed_nodes, prune
from ...errors import CaptureError
from ...graph import Node, Value, short
from ...ops.evaluate import evaluate
from ...ops.finite import fills, keeps_finite, not_finite
from ...ops.op import op_of, selects
from ...ops.random import awaits_number
from ...ops.rules import is_pointwise
from ...rewrite import Rewriter
from ...traced import Traced
from ..rows.chosen_rows import HARMLESS
from ..rows.reduce_rows import MEAN, SUM

# Beside pointwise ops: finite, as are derivatives, where all operands are a half.
FINITE_OF_HALVES = ("aten.linalg_vector_norm", "aten.logsumexp")


def join_answers(yes: Traced, no: Traced, place: int) -> Traced:
    """One graph of both. place: of the answer, a bool, among the outputs, which it is
    taken out of. Raises: CaptureError, where it cannot be shown that neither harms the
    other, or both compute products of their own, which would take twice as long."""
    yes, no = (replace(t, graph=prune(t.graph, awaits_number)) for t in (yes, no))
    return _Join(yes, no).joined(place)


def refusal(why: str, node: Node | None = None) -> CaptureError:
    """The error about readings that are not joined."""
    source = str(node.location) if node else ""
    return CaptureError(f"two readings cannot be joined: {why}", source=source)


class _Join:
    """nodes: of either reading, or of both."""

    def __init__(self, yes: Traced, no: Traced) -> None:
        self.yes, self.no = yes, no
        sources = {
            kind: tuple({v: None for t in (yes, no) for v in getattr(t.graph, kind)})
            for kind in ("inputs", "params", "buffers")
        }
        self.rewriter = Rewriter(replace(yes.graph, **sources, constants=()), {})
        self.literals: dict[str, Tensor] = {}
        self.constants: dict[Hashable, Value] = {}
        self.autocast: dict[str, torch.dtype] = {}
        self.nodes: list[Node] = []
        self.known: dict[Hashable, tuple[Value | None, ...]] = {}
        outputs = [self._add(reading) for reading in (yes, no)]
        if len({*map(len, outputs)}) > 1 or yes.updated != no.updated:
            raise refusal("they return other values")
        self.outputs = [*zip(*outputs, strict=True)]

    def _add(self, reading: Traced) -> list[Value]:
        """Adds what a reading alone makes, under names of its own. Returns its
        outputs."""
        name, now = self.rewriter.builder.name, dict[str, Value]()
        for v in reading.graph.constants:
            x = reading.literals[v.name]
            content = str(x.dtype), str(x.tolist())
            if content not in self.constants:
                self.constants[content] = replace(v, name=name(v.name))
            now[v.name] = self.constants[content]
            self.literals[now[v.name].name] = x
        drawn = 0
        for old in reading.graph.nodes:
            node = old.substitute(lambda v: now.get(v.name, v))
            drawn += awaits_number(node)
            which = drawn if awaits_number(node) else None
            dtypes = [reading.autocast.get(v.name) for v in old.results]
            key = node.op, repr((node.args, node.kwargs, dtypes)), which
            if key not in self.known:
                outs = tuple(v and replace(v, name=name(v.name)) for v in node.outs)
                self.known[key] = outs
                self.nodes.append(replace(node, outs=outs))
            for made, out in zip(node.outs, self.known[key], strict=True):
                if made is not None and out is not None:
                    now[made.name] = out
                    if made.name in reading.autocast:
                        self.autocast[out.name] = reading.autocast[made.name]
        if drawn != sum(map(awaits_number, self.nodes)):
            raise refusal("one alone draws numbers")
        return [now.get(v.name, v) for v in reading.graph.outputs]

    def joined(self, place: int) -> Traced:
        answer, same = self.outputs.pop(place)
        if answer != same:
            raise refusal("they ask different questions")
        rewriter = self.rewriter
        rewriter.builder.nodes[:] = self.nodes
        made = {v.name: node for node in self.nodes for v in node.results}
        rewriter.where = made[answer.name].location
        asked = {answer.name}
        needed_nodes(self.nodes, asked)
        by_weights = not asked.isdisjoint(v.name for v in rewriter.graph.params)
        gaps = not_finite(replace(rewriter.graph, nodes=tuple(self.nodes)))

        def may_harm(v: Value) -> bool:
            real = v.dtype.is_floating_point or v.dtype.is_complex
            return real and (v.name in gaps or (by_weights and v.name in made))

        chosen = answer, rewriter.emit("aten.logical_not.default", answer)
        forward, backward = self._needed(asked, False), self._needed(set(), True)
        products, safe = [], []
        for own, condition in enumerate(chosen):
            alone = forward[own] - forward[1 - own] | backward[own] - backward[1 - own]
            nodes = [n for n in self.nodes if any(v.name in alone for v in n.results)]
            products.append([n for n in nodes if op_of(n).is_product])
            safe.append(_Harmless(self, condition, may_harm).values(nodes))
        if all(products):
            raise refusal("both compute products of their own", products[0][0])
        outputs = []
        for a, b in self.outputs:
            both = safe[0].get(a.name, a), safe[1].get(b.name, b)
            outputs.append(a if a == b else self._where(chosen, both))
        return self._traced(outputs)

    def _needed(self, names: set[str], backward: bool) -> list[set[str]]:
        """Names of what is needed where the answer is yes, and where it is no, beside
        these names. backward: to send a gradient to, not to compute."""
        needed = []
        for which in range(2):
            pairs = self.outputs[: 1 if backward else None]
            own = names | {pair[which].name for pair in pairs}
            for node in reversed(self.nodes):
                if _is_needed(node, own, backward):
                    own.update(v.name for v in node.operands)
            needed.append(own)
        return needed

    def _where(self, chosen: Sequence[Value], both: Sequence[Value]) -> Value:
        """What the answer chooses of two values; a number as a sum, which may be one
        that is pending."""
        emit, (a, b) = self.rewriter.emit, both
        numbers = a.dtype.is_floating_point and b.dtype.is_floating_point
        if a.type != b.type and (a.shape or b.shape or not numbers):
            raise refusal(f"one gives {a.type}, the other {b.type}")
        if a.shape or not numbers:
            return emit("aten.where.self", chosen[0], a, b)
        kind = torch.promote_types(a.dtype, b.dtype)
        terms = []
        for condition, v in zip(chosen, both, strict=True):
            wide = v if v.dtype == kind else emit("aten.to.dtype", v, kind)
            terms.append(emit("aten.where.ScalarOther", condition, wide, 0))
        return emit("aten.add.Tensor", *terms)

    def _traced(self, outputs: Sequence[Value]) -> Traced:
        yes, no = self.yes, self.no
        graph = replace(
            self.rewriter.graph,
            constants=tuple(self.constants.values()),
            nodes=tuple(self.rewriter.builder.nodes),
            outputs=tuple(outputs),
        )
        graph = prune(graph, awaits_number).verify()
        return replace(
            yes,
            graph=graph,
            literals={v.name: self.literals[v.name] for v in graph.constants},
            trainable=yes.trainable | no.trainable,
            autocast=self.autocast,
            asked=(),
            own_masks=yes.own_masks or no.own_masks,
            loops=yes.loops or no.loops,
        )


class _Harmless:
    """Nodes of one answer, made so that they are finite under the other one too.
    condition: whether it is the one. may_harm: whether a value from elsewhere may not
    be finite under the other."""

    def __init__(
        self, join: _Join, condition: Value, may_harm: Callable[[Value], bool]
    ) -> None:
        self.rewriter, self.autocast = join.rewriter, join.autocast
        self.condition, self.may_harm = condition, may_harm
        self.others: dict[Value, Value] = {}

    def values(self, nodes: Sequence[Node]) -> dict[str, Value]:
        """What takes the place of the values that the nodes make, by their names."""
        now: dict[str, Value] = {}
        made = {v.name for node in nodes for v in node.results}

        def entering(v: Value) -> Value:
            harmless = v.name in made or not self.may_harm(v)
            return now.get(v.name, v) if harmless else self._other(v)

        for old in nodes:
            node = old.substitute(entering)
            new = self._made(node)
            if new is None and node.operands == old.operands:
                continue
            if awaits_number(node):
                raise refusal(f"'{short(node.op)}' draws numbers", node)
            new = self._kept(node) if new is None else new
            pairs = zip(old.outs, new, strict=True)
            now.update((v.name, x) for v, x in pairs if v and x)
        return now

    def _made(self, node: Node) -> tuple[Value | None, ...] | None:
        """The results of a node that is not to be kept as it is; else None."""
        if fills(node) and op_of(node).values == "replaced":
            return tuple(v and self._other(v) for v in self._kept(node))
        if op_of(node).labels:
            return self._loss(node)
        kinds = {v.dtype for v in node.results}
        if not fills(node):
            finite = keeps_finite(node) or selects(node.name) or not node.operands
            if finite or kinds == {torch.bool}:
                return None
            if node.name == "aten.div" and len(node.operands) > 1:
                return self._kept(node.with_args(other=self._other(node.arg("other"))))
            if node.name in FINITE_OF_HALVES or _is_finite_of_halves(node):
                return self._kept(node.substitute(self._other))
            if not any(d.is_floating_point or d.is_complex for d in kinds):
                return None
        raise refusal(f"'{short(node.op)}' may give what is not finite", node)

    def _loss(self, node: Node) -> tuple[Value | None, ...] | None:
        """A mean over labels: there may be none."""
        target = node.arg("target")
        if node.arg("reduction") != MEAN or target.dtype.is_floating_point:
            return None
        if node.arg("weight") is not None:
            raise refusal("a mean that classes weigh may be of none", node)
        emit = self.rewriter.emit
        (total,) = self._kept(node.with_args(reduction=SUM))
        assert total is not None
        counted = emit("aten.ne.Scalar", target, node.arg("ignore_index"))
        n = self._other(emit("aten.sum.default", counted))
        return (emit("aten.div.Tensor", total, emit("aten.to.dtype", n, total.dtype)),)

    def _kept(self, node: Node) -> tuple[Value | None, ...]:
        outs = self.rewriter.keep(node)
        for old, new in zip(node.outs, outs, strict=True):
            if old and new and old.name in self.autocast:
                self.autocast[new.name] = self.autocast[old.name]
        return outs

    def _other(self, v: Value) -> Value:
        """A value; under the other answer numbers that no op makes infinite."""
        if v.dtype == torch.bool:
            return v
        if v not in self.others:
            other = HARMLESS if v.dtype.is_floating_point else 1
            self.others[v] = self.rewriter.emit(
                "aten.where.ScalarOther", self.condition, v, other
            )
        return self.others[v]


def _is_finite_of_halves(node: Node) -> bool:
    """Whether a pointwise op gives finite numbers and derivatives of what stands for
    its operands."""
    if not is_pointwise(node):
        return False
    operands = [
        torch.tensor(HARMLESS if v.dtype.is_floating_point else 1, dtype=v.dtype)
        for v in node.operands
    ]
    real = [x.requires_grad_() for x in operands if x.is_floating_point()]
    with torch.enable_grad():
        results = [x for x in evaluate(node, operands) if x is not None]
        if flowing := [x for x in results if x.requires_grad]:
            results += torch.autograd.grad(flowing, real, materialize_grads=True)
    return all(bool(x.isfinite().all()) for x in results)


def _is_needed(node: Node, names: set[str], backward: bool) -> bool:
    """Whether a node makes one of these values; or sends a gradient back from it."""
    if backward and node.op == "aten.detach.default":
        return False
    made = [v.dtype for v in node.results if v.name in names]
    return any(d.is_floating_point or d.is_complex or not backward for d in made)
