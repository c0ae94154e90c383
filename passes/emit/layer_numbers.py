"""layer_numbers: the numbers of some layers, as an emitted module says them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

VARIABLE = "i"
ENDS = 4  # numbers that take no turns with the others, at most


def range_text(first: int, last: int, step: int = 1) -> str:
    """The numbers from the first to the last, both included, as an expression."""
    if step == -1:
        return f"reversed({range_text(last, first)})"
    if step != 1 and first != last:
        return f"range({first}, {last + (1 if step > 0 else -1)}, {step})"
    return f"range({first}, {last + 1})" if first else f"range({last + 1})"


def loop_text(numbers: Collection[int]) -> str:
    """The text after `for` in a comprehension over numbers, whose length does not grow
    with the layers that alternate: `i in range(32) if i % 4 != 3`."""
    own = sorted(numbers)
    first, last = own[0], own[-1]
    runs = _even(own)
    if len(runs) == 1:
        return f"{VARIABLE} in {range_text(*runs[0])}"
    among = range(first, last + 1)
    if turns := in_turn(own, among) or _but_for_ends(own, among):
        return f"{VARIABLE} in {range_text(first, last)} if {turns}"
    texts = [str(a) if a == b else f"*{range_text(a, b, s)}" for a, b, s in runs]
    return f"{VARIABLE} in ({', '.join(texts)})"


def condition_text(numbers: Collection[int], among: Sequence[int]) -> str:
    """The condition that the loop variable is one of `numbers`; "" for all, or none.
    among: ascending numbers at even distances.

    Its length does not grow with the layers that alternate, also where the first and
    the last differ: `i < 24 and i % 4 != 2`.
    """
    own = sorted({*numbers})
    if len(own) in (0, len(among)):
        return ""
    if len(own) == 1:
        return f"{VARIABLE} == {own[0]}"
    begin, end = among.index(own[0]), among.index(own[-1]) + 1
    if end - begin == len(own):
        if begin == 0:
            return f"{VARIABLE} < {own[-1] + 1}"
        if end == len(among):
            return f"{VARIABLE} >= {own[0]}"
        return f"{VARIABLE} in range({own[0]}, {own[-1] + 1})"
    return (
        in_turn(own, among) or _but_for_ends(own, among) or f"{VARIABLE} in {set(own)}"
    )


def in_turn(numbers: Collection[int], among: Sequence[int]) -> str:
    """The condition that one of neighbouring numbers is among these, if they take turns
    with the others, twice at least; "" if they do not."""
    for n in range(2, len(among) // 2 + 1):
        turns = {x % n for x in among[:n] if x in numbers}
        if all((x in numbers) == (x % n in turns) for x in among):
            others = {*range(n)} - turns
            if len(turns) == 1:
                return f"{VARIABLE} % {n} == {turns.pop()}"
            if len(others) == 1:
                return f"{VARIABLE} % {n} != {others.pop()}"
            return f"{VARIABLE} % {n} in {tuple(sorted(turns))}"
    return ""


def _but_for_ends(numbers: Collection[int], among: Sequence[int]) -> str:
    """The condition that one of neighbouring numbers is among these, if all take turns
    but for the first few, or the last few; "" if they do not.

    Those at an end are all among them, or none is.
    """
    for ends in range(1, min(ENDS, len(among)) + 1):
        for first in range(ends + 1):
            stop = len(among) - ends + first
            before, after = among[:first], among[stop:]
            turns = in_turn(numbers, among[first:stop])
            if turns and _alike(before, numbers) and _alike(after, numbers):
                begin, end = among[first], among[stop - 1] + 1
                bounds = [  # (those of an end, that a number is one of them, or none)
                    (before, f"{VARIABLE} < {begin}", f"{VARIABLE} >= {begin}"),
                    (after, f"{VARIABLE} >= {end}", f"{VARIABLE} < {end}"),
                ]
                or_else = [one for own, one, _ in bounds if own and own[0] in numbers]
                unless = [
                    none for own, _, none in bounds if own and own[0] not in numbers
                ]
                return " or ".join([*or_else, " and ".join([*unless, turns])])
    return ""


def _alike(own: Sequence[int], numbers: Collection[int]) -> bool:
    """Whether all of `own` are among the numbers, or none."""
    return len({n in numbers for n in own}) < 2


def _even(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first, last, step) of what stands at even distances in ascending numbers."""
    at, runs = 0, []
    while at < len(numbers):
        steps = [after - n for n, after in pairwise(numbers[at : at + 3])]
        step = steps[0] if steps and steps[0] <= steps[-1] else 1
        first = last = numbers[at]
        while at < len(numbers) and numbers[at] == last:
            at, last = at + 1, last + step
        runs.append((first, last - step, step))
    return runs
