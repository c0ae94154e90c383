"""Arguments of torch's operators by name, and which of them the compiler reads.

An op that some pass treats specially says which of its arguments those who treat it
read, or hand on as they are (`Op.heeds`). A value other than torch's default in another
one is refused: nobody would see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ..errors import CaptureError
from ..graph import Node, Value, parameters, resolve, show
from ..graph_text import OURS
from ..ops.op import op_of

# Where a tensor lies and how, which the rank that runs the program decides.
PLACEMENT = frozenset({"device", "pin_memory", "non_blocking", "memory_format"})


def arguments(node: Node) -> dict[str, Any]:
    """Returns what an `aten` op is called with: every argument of its schema, in order,
    by name; torch's default where the node gives none."""
    return {name: node.arg(name) for name in parameters(node.op)}


def call(op: str, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs for arguments by name, as torch's dispatcher orders them:
    by name only what has no place. Those at their default are given too."""
    schema = resolve(op)._schema.arguments
    args = tuple(bound[a.name] for a in schema if not a.kwarg_only)
    return args, {a.name: bound[a.name] for a in schema if a.kwarg_only}


@cache
def shows_operand(op: str, written: bool = False) -> bool:
    """Whether a result of an op shares memory with an operand, by torch's schema; of
    those that are written in place only if asked for."""
    returns = () if op.startswith(OURS) else resolve(op)._schema.returns
    return any(r.alias_info and (written or not r.alias_info.is_write) for r in returns)


def refuse_unread(node: Node) -> None:
    """Refuses a value that no pass would read.

    Raises: CaptureError that names the argument, if the op is treated specially.
    """
    heeds = op_of(node).heeds
    if not heeds or not node.is_aten:
        return
    heeded = {*heeds.split(), *PLACEMENT}
    defaults = {a.name: a for a in resolve(node.op)._schema.arguments}
    for name, value in arguments(node).items():
        if name in heeded or is_default(defaults[name], value):
            continue
        if value is None and not defaults[name].has_default_value():
            continue  # of another form of the op, and not given
        text = "a tensor" if isinstance(value, Value) else show(value)
        optional = defaults[name].has_default_value()
        raise CaptureError(
            f"'{node.op}' is called with {name}={text}, which is not supported",
            source=str(node.location),
            fix=(f"leave out '{name}', or " if optional else "")
            + "write what it means by other operations",
        )


def is_default(argument: Any, value: Any) -> bool:
    """Whether an argument of a schema has the value that it has if it is left out.
    Tensors are dense, and flags off, unless the model says otherwise."""
    if value is torch.strided and argument.name == "layout":
        return True
    if value is False and not argument.has_default_value():
        return True
    default = argument.default_value
    plain = tuple(default) if isinstance(default, list) else default
    return argument.has_default_value() and not (
        isinstance(value, Value) or value != plain
    )
