"""outline: what runs between two collectives becomes a function; equal runs are one.

As compilers outline what repeats. Which nodes are a function `runs` says; it only
computes: it knows no process group and writes over nothing that outlives it but what it
is told to.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..emit.names import ENTRIES, RESERVED
from ..graph import LAYER, Node, Value, live_in
from ..stage.runs import find_remade, find_runs

CALL = "call."


@dataclass(frozen=True)
class Outlined:
    """A function: its arguments, the numbers among them, what it runs and returns."""

    name: str
    args: tuple[Value, ...]
    numbers: tuple[Number, ...]
    nodes: tuple[Node, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Number:
    """A number that a function takes as an argument."""

    name: str


@dataclass(frozen=True)
class _Run:
    """A run of nodes of a part, and those of its results that others read."""

    part: int
    first: int
    nodes: tuple[Node, ...]
    read: frozenset[str]

    @cached_property
    def places(self) -> dict[str, Any]:
        """Value -> where it comes from in the run: the how-manieth argument, or which
        result of which node."""
        places: dict[str, Any] = {}
        args = 0
        for o, node in enumerate(self.nodes):
            for v in node.operands:
                if v.name not in places:
                    places[v.name] = args
                    args += 1
            places.update((v.name, (o, j)) for j, v in enumerate(node.outs) if v)
        return places


@dataclass(frozen=True)
class Outline:
    """parts: with calls in place of runs. functions: that these call. calls: id of a
    call -> its nodes. same: value that a run makes -> its name in the function."""

    parts: Sequence[Sequence[Node]]
    functions: Sequence[Outlined] = ()
    calls: Mapping[int, Sequence[Node]] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)


def outline(parts: Sequence[tuple[Sequence[Node], Collection[str]]]) -> Outline:
    """Makes repeated runs of nodes into functions, and calls of these.

    parts: nodes, and names of their results that are read elsewhere, in running order.
    """
    # What nobody reads is not returned: it would be there until the call ends. But what
    # makes something again returns the same each time.
    returned: dict[Any, set[Any]] = {}
    rows = []
    for run in _runs(parts):
        made = run.places
        again = _key(run), next((v.name for n in run.nodes for v in n.results), "")
        returned.setdefault(again, set()).update(made[name] for name in run.read)
        rows.append((run, again))
    alike: dict[Any, list[_Run]] = {}
    for run, again in rows:
        key, _ = again
        alike.setdefault((key, frozenset(returned[again])), []).append(run)
    names = {*RESERVED, *ENTRIES}
    functions: list[Outlined] = []
    calls: dict[tuple[int, int], tuple[_Run, Node]] = {}
    same: dict[str, str] = {}
    for group in alike.values():
        function, nodes_of = _function(group, names)
        functions.append(function)
        first = {at: name for name, at in group[0].places.items()}
        for run in group:
            made = {name: at for name, at in run.places.items() if at in first}
            same |= {n: first[at] for n, at in made.items() if isinstance(at, tuple)}
        for run, call in zip(group, nodes_of, strict=True):
            calls[run.part, run.first] = run, call
    outlined = []
    for number, (nodes, _) in enumerate(parts):
        out, i = [], 0
        while i < len(nodes):
            called = calls.get((number, i))
            out.append(called[1] if called else nodes[i])
            i += len(called[0].nodes) if called else 1
        outlined.append(out)
    stand = {id(call): run.nodes for run, call in calls.values()}
    return Outline(outlined, functions, stand, same)


def _runs(parts: Sequence[tuple[Sequence[Node], Collection[str]]]) -> Iterator[_Run]:
    """Yields the runs of all parts, with the names that are read after them."""
    remade = find_remade([nodes for nodes, _ in parts])
    for number, (nodes, live_out) in enumerate(parts):
        last = {v.name: i for i, node in enumerate(nodes) for v in node.operands}
        last.update(dict.fromkeys(live_out, len(nodes)))
        for begin, end in find_runs(nodes, remade):
            own = tuple(nodes[begin:end])
            made = (v.name for n in own for v in n.results)
            read = frozenset(name for name in made if last.get(name, 0) >= end)
            yield _Run(number, begin, own, read)


# --- equal runs ---------------------------------------------------------------------


def _key(run: _Run) -> Any:
    """The key that is equal for runs which one function can do, given its numbers."""
    places = run.places

    def shape(tree: Any) -> Any:
        if isinstance(tree, Value):
            return places[tree.name], tree.shape, tree.dtype
        if isinstance(tree, (tuple, list)):
            return tuple([shape(item) for item in tree])
        if isinstance(tree, dict):
            return tuple((k, shape(tree[k])) for k in sorted(tree))
        if _is_number(tree):
            return type(tree)
        return tree

    return tuple(
        (node.op, shape(node.args), shape(dict(node.kwargs)), len(node.outs))
        for node in run.nodes
    )


def _is_number(tree: Any) -> bool:
    return isinstance(tree, (int, float)) and not isinstance(tree, bool)


def _numbers(tree: Any) -> Iterator[int | float]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _numbers(item)
    elif isinstance(tree, dict):
        for k in sorted(tree):
            yield from _numbers(tree[k])
    elif _is_number(tree):
        yield tree


def _function(group: Sequence[_Run], names: set[str]) -> tuple[Outlined, list[Node]]:
    """The function of equal runs, and its calls."""
    first = group[0]
    rows = [
        [x for node in run.nodes for x in _numbers([node.args, dict(node.kwargs)])]
        for run in group
    ]
    varying = [
        i
        for i, column in enumerate(zip(*rows, strict=True))
        if any(
            x != column[0] and not (x != x and column[0] != column[0]) for x in column
        )
    ]
    numbers = tuple(Number(f"n{i}") for i in range(len(varying)))
    told = dict(zip(varying, numbers, strict=True))
    places = [run.places for run in group]
    args = [list(live_in(run.nodes).values()) for run in group]
    # What any of the runs has read of its results, all return.
    wanted = {
        own[name] for run, own in zip(group, places, strict=True) for name in run.read
    }
    nodes = _nodes(first, told, group)
    outs = {
        (o, j): v for o, node in enumerate(nodes) for j, v in enumerate(node.outs) if v
    }
    order = sorted(wanted)
    name = _name(first, names)
    results = tuple(outs[at] for at in order)
    function = Outlined(name, tuple(args[0]), numbers, nodes, results)
    calls = []
    for run, own, row in zip(group, args, rows, strict=True):
        made = {
            (o, j): v
            for o, node in enumerate(run.nodes)
            for j, v in enumerate(node.outs)
            if v and v.name in run.read
        }
        entering = (*own, *(row[i] for i in varying))
        returned = tuple(made.get(at) for at in order)
        calls.append(Node(CALL + name, entering, {}, returned, run.nodes[0].location))
    return function, calls


def _nodes(
    run: _Run, told: Mapping[int, Number], group: Sequence[_Run]
) -> tuple[Node, ...]:
    """The nodes of a run, with what varies told, and all results that any run names."""
    count = iter(range(1 << 30))

    def tell(tree: Any) -> Any:
        if isinstance(tree, Value):
            return tree
        if isinstance(tree, (tuple, list)):
            return tuple([tell(item) for item in tree])
        if isinstance(tree, dict):
            return {k: tell(tree[k]) for k in sorted(tree)}
        return told.get(next(count), tree) if _is_number(tree) else tree

    nodes = []
    for o, node in enumerate(run.nodes):
        outs = list(node.outs)
        for other in group:
            for j, v in enumerate(other.nodes[o].outs):
                if outs[j] is None and v is not None:
                    outs[j] = v
        args, kwargs = tell([node.args, dict(node.kwargs)])
        own = Node(node.op, args, kwargs, tuple(outs), node.location)
        nodes.append(own.in_module(LAYER.sub("*", node.location.module)))
    return tuple(nodes)


def _name(run: _Run, names: set[str]) -> str:
    """A function's name, after the modules of its nodes if these are one or two."""
    modules: dict[str, None] = {}
    for node in run.nodes:
        path = node.location.module
        layer = node.location.layer
        inside = path[len(layer) :].strip(".") if layer else path.rpartition(".")[2]
        modules[inside.partition(".")[0]] = None
    own = [re.sub(r"\W+", "_", m) for m in modules if m]
    layer = run.nodes[0].location.layer
    if own and len(own) <= 2:
        stem = "_".join(own)
    elif layer:
        path = layer.rpartition(".")[0]
        stem = re.sub(r"\W+", "_", path.rpartition(".")[2])
    else:
        stem = own[-1] if own else "loss"
    back = [v.name for n in run.nodes for v in n.results]
    if sum(n.startswith("d_") for n in back) * 2 > len(back):
        stem += "_backward"
    if not stem.isidentifier():
        stem = f"run_{stem}"
    name, count = stem, 1
    while name in names:
        count += 1
        name = f"{stem}_{count}"
    names.add(name)
    return name
