"""spell: a node as the Python expression that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from ..emit.loop import Varying
from ..emit.outline import Number
from ..graph import Node, Value, resolve
from ..ops.memory import IN_PLACE
from ..ops.op import OPS, op_of

Names = Callable[[Value], str]
Choose = Callable[[Varying], str]


def spell(
    node: Node, name: Names, choose: Choose = str, device: str = "c.device"
) -> str:
    """The text of a call. name: of a value. choose: the text of a constant that varies
    by iteration. device: for tensors that are made of nothing."""
    speller = _Speller(name, choose)
    args = [speller.arg(a) for a in node.args]
    kwargs = [f"{k}={speller.arg(v)}" for k, v in node.kwargs.items()]
    kind, _, op = node.op.partition(".")
    if node.op == "comm.pause":
        return f"yield {args[0]}"
    if kind == "comm":
        args = args[: op_of(node).called_with]
        while args and args[-1] == "None":
            args.pop()
        return f"c.{op}({', '.join([*args, *kwargs])})"
    if kind == "call":
        return f"{op}({', '.join(args)})"
    if kind == "autopar":
        return f"kernels.{op}({', '.join([*args, *kwargs])})"
    if not node.operands:
        kwargs = [k for k in kwargs if not k.startswith("device=")]
        kwargs.append(f"device={device}")
    if node.op in SPELLINGS:
        return _as(SPELLINGS[node.op], args, kwargs)
    library = "" if kind == "aten" else "torch.ops."
    return f"{library}{node.op}({', '.join([*args, *kwargs])})"


def targets(node: Node, name: Names) -> str:
    """The targets that a call's results are assigned to; "" if it has none."""
    if not node.outs:
        return ""
    outs = ["_" if v is None else name(v) for v in node.outs]
    left = ", ".join(outs)
    unpacked = node.op == "comm.wait" or (node.is_aten and returns_list(node.op))
    return f"[{left}]" if unpacked else left


class _Speller:
    def __init__(self, name: Names, choose: Choose) -> None:
        self.name, self.choose = name, choose

    def arg(self, arg: Any) -> str:
        if isinstance(arg, Value):
            return self.name(arg)
        if isinstance(arg, Varying):
            return self.choose(arg)
        if isinstance(arg, tuple | list):
            flat = not any(isinstance(a, str | tuple | list) for a in arg)
            return f"[{', '.join(map(self.arg, arg))}]" if flat else self.nest(arg)
        return constant(arg)

    def nest(self, arg: Any) -> str:
        """Axis names and positions are tuples, and print as such."""
        return as_tuple(
            self.nest(a) if isinstance(a, tuple | list) else self.arg(a) for a in arg
        )


def constant(value: Any) -> str:
    """Writes a constant as a Python expression."""
    if isinstance(value, Number):
        return value.name
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value)
    return repr(value)


def as_tuple(items: Iterable[str]) -> str:
    """Writes a tuple of expressions."""
    texts = list(items)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


@cache
def returns_list(op: str) -> bool:
    """Whether a call returns a list, which is unpacked even if it has one tensor."""
    returns = resolve(op)._schema.returns
    return [str(one.type) for one in returns] == ["List[Tensor]"]


def _as(spelling: str, args: list[str], kwargs: list[str]) -> str:
    """`torch.add(x, y)`, `x.reshape(y)`, or what a text makes of the arguments."""
    if "{" in spelling:
        return spelling.format(*args)
    if spelling.startswith("."):
        return f"{args[0]}{spelling}({', '.join([*args[1:], *kwargs])})"
    return f"{spelling}({', '.join([*args, *kwargs])})"


# Ops whose usual spelling reads better, and is called faster, than the operator's name.
SPELLINGS = {op.op: op.spelling for op in OPS.values() if op.spelling}
SPELLINGS |= {IN_PLACE[op.op]: op.in_place for op in OPS.values() if op.in_place}
