"""read_text: the statements of an emitted module, with what differs by size taken out.

A statement is what it says without its numbers; its variables are named after the order
in which a function makes them, and so are the keys of what functions hand on. Layers
that are alike are a loop, so equal programs have equal statements, however many layers
there are; those outside of loops are counted from the first or from the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<key>\b(?P<table>[a-z]|made)\[f?"(?P<name>[^"]*)"\])  # p["blocks.+0.weight"]
      | (?P<text>f?"[^"]*"|'[^']*')
      | (?P<number>(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)
      | (?P<dotted>\.[A-Za-z_]\w*)
      | (?P<unnamed>\bd\d+\b)                                # a dim without a name
      | (?P<word>[A-Za-z_]\w*)
      | (?P<rest>.)""",
    re.VERBOSE,
)
# Per-rank extents in collectives: as many as there are ranks.
EXTENTS = re.compile(r"[(\[]#(?:, #)+,?[)\]]")
LAYER = re.compile(r"(?:^|(?<=\.))(\+?\d+)(?=\.|$)")
LOOP = re.compile(r"for i in .*?(\d+)\)")
COUNTED = re.compile(
    r"for i in |if i |.*\.pop\("
)  # statements whose numbers are layers
NUMBERS = re.compile(r"\d+")
ENTRY = re.compile(r'"([^"]+)": (\w+)')
KNOWN = ("c", "p", "g", "k", "b")  # arguments that mean the same everywhere
TARGET = re.compile(r"[\[\]\w, ]+$")


# Calls with extents of what ranks hold parts of.
OF_PARTS = re.compile(
    r"\bc\.(lookup|pick|attention|expert|route)\w*\((?P<operands>.*)\)$"
)


@dataclass(frozen=True)
class Number:
    """A number of a statement. layer: it counts layers. whole: it is the extent of no
    operand, but of what ranks hold parts of: no run on shapes alone tells whether it is
    right."""

    value: float
    layer: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Statement:
    text: str
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Module:
    """Statements by function ("": declarations), and where loops end."""

    functions: dict[str, list[Statement]]
    ends: tuple[int, ...]


def read_module(text: str) -> Module:
    parts = re.split(r"^def (\w+)\((.*)\):\n", text, flags=re.MULTILINE)
    keys: dict[str, str] = {}  # of k and b -> which of those
    functions = {"": list(_header(parts[0]))}
    for name, given, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        reader = _Reader(given.split(", "), keys)
        functions[name] = [s for line in body.splitlines() for s in reader.line(line)]
    return Module(functions, tuple(map(int, LOOP.findall(text))))


def _header(text: str) -> Iterator[Statement]:
    body = text[text.index("PARAMETERS") :] if "PARAMETERS" in text else text
    reader = _Reader([], {})
    for line in body.splitlines():
        yield from reader.line(line)


class _Reader:
    """Reads one function. keys: what functions before it handed on."""

    def __init__(self, given: Sequence[str], keys: dict[str, str]) -> None:
        self.names = {
            name: f"<{i}>" for i, name in enumerate(given) if name not in KNOWN
        }
        self.keys = keys

    def line(self, line: str) -> Iterator[Statement]:
        code, _, comment = line.partition("  # ")
        if not code.strip():
            return
        depth = len(code) - len(code.lstrip())
        code = code.strip()
        if code.startswith("return {"):
            for key, name in ENTRY.findall(code):
                self.keys[key] = f"{len(self.keys)}"
                yield self.statement(f"hand on {name}", depth)
            return
        left, equals, _ = code.partition(" = ")
        if equals and TARGET.match(left):
            for name in re.findall(r"[A-Za-z_]\w*", left):
                self.names.setdefault(name, f"<{len(self.names)}>")
        read = self.statement(code, depth)
        remark = NUMBERS.sub("#", _remark(comment))  # what remarks tell is not run
        yield Statement(read.text + remark, read.numbers)

    def statement(self, code: str, depth: int) -> Statement:
        numbers: list[Number] = []
        found = OF_PARTS.search(code)
        parts_from = found.start("operands") if found else len(code)
        counted = COUNTED.match(code) is not None
        parts = [" " * depth]
        for match in TOKEN.finditer(code):
            kind, text = match.lastgroup, match[0]
            if match["key"] is not None:
                place = self.keys.get(match["name"])
                key = match["name"] if place is None else f"<{place}>"
                parts.append(f"{match['table']}[{self._layers(key, numbers)}]")
            elif match["number"] is not None:
                whole = match.start() >= parts_from
                numbers.append(Number(float(text), counted, whole))
                parts.append("#")
            elif match["unnamed"] is not None and text not in self.names:
                parts.append("d#")
            elif kind == "text":
                parts.append(self._layers(text, numbers))
            else:
                parts.append(self.names.get(text, text))
        joined = "".join(parts)
        if "c." in joined:
            joined, numbers = _without_extents(joined, numbers)
        return Statement(joined, tuple(numbers))

    @staticmethod
    def _layers(name: str, numbers: list[Number]) -> str:
        """The name of a parameter, with its layer's number taken out."""

        def take(match: re.Match[str]) -> str:
            numbers.append(Number(float(match[1]), True))
            return "#"

        return LAYER.sub(take, name)


def _remark(comment: str) -> str:
    """The line and module that a statement comes from; dims in remarks are not run."""
    parts = [p for p in comment.split("  ") if p and not p.startswith("[")]
    return f"  # {'  '.join(parts)}" if parts else ""


def _without_extents(text: str, numbers: list[Number]) -> tuple[str, list[Number]]:
    """Extents by rank are as many as ranks."""
    kept, parts, at, last = [], [], 0, 0
    for match in EXTENTS.finditer(text):
        before = text[last : match.start()]
        count = before.count("#")
        kept += numbers[at : at + count]
        at += count + match[0].count("#")
        parts += [before, "(#*)"]
        last = match.end()
    rest = text[last:]
    kept += numbers[at : at + rest.count("#")]
    return "".join([*parts, rest]), kept
