"""What the integers of a batch may be, read off the graph that takes them.

A field whose values pick rows of a table, or are compared with what a loss predicts,
has a range that shapes alone give. What the model itself takes out of a field (labels
that are to be ignored) is in no range, but occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...graph import Graph, Node, Value, bare
from ...ops.arguments import arguments, shows_operand
from ...ops.op import op_of, shows_all

INDEX, LABEL, MASK, VALUE = "index", "label", "mask", "value"
DOCUMENT = "document"


@dataclass(frozen=True)
class InputRange:
    """role: "index", rows of a table; "label", classes of a loss; "mask", what is seen
    and what is not; "document", ids that are compared with each other; "value",
    anything else. low, high: of an index or label, the first
    value and the one after the last. holes: values out of that range, which the model
    takes out before it looks anything up.
    """

    role: str
    low: int = 0
    high: int = 0
    holes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Origin:
    """A value that is a field's, moved about: of which one, what was added to it, and
    whether some of it may have been replaced."""

    field: str
    shift: int = 0
    guarded: bool = False


@dataclass
class _Uses:
    """A field's range. rows: (lowest, one after the highest) of each table or loss.
    ignored: of each loss, the label that it leaves out. strict: there is a table that
    takes values as they come. compared: constants. is_mask: it becomes a truth value.
    is_document: its values are compared with each other.
    """

    rows: list[tuple[int, int]] = field(default_factory=list)
    ignored: list[int] = field(default_factory=list)
    compared: set[int] = field(default_factory=set)
    strict: bool = False
    is_mask: bool = False
    is_document: bool = False

    def range(self) -> InputRange:
        if not self.rows:
            document = DOCUMENT if self.is_document else VALUE
            return InputRange(MASK if self.is_mask else document)
        low = max(low for low, _ in self.rows)
        high = min(high for _, high in self.rows)
        common = set(self.ignored).intersection(*({i} for i in self.ignored))
        holes = common if self.ignored else self.compared
        outside = sorted(n for n in holes if not low <= n < high)
        role = LABEL if self.ignored or (outside and not self.strict) else INDEX
        return InputRange(role, low, high, () if self.strict else tuple(outside))


COMPARED, LOGICAL = {"eq", "ne"}, {"logical_not", "logical_and", "logical_or"}
# A comparison with 0 (or -1) that takes out the negative ones.
SIGNS = {("ge", 0), ("gt", -1), ("lt", 0), ("le", -1)}
IGNORED = -100  # torch's own


def find_input_ranges(graph: Graph) -> dict[str, InputRange]:
    """The range of values of each field of the batch that is not floating point.

    graph: as captured, or normalized; for the shapes of its own inputs.
    """
    fields = [v for v in graph.inputs if not v.dtype.is_floating_point]
    uses = {v.name: _Uses(is_mask=v.dtype is torch.bool) for v in fields}
    origins = {v.name: {_Origin(v.name)} for v in fields}
    for node in graph.nodes:
        if not any(v.name in origins for v in node.operands):
            continue
        _note_uses(node, origins, uses)
        moved = set(_moved(node, origins))
        for out in node.results:
            if moved and not out.dtype.is_floating_point:
                origins[out.name] = moved
    return {name: moved.range() for name, moved in uses.items()}


def _rearranges(node: Node) -> bool:
    """Whether its results hold values of its first tensor alone, as views do."""
    return op_of(node).values == "moved" or shows_all(node) or shows_operand(node.op)


def _arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by the names of torch's schema; none for our own ops."""
    return arguments(node) if node.is_aten else {}


def _of(value: Any, origins: Mapping[str, set[_Origin]]) -> set[_Origin]:
    return origins.get(value.name, set()) if isinstance(value, Value) else set()


def _moved(node: Node, origins: Mapping[str, set[_Origin]]) -> Iterator[_Origin]:
    """The origins of what a node makes."""
    name, op = bare(node.op), op_of(node)
    to_bool = any(v.dtype is torch.bool for v in node.results)
    if _rearranges(node) and node.operands:
        yield from (o for o in _of(node.operands[0], origins) if not to_bool)
    elif op.values == "replaced" and not to_bool and not node.arg("accumulate"):
        for value in node.operands:
            for o in _of(value, origins):
                yield _Origin(o.field, o.shift, guarded=True)
    elif name in ("add", "sub"):
        by = node.arg("other")
        if isinstance(by, int) and not isinstance(by, bool) and not node.kwargs:
            for o in _of(node.arg("self"), origins):
                shift = o.shift + (by if name == "add" else -by)
                yield _Origin(o.field, shift, o.guarded)


def _note_uses(
    node: Node, origins: Mapping[str, set[_Origin]], uses: Mapping[str, _Uses]
) -> None:
    """What a node does with values of a field."""
    name, labels = bare(node.op), op_of(node).labels
    for index, rows in _lookups(node):
        for o in _of(index, origins):
            uses[o.field].rows.append((-o.shift, rows - o.shift))
            uses[o.field].strict |= not o.guarded
    bound = _arguments(node)
    if labels and not bound[labels].dtype.is_floating_point:
        shape = bound["self"].shape
        for o in _of(bound[labels], origins):
            classes = shape[1] if len(shape) > 1 else shape[0]
            uses[o.field].rows.append((-o.shift, classes - o.shift))
            ignored = bound["ignore_index"]
            uses[o.field].ignored.append(ignored - o.shift)
    x, other = bound.get("self"), bound.get("other")
    if name in COMPARED and isinstance(other, int):
        for o in _of(x, origins):
            uses[o.field].compared.add(other - o.shift)
            uses[o.field].is_mask |= other in (0, 1)
    if name == "eq":
        for o in _of(x, origins) & _of(other, origins):
            uses[o.field].is_document = True
    if (name, other) in SIGNS:
        for o in _of(x, origins):
            uses[o.field].compared.add(IGNORED)
    if any(v.dtype is torch.bool for v in node.results):
        moves = _rearranges(node) or name in LOGICAL
        for value in node.operands if moves else ():
            for o in _of(value, origins):
                uses[o.field].is_mask = True


def rows_looked_up(node: Node) -> tuple[Value, int] | None:
    """An index that is in no table from its end, and how many rows that has in which a
    node looks it up."""
    if not (looks_up := op_of(node).looks_up):
        return None
    (table, index, place), bound = looks_up.split(), _arguments(node)
    dim = int(place) if place.isdigit() else bound.get(place) or 0
    return (bound[index], bound[table].shape[dim]) if bound[table].shape else None


def _lookups(node: Node) -> Iterator[tuple[Any, int]]:
    """(index, rows of the table) of each that a node looks up."""
    name, bound = bare(node.op), _arguments(node)
    if (known := rows_looked_up(node)) is not None:
        yield known
    elif name in ("index", "index_put", "_unsafe_index"):
        for dim, index in enumerate(bound["indices"]):
            if index is not None and index.dtype is not torch.bool:
                yield index, bound["self"].shape[dim]
    elif name == "one_hot" and bound["num_classes"] > 0:
        yield bound["self"], bound["num_classes"]
    elif node.op == "autopar.pick":
        yield node.arg("index"), node.arg("x").shape[-1]
