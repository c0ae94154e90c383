"""Ops that write in place, and their forms that make new values."""

from __future__ import annotations

from typing import Any

from ...errors import CaptureError
from ...graph import Node, resolve, short

# Written in place -> the form that makes a new value, where it has another name.
NEW = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
}


def operator_of(node: Node) -> Any:
    """The torch operator, with its schema and tags, which torch does not type."""
    return resolve(node.op)


def without_write(node: Node) -> str:
    """`aten.mul_.Tensor` -> `aten.mul.Tensor`, `aten.__ior__.Scalar` -> `__or__`."""
    if (op := NEW.get(node.op)) is not None:
        return op
    space, name, overload = node.op.split(".")
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    op = f"{space}.{plain}.{overload}"
    try:
        resolve(op)
    except AttributeError:
        raise CaptureError(
            f"'{short(node.op)}' writes in place, and has no form that does not",
            source=str(node.location),
            fix="compute a new tensor instead of writing into one",
        ) from None
    return op
