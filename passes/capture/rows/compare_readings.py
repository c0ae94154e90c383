"""Whether two readings of a model, as if rows were chosen and as if none were, compute
the same: see `passes.capture.forward.guards`."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ...graph import Graph, Node, Value, map_values
from ...ops.finite import keeps_finite
from ...ops.op import is_view, op_of, shows_all
from ...ops.row_dims import along
from ...traced import Traced
from ..forward.guards import Reading
from ..rows.choices import REPEATED, Match, find_counted, find_match
from ..rows.reduce_rows import LOSSES, MEAN
from ..rows.rows import ADDING, CHOOSES, ZEROS

# One that is 0 says so of all numbers only where none is below 0.
TAKEN_TOGETHER = ("aten.sum", "aten.max", "aten.amax")
# 0 throughout where their first operand is, beside what shows some of it.
STAY = ("aten.any", "aten.count_nonzero", *TAKEN_TOGETHER)
WRITES = {
    *(f"aten.index_{name}" for name in ("put", "copy", "fill")),
    "aten.masked_scatter",
    *("aten.scatter", *ADDING),
}
EMPTY = -1  # the key of rows of which there are none


class Keys:
    """Numbers for what graphs compute, the same for what is made alike."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        # Of what is seen in a wider type, the key of what it is, and the type of that.
        self.widened: dict[int, tuple[int, torch.dtype]] = {}
        # Values along rows of which there are none -> the dim that goes along these.
        self.along: dict[str, int] = {}
        self.means = False
        # Values that may not be finite where those that are 0 are; and keys of those
        # that are made in any case.
        self.spoiled: set[str] = set()
        self.shared: Set[int] = frozenset()

    def number(self, made: Hashable) -> int:
        return self.numbers.setdefault(made, len(self.numbers))

    def of_values(
        self,
        graph: Graph,
        literals: Mapping[str, Tensor],
        zeros: Set[str] = frozenset(),
        means: bool = False,
    ) -> dict[str, int]:
        """Value name -> the key of what it is where the values of these names are 0, as
        are rows that they choose. means: whether a mean of no rows is 0 too."""
        keys = {v.name: self.number(v.name) for v in graph.sources}
        keys |= {name: self.number(_content(x)) for name, x in literals.items()}
        zeros, self.means, self.along, self.spoiled = set(zeros), means, {}, set()
        zeros.update(name for name, x in literals.items() if not x.any())
        zero_keys = {keys[name] for name in zeros & keys.keys()} - {EMPTY}
        for node in graph.nodes:
            made = self._of_results(node, keys, zeros)
            for v, key in zip(node.outs, made, strict=True):
                if v is None:
                    continue
                keys[v.name] = self.number(v) if key is None else key
                if v.name in zeros:
                    zero_keys.add(keys[v.name])
                elif keys[v.name] in zero_keys:
                    zeros.add(v.name)
            self._note_spoiled(node, keys, zeros)
        for v in graph.outputs:
            if v.name in zeros:
                keys[v.name] = self.number(("0", v.shape, v.dtype))
        return keys

    def _of_results(
        self, node: Node, keys: Mapping[str, int], zeros: set[str]
    ) -> list[int | None]:
        """A key for each result, None of one that is a matter of its own. keys: of what
        was made before. zeros: is given the names of results that are 0."""
        args, kwargs = map_values(
            lambda v: ("value", keys[v.name]), (node.args, {**node.kwargs})
        )
        made = node.op, args, tuple(sorted(kwargs.items(), key=str))
        read = [keys[v.name] for v in node.operands]
        if EMPTY in read and node.name in WRITES:
            if node.operands[0].name in zeros:
                zeros.add(node.out.name)
            return [read[0]] * len(node.outs)
        if EMPTY in read:
            return [self._of_none(node, read, zeros)] * len(node.outs)
        if (same := self._same(node, args, read)) is not None:
            return [same]
        if node.op == CHOOSES and node.operands[0].name in zeros:
            self.along.update((v.name, 0) for v in node.results)
            return [EMPTY] * len(node.outs)
        if (rest := _added(node, zeros)) is not None:
            zeros.update([node.out.name] if rest.name in zeros else ())
            return [self._widen(keys[rest.name], rest.dtype, node.out.dtype)]
        if _is_zero(node, zeros, self.spoiled):
            zeros.update(v.name for v in node.results)
        return [
            None if v is None else self.number((*made, place))
            for place, v in enumerate(node.outs)
        ]

    def _note_spoiled(
        self, node: Node, keys: Mapping[str, int], zeros: Set[str]
    ) -> None:
        """Notes results that may not be finite, as what is divided by 0 is, or a mean
        of no rows, where they are not made in any case."""
        read = {v.name for v in node.operands}
        mean = node.name == "aten.mean" or node.arg("reduction") == MEAN
        of_none = EMPTY in map(keys.get, read) or not read.isdisjoint(zeros)
        alone = any(keys[v.name] not in self.shared for v in node.results)
        spoils = (mean or not keeps_finite(node)) and (of_none or alone)
        if spoils or not read.isdisjoint(self.spoiled):
            made = [v.name for v in node.results if keys[v.name] != EMPTY]
            self.spoiled.update(name for name in made if name not in zeros)

    def _of_none(self, node: Node, read: list[int], zeros: set[str]) -> int | None:
        """The key of what a node makes of no rows. read: the keys of its operands."""
        pairs = zip(node.operands, read, strict=True)
        if all(v.name in self.along for v, key in pairs if key == EMPTY):
            if not _is_total(node, means=True):
                self._note_along(node)
            elif _is_total(node, self.means):
                zeros.add(node.results[0].name)
        if any(v.name in self.along for v in node.results):
            return EMPTY
        alone = node.name in ("aten.sum", "aten.mean", *LOSSES)
        return None if alone or _is_total(node, means=True) else EMPTY

    def _note_along(self, node: Node) -> None:
        """Notes which dim of a node's results goes along rows, if all work on each."""
        if not node.results or not any(v.name in self.along for v in node.operands):
            return
        if node.name == "aten.broadcast_tensors":
            pairs = zip(node.operands, node.outs, strict=True)
            same = [(v, out) for v, out in pairs if out and v.shape == out.shape]
            known = [(v, out) for v, out in same if v.name in self.along]
            self.along.update((out.name, self.along[v.name]) for v, out in known)
            return
        dim: int | None = None
        if node.name in ("aten.index", "aten.index_select"):
            x, *_ = node.operands
            if x.name not in self.along:
                indices = node.arg("indices") or (None,) * (
                    node.arg("dim") % len(x.shape)
                )
                dim = sum(itertools.takewhile(bool, (i is None for i in indices)))
        else:
            dim = along(node, lambda v: self.along.get(v.name))
        if dim is not None:
            self.along.update((v.name, dim) for v in node.results)

    def _same(self, node: Node, args: Sequence[Any], read: list[int]) -> int | None:
        """The key of what a node makes no other: a copy, or a part put back."""
        if node.name == "aten.copy":
            source, out = node.operands[-1], node.out
            alike = source.shape == out.shape and source.dtype == out.dtype
            return read[-1] if alike else None
        if op_of(node).elements == "same" and node.name != "aten.detach":
            return read[0]
        if op_of(node).elements == "cast" and read[0] in self.widened:
            key, dtype = self.widened[read[0]]
            return key if dtype == node.out.dtype else None
        if node.name == "aten.select_scatter":
            part = "aten.select.int", (args[0], *args[2:]), (), 0
            return read[0] if self.number(part) == read[1] else None
        return None

    def _widen(self, key: int, dtype: torch.dtype, wide: torch.dtype) -> int:
        """The key of what is in a wider type, as a sum with 0 of that type is."""
        if dtype == wide:
            return key
        made = self.number(("in", wide, key))
        self.widened[made] = key, dtype
        return made


