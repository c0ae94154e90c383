"""The elements of choices in a mask that compares them with a number.

    masks = (chosen[..., None] == torch.arange(8)).permute(2, 0, 1)    chosen [s,2]
    mask = masks[3]                              of number 3; dims: s, and which choice

A dim of such a mask goes along parts of the choices, each a stride and an extent in
their elements, so that views may cut dims and join them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...graph import Node, Value
from ...ops.op import op_of, shows_all
from ...ops.reductions import dims_of, topmost
from ...ops.rules import equation
from ..rows.distinct import distinct_dims
from ..rows.input_ranges import rows_looked_up
from ..rows.rows import ZEROS

Part = tuple[int, int]  # stride and extent, in elements of the choices
Parts = tuple[Part, ...]  # the outermost first
NUMBERS = -1  # the stride of the dim of a mask that has one for each number
REPEATED = "aten.repeat_interleave.self_Tensor"
LOSSY = (torch.bool, torch.float16, torch.bfloat16)  # which not all numbers survive


@dataclass(frozen=True)
class Match:
    """A mask: where `choices` is `number`, if it has no dim for numbers. dims: the
    parts of the choices that each goes along. gone: parts, of which any may be it."""

    choices: Value
    dims: tuple[Parts, ...]
    number: int | None = None
    gone: Parts = ()

    @property
    def order(self) -> Parts:
        """The parts that the rows which it chooses are in order of; () if they are as
        the choices are."""
        parts = tuple(p for own in (*self.dims, self.gone) for p in own)
        return () if [*parts] == sorted(parts, reverse=True) else parts


def find_match(v: Value, made: Mapping[str, Node]) -> Match | None:
    """What a mask compares, if it is one of choices."""
    node = made.get(v.name)
    if node is None or not node.operands:
        return None
    x, kind = node.operands[0], op_of(node)
    if node.name == "aten.eq":
        return _is_one(node, made) or _compared(node, made)
    if node.name == "aten.one_hot":
        choices, dims = find_choices(x, made)
        return Match(choices, (*dims, ((NUMBERS, v.shape[-1]),)))
    if node.name == "aten.scatter":
        return _scattered(node, made)
    same = kind.stays or _is_not_zero(node)
    reduces = node.name == "aten.any" or node.name in ("aten.sum", "aten.amax")
    shows = kind.view in ("shape", "order")
    picks = node.name in ("aten.select", "aten.unbind")
    # Of other ops nobody looks at what they are made of, which is all of a model.
    known = find_match(x, made) if same or reduces or shows or picks else None
    if known is None or same:
        return known
    if reduces:
        return _any(known, node)
    if shows:
        after = seen(node, known.dims)
        return None if after is None else replace(known, dims=after)
    if picks:
        dim = int(node.arg("dim")) % len(x.shape)
        at = node.arg("index") if node.name == "aten.select" else node.outs.index(v)
        if known.dims[dim] == ((NUMBERS, x.shape[dim]),):
            dims = (*known.dims[:dim], *known.dims[dim + 1 :])
            return replace(known, dims=dims, number=at % x.shape[dim])
    return None


def find_choices(v: Value, made: Mapping[str, Node]) -> tuple[Value, tuple[Parts, ...]]:
    """What integers are a view of, all of it, and the parts along each of their
    dims."""
    node = made.get(v.name)
    if node is not None and node.operands:
        x, kind = node.operands[0], op_of(node)
        exact = not x.dtype.is_floating_point and x.dtype != torch.bool
        if exact and (kind.stays or kind.view in ("shape", "order")):
            choices, dims = find_choices(x, made)
            after = dims if kind.stays else seen(node, dims)
            if after is not None:
                return choices, after
    strides = [math.prod(v.shape[d + 1 :]) for d in range(len(v.shape))]
    parts = zip(strides, v.shape, strict=True)
    return v, tuple(joined([part]) for part in parts)


def numbers_of(choices: Value, made: Mapping[str, Node]) -> int | None:
    """How many numbers choices may be, 0 and up; None if that is not known."""
    known = _numbers_made(choices, made)
    return _numbers_used(choices, made) if known is None else known


def _numbers_used(choices: Value, made: Mapping[str, Node]) -> int | None:
    """How many rows the smallest table has in which choices are looked up, as scores of
    experts by those that a table names for a token: any other is an error."""
    users = (node for node in made.values() if choices in node.operands)
    lookups = filter(None, map(rows_looked_up, users))
    return min((rows for index, rows in lookups if index == choices), default=None)


def _numbers_made(choices: Value, made: Mapping[str, Node]) -> int | None:
    """The same, by how choices are made."""
    node = made.get(choices.name)
    if node is None or not node.operands:
        return None
    x = node.operands[0]
    if (along := _chosen(choices, node)) is not None:
        return along[0].shape[along[1]]
    if node.name == "aten.remainder" and not x.dtype.is_floating_point:
        most = node.arg("other")
        return most if type(most) is int and most > 0 else None
    if node.name == "aten.masked_fill":
        return _replaced(node, made)
    if node.op == REPEATED:
        return x.numel if counting_dim(x, made) == 0 else None
    if node.name in ("aten.cat", "aten.stack"):
        each = [numbers_of(v, made) for v in node.operands]
        return None if None in each else max(n for n in each if n)
    if _takes(choices, node):
        return None if x.dtype.is_floating_point else numbers_of(x, made)
    return None


def places_along(v: Value, made: Mapping[str, Node]) -> tuple[Value, int] | None:
    """A value and its dim, of which integers are places: those that topk or argmax
    chose, some of them, or with another number in place of some."""
    node = made.get(v.name)
    if node is None or not node.operands:
        return None
    if (along := _chosen(v, node)) is not None:
        return along
    if node.name == "aten.masked_fill" or _takes(v, node):
        return places_along(node.operands[0], made)
    return None


def _chosen(v: Value, node: Node) -> tuple[Value, int] | None:
    x, dim = node.operands[0], node.arg("dim")
    is_index = not v.dtype.is_floating_point and x.dtype.is_floating_point
    if not is_index or not isinstance(dim, int) or not x.shape:
        return None
    largest = op_of(node).rule is topmost or node.name in ("aten.argmax", "aten.max")
    return (x, dim % len(x.shape)) if largest else None


def _takes(v: Value, node: Node) -> bool:
    """Whether the numbers in a value are some of the node's operand."""
    kind = op_of(node)
    shows = kind.view in ("shape", "order", "part", "copies") or kind.values == "moved"
    sorts = kind.rule is topmost and v == node.outs[0]
    return kind.stays or shows or sorts or node.name in ("aten.gather", "aten.index")


