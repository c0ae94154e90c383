"""add_dim: what a node does to one of n alike tensors, done to all n of them at once.

They are side by side in one more dim, which comes first: [n, ...]. What is not one of
them is read by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from string import ascii_letters
from typing import Any

from ...graph import Node, Value, parameters
from ...ops.evaluate import results_like
from ...ops.op import op_of
from ...ops.random import awaits_number
from ...ops.reductions import dims_of
from ...ops.rules import is_pointwise
from ...rewrite import Rewriter

# Arguments that count dims, from the first or from the last.
DIMS = ("dim", "dims", "dim0", "dim1")
# Of ops that go along all dims -> those that are told which.
ALONG = {
    "aten.sum.default": "aten.sum.dim_IntList",
    "aten.mean.default": "aten.mean.dim",
    "aten.max.default": "aten.amax.default",
    "aten.min.default": "aten.amin.default",
    "aten.all.default": "aten.all.dims",
    "aten.any.default": "aten.any.dims",
}


class Unlike(Exception):
    """What is done to one of them cannot be done to all at once."""


def add_dim(
    rewriter: Rewriter, node: Node, several: Mapping[str, Value], n: int
) -> tuple[Value | None, ...]:
    """Emits a node for all of n. several: of the operands that are one of n, by name,
    all of them, [n, ...]. Returns its results, [n, ...]. Raises: Unlike."""
    if awaits_number(node) or "number" in parameters(node.op) or not node.results:
        raise Unlike  # what is drawn or chosen is counted in the model's order
    now = {v.name: rewriter.replaced.get(v.name, v) for v in node.operands}
    now |= {name: several[name] for name in now if name in several}
    x = now[node.operands[0].name]
    out = node.results[0]
    kind = op_of(node)
    if kind.view == "shape":
        return (rewriter.reshape(x, (n, *out.shape)),)
    if kind.view == "copies":
        return (rewriter.expand(_aligned(rewriter, x, out), (n, *out.shape)),)
    if is_pointwise(node) or kind.elements:
        for name in {*now} & {*several}:
            now[name] = _aligned(rewriter, now[name], out)
        return _kept(rewriter, node, now, n)
    if kind.view == "order" and not any(n in DIMS for n in parameters(node.op)):
        if len(out.shape) != 2 and node.name != "aten.mT":
            raise Unlike
        return (rewriter.emit("aten.transpose.int", x, -2, -1),)
    if node.name == "aten.einsum":
        return _kept(rewriter, _einsum(node, several), now, n)
    if node.op in ALONG or any(name in DIMS for name in parameters(node.op)):
        if not node.operands[0].shape:  # a sum of one
            now[node.operands[0].name] = rewriter.reshape(x, (n, 1))
        made, apart = _along(node), [v for v in node.operands if v.shape]
    else:
        made, apart = node, _with_more_dims(node, several)
    for v in apart:  # one that all read, once for each of them
        if v.name not in several:
            rows = rewriter.reshape(now[v.name], (1, *v.shape))
            now[v.name] = rewriter.expand(rows, (n, *v.shape))
    return _kept(rewriter, made, now, n)


def _aligned(rewriter: Rewriter, x: Value, out: Value) -> Value:
    """x [n, ...] with as many dims behind the first as a result has."""
    missing = len(out.shape) + 1 - len(x.shape)
    return rewriter.reshape(x, (x.shape[0], *[1] * missing, *x.shape[1:]))


def _along(node: Node) -> Node:
    """A node that goes along dims which are one further back."""
    rank = len(node.operands[0].shape)
    if node.op in ALONG:
        dims = tuple(range(1, max(rank, 1) + 1))
        return Node(
            ALONG[node.op],
            (*node.args[:1], dims),
            node.kwargs,
            node.outs,
            node.location,
        )
    if "keepdim" in parameters(node.op):
        dims = tuple(d + 1 for d in dims_of(node))
        if node.arg("dim") is None and "dim" not in ("", *parameters(node.op)):
            raise Unlike
        one = isinstance(node.arg("dim"), int)
        return node.with_args(dim=dims[0] if one else dims)
    if node.name == "aten.permute":
        dims = tuple(d % rank + 1 for d in node.arg("dims"))
        return node.with_args(dims=(0, *dims))

    def behind(dim: Any) -> Any:
        if isinstance(dim, tuple):
            return tuple(map(behind, dim))
        return dim + 1 if isinstance(dim, int) and dim >= 0 else dim

    own = {name: node.arg(name) for name in DIMS if name in parameters(node.op)}
    if None in own.values():
        raise Unlike
    return node.with_args(**{name: behind(dim) for name, dim in own.items()})


def _einsum(node: Node, several: Mapping[str, Value]) -> Node:
    """An einsum with a letter for the dim that comes first. Raises: Unlike."""
    text, values = node.arg("equation").replace(" ", ""), node.arg("tensors")
    operands, arrow, out = text.partition("->")
    free = [c for c in ascii_letters if c not in text]
    if "." in text or not arrow or not free:
        raise Unlike
    operands = ",".join(
        free[0] + own if v.name in several else own
        for v, own in zip(values, operands.split(","), strict=True)
    )
    return node.with_args(equation=f"{operands}->{free[0]}{out}")


def _with_more_dims(node: Node, several: Mapping[str, Value]) -> list[Value]:
    """The operands of a node that goes along the last dims alone which have other dims
    before them, as its rule says: `... k, n k -> ... n`. Raises: Unlike."""
    rule = op_of(node).rule
    text = rule(node) if callable(rule) else rule
    operands, outs = (part.split(",") for part in (text or "->").split("->"))
    if len(operands) != len(node.operands) or not all("..." in out for out in outs):
        raise Unlike
    more = []
    for v, dims in zip(node.operands, operands, strict=True):
        if v.name in several and "..." not in dims:
            raise Unlike
        if "..." in dims and len(v.shape) > len(dims.split()) - 1:
            more.append(v)
    return more


def _kept(
    rewriter: Rewriter, node: Node, now: Mapping[str, Value], n: int
) -> tuple[Value | None, ...]:
    """Emits a node of these operands. Raises: Unlike, where its results would be
    others."""
    outs = tuple(v and replace(v, shape=(n, *v.shape)) for v in node.outs)
    made = replace(node.substitute(lambda v: now[v.name]), outs=outs)
    if (sizes := op_of(made).sizes) is not None:
        made = sizes(made)
    try:
        torch_makes = results_like(made.op, made.args, made.kwargs)
    except Exception as error:  # whatever torch says of such arguments
        raise Unlike from error
    if len(torch_makes) != len(outs):
        raise Unlike
    wider = [
        own is not None and other is not None and own.dtype != other.dtype
        for own, other in zip(outs, torch_makes, strict=True)
    ]
    for own, other in zip(outs, torch_makes, strict=True):
        if own and (other is None or own.shape != other.shape):
            raise Unlike
    if not any(wider):
        return rewriter.keep(made)
    # A tensor without dims does not widen what it is combined with; with one it does.
    (out,), (other,) = outs, torch_makes
    assert out is not None and other is not None, "there is one result"
    (wide,) = rewriter.keep(replace(made, outs=(replace(out, dtype=other.dtype),)))
    return (rewriter.emit("aten.to.dtype", wide, out.dtype, name=out.name),)
