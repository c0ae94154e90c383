"""Loops over the numbers that there are: `for e in torch.unique(chosen)`, or of experts
that were hit, `for e in (mask.sum((1, 2)) > 0).nonzero()`.

Which ones there are is known only when a program runs. A model is read as if all were;
that those which are not add nothing is proved: see `passes.capture.forward.guards`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from ..forward.on_meta import counts_rows
from ..forward.values_read import has_shape, is_unknown, read_here

MANY = 4096  # numbers: more than experts of a layer
UNIQUE = (torch.unique, Tensor.unique)
NONZERO = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where)
INDEX = Tensor.__getitem__
EQUAL = (torch.eq, Tensor.eq, Tensor.__eq__)
READS = (Tensor.__bool__, Tensor.__index__, Tensor.__int__, Tensor.item)
# The same numbers, in another shape or place.
SEEN = (
    *(torch.flatten, torch.reshape, Tensor.contiguous, Tensor.detach, Tensor.flatten),
    *(Tensor.long, Tensor.ravel, Tensor.reshape, Tensor.view, Tensor.squeeze),
    *(Tensor.cpu, torch.squeeze),
)

# And what is no table of places any more.
TURNED = (
    *(torch.t, torch.transpose, torch.permute, torch.swapaxes, torch.clone),
    *(Tensor.t, Tensor.transpose, Tensor.permute, Tensor.swapaxes, Tensor.clone),
    *(Tensor.int, Tensor.T.__get__, Tensor.mT.__get__),
)

# Some of the numbers, or all again; those of several; and what is left of others.
TAKEN = (
    *(torch.gather, torch.index_select, torch.take_along_dim, torch.flip, torch.roll),
    *(Tensor.gather, Tensor.index_select, Tensor.take_along_dim, Tensor.flip),
    *(Tensor.roll, Tensor.repeat, Tensor.expand),
)
REPEATED = (torch.repeat_interleave, Tensor.repeat_interleave)
JOINED = (torch.stack, torch.cat, torch.concat, torch.concatenate)
REMAINDERS = (torch.remainder, Tensor.remainder, Tensor.__mod__)

# What gives places along a dim, and which argument that is.
TOPK = (torch.topk, Tensor.topk)
SORTS = (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort)
LARGEST = (torch.max, Tensor.max, torch.argmax, Tensor.argmax)
SMALLEST = (torch.min, Tensor.min, torch.argmin, Tensor.argmin)
PLACES = {**dict.fromkeys(TOPK, 2), **dict.fromkeys((*SORTS, *LARGEST, *SMALLEST), 1)}


class Numbers(tuple[Any, ...]):
    """Numbers that there may be: it may be gone through, and no more."""

    def __getattr__(self, name: str) -> Any:
        raise read_here(name, rows=True).error()


class PresentNumbers(Numbers):
    """The same as tensors, each with a number. listed: what `tolist` would give."""

    listed: Numbers

    def tolist(self) -> Numbers:
        return self.listed


@dataclass(frozen=True)
class Places:
    """The positions of set flags [count]. rows: int64 [n, *each], where each is () or
    (1,). written: how often both had been written to when they were made."""

    rows: Tensor
    flags: Tensor
    written: tuple[int, int]

    @property
    def each(self) -> tuple[int, ...]:
        return _shape(self.rows)[1:]

    @property
    def count(self) -> int:
        return _shape(self.flags)[0]

    @property
    def are_as_made(self) -> bool:
        return self.written == (self.rows._version, self.flags._version)


class Present:
    """Tensors known to list which numbers are present. asked: whether one was iterated
    over."""

    def __init__(self) -> None:
        self.asked = False
        self._places: dict[int, Places] = {}  # by the id of their rows
        self._numbers: dict[int, tuple[Tensor, int]] = {}  # those of `Numbers`, by id
        # Integers of which each is below a number, that, and as of which write.
        self._below: dict[int, tuple[Tensor, int, int]] = {}

    def note(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Notes a result that lists present numbers, is one of them, or is computed
        from them."""
        x, *others = args or (kwargs.get("input"),)
        if isinstance(result, Tensor) and (most := self._limit(func, x, others)):
            self._note_below(result, most)
        if func in PLACES:
            self._note_places(func, x, others, kwargs, result)
        elif func in NONZERO and not (func is torch.where and others):
            self._note_rows(x, result)
        elif func in SEEN and (known := self.places(x)) is not None:
            if len(_shape(result)) in (1, 2):
                self._add(result, known.flags)
        elif func not in (*SEEN, *TURNED, INDEX, *EQUAL):
            return
        elif (number := self._number(x)) is not None:
            same = number == others[0] if func in EQUAL else number
            if type(same) in (bool, int) and math.prod(_shape(result)) == 1:
                self._numbers[id(result)] = result, same

    def below(self, x: Any) -> int:
        """A number that all integers of a tensor are below; 0 if none is known."""
        _, most, written = self._below.get(id(x), (x, 0, 0))
        return most if most and x._version == written else 0

    def _limit(self, func: Any, x: Any, others: Sequence[Any]) -> int:
        """A number that all integers which a call gives are below; 0 if none is
        known."""
        if func in (*SEEN, *TURNED, INDEX, *TAKEN) or (func in REPEATED and others):
            return self.below(x)
        if func in JOINED and isinstance(x, list | tuple) and x:
            each = [self.below(part) for part in x]
            return max(each) if all(each) else 0
        divided = func in REMAINDERS and others and type(others[0]) is int
        if divided and isinstance(x, Tensor) and not x.dtype.is_floating_point:
            return others[0] if 0 < others[0] <= MANY else 0
        return 0

    def _note_below(self, x: Tensor, most: int) -> None:
        if x.is_meta or is_unknown(x):
            self._below[id(x)] = x, most, x._version

    def _note_places(
        self,
        func: Any,
        x: Tensor,
        others: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        usual = -1 if func in (*TOPK, *SORTS) else None
        dim = kwargs.get("dim", [*others, *[usual] * 2][PLACES[func] - 1])
        shape = _shape(x)
        if type(dim) is int and shape:
            places = result if isinstance(result, Tensor) else result.indices
            self._note_below(places, shape[dim])
        if not isinstance(result, Tensor) and (most := self.below(x)):
            self._note_below(result[0], most)

    def _note_rows(self, flags: Tensor, result: Any) -> None:
        count = _shape(flags)
        if len(count) != 1 or not has_shape(flags) or count[0] > MANY:
            return
        for rows in result if isinstance(result, tuple | list) else (result,):
            if counts_rows(_shape(rows)) or not has_shape(rows):
                self._add(rows, flags)

    def _add(self, rows: Tensor, flags: Tensor) -> None:
        written = rows._version, flags._version
        self._places[id(rows)] = Places(rows, flags, written)

    def places(self, x: Tensor) -> Places | None:
        """The places whose rows a tensor holds, if it is as it was made."""
        known = self._places.get(id(x))
        return known if known is not None and known.are_as_made else None

    def of(self, numbers: Sequence[int], each: tuple[int, ...] = ()) -> PresentNumbers:
        """The numbers as tensors of one element, of the shape `each`."""
        made = PresentNumbers(torch.tensor(n).reshape(each) for n in numbers)
        made.listed = Numbers([n] if each else n for n in numbers)
        self._numbers |= {id(x): (x, n) for x, n in zip(made, numbers, strict=True)}
        return made

    def _number(self, x: Any) -> int | None:
        """The number that a tensor holds, if it is one of the listed ones."""
        known, number = self._numbers.get(id(x), (None, None))
        return number if known is not None and not known._version else None

    def _plain(self, index: Any) -> Any:
        """The Python number of an index without dims, if known; else the index."""
        if isinstance(index, Tensor) and not _shape(index):
            return index if (number := self._number(index)) is None else number
        return index

    def instead(self, func: Any, args: Sequence[Any]) -> Any:
        """What is read of such a number; `x[number]` as a part of x, and `x == number`
        as of Python's own, as that is what other loops have; None of other calls."""
        if func in READS or func is Tensor.tolist:
            number = self._number(args[0])
            listed = func is Tensor.tolist and number is not None and _shape(args[0])
            return [number] if listed else number
        if func is Tensor.cpu and args[0].is_meta and self.places(args[0]):
            return args[0]  # nothing to copy
        if func not in (INDEX, *EQUAL) or len(args) < 2:
            return None
        x, index = args[:2]
        if isinstance(index, tuple):
            known = tuple(map(self._plain, index))
            return x[known] if any(map(is_not, known, index)) else None
        if (number := self._number(index)) is None:
            return None
        if func != INDEX:
            return func(x, number) if _shape(x) else None
        part = x.select(0, number)
        return part.unsqueeze(0) if _shape(index) else part


def _shape(x: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # as `has_shape` does
        return tuple(x.shape)
