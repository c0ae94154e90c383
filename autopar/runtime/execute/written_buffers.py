"""Buffers that are written to: by loops; and by a step where forward counts or averages
in them, once, on all ranks alike, from sums over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autopar.passes.graph import Graph
from autopar.passes.ops.evaluate import evaluate
from autopar.passes.program import Program


class WrittenBuffers:
    """The whole buffers of a rank, and the graphs that update them each step.

    buffers: by name, those of the executor, which are written to in place.
    """

    def __init__(
        self, program: Program, buffers: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.buffers, self.device = buffers, device
        # Those that stages compute with.
        self._used = [n for n, spec in program.buffers.items() if spec.stages]
        self._versions: dict[str, int] = {}
        self.graphs = {n: _on(graph, device) for n, graph in program.updates.items()}
        used = {v.name for g in self.graphs.values() for v in g.constants}
        self.literals = {name: program.literals[name].to(device) for name in used}

    def read(self) -> None:
        """Notes that what follows from buffers alone is computed."""
        self._versions = {name: self.buffers[name]._version for name in self._used}

    def since_read(self) -> dict[str, Tensor]:
        """The buffers that stages compute with and that were written to since."""
        held = {name: self.buffers[name] for name in self._used}
        return {n: x for n, x in held.items() if x._version != self._versions[n]}

    def update(self, sums: Mapping[str, Tensor]) -> None:
        """Writes to the buffers. sums: by the names of outputs, over the batch."""
        held = {**self.buffers, **self.literals, **sums}
        # What one buffer becomes may be another one, as it was.
        new = {name: _run(graph, held).clone() for name, graph in self.graphs.items()}
        for name, value in new.items():
            self.buffers[name].copy_(value)


def _on(graph: Graph, device: torch.device) -> Graph:
    """The graph with what it makes of nothing on a device."""
    nodes = tuple(
        replace(node, kwargs={**node.kwargs, "device": device})
        if "device" in node.kwargs
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _run(graph: Graph, values: Mapping[str, Tensor]) -> Tensor:
    """The graph's output."""
    held = {v.name: values[v.name] for v in graph.sources}
    for node in graph.nodes:
        made = evaluate(node, [held[v.name] for v in node.operands])
        pairs = zip(node.outs, made, strict=False)
        held.update({v.name: x for v, x in pairs if v is not None and x is not None})
    return held[graph.outputs[0].name]