def _stays_zero(node: Node) -> bool:
    stays = node.name in STAY and len(node.operands) == 1
    return stays or shows_all(node) or is_view(node)


def _is_zero(node: Node, zeros: Set[str], spoiled: Set[str]) -> bool:
    """Whether all that a node makes is 0, where the values of these names are. spoiled:
    values that may not be finite then."""
    if node.name in ZEROS:
        return True
    if node.name == "aten.mul":
        if any(v.name in spoiled for v in node.operands):
            return False
        return node.arg("other") == 0 or any(v.name in zeros for v in node.operands)
    if node.name == "aten.div" and len(node.operands) == 1:
        return node.operands[0].name in zeros
    first = node.operands[:1]
    return any(v.name in zeros for v in first) and _stays_zero(node)


def _is_total(node: Node, means: bool) -> bool:
    """Whether one number is made of all rows, 0 where there are none: a sum, or a mean
    that is taken to be."""
    if len(node.results) != 1 or node.results[0].shape:
        return False
    if node.name in ("aten.sum", "aten.mean"):
        return means or node.name == "aten.sum"
    return node.arg("reduction") == 2 or (means and node.arg("reduction") == 1)


def _added(node: Node, zeros: Set[str]) -> Value | None:
    """What a sum is, if the other operand is 0."""
    if node.name != "aten.add":
        return None
    rest = [v for v in node.operands if v.name not in zeros]
    if len(node.operands) == 1:
        rest = [*node.operands] if node.arg("other") == 0 else []
    elif len(rest) == len(node.operands):
        return None
    else:
        rest = rest or [*node.operands]
    return rest[0] if rest and rest[0].shape == node.out.shape else None


