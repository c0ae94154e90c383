"""The captured forward of a model, as passes read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .graph import Graph, Value
from .part import Part


@dataclass(frozen=True)
class Traced:
    """The model's forward, from the batch to the loss, its first output.

    aliases: other names of a tied parameter -> the name it has in the graph.
    literals: the values of `graph.constants`.
    trainable: names of the parameters that want a gradient, and have one.
    autocast: value -> the dtype that torch.autocast had for products where it was made;
    of values made outside of autocast, nothing.
    parts: of parameters that are not the model's own, but parts of them. joined:
    parameters that are several of the model's own, stacked -> the names of these.
    outputs: names of the graph's other outputs, which nothing is trained on. metrics:
    how many of these, the first, are the scalars of a dict of losses. remarks: what the
    user should know of how it was read. asked: of what the model asked whether there is
    any. known: buffers of which it asked what is in them -> the digest of what was.
    own_masks: whether dropout leaves out other elements than where the model runs by
    itself, see `has_own_masks`. loops: where loops over experts are one step, the model
    (or a few of its layers) as it was read, and with its loops as one step. updated:
    buffers that forward writes to; what they have after it are the last outputs, until
    these are the sums of the batch from which `updates` compute it, by buffer.
    """

    graph: Graph
    aliases: Mapping[str, str]
    literals: Mapping[str, torch.Tensor]
    trainable: frozenset[str]
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    metrics: int = 0
    remarks: tuple[str, ...] = ()
    asked: tuple[Value, ...] = ()
    known: Mapping[str, int] = field(default_factory=dict)
    own_masks: bool = False
    loops: tuple[Traced, Traced] | None = None
    updated: tuple[str, ...] = ()
    updates: Mapping[str, Graph] = field(default_factory=dict)

    @property
    def named_outputs(self) -> dict[str, Value]:
        return dict(zip(self.outputs, self.graph.outputs[1:], strict=True))

    @property
    def parameters(self) -> dict[str, Value]:
        """The model's own parameters that are read, by name."""
        own: dict[str, Value] = {}
        for v in self.graph.params:
            sources = self.joined.get(v.name, (v.name,))
            shape = v.shape[1:] if v.name in self.joined else v.shape
            own.update((name, Value(name, shape, v.dtype)) for name in sources)
        return own

    def stacked(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values by the model's own names -> by those of the graph."""
        now = dict(values)
        for v in self.graph.params:
            names = self.joined.get(v.name, ())
            if names and all(name in now for name in names):
                now[v.name] = torch.stack([now.pop(name) for name in names])
        return now

    def apart(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values by the graph's names -> by those of the model's own."""
        now = dict(values)
        for name in self.joined.keys() & values.keys():
            now.update(zip(self.joined[name], now.pop(name), strict=True))
        return now

    def part(self, v: Value) -> Part:
        """The part of the model's own parameter that a parameter is."""
        return self.parts.get(v.name) or Part(v.name, v.shape, (0,) * len(v.shape))

    def verify(self) -> Traced:
        self.graph.verify()
        return self

    def __str__(self) -> str:
        return str(self.graph)
