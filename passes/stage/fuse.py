"""fuse: a rank's nodes as the operations that it runs.

Masks get values of their own, a bias joins the product before it, sums of gradients
join each other, and what does nothing at run time is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..graph import Location, Node, Value
from ..ops.attention import ATTENTION
from ..ops.memory import ADD, ADD_EACH
from ..stage.runs import is_sum

# What does nothing at run time: R -> V, and a gradient that ends.
ENDS_GRADIENT = "aten.detach.default"
IDENTITIES = ("comm.enter", ENDS_GRADIENT)


def drop_identities(
    *parts: list[Node], handed_on: Collection[str] = ()
) -> tuple[list[Node], ...]:
    """Drops nodes that do nothing at run time. handed_on: names of values that are
    needed by these names."""
    aliases: dict[str, Value] = {}

    def follow(nodes: list[Node]) -> list[Node]:
        others = []
        for node in nodes:
            if aliases and any(v.name in aliases for v in node.operands):
                node = node.substitute(lambda v: aliases.get(v.name, v))
            named = node.op == ENDS_GRADIENT and node.out.name in handed_on
            if node.op in IDENTITIES and not named:
                aliases[node.out.name] = node.operands[0]
            else:
                others.append(node)
        return others

    return tuple(map(follow, parts))


def materialize_masks(nodes: list[Node]) -> list[Node]:
    """Masks that depend on global positions become values of their own.

    dropout -> where its elements stand in the stream of random bits, a mask made of
    that, and a scaled product with it. Causal attention of some of the rows, where
    these are a product of dims -> attention with the mask of these rows.
    """
    made: list[Node] = []
    args: tuple[Any, ...]
    for node in nodes:
        if node.op == "comm.dropout":
            x, p, number = node.named("x p number")
            of_rows = (*x.shape[:-1], 1)[: len(x.shape)]
            rows = Value(f"rows_{number}", of_rows, torch.int64)
            cols = Value(f"cols_{number}", x.shape[-1:], torch.int64)
            mask = Value(f"keep_{number}", x.shape, torch.bool)
            args = (number, node.arg("position"))
            counters = Node("comm.dropout_counters", args, {}, (rows, cols))
            made.append(replace(counters, location=node.location))
            drawn = Node("autopar.kept", (rows, cols, p), {}, (mask,))
            args = (x, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
            used = replace(node, op="autopar.masked_scale", args=args)
        elif node.op == ATTENTION and len(node.arg("rows")) > 1:
            q, k, v = node.named("q k v")
            samples = [x.shape[0] for x in node.kwargs.values() if isinstance(x, Value)]
            lead = (max(samples), 1) if samples else ()
            shape = (*lead, q.shape[2], k.shape[2])
            mask = Value(f"{node.out.name}_mask", shape, torch.bool)
            args = (node.arg("rows"), k.shape[2])
            drawn = Node("comm.causal_mask", args, node.kwargs, (mask,))
            args = (q, k, v, mask, False, node.arg("scale"))
            used = replace(node, op="autopar.attention", args=args, kwargs={})
        else:
            made.append(node)
            continue
        made += [replace(drawn, location=node.location), used]
    return made


def fuse_bias(nodes: list[Node]) -> list[Node]:
    """A product and the bias added to it run as one kernel if nothing is between."""
    readers: dict[str, int] = {}
    for node in nodes:
        for v in node.operands:
            readers[v.name] = readers.get(v.name, 0) + 1
    made = {v.name: i for i, n in enumerate(nodes) for v in n.results}
    fused: list[Node | None] = list(nodes)
    for i, node in enumerate(nodes):
        if node.op != "aten.add.Tensor" or len(node.operands) != 2 or node.kwargs:
            continue
        y, b = node.operands
        product = fused[made[y.name]] if y.name in made else None
        if product is None or readers[y.name] != 1 or len(b.shape) != 1:
            continue
        x_rank = len(product.operands[0].shape)
        is_linear = product.op == "aten.linear.default"
        is_matmul = product.op == "aten.matmul.default" and x_rank > 1
        is_matmul &= not y.dtype.is_complex  # `autopar.affine` has no conjugates
        if not (is_linear or is_matmul) or len(product.operands) != 2:
            continue
        if len(product.operands[1].shape) != 2 or b.shape[0] != y.shape[-1]:
            continue
        if not b.dtype == y.dtype == node.out.dtype:
            continue
        op = product.op if is_linear else "autopar.affine"
        fused[made[y.name]] = None
        fused[i] = replace(node, op=op, args=(*product.operands, b))
    return [n for n in fused if n is not None]


def add_together(nodes: Sequence[Node]) -> list[Node]:
    """Neighbours that add to gradients of a layer's parameters -> one node, which is a
    few kernels on a GPU for all of them."""
    added: list[Node] = []
    adds: dict[str, Node] = {}  # by what they add to

    def end() -> None:
        own = list(adds.values())
        if len(own) > 1:
            sums, terms = zip(*(n.named("into x") for n in own), strict=True)
            where = Location(own[0].location.layer)
            own = [Node(ADD_EACH, (sums, terms), {}, (), where)]
        added.extend(own)
        adds.clear()

    for node in nodes:
        layers = {n.location.layer for n in adds.values()}
        if node.op != ADD or not is_sum(node):
            end()
            added.append(node)
            continue
        into = node.operands[0].name
        if into in adds or layers - {node.location.layer}:
            end()
        adds[into] = node
    end()
    return added
