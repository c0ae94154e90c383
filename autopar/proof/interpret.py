"""The captured graph itself as the reference: run node by node, derived by autograd.

Nothing of the compiler is in the way: torch's own ops on the captured arguments, in
float64, on one device, with the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.passes.graph import Node, Value, resolve
from autopar.passes.ops.random import DRAWN
from autopar.passes.traced import Traced
from autopar.proof.in_double import grouped_mm, in_double, tree_in_double
from autopar.proof.reference import OurChance

# Checks of the capture, and where a result would be.
SKIPPED = ("aten._assert", "aten.sym_")


def run_graph(
    traced: Traced, values: Mapping[str, Tensor], key: int | None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, the gradient of every trainable parameter of the model's own, and what
    comes out beside the loss, by name.

    values: of inputs, the model's parameters, buffers and constants. key: of random
    numbers and masks of dropout; None: there is no dropout.
    """
    graph = traced.graph
    held = {name: in_double(x) for name, x in traced.stacked(values).items()}
    wanted = [v.name for v in graph.params if v.name in traced.trainable]
    for name in wanted:
        held[name] = held[name].detach().clone().requires_grad_()
    chance, last_use = OurChance(key), _last_uses(traced)
    with torch.enable_grad():
        for i, node in enumerate(graph.nodes):
            if node.op.startswith(SKIPPED) or not node.results:
                continue
            results = _run(node, held, chance)
            made = (results,) if isinstance(results, Tensor) else tuple(results)
            for v, x in zip(node.outs, made, strict=False):
                if v is not None:
                    held[v.name] = x
            for name in last_use.get(i, ()):
                held.pop(name, None)
        loss = held[graph.outputs[0].name]
        leaves = [held[name] for name in wanted]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    gradients_of = {
        name: torch.zeros_like(x) if g is None else g
        for name, x, g in zip(wanted, leaves, grads, strict=True)
    }
    outputs = {n: held[v.name].detach() for n, v in traced.named_outputs.items()}
    return loss.detach(), traced.apart(gradients_of), outputs


def _run(node: Node, held: Mapping[str, Tensor], chance: OurChance) -> Any:
    node = node.substitute(lambda v: held[v.name])
    args, kwargs = tree_in_double(node.args), tree_in_double(dict(node.kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    name = node.name
    if name == "aten.dropout":
        return chance.dropout(*args, **kwargs)
    if name == "aten.view_as_complex":  # pairs, whatever strides small sizes give them
        return torch.view_as_complex(args[0].contiguous())
    if name == "aten.topk":  # as a model calls it: its choices may be told
        return torch.topk(*args, **kwargs)
    if name == "aten._grouped_mm":
        return grouped_mm(*args, **kwargs)
    if name == "aten.copy":  # of which torch knows no derivative
        return args[1].to(args[0].dtype).expand_as(args[0])
    op: Any = resolve(node.op)
    if name in DRAWN and (drawn := chance.draw(op, *args, **kwargs)) is not None:
        return drawn
    if name == "aten.scaled_dot_product_attention":
        return chance.attention(op, *args, **kwargs)
    return op(*args, **kwargs)


def _last_uses(traced: Traced) -> dict[int, Collection[str]]:
    """Position -> values that no later node reads, but sources and the loss."""
    graph = traced.graph
    keep = {v.name for v in (*graph.sources, *graph.outputs)}
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        operands: tuple[Value, ...] = node.operands
        last.update((v.name, i) for v in operands)
    dying: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in keep:
            dying.setdefault(i, []).append(name)
    return {i: tuple(names) for i, names in dying.items()}
