"""Loops over experts that are modules, each with the rows that chose it, as one step.

    for e, expert in enumerate(experts):
        row, place = torch.where(chosen == e)
        y[row] += weight[row, place, None] * expert(x[row])

What the turns of such a loop do is the same but for the number that they compare
choices with, and for the weights. So it is done once, to the rows of all turns: one for
each element of `chosen`, with the weight of the expert that is chosen there, looked up
in all of them, stacked. Where turns do anything else, the loop stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...graph import Graph, Node, Value, short
from ...ops.op import op_of
from ...ops.random import awaits_number
from ...rewrite import Rewriter
from ...traced import Traced
from ..rows.batch_turns import TurnBatch
from ..rows.choices import are_distinct, find_match, numbers_of
from ..rows.rows import ADDING, CHOOSES, SETTING, ZEROS, is_accumulated
from ..rows.turn_values import TurnsDiffer
from ..rows.turn_writes import flat

DROPOUT = "aten.dropout"


@dataclass
class Loop:
    """turns: number -> what it does with its rows, in order."""

    choices: Value
    turns: dict[int, list[Node]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Batched:
    """autocast: value -> the dtype that products had where it was made. differing: of
    loops that stay as they are, what their turns do otherwise, or what cannot be done
    for all: an op, and the user's line. count: of loops that are one step now."""

    graph: Graph
    autocast: Mapping[str, torch.dtype]
    differing: tuple[str, ...] = ()
    count: int = 0


def batch_loops(traced: Traced) -> tuple[Traced, tuple[str, ...]]:
    """The model with its loops over experts as one step each; and of those that stay as
    they are, why."""
    batched = batch_expert_loops(traced.graph, traced.autocast)
    new = replace(traced, graph=batched.graph, autocast=batched.autocast)
    if batched.count and not traced.loops:
        new = replace(new, loops=(traced, new))
    return new, batched.differing


def batch_expert_loops(graph: Graph, autocast: Mapping[str, torch.dtype]) -> Batched:
    """The graph with one turn in place of all, for each loop that allows it."""
    if not any(node.op == CHOOSES for node in graph.nodes):
        return Batched(graph, autocast)
    graph = Rewriter(graph, {}).run({"aten.add": _add_where_written})
    loops = find_loops(graph)
    differing: dict[str, None] = {}
    while loops:
        batching = _Batching(graph, autocast, loops)
        if not batching.differ:
            dtypes = {**autocast, **batching.autocast}
            return Batched(batching.graph, dtypes, tuple(differing), len(loops))
        differing.update(dict.fromkeys(batching.differ.values()))
        loops = [loop for loop in loops if loop.choices.name not in batching.differ]
    return Batched(graph, autocast, tuple(differing))


def _add_where_written(rewriter: Rewriter, node: Node) -> Value | None:
    """`y + new`, of rows that were written into zeros: they are added to y."""
    if len(node.operands) != 2 or node.arg("alpha") not in (None, 1):
        return None
    for y, new in (node.operands, node.operands[::-1]):
        write = rewriter.producer(new, *SETTING, *ADDING)
        alike = y.shape == new.shape == node.out.shape and y.dtype == new.dtype
        if write is None or not alike or not rewriter.is_read_once(new):
            continue
        if not rewriter.producer(write.operands[0], *ZEROS):
            continue
        if write.name in ADDING:
            return rewriter.again(write, self=y)
        if write.name == "aten.index_put" and _is_each_once(rewriter, write):
            return rewriter.again(write, self=y, accumulate=True)
    return None


def _is_each_once(rewriter: Rewriter, write: Node) -> bool:
    """Whether an index_put writes to no place twice: where a mask is set, or at its
    places, of which dims may be left out in which no two choices of a number differ."""
    indices = [_seen(rewriter, i) for i in write.arg("indices") if i is not None]
    chooses = rewriter.made.get(indices[0].name)
    if indices[0].dtype == torch.bool or chooses is None or chooses.op != CHOOSES:
        return indices[0].dtype == torch.bool and len(indices) == 1
    if not {*indices} <= {*chooses.results}:
        return False
    match = find_match(chooses.operands[0], rewriter.made)
    if match is None:
        return {*indices} == {*chooses.outs}
    pairs = zip(chooses.outs, match.dims, strict=True)
    left = flat([parts for out, parts in pairs if out not in indices])
    return are_distinct(match.choices, left, rewriter.made)


