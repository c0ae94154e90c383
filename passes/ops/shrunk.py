"""Arguments that say sizes or positions, in a captured graph with small sizes.

Each function is told the node as it was and as it is with values of small shapes, see
`passes.proof.shrink`. Of others `Op.sizes` says all.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..graph import Node, Value, resolve
from ..ops.op import Small


def view(_: Small, node: Node, new: Node) -> Node:
    """Any view is a reshape to its result's shape."""
    args = (new.operands[0], new.out.shape)
    return replace(new, op="aten.reshape.default", args=args, kwargs={})


def group_norm(at: Small, node: Node, new: Node) -> Node:
    """Gives group_norm as many groups as their factor of the channels has."""
    groups = at.leading(node.operands[0].name, 1, node.arg("num_groups"))
    return new.with_args(num_groups=groups)


def histogram(_: Small, node: Node, new: Node) -> Node:
    """histc of whole numbers, a bin for each: as many bins as there are now."""
    bins, most = node.named("bins max")
    fewer = new.out.shape[0]
    return new.with_args(bins=fewer, max=most - bins + fewer)


def arange(at: Small, node: Node, new: Node) -> Node:
    """Gives arange the smaller count; its start stays."""
    count = new.out.shape[0] if new.out.shape else 1
    if resolve(node.op)._overloadname == "default":
        return new.with_args(end=type(node.arg("end"))(count))
    start, step = node.arg("start"), node.arg("step") or 1
    if isinstance(start, int):
        start = at.number(start, node)
    return new.with_args(start=start, end=start + count * step)


def repeat(_: Small, node: Node, new: Node) -> Node:
    """Gives repeat and tile as many copies of the operand as the smaller result
    holds."""
    x, out = new.operands[0], new.out
    ahead = len(out.shape) - len(x.shape)
    padded = (*(1,) * ahead, *x.shape)
    times = tuple(n // max(m, 1) for n, m in zip(out.shape, padded, strict=True))
    copies = "dims" if node.name == "aten.tile" else "repeats"
    return new.with_args(**{copies: times})


def embedding(at: Small, node: Node, new: Node) -> Node:
    """A row for padding is as far from the end, or the beginning, as it was."""
    padding = node.arg("padding_idx")
    rows, fewer = node.operands[0].shape[0], new.operands[0].shape[0]
    if padding < fewer:
        return new
    place = max(0, fewer - (rows - padding)) if rows - padding <= fewer else fewer - 1
    at.compared[padding] = place
    return new.with_args(padding_idx=place)


def comparison(at: Small, node: Node, new: Node) -> Node:
    """Positions are compared with, or shifted by, numbers that speak of sizes."""
    x, other = node.named("self other")
    whole = isinstance(x, Value) and not x.dtype.is_floating_point
    if not whole or not isinstance(other, int) or isinstance(other, bool) or other < 0:
        return new
    return new.with_args(other=at.number(other, node))


def equality(at: Small, node: Node, new: Node) -> Node:
    """One of those that were chosen along a dim may be told from the others."""
    x, other = node.named("self other")
    if isinstance(x, Value) and type(other) is int:
        return new.with_args(other=at.choice(other, x))
    return new


def quotient(at: Small, node: Node, new: Node) -> Node:
    """Rows by how many of them are one token's: the last factors of their number."""
    x, other = node.named("self other")
    if isinstance(x, Value) and x.shape and type(other) is int and other > 1:
        small = at.trailing(x.name, len(x.shape) - 1, other)
        return new if small is None else new.with_args(other=small)
    return new


def filled(at: Small, node: Node, new: Node) -> Node:
    """Shrinks constants written among positions, as those that positions are compared
    with: beyond the sequence they mean its end."""
    if node.arg("size") is not None:
        new = new.with_args(size=new.out.shape)
    if node.out.dtype not in (torch.int32, torch.int64):
        return new
    written = {n: node.arg(n) for n in ("fill_value", "value", "self", "other")}
    return new.with_args(
        **{
            n: at.number(x, node)
            for n, x in written.items()
            if type(x) is int and x > 0
        }
    )


def limited(at: Small, node: Node, new: Node) -> Node:
    """Distances are kept below how far a table goes."""
    if node.out.dtype not in (torch.int32, torch.int64):
        return new
    limits = {n: node.arg(n) for n in ("min", "max")}
    numbers = {n: x for n, x in limits.items() if type(x) is int and x > 0}
    return new.with_args(**{n: at.number(x, node) for n, x in numbers.items()})


def two_sizes(_: Small, node: Node, new: Node) -> Node:
    """Gives eye the shape of its smaller result."""
    sizes = dict(zip(("n", "m"), new.out.shape, strict=True))
    return new.with_args(**sizes if node.op.endswith(".m") else {"n": sizes["n"]})
