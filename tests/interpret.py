"""Runs a graph on real tensors, one node after another: what a pass must preserve."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.passes.graph import Graph
from autopar.passes.ops.evaluate import evaluate
from autopar.passes.traced import Traced


def interpret(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Value name -> tensor, for every value; `values` has one for each source."""
    known = dict(values)
    for node in graph.nodes:
        if not node.results:
            continue  # an assertion
        results = evaluate(node, [known[v.name] for v in node.operands])
        for v, x in zip(node.outs, results, strict=True):
            if v is not None:
                assert x is not None and x.shape == v.shape, f"{node}: not {v.type}"
                known[v.name] = x
    return known


def sources_of(
    traced: Traced, model: nn.Module, batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors that the sources of a model's graph stand for."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    named = state | dict(batch) | dict(traced.literals)
    return {v.name: named[v.name] for v in traced.graph.sources}


def loss_of(traced: Traced, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that a graph computes for a model and a batch."""
    (loss,) = traced.graph.outputs
    with torch.no_grad():
        values = interpret(traced.graph, sources_of(traced, model, batch))
    return values[loss.name]