def _seen(rewriter: Rewriter, x: Value) -> Value:
    """What x is in another shape, as places that were columns."""
    while (node := rewriter.made.get(x.name)) and op_of(node).view == "shape":
        x = node.operands[0]
    return x


def find_loops(graph: Graph) -> list[Loop]:
    """Loops in which each number that may be chosen has a turn of as many steps."""
    made = graph.producers()
    loops: dict[str, Loop] = {}
    rows: dict[str, tuple[str, int]] = {}  # value -> the choices and number of its turn
    others: set[str] = set()  # choices whose rows are used otherwise
    for node in graph.nodes:
        if node.op == CHOOSES:
            match = find_match(node.operands[0], made)
            if match is None or match.number is None:
                continue
            if not are_distinct(match.choices, match.gone, made):
                continue
            turn = match.choices.name, match.number
            loops.setdefault(match.choices.name, Loop(match.choices))
        else:
            turns = {rows[v.name] for v in node.operands if v.name in rows}
            if not turns or not node.results:
                continue
            if len(turns) > 1 or (awaits_number(node) and node.name != DROPOUT):
                others.update(choices for choices, _ in turns)
            turn = min(turns)
        loops[turn[0]].turns[turn[1]].append(node)
        if not is_accumulated(node, rows):
            rows.update((v.name, turn) for v in node.results)
    others.update(rows[v.name][0] for v in graph.outputs if v.name in rows)
    return [
        loop
        for name, loop in loops.items()
        if name not in others and _is_whole(loop, numbers_of(loop.choices, made))
    ]


def _is_whole(loop: Loop, numbers: int | None) -> bool:
    alike = {tuple(node.op for node in nodes) for nodes in loop.turns.values()}
    return len(alike) == 1 and {*loop.turns} == {*range(numbers or 0)}


class _Batching:
    """The graph with turns of loops batched, but for those whose turns differ; and of
    new values, the dtype that autocast has for products where they are made."""

    def __init__(
        self,
        graph: Graph,
        autocast: Mapping[str, torch.dtype],
        loops: Sequence[Loop],
    ) -> None:
        self.before = autocast
        self.differ: dict[str, str] = {}  # the name of choices -> where
        self.autocast: dict[str, torch.dtype] = {}
        self.rewriter = Rewriter(graph, {})
        self.steps: dict[str, tuple[TurnBatch, int]] = {}
        # Dropout of turns: of rows, whose one mask takes the place of theirs.
        self.masks = {
            node.results[0].name
            for loop in loops
            for nodes in loop.turns.values()
            for node in nodes
            if node.name == DROPOUT
        }
        ops = {DROPOUT}
        for loop in loops:
            turns = [loop.turns[number] for number in sorted(loop.turns)]
            batch = TurnBatch(self.rewriter, graph, loop.choices, turns)
            for step, node in enumerate(turns[batch.last]):
                self.steps[node.results[0].name] = batch, step
                ops.add(node.op)
        self.graph = self.rewriter.run(dict.fromkeys(ops, self.visit))

    def visit(self, rewriter: Rewriter, node: Node) -> Value | None:
        """What takes the place of the result of the last turn's node, if it is read
        outside of the loop."""
        name = next((v.name for v in node.results), "")
        instead = node.operands[0] if name in self.masks else None
        batch, step = self.steps.get(name, (None, 0))
        if batch is None or batch.choices.name in self.differ:
            return instead
        first = len(rewriter.builder.nodes)
        try:
            made = batch.emit(step)
        except TurnsDiffer:
            where = f"'{short(node.op)}' at {node.location.source}"
            self.differ[batch.choices.name] = where
            return None
        if (dtype := self.before.get(name)) is not None:
            new = (v for n in rewriter.builder.nodes[first:] for v in n.results)
            self.autocast.update((v.name, dtype) for v in new)
        return made or instead