def _replaced(node: Node, made: Mapping[str, Node]) -> int | None:
    """How many numbers choices may be after some were replaced by another one; the last
    is none of them if it was (an expert that does nothing)."""
    x, mask, fill = node.operands[0], node.operands[1], node.arg("value")
    most = numbers_of(x, made)
    if most is None or type(fill) is not int or fill < 0:
        return None
    compared = made.get(mask.name)
    if compared is not None and compared.op == "aten.eq.Scalar":
        one, last = compared.named("self other")
        most -= one == x and last == most - 1
    return max(most, fill + 1)


def find_counted(counts: Value, made: Mapping[str, Node]) -> Value | None:
    """The choices of which it says how many are 0, 1, 2 and so on, to the last that
    there may be."""
    counts = unseen(counts, made)
    node = made.get(counts.name)
    if node is None or len(counts.shape) != 1:
        return None
    every, choices = counts.numel, None
    if node.name == "aten.histc":
        bins, low, high = node.named("bins min max")
        if low == 0 and bins - 1 <= high <= bins:
            choices, _ = find_choices(unseen(node.operands[0], made), made)
    elif node.name == "aten.sum" and (match := find_match(node.operands[0], made)):
        kept = {*range(len(match.dims))} - {*dims_of(node)}
        whole = [match.dims[d] for d in kept] == [((NUMBERS, every),)]
        if whole and are_distinct(match.choices, match.gone, made):
            choices = match.choices
    most = choices and numbers_of(choices, made)
    return choices if most and most <= every else None


def unseen(v: Value, made: Mapping[str, Node]) -> Value:
    """What v is a view or a cast of, of all its elements in their order; casts that not
    all numbers survive are left."""
    node = made.get(v.name)
    if node is None or not shows_all(node) or v.dtype in LOSSY:
        return v
    return unseen(node.operands[0], made)


def are_distinct(choices: Value, parts: Parts, made: Mapping[str, Node]) -> bool:
    """Whether no two choices are one number that differ in these parts alone."""
    shape, distinct = choices.shape, distinct_dims(choices, made)
    strides = {math.prod(shape[d + 1 :]): d for d, n in enumerate(shape) if n > 1}
    along = {strides.get(stride) for stride, _ in parts}
    return len(along) <= 1 and along <= {*distinct}


# --- parts -------------------------------------------------------------------------


def joined(parts: Sequence[Part]) -> Parts:
    """The same with neighbours that are one part made one, and none of extent 1."""
    made: list[Part] = []
    for stride, n in parts:
        if n == 1:
            continue
        if made and made[-1][0] == stride * n and stride != NUMBERS:
            made[-1] = stride, made[-1][1] * n
        else:
            made.append((stride, n))
    return tuple(made)


def extent(parts: Parts) -> int:
    """How many elements there are along parts."""
    return math.prod(n for _, n in parts)