def _content(x: Tensor) -> Hashable:
    return str(x.dtype), tuple(x.shape), str(x.tolist())


def _compared_alike(one: Traced, keys: Mapping[str, int], zeros: Set[str]) -> set[str]:
    """Comparisons of the same numbers as those that are 0, seen in other shapes."""
    made = one.graph.producers()

    def source(v: Value) -> Value:
        node = made.get(v.name)
        is_cast = node is not None and op_of(node).elements == "cast"
        if node is None or is_cast or not shows_all(node):
            return v
        return source(node.operands[0])

    alike: dict[tuple[int, Any], set[str]] = {}
    for node in one.graph.nodes:
        if node.name == "aten.eq":
            x, number = source(node.operands[0]), node.arg("other")
            if isinstance(number, Value):
                literal = one.literals.get(source(number).name)
                number = None if literal is None or literal.ndim else literal.item()
            alike.setdefault((keys[x.name], number), set()).add(node.out.name)
    return {
        name
        for (_, number), names in alike.items()
        if number is not None and names & zeros
        for name in names
    }


def _of_numbers(one: Traced, made: Mapping[str, Node]) -> set[str]:
    """Masks that choose nothing where none of the choices is a number that was asked
    about, as `one_hot(choices).sum(0)[number] > 0`."""

    def numbers(match: Match | None) -> tuple[str, int | None] | None:
        """Which numbers are compared with which; by how many of each there are, those
        that were counted."""
        if match is None:
            return None
        node, name = made.get(match.choices.name), match.choices.name
        if node is not None and node.op == REPEATED:
            counted = find_counted(node.arg("repeats"), made)
            name = counted.name if counted is not None else name
        return name, match.number

    asked = {numbers(find_match(v, made)) for v in one.asked if not v.shape}
    asked = {known for known in asked if known and known[1] is not None}
    if not asked:
        return set()
    values = (v for node in one.graph.nodes for v in node.results)
    return {v.name for v in values if numbers(find_match(v, made)) in asked}


