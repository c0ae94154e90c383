"""Composite ops of torch in an exported graph: other names of ops, as concatenate, and
functions that torch itself writes by ops, as kron.

Export keeps them as they were called. Those that are declared nowhere in `passes.ops`
become what torch's own kernels call, for which there are rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from ..graph import without_overload
from ..ops.op import OPS

KERNEL = "CompositeImplicitAutograd"


def is_composite(node: fx.Node) -> bool:
    """Whether a call is of an op that has no rule, but a kernel of other ops. It is of
    tensors whose shapes are known."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    name = without_overload(str(op)).removesuffix("_")  # also of what writes in place
    if torch.Tag.pointwise in op.tags or name in OPS:
        return False
    if op._schema.is_mutable and not hasattr(torch.ops.aten, name.partition(".")[2]):
        return False  # which is refused
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), KERNEL):
        return False
    operands = [v.meta.get("val") for v in node.all_input_nodes]
    return bool(operands) and all(
        isinstance(x, torch.Tensor) and all(type(n) is int for n in x.shape)
        for x in (*operands, *tree_leaves(node.meta.get("val")))
    )


def plain_composite(node: fx.Node) -> tuple[list[fx.Node], fx.GraphModule]:
    """What a call reads of other nodes, and it as a module of what its kernel calls on
    these."""
    reads = list(node.all_input_nodes)
    op: Any = node.target

    def run(*fakes: torch.Tensor) -> Any:
        value = dict(zip(reads, fakes, strict=True)).__getitem__
        return op.decompose(
            *fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value)
        )

    fakes = [v.meta["val"] for v in reads]
    with fakes[0].fake_mode, torch.enable_grad():
        plain = make_fx(run, decomposition_table={})(*fakes)
    for inner in plain.graph.nodes:
        for key in ("stack_trace", "nn_module_stack"):
            inner.meta[key] = node.meta.get(key)
    return reads, plain