def regrouped(parts: Sequence[Part], shape: Sequence[int]) -> tuple[Parts, ...] | None:
    """Parts as dims of this shape; None where one would be cut otherwise than
    evenly."""
    left, dims = [*parts][::-1], []
    for n in shape:
        own: list[Part] = []
        while n > 1:
            if not left:
                return None
            stride, size = left.pop()
            if size > n and size % n == 0 and stride != NUMBERS:
                left.append((stride, size // n))
                stride, size = stride * (size // n), n
            if n % size:
                return None
            own.append((stride, size))
            n //= size
        dims.append(joined(own))
    return None if left else tuple(dims)


def seen(node: Node, dims: tuple[Parts, ...]) -> tuple[Parts, ...] | None:
    """The parts along the dims of what a view shows, by those of its operand."""
    if op_of(node).view == "shape":
        return regrouped([p for own in dims for p in own], node.out.shape)
    rule = equation(node)
    if rule is None:
        return None
    return tuple(dims[rule.operands[0].index(letters)] for letters in rule.outs[0])


def complete(parts: Sequence[Part], numel: int) -> list[tuple[Part, bool]] | None:
    """All parts of choices with so many elements, the outermost first, and whether each
    is among these; None if they are not apart."""
    every: list[tuple[Part, bool]] = []
    outer = numel
    for stride, n in sorted(parts, reverse=True):
        if outer % (stride * n):
            return None
        if outer > stride * n:
            every.append(((stride * n, outer // (stride * n)), False))
        every.append(((stride, n), True))
        outer = stride
    if outer > 1:
        every.append(((1, outer), False))
    return every


# --- ops ----------------------------------------------------------------------------


def _compared(node: Node, made: Mapping[str, Node]) -> Match | None:
    """`choices == 3`, or with all numbers in a row."""
    x, other = node.named("self other")
    if not isinstance(other, Value):
        choices, dims = find_choices(x, made)
        exact = type(other) is int and not x.dtype.is_floating_point
        return Match(choices, dims, other) if exact and x.dtype != torch.bool else None
    for numbers, v in ((x, other), (other, x)):
        place = counting_dim(numbers, made)
        if place is None or v.dtype.is_floating_point or v.dtype == torch.bool:
            continue
        choices, dims = find_choices(v, made)
        back = place - len(numbers.shape)
        rank = len(node.out.shape)
        aligned: list[Parts] = [()] * (rank - len(dims)) + [*dims]
        if aligned[back]:
            continue
        aligned[back] = ((NUMBERS, numbers.shape[place]),)
        return Match(choices, tuple(aligned))
    return None


def counting_dim(v: Value, made: Mapping[str, Node]) -> int | None:
    """The dim along which integers are 0, 1, 2 ..., of a value that has no other."""
    node = made.get(v.name)
    while node is not None and node.operands:
        if node.operands[0].numel != v.numel or op_of(node).view not in (
            "shape",
            "order",
        ):
            return None
        node = made.get(node.operands[0].name)
    if node is None or node.name != "aten.arange":
        return None
    if (node.arg("start") or 0, node.arg("step") or 1) != (0, 1):
        return None
    long = [d for d, n in enumerate(v.shape) if n != 1]
    return long[0] if len(long) == 1 else None


def _is_one(node: Node, made: Mapping[str, Node]) -> Match | None:
    """`one_hot(choices) == 1`; of a sum, if no more than one of it is that number."""
    x, other = node.named("self other")
    known = find_match(x, made) if type(other) is int and other == 1 else None
    if known is None or are_distinct(known.choices, known.gone, made):
        return known
    return None


def _scattered(node: Node, made: Mapping[str, Node]) -> Match | None:
    """Zeros, and 1 at each of choices along a dim."""
    base, dim, index, value = node.named("self dim index value")
    zeros = made.get(base.name)
    if zeros is None or zeros.name not in ZEROS or type(value) is not int or value != 1:
        return None
    choices, dims = find_choices(index, made)
    dim, numbers = dim % len(base.shape), base.shape[dim]
    before, after = slice(dim), slice(dim + 1, None)
    if any(base.shape[part] != index.shape[part] for part in (before, after)):
        return None
    every = ((NUMBERS, numbers),)
    return Match(choices, (*dims[before], every, *dims[after]), gone=dims[dim])


def _is_not_zero(node: Node) -> bool:
    return node.name in ("aten.ne", "aten.gt") and node.arg("other") == 0


def _any(known: Match, node: Node) -> Match | None:
    """Whether any of a mask is set, along dims."""
    rank = len(node.operands[0].shape)
    dims = {d % rank for d in dims_of(node)}
    gone = tuple(p for d in sorted(dims) for p in known.dims[d])
    if any(stride == NUMBERS for stride, _ in gone):
        return None
    kept = tuple(_left(known.dims, dims, bool(node.arg("keepdim"))))
    return replace(known, dims=kept, gone=(*known.gone, *gone))


def _left(dims: tuple[Parts, ...], gone: set[int], keepdim: bool) -> Iterator[Parts]:
    for d, parts in enumerate(dims):
        if d not in gone:
            yield parts
        elif keepdim:
            yield ()