def are_same(
    some: Traced, none: Traced, means: bool = False, every: bool = True
) -> bool:
    """Whether a model computes the same where there are no rows as it does if it is
    read as if there were some. means: if a mean of no rows is 0 where it is read as if
    there were some, of which there is a mean then. every: whether there are none of
    any."""
    keys, outputs = Keys(), []
    for one in (none, some):
        graph, literals = one.graph, one.literals
        plain, made = keys.of_values(graph, literals), graph.producers()
        if one is none:
            keys.shared = {*plain.values()}
        zero_keys = {plain[name] for v in one.asked for name in _zeros(v, made)}
        zeros = {name for name, key in plain.items() if key in zero_keys}
        zeros |= _compared_alike(one, plain, zeros) | _of_numbers(one, made)
        left = keys.of_values(graph, literals, zeros, means and one is some)
        outputs.append([left[v.name] for v in graph.outputs])
        chosen = (node for node in graph.nodes if node.op == CHOOSES)
        full = (left[v.name] != EMPTY for n in chosen for v in n.results)
        if means and every and any(full):
            return False  # means of these are no number where they are none
    return outputs[0] == outputs[1]


def are_equal(one: Traced, other: Traced) -> bool:
    """Whether two readings of a model are the same, operation by operation."""
    keys, outputs = Keys(), []
    for reading in (one, other):
        plain = keys.of_values(reading.graph, reading.literals)
        outputs.append([plain[v.name] for v in reading.graph.outputs])
    return outputs[0] == outputs[1]


# Readings that are to compute the same.
AGREE = (
    (Reading.SOME, Reading.NONE, are_same),
    (Reading.SOME, Reading.ONE, are_equal),
    (Reading.MARKED, Reading.LEFT, are_same),  # each turn adds what it would alone
)


def agree(readings: Mapping[Reading, Traced]) -> bool:
    """Whether those of the readings that are to compute the same do."""
    return all(
        alike(readings[one], readings[other])
        for one, other, alike in AGREE
        if other in readings
    )


def _zeros(v: Value, made: Mapping[str, Node]) -> list[str]:
    """Values that are 0 throughout where v is, or has no elements."""
    node = made.get(v.name)
    if node is None or not node.operands:
        return [v.name]
    x = node.operands[0]
    if node.op == CHOOSES or (node.name == "aten.slice" and not node.arg("start")):
        return _zeros(x, made)
    if node.name == "aten.cat":  # a table of places, or what is 0 as all of it is
        return [v.name, *_zeros(x, made)]
    if node.name == "aten.index" and len(node.operands) > 1 and v.shape:
        return _zeros(node.operands[1], made)
    if node.name in ("aten.gt", "aten.ne") and node.arg("other") == 0:
        is_zero = node.name == "aten.ne" or _counts(x, made)
        return [v.name, *(_zeros(x, made) if is_zero else [])]
    if node.name in TAKEN_TOGETHER and x.dtype != torch.bool:
        return [v.name]
    # One number of x that is 0 says nothing of the others.
    if op_of(node).view == "copies":  # of all, or windows with gaps between them
        whole = node.name == "aten.expand"
    else:
        whole = _stays_zero(node) and (not is_view(node) or v.numel == x.numel)
    return [v.name, *(_zeros(x, made) if whole else [])]


def _counts(v: Value, made: Mapping[str, Node]) -> bool:
    """Whether a value is a sum of what cannot be below 0, as if it is of a mask."""
    node = made.get(v.name)
    if node is not None and node.name == "aten.count_nonzero":
        return True
    if node is None or node.name != "aten.sum":
        return False
    x = node.operands[0]
    while (node := made.get(x.name)) is not None and x.dtype != torch.bool:
        if node.name == "aten.one_hot":
            return True
        if not (op_of(node).elements == "cast" or _stays_zero(node)):
            return False
        x = node.operands[0]
    return x.dtype == torch.bool
