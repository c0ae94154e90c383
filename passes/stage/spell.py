"""spell: a node as the Python expression that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from passes.graph import Node, Value, resolve
from passes.stage.loops import Varying
from passes.stage.outline import Number

Names = Callable[[Value], str]
Choose = Callable[[Varying], str]


def spell(
    node: Node, name: Names, choose: Choose = str, device: str = "c.device"
) -> str:
    """The call. name: of a value; choose: a constant that varies, in its iteration;
    device: where it makes what it makes of nothing."""
    speller = _Speller(name, choose)
    args = [speller.arg(a) for a in node.args]
    kwargs = [f"{k}={speller.arg(v)}" for k, v in node.kwargs.items()]
    kind, _, op = node.op.partition(".")
    if node.op == "comm.pause":
        return f"yield {args[0]}"
    if kind == "comm":
        args = args[: COMM_ARGS.get(op, len(args))]
        return f"c.{op}({', '.join([*args, *kwargs])})"
    if kind == "call":
        return f"{op}({', '.join(args)})"
    if kind == "autopar":
        return f"kernels.{op}({', '.join([*args, *kwargs])})"
    if not node.operands:
        kwargs = [k for k in kwargs if not k.startswith("device=")]
        kwargs.append(f"device={device}")
    if node.op in SPELLINGS:
        return SPELLINGS[node.op](args, kwargs)
    library = "" if kind == "aten" else "torch.ops."
    return f"{library}{node.op}({', '.join([*args, *kwargs])})"


def targets(node: Node, name: Names) -> str:
    """What a call's results are assigned to; "" if it has none."""
    if not node.outs:
        return ""
    outs = ["_" if v is None else name(v) for v in node.outs]
    left = ", ".join(outs)
    unpacked = node.op == "comm.wait" or _returns_list(node)  # of one tensor too
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
    if isinstance(value, Number):
        return value.name
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value)
    return repr(value)


def as_tuple(items: Iterable[str]) -> str:
    found = list(items)
    return f"({found[0]},)" if len(found) == 1 else f"({', '.join(found)})"


def is_method(node: Node) -> bool:
    """Whether it is a view of its first operand, spelled as a method of that."""
    return node.op in VIEWS


def _returns_list(node: Node) -> bool:
    """Whether a call gives a list: that of one tensor is unpacked too."""
    if not node.op.startswith("aten."):
        return False
    returns = resolve(node.op)._schema.returns
    return [str(one.type) for one in returns] == ["List[Tensor]"]


VIEWS = frozenset({"aten.reshape.default", "aten.transpose.int"})
VIEWS |= {"aten.permute.default", "aten.expand.default"}

# How many of a collective's arguments its call takes; the others are for the compiler.
COMM_ARGS = {
    "shard": 3,
    "all_gather": 4,
    "lookup": 4,
    "attention": 9,
    "attention_backward": 12,
}


def _method(name: str) -> Callable[[list[str], list[str]], str]:
    def spell(args: list[str], kwargs: list[str]) -> str:
        return f"{args[0]}.{name}({', '.join([*args[1:], *kwargs])})"

    return spell


def _plain(name: str) -> Callable[[list[str], list[str]], str]:
    def spell(args: list[str], kwargs: list[str]) -> str:
        return f"{name}({', '.join([*args, *kwargs])})"

    return spell


# Ops whose usual spelling reads better, and is called faster, than the operator's name.
SPELLINGS: dict[str, Callable[[list[str], list[str]], str]] = {
    "aten.reshape.default": _method("reshape"),
    "aten.transpose.int": _method("transpose"),
    "aten.permute.default": _method("permute"),
    "aten.expand.default": _method("expand"),
    "aten.detach.default": _method("detach"),
    "aten.to.dtype": _method("to"),
    "aten.add_.Tensor": _method("add_"),
    "aten.sub_.Tensor": _method("sub_"),
    "aten.mul_.Tensor": _method("mul_"),
    "aten.div_.Tensor": _method("div_"),
    "aten.neg_.default": _method("neg_"),
    "aten.neg.default": _plain("torch.neg"),
    "aten.add.Tensor": _plain("torch.add"),
    "aten.sub.Tensor": _plain("torch.sub"),
    "aten.mul.Tensor": _plain("torch.mul"),
    "aten.div.Tensor": _plain("torch.div"),
    "aten.matmul.default": _plain("torch.matmul"),
    "aten.linear.default": _plain("F.linear"),
    "aten.split.Tensor": _plain("torch.split"),
    "aten.cat.default": _plain("torch.cat"),
    "aten.amax.default": _plain("torch.amax"),
    "aten.native_layer_norm.default": _plain("torch.native_layer_norm"),
    "aten.log.default": _plain("torch.log"),
    "aten.rsqrt.default": _plain("torch.rsqrt"),
    # Pairs must lie next to each other, which gradients of views do not.
    "aten.view_as_complex.default": lambda args, _: (
        f"torch.view_as_complex({args[0]}.contiguous())"
    ),
}
