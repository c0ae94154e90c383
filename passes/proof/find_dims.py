"""find_dims: which numbers of an emitted statement say dims of tensors, and no sizes.

A dim is the same number in a large program as in the small one. Were it compared as a
size, a pass that looks for a dim by its extent could find another one where two local
extents happen to be equal, and no text would show it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..graph import bare
from ..ops.op import OPS

OF_US = re.compile(r"(^|_)dims?$")
# Arguments of collectives and the like that are dims; of ops torch's schemas tell.
OF_RANKS = {
    "pad": (2,),
    **{
        bare(name): tuple(i for i, a in enumerate(op.heeds.split()) if OF_US.search(a))
        for name, op in OPS.items()
        if name.startswith("comm.")
    },
}
DIM = re.compile(r"^dims?\d?$|^(start|end)_dim$")
CALLEE = re.compile(r"[\w.]+$")
KEYWORD = re.compile(r"\s*(\w+)=")
RANKS = "c."  # how a statement calls the ranks that it talks to


@dataclass
class _Call:
    """An open bracket. callee: of a call, "" for a list. argument: which one is next,
    where it begins."""

    callee: str
    of_ranks: bool = False
    argument: int = 0
    begin: int = 0


@lru_cache(maxsize=4096)
def find_dims(text: str) -> frozenset[int]:
    """Places among a statement's numbers, see `passes.proof.read_text.Statement`."""
    code = text.partition("  # ")[0]
    opened: list[_Call] = []
    numbers, number = set(), -1
    for at, letter in enumerate(code):
        if letter in "([":
            match = CALLEE.search(code[:at]) if letter == "(" else None
            callee = match[0] if match else ""
            ranks = callee.startswith(RANKS)
            opened.append(_Call(callee, ranks, 0, at + 1))
        elif letter in ")]" and opened:
            opened.pop()
        elif letter == "," and opened:
            opened[-1].argument += 1
            opened[-1].begin = at + 1
        elif letter == "#" and code[at - 1] != "d":
            number += 1
            call = next((one for one in reversed(opened) if one.callee), None)
            if call is not None and _is_dim(call, code[call.begin : at]):
                numbers.add(number)
    return frozenset(numbers)


def _is_dim(call: _Call, argument: str) -> bool:
    """Whether a number in an argument of a call is a dim. argument: its text so far."""
    kind, _, name = call.callee.partition(".")
    if call.of_ranks:
        return call.argument in OF_RANKS.get(name, ())
    if (keyword := KEYWORD.match(argument)) is not None:
        return DIM.match(keyword[1]) is not None
    place = call.argument
    if kind == "aten":
        name, _, overload = name.partition(".")
        overloads = [overload or "default"]
    elif kind == "" and hasattr(torch.ops.aten, name):  # a tensor's own method
        overloads, place = getattr(torch.ops.aten, name).overloads(), place + 1
    else:
        return False
    packet = getattr(torch.ops.aten, name)
    schemas = [getattr(packet, one)._schema.arguments for one in overloads]
    return any(len(a) > place and DIM.match(a[place].name) for a in schemas)
