"""The notation of sharding rules, after einsum: how it reads, and what it becomes.

Operands are the tensor arguments in order; a suffix says what a letter allows:

    m     may be split: each shard of the result needs that shard of the operands
    k+    summed away: splitting it leaves a pending sum
    k^    maximised away: splitting it leaves a pending maximum
    v@    looked up by global index: splitting it leaves a pending sum, from an op that
          knows where its shard starts
    s~    may be split as m, by an op that knows where its shard starts
    d!    must stay whole
    (a b) a dim that is a product, a outermost
    ...   leading dims, aligned from the right

A dim of extent 1 broadcasts: it takes part in no letter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..graph import Node, Value

Role = Literal["map", "sum", "max", "lookup", "rows", "ring", "routed", "whole"]
SUFFIXES: dict[str, Role] = {
    "+": "sum",
    "^": "max",
    "@": "lookup",
    "~": "rows",
    "!": "whole",
}
# What an op's result is on an axis that splits a letter of this role.
PENDING: dict[Role, str] = {"sum": "sum", "lookup": "sum", "max": "max"}


@dataclass(frozen=True)
class Equation:
    """A rule written out for one node: for each dim of each tensor, its letters."""

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    outs: tuple[tuple[tuple[str, ...], ...], ...]
    roles: Mapping[str, Role]


def parse(text: str, node: Node) -> Equation | None:
    """Read a rule's text against the ranks of a node's tensors; None if it is not for
    such ranks (a product of a matrix and a vector)."""
    left, right = text.split("->")
    tensors = [*node.operands, *[v for v in node.outs]]
    patterns = [*left.split(","), *right.split(",")]
    assert len(patterns) == len(tensors), f"rule '{text}' does not fit {node}"
    roles: dict[str, Role] = {}
    read = [
        _dims_of(pattern.strip(), tensor, roles)
        for pattern, tensor in zip(patterns, tensors, strict=True)
    ]
    for tensor, dims in zip(tensors, read, strict=True):
        if tensor is not None and len(tensor.shape) != len(dims):
            return None
    count = len(node.operands)
    return Equation(tuple(read[:count]), tuple(read[count:]), roles)


def _dims_of(
    pattern: str, tensor: Value | None, roles: dict[str, Role]
) -> tuple[tuple[str, ...], ...]:
    tokens = _tokens(pattern)
    dims: list[tuple[str, ...]] = []
    for token in tokens:
        if token == ("...",):
            rank = len(tensor.shape) if tensor is not None else len(tokens) - 1
            lead = rank - len(tokens) + 1
            dims += [(f".{lead - i}",) for i in range(lead)]
            continue
        dims.append(tuple(_letter(item, roles) for item in token if item != "_"))
    for names in dims:
        for name in names:
            roles.setdefault(name, "map")
    return tuple(dims)


def _letter(item: str, roles: dict[str, Role]) -> str:
    role = SUFFIXES.get(item[-1])
    if role is not None:
        item = item[:-1]
        roles[item] = role
    return item


@cache
def _tokens(pattern: str) -> tuple[tuple[str, ...], ...]:
    """`(g=2 r) s e!` -> (("g=2", "r"), ("s",), ("e!",))."""
    tokens: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in pattern.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            assert group is not None, f"unbalanced ) in '{pattern}'"
            tokens.append(tuple(group))
            group = None
        elif group is not None:
            group.append(word)
        else:
            tokens.append((word,))
    return tuple(tokens)


def extent_of(letter: str) -> int | None:
    """The extent that a letter states itself (`g=2`), if it does."""
    name, _, extent = letter.partition("=")
    return int(extent) if extent and name else None


# --- Rules in it --------------------------------------------------------------------


def letters(count: int, start: str = "a") -> list[str]:
    """Returns `count` letters from `start`, one for each dim of a rule."""
    return [chr(ord(start) + i) for i in range(count)]


def marked(x: list[str], dims: Collection[int], mark: str = "!") -> list[str]:
    """The letters of a tensor, with a mark behind those of the given dims."""
    return [f"{c}{mark}" if i in dims else c for i, c in enumerate(x)]


def spell(operand: list[str], out: list[str], copies: int = 1) -> str:
    """The rule of an op of one operand."""
    return f"{' '.join(operand)} -> {', '.join([' '.join(out)] * copies)}"
