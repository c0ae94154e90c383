"""layer_uses: whether each layer has its turn in what a module does, loops included.

The number of a layer that stands outside of loops is counted from the first or from
the last, and a text alone does not tell from which. But functions take layers in order,
all of them, and as often in a large module as in the small one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

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
        return self.layers.get(kind[1], self.layers[""])


@dataclass(frozen=True)
class OutOfTurn:
    """function: of a module. name: of what it takes of layers. large, small: of which,
    in turn."""

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
            found = big.functions[function].get(kind, ())  # if names are not the same
            turns = _turns(numbers, few.of(kind)) if found else None
            if turns and list(found) != list(_in_turn(big.of(kind), *turns)):
                return OutOfTurn(function, f'{kind[0]}["{kind[1]}"]', found, numbers)
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
    layers: dict[str, list[int]] = {}
    functions: dict[str, Mapping[Kind, Sequence[int]]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = _functions_uses(node, own)
        elif (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "PARAMETERS"
        ):
            for match in map(own.match, eval(_code(node.value), {"torch": torch})):
                if match is not None:
                    layers.setdefault(match[2], []).append(int(match[1]))
    layers[""] = sorted({n for own in layers.values() for n in own})
    return Uses(layers, functions)


def _functions_uses(
    node: ast.FunctionDef, own: re.Pattern[str]
) -> dict[Kind, list[int]]:
    found: dict[Kind, list[int]] = {}
    for table, key in _keys(_read(node.body), {}):
        if (match := own.match(key)) is not None:
            found.setdefault((table, match[2]), []).append(int(match[1]))
        elif (match := NUMBERED.match(key)) is not None:
            found.setdefault((table, match[1]), []).append(int(match[2]))
    return found


# --- what is run, in order ------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """`table[key]`, where the key is text."""

    table: str
    key: CodeType


@dataclass(frozen=True)
class _Under:
    """What is done for each i of these, or only under a condition."""

    over: CodeType
    inside: tuple[_Key | _Under, ...]
    each: bool


def _read(nodes: Iterable[ast.AST]) -> tuple[_Key | _Under, ...]:
    found: list[_Key | _Under] = []
    for node in nodes:
        if isinstance(node, ast.For):
            found.append(_Under(_code(node.iter), _read(node.body), each=True))
        elif isinstance(node, ast.If):
            found.append(_Under(_code(node.test), _read(node.body), each=False))
        elif isinstance(node, ast.Subscript) and isinstance(
            node.slice, ast.Constant | ast.JoinedStr
        ):
            found.append(_Key(ast.unparse(node.value), _code(node.slice)))
        else:
            found += _read(ast.iter_child_nodes(node))
    return tuple(found)


def _keys(
    found: Sequence[_Key | _Under], names: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for one in found:
        value = eval(one.key if isinstance(one, _Key) else one.over, {}, names)
        if isinstance(one, _Key):
            yield one.table, str(value)
        elif not one.each:
            yield from _keys(one.inside if value else (), names)
        else:
            for i in value:
                yield from _keys(one.inside, {"i": i})


def _code(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<emitted>", "eval")
