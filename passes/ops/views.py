"""Ops that move elements, show a part of them, join or repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph import Node, Value, resolve
from ..ops import extents, parts
from ..ops.cotangents import Cotangents
from ..ops.notation import letters, marked, spell
from ..ops.op import Op, OutCotangents, to_out
from ..ops.parts import dim_of

# --- Rules ------------------------------------------------------------------------


def moved(node: Node) -> str:
    """Dims in another order: the one that dims of distinct extents come out in."""
    x = letters(len(node.operands[0].shape))
    extents = range(2, 2 + len(x))
    one = node.substitute(lambda _: torch.empty(tuple(extents), device="meta"))
    out = resolve(one.op)(*one.args, **one.kwargs)
    return spell(x, [x[extents.index(n)] for n in out.shape])


def expanded(node: Node) -> str:
    """expand: dims are aligned on the right."""
    out = letters(len(node.out.shape))
    return spell(out[len(out) - len(node.operands[0].shape) :], out)


def changed_whole(node: Node) -> str:
    """slice, pad: a dim that grows, shrinks or shifts must be whole."""
    x, y = node.operands[0].shape, node.out.shape
    pads, each = node.arg("pad") or (), letters(len(x))
    whole = {len(x) - 1 - i // 2 for i, count in enumerate(pads) if count}
    whole.update(i for i in range(len(x)) if x[i] != y[i])
    return spell(marked(each, whole), marked(each, whole, "out!"))


def windows(node: Node) -> str:
    """unfold: windows that overlap need the whole dim; places in one are a new dim."""
    dim, each = node.arg("dimension"), letters(len(node.operands[0].shape))
    whole = [dim % len(each)]
    return spell(marked(each, whole), [*marked(each, whole, "out!"), "w!"])


def windows_backward(node: Node) -> str:
    """unfold_backward: each window is added where it lay."""
    dim, each = node.arg("dim"), letters(len(node.out.shape))
    whole = [dim % len(each)]
    return spell([*marked(each, whole, "out!"), "w!"], marked(each, whole))


def selected(node: Node) -> str:
    """select, unbind: one dim goes away."""
    x, dim = letters(len(node.operands[0].shape)), dim_of(node)
    return spell(marked(x, [dim]), x[:dim] + x[dim + 1 :], len(node.outs))


def cut(node: Node) -> str:
    """Equal pieces split the dim into (which piece, position in it)."""
    x, dim = letters(len(node.operands[0].shape)), dim_of(node)
    sizes = {v.shape[dim] if v else -1 for v in node.outs}
    if len(sizes) > 1:
        outs = [" ".join(marked(x, [dim], f"{i}!")) for i in range(len(node.outs))]
        return f"{' '.join(marked(x, [dim]))} -> {', '.join(outs)}"
    pieces = f"(pieces={len(node.outs)}! {x[dim]})"
    return spell([*x[:dim], pieces, *x[dim + 1 :]], x, len(node.outs))


def joined(node: Node) -> str:
    """cat: the dim along which it joins must be whole."""
    x = letters(len(node.out.shape))
    dim, count = dim_of(node, len(x)), len(node.operands)
    operands = [" ".join(marked(x, [dim], f"{i}!")) for i in range(count)]
    return f"{', '.join(operands)} -> {' '.join(marked(x, [dim]))}"


def stacked(node: Node) -> str:
    """stack: the new dim must be whole."""
    out = letters(len(node.out.shape))
    dim = dim_of(node, len(out))
    operand = " ".join(out[:dim] + out[dim + 1 :])
    operands = [operand] * len(node.operands)
    return f"{', '.join(operands)} -> {' '.join(marked(out, [dim]))}"


def repeated(node: Node) -> str | None:
    """repeat_interleave by a number: the dim becomes (its own, which copy)."""
    if node.op != "aten.repeat_interleave.self_int":
        return None
    x = letters(len(node.operands[0].shape))
    dim, repeats = node.named("dim repeats")
    if dim is None or not isinstance(repeats, int):
        return f"{' '.join(c + '!' for c in x)} -> z!"
    dim %= len(x)
    return spell(x, [*x[:dim], f"({x[dim]} times={repeats}!)", *x[dim + 1 :]])


# --- Sizes ------------------------------------------------------------------------


def piece_sizes(argument: str) -> Callable[[Node], Node]:
    """An argument that says the extent of each piece, or of all."""

    def change(node: Node) -> Node:
        dim, sizes = node.arg("dim"), node.arg(argument)
        extents = tuple(v.shape[dim] if v else 0 for v in node.outs)
        pieces: Any = extents[0] if isinstance(sizes, int) else extents
        return node.with_args(**{argument: pieces})

    return change


def length_of_copies(node: Node) -> Node:
    """Sets the length of repeat_interleave's result, where torch noted one."""
    if node.arg("output_size") is None:
        return node
    return node.with_args(output_size=node.out.shape[node.arg("dim") or 0])


