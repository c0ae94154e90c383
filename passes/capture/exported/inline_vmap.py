"""torch.vmap in an exported graph: its region becomes plain operations.

Export keeps a region as calls of functorch's own functions around operations on single
samples. Traced once more, below these functions, it is the operations on all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

ENTERS, LEAVES = "_vmap_increment_nesting", "_vmap_decrement_nesting"
# x[i] by a sample's own index, in flex attention's mode, in which Hugging Face's masks
# are made: a call of torch's own function.
LOOK_UP = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"
LOADS = "lazy_load_decompositions"  # of functorch, before a region; gives nothing


def regions(nodes: list[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
    """The nodes of a graph; those of an outermost vmap together."""
    depth, region = 0, list[fx.Node]()
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        if name == LOADS:
            continue
        depth += (name == ENTERS) - (name == LEAVES)
        if depth or region:
            region.append(node)
            if not depth:
                yield region
                region = []
        else:
            yield node
    assert not region, "a vmap does not end"


def plain_region(
    module: fx.GraphModule, region: list[fx.Node]
) -> tuple[list[fx.Node], fx.GraphModule, list[fx.Node]]:
    """What a region reads of other nodes; it as a module of plain operations on these;
    and its nodes that others read, which the module returns.

    Raises: NotImplementedError for regions within, as one without gradients: autograd
    sees these, but not what is traced of them.
    """
    inside = set(region)
    reads = list(
        dict.fromkeys(v for n in region for v in n.all_input_nodes if v not in inside)
    )
    made = [n for n in region if not set(n.users) <= inside]
    for node in region:
        within = isinstance(node.target, torch._ops.HigherOrderOperator)
        if within and LOOK_UP not in node.args:
            raise NotImplementedError(f"{node.target} within")
    functions = [v for v in reads if "val" not in v.meta]
    reads = [v for v in reads if "val" in v.meta]
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {v: graph.placeholder(v.name) for v in reads}
    copies |= {v: graph.node_copy(v) for v in functions}
    for node in region:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in made))
    fakes = [v.meta["val"] for v in reads]
    with fakes[0].fake_mode, torch.enable_grad():
        # Without a table torch 2.15 takes a detach for a view, as nothing is derived
        # from most of what is traced so.
        plain = make_fx(fx.GraphModule(module, graph), decomposition_table={})(*fakes)
    for node in plain.graph.nodes:
        for key in ("stack_trace", "nn_module_stack"):
            node.meta[key] = next((n.meta[key] for n in region if key in n.meta), None)
    return reads, plain, made
