"""layer_uses: whether each layer has its turn in what a module does, loops included.

The number of a layer that stands outside of loops is counted from the first or from
the last, and a text alone does not tell from which. But functions take layers in order,
all of them, and as often in a large module as in the small one.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from ..proof.read_text import end_of

FUNCTION = re.compile(r"^def (\w+)\(.*\):\n", re.MULTILINE)
UNDER = re.compile(r"\s*(for i in|if) (.*):$")
KEY = re.compile(r"(\w+)\[(f?)\"([^\"]*)\"\]")  # p["blocks.+0.weight"]
OF_TWO: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.In: lambda one, several: one in several,
}
# A key of what layers hand on: a name, and which one it is.
NUMBERED = re.compile(r"^(\w+)\.(\d+)$")

# (table, name of a parameter without its layer, or of what layers hand on)
Kind = tuple[str, str]


@dataclass(frozen=True)
class Uses:
    """layers: name of a parameter without its layer -> the layers that have it; "":
    all. functions: of each, by kind: of which layers, in turn."""

    layers: Mapping[str, Sequence[int]]
    functions: Mapping[str, Mapping[Kind, Sequence[int]]]

    def of(self, kind: Kind) -> Sequence[int]:
        """Layers that use a kind of parameter."""
        return self.layers.get(kind[1], self.layers[""])


@dataclass(frozen=True)
class OutOfTurn:
    """function: of a module. name: of the value it takes. large, small: the layers it
    takes this from, in turn."""

    function: str
    name: str
    large: Sequence[int]
    small: Sequence[int]


def find_out_of_turn(large: str, small: str, path: str) -> OutOfTurn | None:
    """What a large module takes of other layers than its small one, or in another
    order; None if there is nothing. Their texts are alike. path: of the list of layers.
    """
    big, few = find_uses(large, path), find_uses(small, path)
    for function, kinds in few.functions.items():
        for kind, numbers in kinds.items():
            uses = big.functions[function].get(kind, ())  # if names are not the same
            turns = _turns(numbers, few.of(kind)) if uses else None
            if turns and list(uses) != list(_in_turn(big.of(kind), *turns)):
                return OutOfTurn(function, f'{kind[0]}["{kind[1]}"]', uses, numbers)
    return None


def _turns(numbers: Sequence[int], layers: Sequence[int]) -> tuple[int, int] | None:
    """(1 or -1 if from the last on, how often each) of layers that have their turns."""
    times = len(numbers) // max(1, len(layers))
    for step in (1, -1):
        if len(layers) > 1 and list(numbers) == list(_in_turn(layers, step, times)):
            return step, times
    return None


def _in_turn(layers: Sequence[int], step: int, times: int) -> Iterator[int]:
    return (n for n in layers[::step] for _ in range(times))


@lru_cache(maxsize=64)
def find_uses(text: str, path: str) -> Uses:
    """Finds an emitted module's uses of layers. path: of the list of layers."""
    own = re.compile(rf"^{re.escape(path)}\.\+(\d+)\.(.*)$")
    head, *parts = FUNCTION.split(text)
    layers: dict[str, list[int]] = {}
    for match in map(own.match, _declared(head)):
        if match is not None:
            layers.setdefault(match[2], []).append(int(match[1]))
    layers[""] = sorted({n for numbers in layers.values() for n in numbers})
    functions: dict[str, Mapping[Kind, Sequence[int]]] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        uses: dict[Kind, list[int]] = {}
        for table, key in _keys(body.splitlines(), {}):
            if (match := own.match(key)) is not None:
                uses.setdefault((table, match[2]), []).append(int(match[1]))
            elif (match := NUMBERED.match(key)) is not None:
                uses.setdefault((table, match[1]), []).append(int(match[2]))
        functions[name] = uses
    return Uses(layers, functions)


def _declared(head: str) -> Iterator[str]:
    """Yields the names of parameters in the table of their shapes."""
    (text,) = re.findall(r"^PARAMETERS = (\{.*?\})$", head, re.DOTALL | re.MULTILINE)
    table: Any = _expression(text)
    for key, value in zip(table.keys, table.values, strict=True):
        if key is not None:
            yield key.value
            continue
        layers, rows = value.generators
        for i in _value(layers.iter, {}):
            if not all(_value(one, {"i": i}) for one in layers.ifs):
                continue
            for name in rows.iter.func.value.keys:
                yield _value(value.key, {"i": i, "name": name.value})


def _keys(lines: Sequence[str], names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(table, key) of all that is taken and written, in the order of a run."""
    at = 0
    while at < len(lines):
        if (under := UNDER.match(lines[at])) is None:
            for table, key in _in_line(lines[at]):
                yield table, key if isinstance(key, str) else _value(key, names)
            at += 1
            continue
        end = end_of(lines, at)
        value, inside = _value(_expression(under[2]), names), lines[at + 1 : end]
        for own in [{"i": i} for i in value] if under[1] == "for i in" else [names]:
            if under[1] != "if" or value:
                yield from _keys(inside, own)
        at = end


@lru_cache(maxsize=1 << 12)
def _in_line(line: str) -> list[tuple[str, str | ast.expr]]:
    keys = KEY.findall(line.partition("  # ")[0])
    return [(table, _expression(f'f"{key}"') if f else key) for table, f, key in keys]


@lru_cache(maxsize=1 << 12)
def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: Any, names: Mapping[str, Any]) -> Any:
    """Evaluates what loops, their conditions and keys are written in
    (`write_loop.Index`, `layer_numbers`)."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.FormattedValue():
            return _value(node.value, names)
        case ast.JoinedStr():
            return "".join(str(_value(part, names)) for part in node.values)
        case ast.Set() | ast.Tuple():
            values = (
                _value(one.value, names)
                if isinstance(one, ast.Starred)
                else (_value(one, names),)
                for one in node.elts
            )
            return [*chain.from_iterable(values)]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, names)
        case ast.BinOp():
            return OF_TWO[type(node.op)](
                _value(node.left, names), _value(node.right, names)
            )
        case ast.BoolOp():
            each = (_value(one, names) for one in node.values)
            return all(each) if isinstance(node.op, ast.And) else any(each)
        case ast.Compare(ops=[how], comparators=[other]):
            return COMPARED[type(how)](_value(node.left, names), _value(other, names))
        case ast.Call(func=ast.Name(id="range")):
            return range(*(_value(one, names) for one in node.args))
        case ast.Call(func=ast.Name(id="reversed")):
            return _value(node.args[0], names)[::-1]
    raise AssertionError(f"'{ast.unparse(node)}' is in no loop")
