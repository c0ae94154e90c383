"""join_weights: parameters that are read as one stack, and nowhere else, become one.

    torch.stack([experts.0.w1, experts.1.w1, ...])     ->     experts[0:8].w1

So an axis may split which of them a rank holds. What each is of the model's own is
remembered (`Traced.joined`), for those who read and write parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from itertools import takewhile

from ...builder import unused
from ...graph import Graph, Node, Value

STACK = "aten.stack.default"


def join_weights(
    graph: Graph, kind_of: Callable[[str], Hashable]
) -> tuple[Graph, dict[str, tuple[str, ...]]]:
    """The graph with one parameter for each such stack; and of each of these the names
    of the model's own. kind_of: what parameters of one stack must have alike, beside
    their shapes."""
    params = {v.name: v for v in graph.params}
    readers = graph.consumers()
    taken = {v.name for v in graph.sources}
    joined: dict[str, Value] = {}  # the name of the first in a stack -> the parameter
    sources: dict[str, tuple[str, ...]] = {}
    stands_for: dict[str, Value] = {}
    for node in graph.nodes:
        if node.op != STACK or not _is_joined(node, params, readers, kind_of):
            continue
        names = tuple(v.name for v in node.operands)
        if names[0] not in joined:
            name = unused(spanning(names) or f"{names[0]}[0:{len(names)}]", taken)
            taken.add(name)
            joined[names[0]], sources[name] = replace(node.out, name=name), names
        stands_for[node.out.name] = joined[names[0]]
    if not joined:
        return graph, {}
    gone = {name for names in sources.values() for name in names}
    nodes = [
        n.substitute(lambda v: stands_for.get(v.name, v))
        for n in graph.nodes
        if n.results[:1] == () or n.results[0].name not in stands_for
    ]
    own = [joined.get(v.name, v) for v in graph.params]
    graph = replace(
        graph,
        params=tuple(v for v in own if v.name not in gone),
        nodes=tuple(nodes),
    )
    return graph.verify(), sources


def _is_joined(
    node: Node,
    params: dict[str, Value],
    readers: dict[str, list[Node]],
    kind_of: Callable[[str], Hashable],
) -> bool:
    """Whether a stack is of parameters of one kind, and each of them is read in stacks
    of the same alone."""
    names = [v.name for v in node.operands]
    return (
        node.arg("dim") == 0
        and 1 < len({*names}) == len(names)
        and all(name in params for name in names)
        and len({kind_of(name) for name in names}) == 1
        and all(
            other.op == STACK
            and (other.operands, other.arg("dim")) == (node.operands, 0)
            for name in names
            for other in readers[name]
        )
    )


def remark_on_frozen(
    graph: Graph, kind_of: Callable[[str], Hashable], trainable: Collection[str]
) -> tuple[str, ...]:
    """Which stacks would be one parameter, were not some of it frozen."""
    _, sources = join_weights(graph, kind_of)
    mixed = [
        name
        for name, own in sources.items()
        if len({source in trainable for source in own}) > 1
    ]
    if not mixed:
        return ()
    more = f" and {len(mixed) - 1} more" if mixed[1:] else ""
    return (
        f"each rank has all of {mixed[0]}{more}, of which some want a gradient and "
        "some do not; where all do as the step is compiled, and some of "
        "step.named_parameters() are frozen then, a rank of ep has its own",
    )


def enclosing(paths: Sequence[str]) -> str:
    """A path for what is in all of these: `experts[0:8].w1`; or the module that has
    them all."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    common = takewhile(lambda level: len({*level}) == 1, levels)
    return spanning(paths) or ".".join(level[0] for level in common)


def spanning(names: Sequence[str]) -> str | None:
    """`experts[0:8].w1` for experts.0.w1, experts.1.w1 ...; None for names that have
    no number in common place that counts from 0."""
    if len({*names}) == 1:
        return names[0]
    rows = [name.split(".") for name in names]
    if len({len(row) for row in rows}) > 1:
        return None
    columns = [*zip(*rows, strict=True)]
    differing = [i for i, column in enumerate(columns) if len({*column}) > 1]
    if len(differing) != 1:
        return None
    (at,) = differing
    stem = columns[at][0].rstrip("0123456789")
    numbers = [part.removeprefix(stem) for part in columns[at]]
    if numbers != [str(i) for i in range(len(names))]:
        return None
    before, after = ".".join([*rows[0][:at], stem]), ".".join(rows[0][at + 1 :])
    before = before.removesuffix(".")
    return f"{before}[0:{len(names)}]" + (f".{after}" if after else "")
