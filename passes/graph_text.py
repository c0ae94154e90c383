"""The text of a graph: names, types and constants as they print, and are read again.

    input  %x  f32[4,8]  [batch/dp, embed]
    param  %up.weight  f32[16,8]
    # forward
    f32[4,16]                %linear = linear(%x, %up.weight)  # model.py:12  up
    f32[4,16]                %twice = mul.Tensor(%linear, 2)  # model.py:13
    return %twice

What follows a type is a note: what a pass says of the value. An op is of ours, or
`aten.<name>.<overload>` without `aten.` and `.default`. `[4, 8]` is a tuple, `_` an out
that nobody reads, and `# source  module` is where a node comes from. A line that begins
with `#` is a title.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
OURS = ("autopar.", "comm.")

NAME = r"[\w.+-]+(?:\[\d+:\d+\][\w.+-]*)*"
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
VALUE = rf"%(?:{NAME}|{QUOTED})"
ONE_NAME = re.compile(NAME)
TOKEN = re.compile(rf"{QUOTED}|#.*|{VALUE}")
TYPE = r"[\w.]+\[[\d,]*\]"
SOURCE = re.compile(rf"(input|param|buffer|const) +({VALUE}) +({TYPE})(?: +(.*))?")
OUT = rf"(?:{VALUE}|_)"
NODE = re.compile(rf"([^%='\"]*?) *({OUT}(?:, {OUT})*) = (.*)")
BETWEEN_TYPES = re.compile(rf", (?={TYPE}(?: |,|$))")


class Call(NamedTuple):
    """A node's op and arguments, and the remark behind it."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    comment: str


def name_text(name: str) -> str:
    """Writes a value's name, in quotes where it is not one word."""
    return f"%{name if ONE_NAME.fullmatch(name) else repr(name)}"


def read_name(text: str) -> str:
    """Reads what `name_text` writes."""
    return ast.literal_eval(text[1:]) if text[1] in "'\"" else text[1:]


def type_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """`f32[4,16,48]`."""
    return f"{DTYPES.get(dtype, str(dtype))}[{','.join(map(str, shape))}]"


def read_type(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Reads shape and dtype out of `f32[2,3]`."""
    name, _, extents = text[:-1].partition("[")
    shape = tuple(map(int, extents.split(","))) if extents else ()
    known = {text: dtype for dtype, text in DTYPES.items()}
    return shape, known.get(name) or getattr(torch, name.removeprefix("torch."))


def op_text(op: str) -> str:
    """`add.Tensor` of `aten.add.Tensor`, `linear` of `aten.linear.default`."""
    return op.removeprefix("aten.").removesuffix(".default") if is_aten(op) else op


def is_aten(op: str) -> bool:
    """Whether an op is torch's own, spelled with its overload."""
    return op.startswith("aten.") and op.count(".") == 2


def read_op(text: str) -> str:
    """Completes an op's name: `aten.` and `.default` are left out of the text."""
    if text.startswith((*OURS, "aten.")) or text.count(".") > 1:
        return text
    return f"aten.{text}" if "." in text else f"aten.{text}.default"


def constant_text(constant: object) -> str:
    """A constant as it is written in Python, but for `torch.float32` and its like."""
    kinds = (torch.dtype, torch.memory_format, torch.layout)
    return str(constant) if isinstance(constant, kinds) else repr(constant)


def read_outs(text: str) -> tuple[list[tuple[str, str]], list[str | None], str]:
    """Splits a node's line: the types and notes of its results, the names of its outs,
    and its call."""
    match = NODE.fullmatch(text)
    if match is None:
        return [], [], text
    types, names, call = match.groups()
    results = [t.partition(" ") for t in BETWEEN_TYPES.split(types)] if types else []
    outs = [None if n == "_" else read_name(n) for n in re.findall(OUT, names)]
    return [(own, note.strip()) for own, _, note in results], outs, call


def read_call(text: str, values: Mapping[str, T]) -> Call:
    """Reads `linear(%x, %w)  # model.py:3`. values: by name. Raises: KeyError."""

    def as_python(match: re.Match[str]) -> str:
        token = match[0]
        return f"_[{read_name(token)!r}]" if token[0] == "%" else token

    op, _, rest = text.partition("(")
    source = f"_({TOKEN.sub(as_python, rest)}"
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call), f"{text!r} is no call"
    args = tuple(_read(arg, values) for arg in call.args)
    kwargs = {str(k.arg): _read(k.value, values) for k in call.keywords}
    comment = source.encode()[call.end_col_offset :].decode()
    return Call(read_op(op), args, kwargs, comment.strip().removeprefix("# "))


def _read(arg: ast.expr, values: Mapping[str, Any]) -> Any:
    """An argument: a value, a constant, or a tuple of them."""
    if isinstance(arg, ast.Subscript):
        return values[ast.literal_eval(arg.slice)]
    if isinstance(arg, ast.List):
        return tuple(_read(item, values) for item in arg.elts)
    if isinstance(arg, ast.Attribute):
        return getattr(torch, arg.attr)
    if isinstance(arg, ast.Call):  # device(type='cpu')
        return torch.device(**{str(k.arg): _read(k.value, {}) for k in arg.keywords})
    if isinstance(arg, ast.UnaryOp) and isinstance(arg.operand, ast.Name):
        return -float(arg.operand.id)
    return float(arg.id) if isinstance(arg, ast.Name) else ast.literal_eval(arg)
