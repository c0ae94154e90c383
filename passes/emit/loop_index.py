"""The variable of a loop, and what is said by it: numbers, texts, conditions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import ceil

from ..emit.layer_numbers import condition_text, range_text
from ..emit.loop import Loop, Varying, line, numbered
from ..emit.spell import constant
from ..graph import LAYER, Node

# What a prologue makes, in time: only the one that is asked for is waited for, and it
# may be what an iteration makes.
ENTRY = re.compile(r'(?P<table>b|made)\[(?P<key>"[^"]*")\]')


class Index:
    """The variable of a loop, and texts of series in its iterations."""

    def __init__(self, loop: Loop) -> None:
        self.count = loop.count
        self.first, self.step = loop.index

    @property
    def keys(self) -> list[int]:
        """The number that each iteration goes by."""
        return [self.first + self.step * t for t in range(self.count)]

    @property
    def range(self) -> str:
        """The iterations, as an expression."""
        return range_text(self.first, self.keys[-1], self.step)

    def of(self, first: Fraction | int, step: Fraction | int) -> str:
        """first + step * iteration, in iterations where that is a whole number."""
        slope = Fraction(step) / self.step
        offset = first - slope * self.first
        times, parts = slope.numerator, slope.denominator
        if not times:
            return str(offset)
        scaled = {1: "i", -1: "-i"}.get(times, f"{times} * i")
        if parts == 1:
            return _plus(scaled, offset)
        if times != 1:
            return f"({_plus(scaled, offset * parts)}) // {parts}"
        return _plus(f"i // {parts}", ceil(offset))

    def choose(self, varying: Varying) -> str:
        """A constant in its iteration."""
        if progression := line(varying.values, varying.times):
            return self.of(*progression)
        return self._one_of(map(constant, varying.values), varying.times)

    def text(self, texts: Sequence[str], times: Sequence[int]) -> str:
        """One of several expressions, of some iterations: by a number in it, if they
        differ in that."""
        parts = numbered(texts, times) if len(texts) > 1 else [texts[0]]
        if parts is None:
            entries = [ENTRY.fullmatch(text) for text in texts]
            keys = [entry["key"] for entry in entries if entry]
            tables = {entry and entry["table"] for entry in entries}
            if len(tables) == 1 and len(keys) == len(texts):
                return f"{tables.pop()}[{self._one_of(keys, times)}]"
            return self._one_of(texts, times)
        own = (p if isinstance(p, str) else f"{{{self.of(*p)}}}" for p in parts)
        text = "".join(own)
        return text.replace('["', '[f"') if text != texts[0] else text

    def _one_of(self, texts: Iterable[str], times: Sequence[int]) -> str:
        own = list(texts)
        if turns := self.turns(own, times):
            return f"({', '.join(turns)})[i % {len(turns)}]"
        pairs = ((self.keys[t], text) for t, text in zip(times, own, strict=True))
        return f"{{{', '.join(f'{key}: {text}' for key, text in pairs)}}}[i]"

    def turns(self, texts: Sequence[str], times: Sequence[int]) -> list[str]:
        """The texts that alternate over iterations, as i % len says; [] unless they
        repeat, twice at least."""
        count = len(texts)
        neighbours = abs(self.step) == 1 and times[-1] - times[0] == count - 1
        for n in range(2, count // 2 + 1) if neighbours else ():
            if all(text == texts[t % n] for t, text in enumerate(texts)):
                by_turn = {self.keys[times[t]] % n: texts[t] for t in range(n)}
                return [by_turn[turn] for turn in range(n)]
        return []

    def remark(self, node: Node, t: int) -> str:
        """The origin of a node of the body, its layer as the loop's variable. t: its
        iteration."""
        module = node.location.module
        if (match := LAYER.search(module)) is None:
            return str(node.location)
        apart = int(match[1]) - self.first - self.step * t
        number = "i" if not apart else f"(i{apart:+d})"
        sign = "+" if match[1].startswith("+") else ""
        there = f"{module[: match.start()]}{sign}{number}{module[match.end() :]}"
        return str(node.location).replace(module, there)

    def condition(self, iterations: Collection[int]) -> str:
        """The condition that an iteration is one of these; "" for all, or none."""
        own = [self.first + self.step * t for t in iterations]
        return condition_text(own, sorted(self.keys))


def _plus(text: str, number: Fraction | int) -> str:
    """The sum of both as text."""
    if not number:
        return text
    return f"{text} {'+' if number > 0 else '-'} {abs(number)}"