# --- Derivatives ------------------------------------------------------------------


def reshape(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is dy in x's shape."""
    return [cts.view("aten.reshape.default", dys[0], node.operands[0], node)]


def transpose(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is dy with the same dims swapped."""
    x, *dims = node.named("self dim0 dim1")
    return [cts.view(node.op, dys[0], x, node, *dims)]


def permute(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is dy permuted back."""
    dims = node.arg("dims")
    order = [0] * len(dims)
    for new, old in enumerate(dims):
        order[old] = new
    return [cts.view(node.op, dys[0], node.operands[0], node, tuple(order))]


def split(cts: Cotangents, node: Node, dys: OutCotangents) -> list[Value | None]:
    """dx is the pieces' dy joined, zeros where one is unused."""
    pieces = []
    for out, dy in zip(node.outs, dys, strict=True):
        assert out is not None
        pieces.append(dy if dy is not None else cts.zeros(out, node))
    dim = node.arg("dim")
    return [cts.emit("aten.cat.default", node.operands[0], node, tuple(pieces), dim)]


def _order(name: str, heeds: str, examples: str, **declared: Any) -> Op:
    declaration: Any = {"linear": "jointly", "view": "order", **declared}
    return Op(f"aten.{name}", heeds, moved, examples, **declaration)


OPS = (
    Op(
        "aten.reshape",
        "self shape",
        linear="jointly",
        view="shape",
        sizes=to_out("shape"),
        put_back=parts.reshaped,
        derivative=reshape,
        spelling=".reshape",
    ),
    _order(
        "transpose",
        "self dim0 dim1",
        "int(x(a, b, c), -1, 0)",
        form="int",
        put_back=parts.turned_again,
        derivative=transpose,
        spelling=".transpose",
    ),
    _order(
        "permute",
        "self dims",
        "default(x(a, b, c), (2, 0, -2))",
        put_back=parts.turned_back,
        derivative=permute,
        spelling=".permute",
    ),
    _order("t", "self", "default(x(a, b))", put_back=parts.turned_again),
    _order("numpy_T", "self", "default(x(a, b))", put_back=parts.turned_again),
    _order("mT", "self", "default(x(a, b, c))", put_back=parts.turned_again),
    *(
        _order(
            name,
            "self",
            "default(x(a, b, c)); default(x(a, b, c, dtype=torch.complex64))",
            spelling=f"{{0}}.{called}.resolve_conj()",
        )
        for name, called in (("mH", "mH"), ("adjoint", "adjoint()"))
    ),
    _order(
        "movedim",
        "self source destination",
        "int(x(a, b, c, d), -2, 0); intlist(x(a, b, c), (0, 1), (2, 0))",
    ),
    _order("moveaxis", "self source destination", "int(x(a, b, c), 0, -1)"),
    _order("swapaxes", "self axis0 axis1", "default(x(a, b, c), 0, -1)"),
    _order("swapdims", "self dim0 dim1", "default(x(a, b, c), 1, 2)"),
    Op(
        "aten.expand",
        "self size",
        expanded,
        "default(x(a, 1, c), (d, a, b, -1))",
        linear="jointly",
        view="copies",
        put_back=parts.reshaped,
        sizes=to_out("size"),
        spelling=".expand",
    ),
    Op(
        "aten.unfold",
        "self dimension size step",
        windows,
        "default(x(a, b, c), 1, 2, 1); default(x(a, 7), -1, 3, 2)",
        linear="jointly",
        view="copies",
    ),
    Op(
        "aten.unfold_backward",
        "grad_in input_sizes dim size step",
        windows_backward,
        "default(x(a, 5, c, 2), (a, 6, c), 1, 2, 1)",
        linear="jointly",
        sizes=to_out("input_sizes"),
    ),
    *(Op(f"aten.{name}", values="moved") for name in ("flip", "unsafe_split")),
    *(Op(f"aten.{name}_backward", selects=True) for name in ("select", "slice")),
    Op("aten.as_strided", view="copies"),
    Op(
        "aten.slice",
        "self dim start end step",
        changed_whole,
        (
            "Tensor(x(c, d), 1, 1, a); Tensor(x(c, d), 0, 0, 2**63 - 1); "
            "Tensor(x(c, d), 1, 0, 2**63 - 1, 2)"
        ),
        linear="jointly",
        view="part",
        part=parts.sliced,
        put_back=parts.into_slice,
    ),
    Op(
        "aten.select",
        "self dim index",
        selected,
        "int(x(a, b, c), -1, 1)",
        linear="jointly",
        view="part",
        part=parts.picked,
        put_back=parts.into_row,
    ),
    Op(
        "aten.unbind",
        "self dim",
        selected,
        "int(x(a, b, c)); int(x(a, b, c), -1)",
        linear="jointly",
        view="part",
        extents=extents.pieces,
    ),
    Op(
        "aten.split",
        "self split_size dim",
        cut,
        (
            "Tensor(x(b, 3 * c), c, -1); Tensor(x(3 * c, b), c); "
            "Tensor(x(b, 2 * c + 1), c, 1)"
        ),
        form="Tensor",
        linear="jointly",
        view="part",
        extents=extents.split,
        sizes=piece_sizes("split_size"),
        derivative=split,
        spelling="torch.split",
    ),
    Op(
        "aten.split_with_sizes",
        "self split_sizes dim",
        cut,
        "default(x(b, 2 * c), (c, c), 1); default(x(b, c + d), (c, d), 1)",
        linear="jointly",
        view="part",
        extents=extents.split,
        sizes=piece_sizes("split_sizes"),
    ),
    Op(
        "aten.chunk",
        "self chunks dim",
        cut,
        "default(x(b, 2 * c), 2, 1)",
        linear="jointly",
        view="part",
        extents=extents.pieces,
        row_by_row=True,
    ),
    Op(
        "aten.cat",
        "tensors dim",
        joined,
        ("default((x(a, b), x(a, c)), -1); default((x(a, b), x(a, b), x(a, b)), 1)"),
        linear="jointly",
        extents=extents.joined,
        spelling="torch.cat",
        values="replaced",
    ),
    Op(
        "aten.stack",
        "tensors dim",
        stacked,
        "default((x(a, b), x(a, b)), 1); default((x(a, b), x(a, b)), dim=-1)",
        linear="jointly",
        extents=extents.stacked,
        values="replaced",
    ),
    Op(
        "aten.pad",
        "self pad mode value",
        changed_whole,
        "default(x(a, b, c), (1, 2, 0, 0)); default(x(a, b, c), (0, 0, 1, -1))",
        extents=extents.padded,
        values="replaced",
    ),
    Op(
        "aten.constant_pad_nd",
        "self pad value",
        changed_whole,
        "default(x(a, b), (0, -1), 1.0)",
        extents=extents.padded,
        values="replaced",
    ),
    Op(
        "aten.repeat_interleave",
        "self repeats dim output_size",
        repeated,
        "self_int(x(a, b, c), 3, dim=1); self_int(x(a, b), 2)",
        extents=extents.copied,
        sizes=length_of_copies,
        values="moved",
    ),
    Op(
        "aten.view_as_complex",
        "self",
        "... two! -> ...",
        "default(x(a, b, 2))",
        # Pairs must lie next to each other, which gradients of views do not.
        spelling="torch.view_as_complex({0}.contiguous())",
        autocast="wide",
    ),
    Op(
        "aten.view_as_real",
        "self",
        "... -> ... two!",
        "default(x(a, b, dtype=torch.complex64))",
    ),
    # Torch only marks what it is to conjugate, and then shows no parts of it; nor do
    # messages have the mark.
    Op(
        "aten._conj",
        "self",
        "pointwise",
        "default(x(a, b, dtype=torch.complex64))",
        spelling="torch.conj_physical",
    ),
    Op(
        "aten.detach",
        "self",
        "pointwise",
        linear="jointly",
        view="same",
        elements="same",
        spelling=".detach",
    ),
)
