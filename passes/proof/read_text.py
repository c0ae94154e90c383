"""read_text: the statements of an emitted module, with what differs by size taken out.

A statement is what it says without its numbers; its variables are named after the order
in which a function makes them, and so are the keys of what functions hand on. Layers
that are alike are a loop, so equal programs have equal statements, however many layers
there are; those outside of loops are counted from the first or from the last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import zip_longest

TOKEN = re.compile(
    r"""(?P<key>\b(?P<table>[a-z]|made)\[f?"(?P<name>[^"]*)"\])  # p["blocks.+0.weight"]
      | (?P<text>f?"[^"]*"|'[^']*')
      | (?P<number>(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)
      | (?P<dotted>\.[A-Za-z_]\w*)
      | (?P<unnamed>\bd\d+\b)                                # a dim without a name
      | (?P<word>[A-Za-z_]\w*)
      | (?P<rest>[^\w"'.-]+|.)""",
    re.VERBOSE,
)
# In the name of a parameter: the number of a layer, or where a piece of one lies.
LAYER = re.compile(
    r"(?:^|(?<=\.))(\+?\d+)(?=\.|$)|\[(?P<whole>(?::,)*)(?P<start>\d+):(?P<end>\d+)\]"
)
# Numbers of these are layers', where they are of a loop over layers; but for what is
# added to the loop's variable, a step, and how layers take turns.
COUNTED = re.compile(r"(?P<loop>for i in |if i )|.*\.pop\(")
COUNTED_AFTER = re.compile(
    r" for i in (?:range\((?:-?\d+, )?|\([^{}]*|[^{}]*\bi (?:<|>=|==) )$"
)
# What iterations are given, each by its number.
GIVEN = re.compile(r"\w+ = \{(?:\d+: \[[^]]*\], )*$")
# Draws and choices are numbered through all layers.
MASK = re.compile(
    r"c\.(?:dropout_counters\(|draw\([^,]*, |choose\(.*, \d+, )((?:\d+ \* )?i \+ )?$"
)
APART = re.compile(r"(?:\bi [+-] |range\([^,)]*,[^,)]*, |\bi % .*)$")
# The row that is taken of a table, as a number for each layer; in a loop, what is added
# to its variable for that, be it where a function is told of it.
ROW = re.compile(
    r"aten\.select(?:_backward\.default\([^,]+, \[[^]]*\]|\.int\([^,]+), \d+, "
    r"(?P<i>i \+ )?$"
    r"|(?<![.\w])\w+\(.*, (?P<told>i \+ )$"
)
ONE_LAYER = re.compile(r"^if i == (\d+):")  # of as many as there are
NUMBERS = re.compile(r"\d+")
ENTRY = re.compile(r'"([^"]+)": (\w+)')
KNOWN = ("c", "p", "g", "k", "b")  # arguments that mean the same everywhere
ENTRY_OF = re.compile(r'\b(?:b|made)\[f?"([^"]*)"\]')
WHOLE = re.compile(r'"(\w+)\.(?:\{i\}|\d+)"')
TARGET = re.compile(r"[\[\]\w, ]+$")


# Calls with extents of what ranks hold parts of.
OF_PARTS = re.compile(
    r"\bc\.(lookup|pick|attention|expert|route)\w*\((?P<operands>.*)\)$"
)


# Views among these say what a rank has.
VIEW = re.compile(r"\.\w+\([^()]*\)")


class Counts(Enum):
    """What a number counts. SOME: layers, or other items of which a small program has
    as many. ROWS: layers of the whole model, or rows of another table. BEFORE: layers
    before this stage. MASKS: draws before this one. OTHERS: the same as in the small
    program."""

    SIZE, LAYERS, SOME, ROWS, BEFORE, MASKS, OTHERS = range(7)


@dataclass(frozen=True)
class Number:
    """A number of a statement. counts: what. whole: it is the extent of no operand, but
    of what ranks hold parts of: no run on shapes alone tells whether it is right."""

    value: float
    counts: Counts = Counts.SIZE
    whole: bool = False


@dataclass(frozen=True)
class Statement:
    """One line of a module: its text with the numbers taken out, and these."""

    text: str
    numbers: tuple[Number, ...]


@lru_cache(maxsize=64)
def read_module(text: str, path: str) -> Mapping[str, Sequence[Statement]]:
    """Statements by function ("": declarations). path: of the list of layers."""
    parts = re.split(r"^def (\w+)\((.*)\):\n", text, flags=re.MULTILINE)
    keys: dict[str, str] = {}  # of k and b -> which of those
    functions = {"": list(_header(parts[0], path))}
    wholes = frozenset(WHOLE.findall(parts[0].partition("WHOLE_GRADIENTS")[2]))
    for name, head, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        reader = _Reader(head.split(", "), keys, path, wholes)
        functions[name] = list(reader.lines(_without_dels(body.splitlines())))
    return functions


def _header(text: str, path: str) -> Iterator[Statement]:
    body = text[text.index("PARAMETERS") :] if "PARAMETERS" in text else text
    return _Reader([], {}, path).lines(body.splitlines())


def _without_dels(lines: Sequence[str]) -> list[str]:
    """Drops `del` lines, as a wrong one fails where shapes run, and joins neighbouring
    blocks under one condition."""
    left = [x for x in lines if x.strip() and not x.lstrip().startswith("del ")]
    full = [
        line
        for line, after in zip_longest(left, left[1:], fillvalue="")
        if not _is_if(line) or _depth(after) > _depth(line)
    ]
    kept: list[str] = []
    under = ""  # the condition that the last line is under
    for line in full:
        if under and line == under:
            continue
        if _is_if(line):
            under = line
        elif under and _depth(line) <= _depth(under):
            under = ""
        kept.append(line)
    return kept


def _is_if(line: str) -> bool:
    return line.lstrip().startswith("if ")


def end_of(lines: Sequence[str], at: int) -> int:
    """The index of the first line after the body of the statement at `at`."""
    depth = _depth(lines[at])
    rest = range(at + 1, len(lines))
    return next((i for i in rest if _depth(lines[i]) <= depth), len(lines))


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


class _Reader:
    """Reads one function. keys: what functions before it handed on. wholes: what keys
    of whole gradients begin with, before the number of a layer."""

    def __init__(
        self,
        parameters: Sequence[str],
        keys: dict[str, str],
        path: str,
        wholes: Collection[str] = (),
    ) -> None:
        self.names = {
            name: f"<{i}>" for i, name in enumerate(parameters) if name not in KNOWN
        }
        self.keys, self.path, self.wholes = keys, path, wholes
        self.loop = Counts.OTHERS  # what the loop counts
        self.locals: set[str] = set()

    def lines(self, lines: Sequence[str]) -> Iterator[Statement]:
        layers = re.compile(rf"\b{re.escape(self.path)}\.\+[i({{]")
        # What a loop hands on is read before it is made, as texts go.
        self.locals = {name for line in lines for name in _targets(line)}
        for at, line in enumerate(lines):
            if line.strip().startswith("for i in "):
                inside = lines[at + 1 : end_of(lines, at)]
                # Declarations name layers before they say which.
                named = any(map(layers.search, (*lines[max(0, at - 1) : at], *inside)))
                self.loop = Counts.LAYERS if named else Counts.OTHERS
            yield from self.line(line)

    def line(self, line: str) -> Iterator[Statement]:
        code, _, comment = line.partition("  # ")
        if not code.strip() or code.startswith("FLOPS"):
            return
        depth = _depth(code)
        code = ONE_LAYER.sub(_as_range, code.strip())
        if code.startswith("return {"):
            for key, name in ENTRY.findall(code):
                self.keys[key] = f"{len(self.keys)}"
                yield self.statement(f"hand on {name}", depth)
            return
        left, equals, _ = code.partition(" = ")
        if equals and ENTRY_OF.search(left):
            for match in ENTRY_OF.finditer(left):
                self.keys.setdefault(match[1], f"{len(self.keys)}")
            left = ENTRY_OF.sub("_", left)
        if equals and TARGET.match(left):
            for name in re.findall(r"[A-Za-z_]\w*", left):
                self.names.setdefault(name, f"<{len(self.names)}>")
        read = self.statement(code, depth)
        remark = NUMBERS.sub("#", _remark(comment))  # what remarks tell is not run
        yield Statement(read.text + remark, read.numbers)

    def statement(self, code: str, depth: int) -> Statement:
        numbers: list[Number] = []
        comment = OF_PARTS.search(code)
        parts_from = comment.start("operands") if comment else len(code)
        views = {
            at for own in VIEW.finditer(code, parts_from) for at in range(*own.span())
        }
        counted = COUNTED.match(code)
        counts = Counts.SIZE
        if counted is not None:
            counts = self.loop if counted["loop"] else Counts.SOME
        parts = [" " * depth]
        for match in TOKEN.finditer(code):
            kind, text = match.lastgroup, match[0]
            if match["key"] is not None:
                place = self.keys.get(match["name"])
                key = match["name"] if place is None else f"<{place}>"
                table = match["table"]
                named = table == "p" or key.rpartition(".")[0] not in self.wholes
                some = Counts.OTHERS if named and table in ("p", "g") else Counts.SOME
                parts.append(f"{table}[{self._layers(key, numbers, some)}]")
            elif match["number"] is not None:
                whole = match.start() >= parts_from and match.start() not in views
                own, before = counts, code[: match.start()]
                if (counted or " for i in " in before) and APART.search(before):
                    own = Counts.OTHERS
                elif COUNTED_AFTER.search(before) or GIVEN.match(before):
                    own = Counts.SOME
                elif row := ROW.search(before):
                    own = Counts.BEFORE if row["i"] or row["told"] else Counts.ROWS
                elif MASK.search(before):
                    own = Counts.MASKS
                numbers.append(Number(float(text), own, whole))
                parts.append("#")
            elif match["unnamed"] is not None and text not in self.names:
                parts.append("d#")
            elif kind == "text":
                parts.append(self._layers(text, numbers, Counts.OTHERS))
            else:
                if kind == "word" and text in self.locals:
                    self.names.setdefault(text, f"<{len(self.names)}>")
                parts.append(self.names.get(text, text))
        joined = "".join(parts)
        if "aten.arange.start" in code:  # a count, as of others
            first, end, *rest = numbers
            numbers = [first, replace(end, value=end.value - first.value), *rest]
        return Statement(joined, tuple(numbers))

    def _layers(self, name: str, numbers: list[Number], others: Counts) -> str:
        """The name of a parameter, with its layer's number taken out."""
        first = len(self.path) + 1 + name.startswith('"')

        def take(match: re.Match[str]) -> str:
            if match["end"] is not None:  # pieces are named one after the other
                numbers.append(Number(float(match["end"]) - float(match["start"])))
                return f"[{match['whole']}#]"
            ours = match.start() == first and name.lstrip('"').startswith(
                f"{self.path}."
            )
            counts = Counts.LAYERS if ours and self.path else others
            numbers.append(Number(float(match[1]), counts))
            return "#"

        return LAYER.sub(take, name)


def _targets(line: str) -> list[str]:
    """The names that a line assigns."""
    left, equals, _ = line.partition("  # ")[0].strip().partition(" = ")
    named = TARGET.match(ENTRY_OF.sub("_", left)) if equals else None
    return re.findall(r"[A-Za-z_]\w*", left) if named else []


def _as_range(match: re.Match[str]) -> str:
    first = int(match[1])
    return f"if i in range({first}, {first + 1}):"


def _remark(comment: str) -> str:
    """The line and module that a statement comes from; dims in remarks are not run."""
    parts = [p for p in comment.split("  ") if p and not p.startswith("[")]
    return f"  # {'  '.join(parts)}" if parts else ""
