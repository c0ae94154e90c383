"""What turns of a loop over experts read that is not of their rows: `batch_turns`.

All read the same value, or each its own: a parameter of its expert, or the scores of
its number (`scores[:, e]`, `(weight * (chosen == e)).sum(-1)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ...graph import Graph, Node, Value, map_values
from ...ops.op import op_of
from ...ops.random import awaits_number
from ...ops.reductions import dims_of
from ...ops.rules import equation
from ...rewrite import Rewriter
from ..rows.choices import Match, Parts, are_distinct, find_match, seen
from ..rows.join_weights import STACK

HOLE = Value("", (), torch.bool)  # any operand


class TurnsDiffer(Exception):
    """Turns do what one for all of them cannot."""


@dataclass(frozen=True)
class Stacked:
    """A value for each turn: [turns, ...]."""

    value: Value


@dataclass(frozen=True)
class Weighed:
    """A value of as many elements as choices, where a turn's number is chosen; else 0.
    dims: the parts of the choices along those of what is seen of it. whole: those of
    the value; some may be summed over, as one choice at most is that number."""

    choices: Value
    value: Value
    whole: tuple[Parts, ...]
    dims: tuple[Parts, ...]


Steady: TypeAlias = Value | Stacked | Weighed | Match


class TurnValues:
    """rewriter: builds the new graph, of `graph`. last: the turn that comes last, which
    that of all takes the place of. The values of turns are in the order of their
    numbers."""

    def __init__(self, rewriter: Rewriter, graph: Graph, last: int) -> None:
        self.rewriter, self.last = rewriter, last
        self.made = graph.producers()
        self.params = {v.name for v in graph.params}
        self.known: dict[tuple[str, ...], Steady] = {}

    def now(self, v: Value) -> Value:
        """A value of the graph, as it is in the new one."""
        return self.rewriter.replaced.get(v.name, v)

    def of(self, values: Sequence[Value]) -> Steady:
        """What turns read in one place. Raises: TurnsDiffer."""
        key = tuple(v.name for v in values)
        if key not in self.known:
            self.known[key] = self._find(values)
        return self.known[key]

    def _find(self, values: Sequence[Value]) -> Steady:
        last = values[self.last]
        if all(v == last for v in values):
            return self.now(last)
        if all(v.name in self.params for v in values):
            if len({(v.shape, v.dtype) for v in values}) > 1:
                raise TurnsDiffer
            return Stacked(self.rewriter.emit(STACK, tuple(values)))
        nodes = [self.made.get(v.name) for v in values]
        matches = [find_match(v, self.made) for v in values]
        numbers = [m and m.number for m in matches]
        if (match := matches[self.last]) is not None:
            alike = {m and replace(m, number=None) for m in matches}
            if numbers == [*range(len(values))] and len(alike) == 1:
                return match
            raise TurnsDiffer
        made = [node for node in nodes if node is not None]
        if len(made) < len(nodes):
            raise TurnsDiffer
        return self._of_nodes(made, values)

    def _of_nodes(self, nodes: Sequence[Node], values: Sequence[Value]) -> Steady:
        """What nodes make that do the same."""
        last = nodes[self.last]
        if awaits_number(last):  # each turn its own
            raise TurnsDiffer
        if last.name in ("aten.unbind", "aten.select"):
            return self._of_numbers(nodes, values)
        operands = self.operands(nodes)
        if len(last.outs) > 1 or len({n.op for n in nodes}) > 1:
            raise TurnsDiffer
        if all(isinstance(x, Value) for x in operands):
            return self.now(last.out)
        if len(operands) == 1 and isinstance(x := operands[0], Stacked):
            return Stacked(self._of_stacked(last, x.value))
        if last.name == "aten.mul" and len(operands) == 2:
            return self._weighed(last, operands)
        if last.name == "aten.where" and last.args[2:] == (0,):
            return self._weighed(last, operands[::-1])
        if len(operands) == 1 and isinstance(x := operands[0], Weighed):
            return self._of_weighed(last, x)
        raise TurnsDiffer

    def operands(self, nodes: Sequence[Node]) -> list[Steady]:
        """The operands of nodes that are alike in all else."""
        self.check_alike(nodes)
        columns = zip(*(node.operands for node in nodes), strict=True)
        return [self.of(column) for column in columns]

    def check_alike(self, nodes: Sequence[Node], but: str = "") -> None:
        """Whether nodes have the same arguments that are no values. but: one that may
        differ. Raises: TurnsDiffer."""
        hidden = [n.with_args(**{but: None}) if but else n for n in nodes]
        told = {str(_without_values((n.op, n.args, n.kwargs))) for n in hidden}
        if len(told) > 1:
            raise TurnsDiffer

    def _of_numbers(self, nodes: Sequence[Node], values: Sequence[Value]) -> Steady:
        """`x[:, e]`, of turn e, or the e-th piece; or the same of other values."""
        last = nodes[self.last]
        if last.name == "aten.unbind":
            places = [n.outs.index(v) for n, v in zip(nodes, values, strict=True)]
            self.check_alike(nodes)
        else:
            dim = int(last.arg("dim")) % len(last.operands[0].shape)
            n = last.operands[0].shape[dim]
            places = [int(node.arg("index")) % n for node in nodes]
            self.check_alike(nodes, "index")
        x = self.of([node.operands[0] for node in nodes])
        if isinstance(x, Value) and len({*places}) == 1:
            return self.now(values[self.last])
        dim = int(last.arg("dim")) % len(last.operands[0].shape)
        all_numbers = places == [*range(len(places))]
        if not isinstance(x, Value) or not all_numbers or x.shape[dim] != len(places):
            raise TurnsDiffer
        if dim == 0:
            return Stacked(x)
        order = (dim, *(d for d in range(len(x.shape)) if d != dim))
        return Stacked(self.rewriter.emit("aten.permute.default", x, order))

    def _of_stacked(self, node: Node, x: Value) -> Value:
        """What a node makes of each turn's value."""
        emit = self.rewriter.emit
        if op_of(node).view == "order" and (rule := equation(node)) is not None:
            order = [rule.operands[0].index(letters) for letters in rule.outs[0]]
            if order == [1, 0]:
                return self.rewriter.transpose(x, 1, 2)
            return emit("aten.permute.default", x, (0, *(1 + d for d in order)))
        if op_of(node).elements == "cast":
            return emit("aten.to.dtype", x, node.out.dtype)
        if op_of(node).elements == "same":
            return x
        raise TurnsDiffer

    def _weighed(self, node: Node, operands: Sequence[Steady]) -> Weighed:
        """`weight * (chosen == e)`."""
        for x, match in (operands, operands[::-1]):
            if not isinstance(x, Value) or not isinstance(match, Match) or match.gone:
                continue
            if x.shape == node.out.shape and len(match.dims) == len(x.shape):
                return Weighed(match.choices, x, match.dims, match.dims)
        raise TurnsDiffer

    def _of_weighed(self, node: Node, x: Weighed) -> Weighed:
        """What is seen of it, or a sum."""
        kind = op_of(node)
        if kind.elements == "same":
            return x
        if kind.view in ("shape", "order"):
            if (after := seen(node, x.dims)) is not None:
                return replace(x, dims=after)
        elif node.name == "aten.sum" and node.out.dtype == x.value.dtype:
            gone, kept = dims_of(node), bool(node.arg("keepdim"))
            summed = tuple(part for d in gone for part in x.dims[d])
            if not are_distinct(x.choices, summed, self.made):
                raise TurnsDiffer
            dims = [() if d in gone else own for d, own in enumerate(x.dims)]
            left = [own for d, own in enumerate(dims) if kept or d not in gone]
            return replace(x, dims=tuple(left))
        raise TurnsDiffer


def _without_values(tree: Any) -> Any:
    return map_values(lambda _: HOLE, tree)
