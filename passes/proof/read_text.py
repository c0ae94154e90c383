"""read_text: the statements of an emitted module, with what differs by size taken out.

A statement is what it says without its numbers; its variables are named after where
they were made (which layer, counted from this one, and the how-manieth statement of
it), and layers are counted likewise. So layers that are alike have equal statements.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from passes.graph import LAYER

Numbers = tuple[float, ...]


class Whole(float):
    """A number that is the extent of no operand, but of what ranks hold parts of: no
    run on shapes alone tells whether it is right."""


# The layer in which a variable was made, and which one of it.
Place = tuple[str, str]
# What repeats together is at most so long: a few layers of a pattern, with what is
# fetched ahead between them.
LONGEST = 16

TOKEN = re.compile(
    r"""(?P<key>(?P<table>\b[a-z])\["(?P<name>[^"]*)"\])   # p["blocks.+0.weight"]
      | (?P<text>"[^"]*"|'[^']*')
      | (?P<number>(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)
      | (?P<dotted>\.[A-Za-z_]\w*)
      | (?P<unnamed>\bd\d+\b)                                # a dim without a name
      | (?P<word>[A-Za-z_]\w*)
      | (?P<rest>.)""",
    re.VERBOSE,
)
# Per-rank extents in collectives: as many as there are ranks.
EXTENTS = re.compile(r"[(\[]#(?:, #)+,?[)\]]")
# What runs once a step, and what goes in one message there.
ONCE = ("prologue", "epilogue")
STARTED = re.compile(
    r"    (\w+) = c\.(start_\w+)\(\[(.*?)\], ('\w+'|\(.*?\)), (.*)\)(?:  #|$)"
)
WAITED = re.compile(r"    \[(.*?)\] = c\.wait\((\w+)\)")
# Lists without numbers, and the key of a parameter.
LISTS = re.compile(r"(?<![\w\]])\[([^\[\]#]*(?:\w\[[^\]]*\][^\[\]#]*)*)\]")
KEY = re.compile(r'\w\["([^"]*)"\]')
SOURCE = re.compile(r"\S+\.py:\d+")
# Calls with extents of what ranks hold parts of.
OF_PARTS = re.compile(
    r"\bc\.(lookup|pick|attention|expert|route)\w*\((?P<operands>.*)\)(?:  # |$)"
)


@dataclass(frozen=True)
class Statement:
    """What a statement says, the layer it belongs to, and its numbers."""

    text: str
    layer: str
    numbers: Numbers


@dataclass(frozen=True)
class Chunk:
    """Statements of one layer that follow each other."""

    texts: tuple[str, ...]
    numbers: tuple[Numbers, ...]


def collapse(kinds: Sequence[int]) -> list[int]:
    """What repeats directly after itself once, shortest repeats first."""
    found = list(kinds)
    for length in range(1, LONGEST + 1):
        i = 0
        while i + 2 * length <= len(found):
            if found[i : i + length] == found[i + length : i + 2 * length]:
                del found[i + length : i + 2 * length]
            else:
                i += 1
    return found


@dataclass
class _Names:
    """Variables of one function: name -> (layer, number within that layer); or, where
    the order is a matter of bytes, what made it. under_way: of what was started
    together, the layers of its parts."""

    made: dict[str, Place] = field(default_factory=dict)
    ordered: bool = True
    counts: dict[str, int] = field(default_factory=dict)
    under_way: dict[str, list[str]] = field(default_factory=dict)

    def place(self, name: str) -> Place:
        """Where a variable was made; of one that nobody made, nowhere."""
        return self.made.get(name, ("", "nowhere"))

    def make(self, name: str, layer: str, text: str) -> None:
        count = self.counts.get(layer, 0)
        self.counts[layer] = count + 1
        tag = f"{count}" if self.ordered else f"{crc32(text.encode()):x}"
        self.made[name] = (layer, tag)


def read_functions(text: str) -> dict[str, list[Chunk]]:
    """Name of a function, "" for what stands before the first -> its chunks."""
    parts = re.split(r"^def (\w+)\((.*)\):\n", text, flags=re.MULTILINE)
    found = {"": _chunks(_header(parts[0]))}
    handed: dict[str, Place] = {}  # keys of k and b -> where made
    saved: list[Place] = []
    for name, given, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        names = _Names({arg: ("", "") for arg in given.split(", ")}, name not in ONCE)
        if name.startswith("backward") or name == "epilogue":
            names.made.update(handed)
        if name in ONCE:
            body = _one_by_one(body)
        statements = list(_statements(body, names, handed, saved))
        if name in ONCE:
            statements.sort(key=lambda s: (_number(s.layer), s.text))
        found[name] = _chunks(statements)
    return found


def _number(layer: str) -> tuple[str, int]:
    path, _, number = layer.rpartition(".")
    return path, int(number or -1)


def _one_by_one(body: str) -> str:
    """What goes in one message for each of its parts: which go together once a step is
    a matter of bytes."""
    lines, parts = [], {}
    for line in body.splitlines():
        started = STARTED.match(line)
        waited = WAITED.match(line)
        if started is not None:
            name, op, moved, axes, rest = started.groups()
            own = ast.literal_eval(f"[{rest}]")
            given = [
                f"c.{op}({x}, {axes}, {', '.join(repr(row[i]) for row in own)})"
                for i, x in enumerate(moved.split(", "))
            ]
            parts[name] = list(zip(given, moved.split(", "), strict=True))
        elif waited is not None and waited[2] in parts:
            for target, (call, moved) in zip(
                waited[1].split(", "), parts[waited[2]], strict=True
            ):
                lines.append(f"    {target} = {call}  # of {moved}")
        elif line.strip().removeprefix("del ") not in parts:
            lines.append(line)
    return "\n".join(lines)


def _header(text: str) -> Iterator[Statement]:
    """Declarations; names of parameters are those of their layer."""
    body = text[text.index("PARAMETERS") :] if "PARAMETERS" in text else text
    for line in body.splitlines():
        if line.startswith("WHOLE_GRADIENTS"):
            break  # the names of what g holds: backwards say which these are
        for part in re.split(r"(?<=['\"\]),}]),? (?=['\"(])", line.strip()):
            layer = _layer(part)
            yield _statement(part, layer, _Names(), {})


def _statements(
    body: str,
    names: _Names,
    handed: dict[str, Place],
    saved: list[Place],
) -> Iterator[Statement]:
    for line in body.splitlines():
        code, _, comment = line.strip().partition("  # ")
        if not code:
            continue
        if code.startswith("del "):
            for name in code[4:].split(", ") if names.ordered else ():
                yield _statement(f"del {name}", names.place(name)[0], names, handed)
            continue
        if code.endswith("] = saved") or code == "[] = saved":
            for name, place in zip(_listed(code), saved, strict=False):
                names.made[name] = (place[0], place[1])
            yield Statement("take saved", "", ())
            continue
        if code.startswith("return"):
            yield from _returned(code, names, handed, saved)
            continue
        layer = _layer(comment)
        if comment.startswith("of "):  # a part of what goes in one message
            moved = comment[3:]
            if (key := KEY.search(moved)) is not None:
                moved = key[1]
            made = handed.get(moved) or names.made.get(moved)
            layer, comment = made[0] if made else _layer(f"{moved} "), ""
        targets, equals, _ = code.partition(" = ")
        if equals and re.fullmatch(r"[\[\]\w, ]+", targets):
            expression = _statement(
                code[len(targets) :] + _remark(comment), layer, names, handed
            )
            results = _listed(targets)
            layers = _layers_of(code, results, names, layer)
            for i, (name, own) in enumerate(zip(results, layers, strict=True)):
                names.make(name, own, f"{i} {expression.text}")
            stems = _collapsed(f"[{', '.join(map(_stem, results))}]")
            yield Statement(stems + expression.text, layer, expression.numbers)
        else:
            yield _statement(code + _remark(comment), layer, names, handed)


def _layers_of(code: str, made: list[str], names: _Names, layer: str) -> list[str]:
    """The layer of each result: of what was started for several layers, theirs."""
    started = re.search(r"= c\.start_\w+\(\[(.*?)\]", code)
    if started is not None:
        parts = started[1].split(", ")
        own = [
            _layer(f"{key[1]} ") if (key := KEY.search(part)) else _made(part, names)
            for part in parts
        ]
        names.under_way[made[0]] = own
    waited = re.search(r"= c\.wait\((\w+)\)", code)
    found = names.under_way.get(waited[1], []) if waited else []
    return found if len(found) == len(made) else [layer] * len(made)


def _made(name: str, names: _Names) -> str:
    return names.made.get(name, ("", ""))[0]


def _collapsed(text: str) -> str:
    """Lists of things of several layers, with what repeats in them once."""

    def change(match: re.Match[str]) -> str:
        parts = match[1].split(", ")
        kinds = {part: i for i, part in enumerate(dict.fromkeys(parts))}
        known = list(kinds)
        kept = collapse([kinds[part] for part in parts])
        return f"[{', '.join(known[i] for i in kept)}]"

    return LISTS.sub(change, text)


def _returned(
    code: str,
    names: _Names,
    handed: dict[str, Place],
    saved: list[Place],
) -> Iterator[Statement]:
    """What a function hands on, a statement each."""
    if code.startswith("return {"):
        for key, name in re.findall(r'"([^"]+)": (\w+)', code):
            handed[key] = names.made.get(name, ("", ""))
            yield _statement(f"hand on {name}", handed[key][0], names, handed)
        return
    if "), [" in code:
        kept = _listed(code.partition("), [")[2])
        saved[:] = [names.place(name) for name in kept]
        code = code.partition("), [")[0]
        # In the order of the layers; the backward takes them in that order too.
        for name in kept:
            yield _statement(f"keep {name}", names.place(name)[0], names, handed)
    yield _statement(code, "", names, handed)


def _listed(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text.partition(" = ")[0])


def _stem(name: str) -> str:
    """`all_gather` of `all_gather_12`; layers' numbers within a name are gone."""
    return re.sub(r"_\d+", "", name)


def _remark(comment: str) -> str:
    """The line and module that a statement comes from; dims in remarks are not run."""
    parts = [p for p in comment.split("  ") if p and not p.startswith("[")]
    return f"  # {'  '.join(parts)}" if parts else ""


def _layer(text: str) -> str:
    """`blocks.+1` of `gpt.py:34  blocks.+1.attention`; "" outside of layers."""
    for word in re.findall(r"[\w.+*]+", SOURCE.sub("", text)):
        if "." in word and (match := LAYER.search(word)) and match[1].startswith("+"):
            return word[: match.end()]
    return ""


def _away(layer: str, here: str) -> str:
    """How far a layer is from here: `blocks.~1` is the next one."""
    if not layer:
        return ""
    path, number = layer.rsplit(".", 1)
    if not here or here.rsplit(".", 1)[0] != path:
        return f"{path}.~"
    return f"{path}.~{int(number) - int(here.rsplit('.', 1)[1])}"


def _statement(
    code: str, layer: str, names: _Names, handed: Mapping[str, Place]
) -> Statement:
    numbers: list[float] = []
    parts_from = found.start("operands") if (found := OF_PARTS.search(code)) else -1
    end = len(code.partition("  # ")[0])
    parts = []
    here = layer  # outside of layers, from what was named before it
    for match in TOKEN.finditer(code):
        kind, text = match.lastgroup, match[0]
        if match["key"] is not None:
            key = match["name"]
            place = handed.get(key) if match["table"] in "kbg" else None
            parts.append(f"{match['table']}[{_named(key, place, here)}]")
            here = layer or (place[0] if place else _layer(f"{key} ")) or here
        elif match["unnamed"] is not None and text not in names.made:
            parts.append("d#")
        elif match["number"] is not None:
            if match.start() < end:  # what remarks tell is not run
                is_whole = 0 <= parts_from <= match.start()
                numbers.append(Whole(text) if is_whole else float(text))
            parts.append("#")
        elif text in names.made:
            made, count = names.made[text]
            parts.append(f"<{_stem(text)} {_away(made, here)}:{count}>")
            here = layer or made or here
        elif kind == "text" or match["word"] is not None:
            parts.append(_relative(text, layer))
        else:
            parts.append(text)
    joined = _relative("".join(parts), layer)
    if " c." in code or "c." in code[:2]:
        joined, numbers = _without_extents(joined, numbers)
    joined = _collapsed(joined)
    return Statement(joined, layer, tuple(numbers))


def _named(key: str, place: Place | None, layer: str) -> str:
    if place is not None:
        return f"{_stem(key)} {_away(place[0], layer)}:{place[1]}"
    return _relative(key, layer)


def _relative(text: str, layer: str) -> str:
    """Layers counted from this one."""

    def change(match: re.Match[str]) -> str:
        found = match[0]
        return _away(found, layer) if found != layer else f"{_away(layer, layer)}"

    return re.sub(r"[\w.]+\.\+\d+(?=\b)", change, text)


def _without_extents(text: str, numbers: list[float]) -> tuple[str, list[float]]:
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


def _chunks(statements: Iterable[Statement]) -> list[Chunk]:
    found: list[list[Statement]] = []
    for one in statements:
        if found and found[-1][0].layer == one.layer:
            found[-1].append(one)
        else:
            found.append([one])
    return [
        Chunk(tuple(s.text for s in own), tuple(s.numbers for s in own))
        for own in found
    ]
