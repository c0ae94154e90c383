"""`if mask.any():` around what is done with the rows that a mask chooses.

Whether there are such rows is known only when a program runs. But where the rows of
`keep_all_rows` are none, nothing is added; so the model is read as if there were some.
That it is the same without them is proved: it is read a second time as if there were
none, and must be, operation by operation, what is left of the first reading.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.chosen_rows import ADDING, CHOOSES, LOSSES
from ..capture.user_frames import asked_by_user, at_work
from ..capture.values_read import UNKNOWN, Read, read_here
from ..errors import CaptureError
from ..graph import Graph, Node, Value, map_values
from ..ops.op import op_of, shows_all

# Marks the tensor that was asked about in a capture, if it asserts nothing of it.
MARK = torch.ops.aten._assert_tensor_metadata.default
TOPK = (torch.topk, Tensor.topk)
UNIQUE = (torch.unique, Tensor.unique)
BINCOUNT = (torch.bincount, Tensor.bincount)
# What gives counts one by one, of which the last that are 0 change nothing.
ONE_BY_ONE = (Tensor.tolist, Tensor.unbind, Tensor.dim)
# The same numbers, in another shape or place.
SEEN = (
    *(torch.flatten, torch.reshape, Tensor.contiguous, Tensor.detach, Tensor.flatten),
    *(Tensor.long, Tensor.ravel, Tensor.reshape, Tensor.view),
)
# 0 throughout where their first operand is, beside what shows all of it.
STAY = {"aten.any", "aten.select", "aten.sum", "aten.expand"}
EMPTY = -1  # the key of rows of which there are none


def is_unknown(x: Tensor) -> bool:
    """Whether what is in a tensor is not known in a capture."""
    return isinstance(x, FakeTensor) and x.constant is None


class Guards:
    """Answers to whether there are rows, while a model is captured. some: the answer.
    read: what was asked last, as an error would say it."""

    def __init__(self) -> None:
        self.some = True
        self.read: Read | None = None
        # Tensors by their id. Of what topk chose: from how many, and as of which write;
        # of what `bincount` counts: what it counts.
        self.chosen: dict[int, tuple[Tensor, int, int]] = {}
        self.counted: dict[int, tuple[Tensor, Tensor]] = {}
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}  # each, and if it is not 0
        # Counts that torch would give without the last ones that are 0, of how many.
        self.short: dict[int, tuple[Tensor, int]] = {}

    def instead(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives that torch cannot answer; None of others."""
        if func is Tensor.__bool__ and is_unknown(args[0]) and asked_by_user():
            return self.answer(args[0])
        x = _first(args, kwargs)
        count = self._count(x)
        if count and func in UNIQUE and len(args) < 2 and not kwargs.get("dim"):
            if any(kwargs.get(f"return_{extra}") for extra in ("inverse", "counts")):
                return None
            return self._different(x, count)
        if (
            count
            and func in BINCOUNT
            and len(args) == 1
            and not kwargs.keys() - {"minlength"}
        ):
            least = kwargs.get("minlength", 0)
            counts = F.one_hot(x, max(count, least)).sum(0)
            self.counted[id(counts)] = counts, x
            if least < count:
                self.short[id(counts)] = counts, count
            return counts
        if func not in ONE_BY_ONE and (short := _any_of(self.short, args)):
            raise CaptureError(
                "how long the result of bincount is depends on the values of tensors",
                source=at_work(),
                fix=f"say how many there are: torch.bincount(x, minlength={short[1]})",
            )
        if func is Tensor.unbind and id(x) in self.counted:  # as of tolist
            counts, values = self.counted[id(x)]
            by_number = counts.unbind()
            for number, n in enumerate(by_number):
                self.numbers[id(n)] = n, (values == number).any()
            return by_number
        if func is Tensor.item and id(x) in self.numbers:
            n, any_row = self.numbers[id(x)]
            return RowCount(self, any_row, n)
        return None

    def _different(self, x: Tensor, count: int) -> Choices:
        """What there is in `x`, of numbers below `count`."""
        if self.some:
            for number in range(count):
                MARK((x == number).any())
        self.read = read_here("unique", rows=True)
        choices = [torch.tensor(number) for number in range(count)]
        return Choices(choices if self.some else ())

    def answer(self, x: Tensor, rows: bool = False) -> bool:
        """x: a number, whether it is other than 0; or rows, whether there are any."""
        MARK(x)
        self.read = read_here("numel" if rows else "__bool__", rows)
        return self.some

    def note(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> Any:
        """Its result, or of a number of rows what can be asked about it."""
        x = _first(args, kwargs)
        if func is Tensor.numel and isinstance(result, UNKNOWN):
            return RowCount(self, x, result)
        if func in TOPK and x.ndim and is_unknown(result.indices):
            dim = kwargs.get("dim", (*args, -1, -1, -1)[2])
            self._choose(result.indices, x.shape[dim])
        elif func in SEEN and (count := self._count(x)):
            self._choose(result, count)
        return result

    def _choose(self, x: Tensor, count: int) -> None:
        self.chosen[id(x)] = x, count, x._version

    def _count(self, x: Any) -> int:
        """From how many topk chose what is in a tensor; 0 of others."""
        _, count, written = self.chosen.get(id(x), (x, 0, 0))
        return count if count and x._version == written else 0


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call works on, which may be given by name."""
    return args[0] if args else kwargs.get("input")


def _any_of(known: Mapping[int, tuple], args: Sequence[Any]) -> tuple | None:
    """What is known of the first tensor among the arguments of which something is."""
    return next((known[id(x)] for x in args if id(x) in known), None)


class Choices(tuple[Tensor, ...]):
    """What topk chose at all: it may be gone through, and no more."""

    def __getattr__(self, name: str) -> Any:
        raise read_here(name, rows=True).error()


class RowCount:
    """The number of rows that the data choose: it may be compared with 0, or be an
    unknown number. x: rows, or whether there are any."""

    def __init__(self, guards: Guards, x: Tensor, unknown: Any) -> None:
        self.guards, self.x, self.unknown = guards, x, unknown

    def __bool__(self) -> bool:
        return self.guards.answer(self.x, rows=True)

    def __gt__(self, other: Any) -> Any:
        return bool(self) if other == 0 else self.unknown > other

    def __ge__(self, other: Any) -> Any:
        return bool(self) if other == 1 else self.unknown >= other

    def __lt__(self, other: Any) -> Any:
        return not self if other == 1 else self.unknown < other

    def __le__(self, other: Any) -> Any:
        return not self if other == 0 else self.unknown <= other

    def __eq__(self, other: object) -> Any:
        return not self if other == 0 else self.unknown == other

    def __ne__(self, other: object) -> Any:
        return bool(self) if other == 0 else self.unknown != other

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unknown, name)

    def __mul__(self, other: Any) -> Any:
        return self.unknown * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.unknown

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.unknown


class Keys:
    """Numbers for what graphs compute, the same for what is made alike."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, made: Hashable) -> int:
        return self.numbers.setdefault(made, len(self.numbers))

    def of(
        self,
        graph: Graph,
        literals: Mapping[str, Tensor],
        zeros: Set[str] = frozenset(),
    ) -> dict[str, int]:
        """Value name -> the key of what it is where the values of these names are 0, as
        are rows that they choose."""
        keys = {v.name: self.number(v.name) for v in graph.sources}
        keys |= {name: self.number(_content(x)) for name, x in literals.items()}
        zeros = set(zeros)
        for node in graph.nodes:
            args, kwargs = map_values(
                lambda v: ("value", keys[v.name]), (node.args, {**node.kwargs})
            )
            made = node.op, args, tuple(sorted(kwargs.items(), key=str))
            read = [keys[v.name] for v in node.operands]
            fresh = [
                None if v is None else self.number((*made, place))
                for place, v in enumerate(node.outs)
            ]
            if EMPTY in read:
                fresh = [_without(node, read)] * len(fresh)
            elif zeros.intersection(v.name for v in node.operands):
                if node.op == CHOOSES:
                    fresh = [EMPTY] * len(fresh)
                elif _stays(node, zeros):
                    zeros.update(v.name for v in node.results)
                elif (rest := _added(node, zeros)) is not None:
                    fresh = [keys[rest.name]]
            for v, key in zip(node.outs, fresh, strict=True):
                if v is not None:
                    keys[v.name] = self.number(v) if key is None else key
        return keys


def _stays_zero(node: Node) -> bool:
    return shows_all(node) or node.name in STAY


def _stays(node: Node, zeros: Set[str]) -> bool:
    """Whether what a node makes of values that are 0 is 0."""
    if node.name == "aten.mul":
        return True
    return _stays_zero(node) and node.operands[0].name in zeros


def _added(node: Node, zeros: Set[str]) -> Value | None:
    """What a sum is, if the other operand is 0."""
    if node.name != "aten.add" or len(node.operands) != 2:
        return None
    rest = [v for v in node.operands if v.name not in zeros]
    return rest[0] if rest and rest[0].shape == node.out.shape else None


def _without(node: Node, keys: list[int]) -> int | None:
    """The key of what a node makes of no rows; None if it is a matter of its own.
    keys: of its operands."""
    if node.name in ("aten.index_put", *ADDING):
        return keys[0]
    alone = node.name in ("aten.sum", "aten.mean", *LOSSES)
    return None if alone else EMPTY


def _content(x: Tensor) -> Hashable:
    return str(x.dtype), tuple(x.shape), str(x.tolist())


class Reading(Protocol):
    """A captured model: `passes.capture.trace.Traced`."""

    @property
    def graph(self) -> Graph: ...

    @property
    def literals(self) -> Mapping[str, Tensor]: ...

    @property
    def asked(self) -> Sequence[Value]: ...


def _compared_alike(one: Reading, keys: Mapping[str, int], zeros: Set[str]) -> set[str]:
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
            x, number = source(node.operands[0]), node.args[1]
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


def are_same(some: Reading, none: Reading) -> bool:
    """Whether a model computes the same where there are no rows as it does if it is
    read as if there were some."""
    keys, outputs = Keys(), []
    for one in (some, none):
        graph, literals = one.graph, one.literals
        plain, made = keys.of(graph, literals), graph.producers()
        zero_keys = {plain[name] for v in one.asked for name in _zeros(v, made)}
        zeros = {name for name, key in plain.items() if key in zero_keys}
        zeros |= _compared_alike(one, plain, zeros)
        left = keys.of(graph, literals, zeros)
        outputs.append([left[v.name] for v in graph.outputs])
    return outputs[0] == outputs[1]


def _zeros(v: Value, made: Mapping[str, Node]) -> list[str]:
    """Values that are 0 throughout where v is, or has no elements."""
    node = made.get(v.name)
    if node is None or not node.operands:
        return [v.name]
    x = node.operands[0]
    if node.op == CHOOSES:
        return _zeros(x, made)
    if node.name == "aten.index" and len(node.operands) > 1 and v.shape:
        return _zeros(node.operands[1], made)
    if node.name in ("aten.gt", "aten.ne") and node.args[1:] == (0,):
        is_zero = node.name == "aten.ne" or _counts(x, made)
        return [v.name, *(_zeros(x, made) if is_zero else [])]
    if node.name == "aten.sum" and x.dtype != torch.bool:
        return [v.name]
    # One number of x that is 0 says nothing of the others.
    whole = _stays_zero(node) and node.name != "aten.select"
    return [v.name, *(_zeros(x, made) if whole else [])]


def _counts(v: Value, made: Mapping[str, Node]) -> bool:
    """Whether a value is a sum of what cannot be below 0, as if it is of a mask."""
    node = made.get(v.name)
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
