"""runs: which nodes in a row a function is worth, between two collectives.

A run ends where something is sent or waited for, and at the end of a layer. What a
function cannot do stands before it, as masks of dropout, or after it, as sums of
gradients in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from ..graph import Node, Value
from ..ops.memory import find_owners
from ..ops.op import is_view
from ..ops.random import DRAWS
from ..ops.rules import is_fusable
from ..stage.split_backward import GRADIENT

Parts = Sequence[Sequence[Node]]
LEAST = 3  # nodes that compute and are worth a function


def gather_runs(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, with what a function cannot do before and after the run it is in.

    nodes: before `reuse`, so that only nodes without results write over something,
    their first operand.
    """
    owners = find_owners(nodes) if any(map(is_sum, nodes)) else {}
    gathered: list[Node] = []
    before: list[Node] = []
    run: list[Node] = []
    after: list[Node] = []

    def end() -> None:
        gathered.extend([*before, *run, *after])
        for part in (before, run, after):
            part.clear()

    def root(v: Value) -> str:
        return owners.get(v.name, v.name)

    layer = None
    for node in nodes:
        drawn = node.op in DRAWS
        own = node.location.layer
        if not drawn and not is_sum(node) and not is_pure(node):
            end()
            gathered.append(node)
            continue
        if own != layer:
            end()
            layer = own
        if drawn:
            before.append(node)
        elif is_sum(node):
            after.append(node)
        else:
            writes = not node.results
            if writes and root(node.operands[0]) in {
                root(v) for n in after for v in n.operands
            }:
                end()
            run.append(node)
    end()
    return gathered


def is_sum(node: Node) -> bool:
    """Whether it only adds to a parameter's gradient."""
    into = not node.results and node.operands[0].name.startswith(GRADIENT)
    return into and not node.is_comm


def is_pure(node: Node) -> bool:
    """Whether a function may run the node: no collective, and no write to what lives
    longer."""
    return not node.is_comm and not is_sum(node)


def find_runs(
    nodes: Sequence[Node], remade: Collection[str] = ()
) -> Iterator[tuple[int, int]]:
    """(begin, end) of the runs that are worth a function; nodes that make recomputed
    values are runs of their own, if they are worth it."""

    def kind(node: Node) -> Any:
        return (node.location.layer, _makes(node, remade)) if is_pure(node) else None

    kinds: list[Any] = []
    for own, row in groupby(nodes, kind):
        group = list(row)
        alone = own is None or _is_worth_a_function(group)
        kinds += [own if alone else (own[0], False)] * len(group)
    begin = 0
    for own, row in groupby(kinds):
        end = begin + len(list(row))
        if own is not None and _is_worth_a_function(nodes[begin:end]):
            yield begin, end
        begin = end


def _is_worth_a_function(nodes: Sequence[Node]) -> bool:
    computing = islice((n for n in nodes if not is_view(n)), LEAST)
    return sum(1 for _ in computing) == LEAST and _reads_others(nodes)


def _reads_others(nodes: Sequence[Node]) -> bool:
    """Whether nodes read what they do not make, as `live_in` would say."""
    made: set[str] = set()
    for node in nodes:
        if any(v.name not in made for v in node.operands):
            return True
        made.update(v.name for v in node.results)
    return False


def passed_on(parts: Parts, remade: frozenset[str]) -> frozenset[str]:
    """Names of recomputed values that nodes other than their makers read, in any part:
    one function makes them each time, and returns them. remade: see `find_remade`."""
    if not remade:
        return remade
    others = (n for p in parts for n in p if not _makes(n, remade))
    return remade.intersection(v.name for n in others for v in n.operands)


def find_remade(parts: Parts) -> frozenset[str]:
    """Names of what several parts make, in the order in which they run; but where
    elementwise ops alone are run again, they belong to those that read them."""
    made: set[str] = set()
    again: set[str] = set()
    for nodes in parts:
        own = {v.name for n in nodes for v in n.results}
        again |= made & own
        made |= own
    by_themselves: set[str] = set()
    for nodes in parts if again else ():
        for remade, row in groupby(nodes, lambda n: _makes(n, again)):
            run = list(row)
            if remade and not all(is_view(n) or is_fusable(n) for n in run):
                by_themselves.update(v.name for n in run for v in n.results)
    return frozenset(again & by_themselves)


def _makes(node: Node, names: Collection[str]) -> bool:
    return bool(names) and any([v.name in names for v in node.results])
