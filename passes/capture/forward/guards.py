"""`if mask.any():` around what is done with the rows that a mask chooses.

Whether there are such rows is known only when a program runs. But where the rows of
`keep_all_rows` are none, nothing is added; so the model is read as if there were some.
That it is the same without them is proved: it is read a second time as if there were
none, and must be, operation by operation, what is left of the first reading.

So it is where some answers are yes and others are no, of a few of such cases.

Of a model that computes something else without them, the answers to a few questions
are decided: it is read under each, and what it asked is computed, see
`passes.capture.read_answers`.

Where one of the answers makes a user's own code raise an error, as `assert (ids <
n).all()` does, it is the other one: that computes nothing, and a remark says that
programs do not check it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from enum import Enum
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CaptureError
from ..forward.numbers_present import (
    EQUAL,
    UNIQUE,
    Present,
    PresentNumbers,
)
from ..forward.of_rows import OF_ROWS
from ..forward.row_counts import RowCount, Truth, is_number
from ..forward.split_by_counts import Pieces
from ..forward.user_frames import (
    Place,
    asked_by_user,
    at_work,
    place_at_work,
    raised_at,
    raised_by_user,
)
from ..forward.values_read import (
    CUT,
    NO_NUMBER,
    Read,
    has_shape,
    is_unknown,
    read_here,
)

# Marks the tensor that was asked about in a capture, if it asserts nothing of it.
MARK = torch.ops.aten._assert_tensor_metadata.default
IN_TURN = (Tensor.unbind, Tensor.tolist)
BINCOUNT = (torch.bincount, Tensor.bincount)
# What gives counts one by one, of which the last that are 0 change nothing.
ONE_BY_ONE = (Tensor.tolist, Tensor.unbind, Tensor.dim)
COUNTS = (torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero)
NOT = (torch.logical_not, Tensor.logical_not, Tensor.__invert__)
SHAPE = Tensor.shape.__get__  # type of a getset descriptor's method
MANY = 2**20
FEW = 3  # questions: each way to answer them is read
Question = tuple[Place, int]  # and how often it was asked there
MOST = 2**14  # times that a line asks: more than experts of all layers


class Reading(Enum):
    """How a forward is read. ONE: what Python wants a number for, as `len`, is given
    one, else as many as there may be. Of numbers that there are, all are there; but
    LEFT: one in their middle, and MARKED: the others alone are said to be asked about,
    so that neither the first nor the last one of those that there are is told apart."""

    SOME, NONE, ONE, MARKED, LEFT = range(5)


class Guards:
    """Answers to whether there are rows, while a model is captured, by its reading.
    read: what was asked last, as an error would say it.

    numbered: whether Python was given any number, which must make no difference.

    asked: how often each place in the code did, in one forward. checks: by its place, a
    question that is there to raise an error: the answer for which it does not, and the
    line that raises."""

    def __init__(self) -> None:
        self.reading = Reading.SOME
        self.numbered = False
        self.means = False  # whether a mean of no rows is 0, as no forward takes one
        self.present = Present()
        self.read: Read | None = None
        # Sizes that were compared with a limit, and by which call: read as if they
        # were above it, or, within, as if none was.
        self.within = False
        self.limits: dict[str, int] = {}
        self.compared: Read | None = None
        # Where a number that is not known is said to be equal to another one, and read.
        self.equal: dict[Place, Read] = {}
        self.checks: dict[Place, tuple[bool, str]] = {}
        self._last: tuple[Place, bool] | None = None
        self.asked = Counter[Place]()
        # What is asked, in the order in which it is marked; None of parts of a number.
        # Of those that are in doubt, the answer is no where all are yes.
        self.marked: list[Question | None] = []
        self.doubted: Set[Question] = frozenset()
        # Where questions are decided, the answers in turn, and what was asked.
        self.decided: set[Place] = set()
        self.answers: list[bool] = []
        self.questions: list[Tensor] = []
        # Tensors by their id. Of what `bincount` counts: what it counts.
        self.counted: dict[int, tuple[Tensor, Tensor]] = {}
        self.pieces = Pieces(self.counted)
        self.numbers: dict[int, tuple[Tensor, Tensor]] = {}  # each, and if it is not 0
        # Counts that torch would give without the last ones that are 0, of how many.
        self.short: dict[int, tuple[Tensor, int]] = {}
        # Counts of what is not 0, of how many; and what is true where another is 0.
        self.totals: dict[int, tuple[Tensor, int]] = {}
        self.negated: dict[int, tuple[Tensor, Tensor]] = {}

    def instead(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives that torch cannot answer; None of others."""
        some = self.reading not in (Reading.NONE, Reading.LEFT)
        if (pieces := self.pieces.instead(func, args, kwargs, some)) is not None:
            return pieces
        x = _first(args, kwargs)
        if func is Tensor.__bool__ and is_unknown(x) and asked_by_user():
            if id(x) in self.negated:
                return not self.answer(self.negated[id(x)][1])
            return self.answer(x)
        if func is Tensor.__len__ and not has_shape(x) and asked_by_user():
            return self._number(x, _upper_bound(x.shape[0]), "__len__")
        if func is Tensor.__int__ and id(x) in self.totals and asked_by_user():
            return self._number(x > 0, self.totals[id(x)][1], "")
        if func in OF_ROWS and x is not None and not has_shape(x):
            more = {name: y for name, y in kwargs.items() if name != "input"}
            return OF_ROWS[func](x, *args[1:], **more)
        count = self.present.below(x)
        if count and func in UNIQUE and len(args) < 2 and kwargs.get("dim") is None:
            if any(kwargs.get(f"return_{extra}") for extra in ("inverse", "counts")):
                return None
            return self._all_numbers("unique", count, lambda n: (x == n).any())
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
        if (known := self.present.instead(func, args)) is not None:
            return known
        in_turn = func in IN_TURN and args[1:] in ((), (0,)) and not kwargs
        if in_turn and (numbers := self.hit(x)) is not None:
            return numbers.tolist() if func is Tensor.tolist else numbers
        if func is Tensor.unbind and id(x) in self.counted:  # as of tolist
            counts, values = self.counted[id(x)]
            by_number = counts.unbind()
            for number, n in enumerate(by_number):
                self.numbers[id(n)] = n, (values == number).any()
            return by_number
        if func is Tensor.item and id(x) in self.numbers:
            return RowCount(self, self.numbers[id(x)][1], func(x))
        return None

    def _number(self, x: Tensor, most: int, rows: str) -> int:
        """A number of rows, as Python wants it."""
        self.numbered = True
        most = 1 if self.reading == Reading.ONE else most
        return most if self.answer(x, rows) else 0

    def hit(self, x: Tensor) -> PresentNumbers | None:
        """The rows of `flags.nonzero()`, if x is that."""
        if (places := self.present.places(x)) is None:
            return None

        def there(number: int) -> Tensor:
            return places.flags.select(0, number) != 0

        return self._all_numbers("nonzero", places.count, there, places.each)

    def _all_numbers(
        self,
        name: str,
        count: int,
        there: Callable[[int], Tensor],
        each: tuple[int, ...] = (),
    ) -> PresentNumbers:
        """The numbers below `count`, of which a call of this name returns some. there:
        whether a number is among them. each: the shape of one."""
        every, alone = range(count), count // 2
        if self.reading in (Reading.SOME, Reading.ONE, Reading.MARKED):
            for number in every:
                if self.reading != Reading.MARKED or number != alone:
                    self._mark(there(number), None)
        self.read = read_here(name, rows=True)
        self.present.asked = True
        left = {Reading.LEFT: every[alone : alone + 1], Reading.NONE: every[:0]}
        return self.present.of(left.get(self.reading, every), each)

    def answer(self, x: Tensor, rows: str = "", of: Tensor | None = None) -> bool:
        """x: a number, whether it is other than 0; or rows, whether there are any,
        which a call of this name asks. of: of what it is made, if it is a number."""
        place = place_at_work()
        self.asked[place] += 1
        read = read_here(rows or "__bool__", bool(rows))
        if self.asked[place] > MOST:
            raise read.error()  # a `while` that is told the same each time
        if place in self.checks:
            return self.checks[place][0]
        if place in self.decided:
            return self._decide(x, rows)
        piece, every = self.pieces.number(x if of is None else of) or (-1, 0)
        alone = piece == every // 2
        self.present.asked |= bool(every)
        left = self.reading == Reading.MARKED and every and not alone
        question = None if every else (place, self.asked[place])
        if left or self.reading not in (Reading.MARKED, Reading.LEFT):
            self._mark(x, question)
        self.read = read
        there = alone if every and self.reading == Reading.LEFT else self.some
        there &= question not in self.doubted
        self._last = place, there
        return there

    def _mark(self, x: Tensor, question: Question | None) -> None:
        MARK(x)
        self.marked.append(question)

    def mixtures(self) -> Iterator[Set[Question]]:
        """Yields questions whose answer is no where that of all others is yes: all
        there are, of a few; else of each place, the last, all others, and each
        second."""
        every = [q for q in dict.fromkeys(self.marked) if q is not None]
        if len(every) <= FEW:
            for n in range(1, len(every)):
                yield from map(set, combinations(every, n))
            return
        places = dict.fromkeys(place for place, _ in every)
        for place in places if len(places) > 1 else ():
            yield {q for q in every if q[0] == place}
        yield from (set(every[-1:]), set(every[:-1]), set(every[::2]))

    def _decide(self, x: Tensor, rows: str) -> bool:
        """The next answer; what is asked becomes a value."""
        self._last = None
        if rows:
            with torch._C.DisableTorchFunction():  # as `has_shape` does
                unknown = next(n for n in x.shape if type(n) is not int)
            x = torch.zeros((), device=x.device) + unknown
        self.questions.append((x != 0).reshape(()))
        if len(self.questions) > len(self.answers):
            self.answers.append(True)
        return self.answers[len(self.questions) - 1]

    @property
    def some(self) -> bool:
        return self.reading != Reading.NONE

    def is_above(self, size: Any, limit: int) -> bool:
        """Whether there are more rows than a limit, above 0."""
        self.compared = replace(read_here("numel", rows=True), fix=CUT)
        if self.limits.setdefault(str(size), limit) != limit:
            raise self.compared.error()
        return self.some and not self.within

    def is_equal(self) -> bool:
        """What an unknown number is that is compared for equality: a check holds, and
        no other comparison can be read."""
        place, read = place_at_work(), read_here("==", rows=False)
        if place in self.checks:
            return self.checks[place][0]
        self.read = self.equal[place] = read
        self._last = place, self.some
        return self.some

    def unproved(self) -> CaptureError | None:
        """What is to be said of a comparison for equality that is no check."""
        reads = (read for place, read in self.equal.items() if place not in self.checks)
        return next((read.error() for read in reads), None)

    def refusal(self) -> CaptureError:
        """What is to be said of what was asked last."""
        error = (self.read or read_here("__int__", rows=False)).error()
        if self.numbered:
            return CaptureError(error.message, source=error.source, fix=NO_NUMBER)
        return error

    def begin(self) -> None:
        """Forgets what was asked; checks are known."""
        self.reading, self.numbered, self.means = Reading.SOME, False, False
        self.read = self._last = None
        self.equal.clear()

    def begin_forward(self) -> None:
        for of_forward in (self.asked, self.marked, self.questions):
            of_forward.clear()
        self.pieces.begin()

    def others(self) -> Iterator[Reading]:
        """Yields how else a forward is to be read that asked in the first reading."""
        if self.read is not None:
            yield Reading.NONE
        if self.numbered:
            yield Reading.ONE
        if self.read is not None and self.present.asked:
            yield from (Reading.MARKED, Reading.LEFT)

    def is_check(self, error: Exception) -> bool:
        """Whether the last answer made a user's own code raise this: from now on it is
        the other one."""
        last, self._last = self._last, None
        if last is None or last[0] in self.checks or not raised_by_user(error):
            return False
        place, answer = last
        self.checks[place] = not answer, raised_at(error)
        return True

    def remarks(self) -> Iterator[str]:
        """Yields what is said of checks, a line each."""
        for line in sorted({line for _, line in self.checks.values()}):
            yield f"programs leave out what is checked at {os.path.basename(line)}"

    def note(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> Any:
        """The call's result; a number of rows as one that notes what is asked of it."""
        x = _first(args, kwargs)
        if not isinstance(x, Tensor):
            if isinstance(x, list | tuple):
                self.present.note(func, args, kwargs, result)
            return result
        sized = func in (Tensor.numel, Tensor.size) or func == SHAPE
        if sized and not has_shape(x) and asked_by_user():
            if isinstance(result, torch.Size):
                return torch.Size(self._rows_of(x, n) for n in result)
            return self._rows_of(x, result)
        if func is Tensor.item and is_unknown(x) and asked_by_user():
            if isinstance(result, torch.SymBool):
                return Truth(self, x, result)
            return RowCount(self, x, result) if type(result) is torch.SymInt else result
        if isinstance(result, Tensor) and is_unknown(result) and _is_number(result):
            if func in COUNTS and x.dtype == torch.bool and has_shape(x):
                self.totals[id(result)] = result, x.numel()
            elif func in EQUAL and any(is_number(other, 0) for other in args[1:]):
                self.negated[id(result)] = result, x != 0
            elif func in NOT and x.dtype == torch.bool:
                self.negated[id(result)] = result, x
        self.present.note(func, args, kwargs, result)
        return result

    def _rows_of(self, x: Tensor, n: Any) -> Any:
        return RowCount(self, x, n, rows="numel") if isinstance(n, torch.SymInt) else n


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call works on, which may be given by name."""
    return args[0] if args else kwargs.get("input")


def _is_number(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # as `has_shape` does
        return x.ndim == 0


def _any_of(known: Mapping[int, tuple], args: Sequence[Any]) -> tuple | None:
    """What is known of the first tensor among the arguments of which something is."""
    tensors = (x for x in args if isinstance(x, Tensor))
    return next((known[id(x)] for x in tensors if id(x) in known), None)


def _upper_bound(n: Any) -> int:
    """The most that an unknown number of rows can be."""
    node = n.node
    ranges = node.shape_env.var_to_range
    return int(ranges[node.expr].upper) if node.expr in ranges else MANY
