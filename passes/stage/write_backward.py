"""write_backward: the forward of a rank's stage as its backward needs it, and that.

Reverse mode over the local graph, collectives included, so that the backward's
collectives are the transposes of the forward's. Parameter gradients are added up in
place over microbatches; what is pending over mesh axes stays so until the step's end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..builder import Builder, needed_nodes
from ..graph import Node, Value
from ..ops.cotangents import Cotangents, seed_of
from ..ops.op import Derivative, is_usual, op_of
from ..shard.parameter_sharding import find_gathered
from ..stage.fuse import drop_identities
from ..stage.overlap import by_layer, gather_ahead
from ..stage.split_backward import GRADIENT
from ..stage.traced_vjp import expand_forward, traced


class Writer:
    """Writes a stage's forward and backward, part by part, in this order."""

    def __init__(
        self,
        builder: Builder,
        differentiable: frozenset[str],
        trained: tuple[Value, ...],
        sizes: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
        casts: Mapping[str, str],
    ) -> None:
        grads = {
            v.name: Value(GRADIENT + v.name, v.shape, dtypes.get(v.name, v.dtype))
            for v in trained
            if v.name in differentiable
        }
        self.cts = Cotangents(builder, differentiable, grads, sizes, dtypes, casts)
        self.forward: list[Node] = []
        self.backward: list[Node] = []
        self.epilogue: list[Node] = []
        # Nodes that a gradient flows through, as the backward sees them.
        self.through: list[Node] = []
        self.seeds: list[Value] = []
        # Value -> its cotangent, for those that nodes of `through` make.
        self.cotangents: dict[str, Value] = {}
        # Value -> the forward's nodes that make it, and what they are called in the
        # template of its op; None where that has a derivative of its own.
        self._taken: dict[str, tuple[list[Node], dict[str, Value] | None]] = {}

    def run_forward(self, nodes: list[Node], like: Writer | None = None) -> None:
        """Takes nodes into the forward, in forms that keep what derivatives read.

        like: a writer that has taken the same nodes, and may see some in other forms.
        """
        for node in nodes:
            flows = any(self.cts.wanted(v) for v in node.results)
            is_traced = flows and self._derivative(node) is None
            name = node.results[0].name
            own, bound = like._taken[name] if like else ([], None)
            if not own or (bound is not None) != is_traced:
                own, bound = self._forms(node, is_traced)
            if bound is not None:
                self.cts.bindings[name] = dict(bound)
            self._taken[name] = own, bound
            self.forward += own
            if flows:
                self.through.append(node if is_traced else own[0])

    def _forms(
        self, node: Node, is_traced: bool
    ) -> tuple[list[Node], dict[str, Value] | None]:
        if not is_traced:
            return [self.with_results(node)], None
        own = expand_forward(self.cts, node)
        return own, self.cts.bindings[node.results[0].name]

    def with_results(self, node: Node) -> Node:
        """The node with all results of the function that runs it."""
        op = op_of(node)
        return op.forward(self.cts, node) if op.forward else node

    def _derivative(self, node: Node) -> Derivative | None:
        """The derivative that a node's op declares; None if it is to be traced."""
        op = op_of(node)
        is_traced = op.traced_if is not None and op.traced_if(self.cts, node)
        return op.derivative if is_usual(node) and not is_traced else None

    def seed(
        self, sends: tuple[Value, ...], loss: Value | None, halves: bool, scaled: bool
    ) -> tuple[Value | None, ...]:
        """Start the backward with the cotangents that come in, and the loss's own.

        halves: the next stage, if it is on this rank, may still read what comes in.
        """
        incoming: list[Value | None] = []
        for v in sends:
            if not self.cts.wanted(v):
                incoming.append(None)
                continue
            dy = self.cts.fresh(v)
            incoming.append(dy)
            self.seeds.append(dy)
            if halves:
                self.cts.share(dy)
            self.cts.add(v, dy)
        if loss is not None and self.cts.wanted(loss):
            self.cts.add(loss, seed_of(self.cts, loss, self.through[-1], scaled))
        return tuple(incoming)

    def run_backward(self, receives: tuple[Value, ...]) -> tuple[Value | None, ...]:
        """Writes the backward down to the cotangents that the stage before waits for:
        zeros, where this one's gradient does not depend on what it received."""
        cts = self.cts
        self._transpose(self.through)
        # A stage may only look at what it hands on: a maximum of the logits.
        at = (self.through or self.forward)[0]
        gradients: list[Value | None] = []
        for v in receives:
            dy = (cts.take(v, at) or cts.zeros(v, at)) if cts.wanted(v) else None
            # A stage before on this rank adds to it in place.
            if dy is not None and (cts.is_shared(dy) or dy in gradients):
                dy = cts.emit("aten.clone.default", v, at, dy)
            gradients.append(dy)
        self.backward, cts.nodes = cts.nodes, []
        return tuple(gradients)

    def take_gradients(self, params: tuple[Value, ...]) -> dict[str, Value]:
        """The gradient that the backward has made for each parameter, by name."""
        at = (self.through or self.forward)[0]
        took = {v.name: self.cts.take(v, at) for v in params if self.cts.wanted(v)}
        self.backward, self.cts.nodes = [*self.backward, *self.cts.nodes], []
        return {name: dy for name, dy in took.items() if dy is not None}

    def run_epilogue(self) -> None:
        """Writes the backward from what is gathered for the whole step to the
        parameters.

        The loop stops at gathered values, so their makers are left to be done.
        """
        cts = self.cts
        made = [v for n in self.through for v in n.results if v.name in cts.grads]
        for v in made:
            cts.add(v, cts.grads[v.name])
            cts.share(cts.grads[v.name])
        self._transpose(self.through if made else [])
        self.epilogue, cts.nodes = cts.nodes, []

    def _transpose(self, nodes: list[Node]) -> None:
        """Pass the cotangents that are known on, from the last node to the first."""
        cts = self.cts
        for node in reversed(nodes):
            dys = [None if v is None else cts.take(v, node) for v in node.outs]
            for v, dy in zip(node.outs, dys, strict=True):
                if v is not None and dy is not None:
                    self.cotangents[v.name] = dy
            if not any(dys):
                continue
            gradients = (self._derivative(node) or traced)(cts, node, dys)
            for v, dy in zip(node.operands, gradients, strict=True):
                if dy is None or not cts.wanted(v):
                    continue
                if cts.is_param(v):
                    cts.accumulate(v, "autopar.add_", node, dy)
                else:
                    cts.add(v, cts.cast(dy, v, node))

    def drop_dead(
        self, outputs: tuple[Value | None, ...], ends: Collection[str]
    ) -> None:
        """Keep the backward's nodes that a result or a gradient depends on. ends: names
        of what the forward hands on."""
        parts = drop_identities(
            self.forward, self.backward, self.epilogue, handed_on=ends
        )
        self.forward, backward, epilogue = parts
        self.backward = _alive(backward, {v.name for v in outputs if v is not None})
        self.epilogue = _alive(epilogue, set())

    def take_once(
        self, casts: Collection[str], standing: set[str], gathers: bool
    ) -> list[Node]:
        """Moves out of forward what is done once a step: casts of parameters, gathers
        if `gathers`, and what the epilogue reads."""
        taken = self._take_out(casts)
        if gathers:
            whole = self._take_out(find_gathered(self.forward, standing))
            taken += gather_ahead(whole, standing, by_layer, self.cts.builder)
        return taken + self._take_out(self._read_after())

    def _read_after(self) -> set[str]:
        """Names of what the epilogue reads of the forward, and of what makes that: a
        constant of an op's derivative, a weight seen another way."""
        makers = {v.name: n for n in self.forward for v in n.results}
        waiting = [v.name for n in self.epilogue for v in n.operands]
        read: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in makers and name not in read:
                read.add(name)
                waiting += [v.name for v in makers[name].operands]
        return read

    def _take_out(self, made: Collection[str]) -> list[Node]:
        """Remove from the forward the nodes that make these values."""
        makers = {id(n) for n in self.forward for v in n.results if v.name in made}
        taken = [n for n in self.forward if id(n) in makers]
        self.forward = [n for n in self.forward if id(n) not in makers]
        return taken


def _alive(nodes: list[Node], needed: set[str]) -> list[Node]:
    """Nodes that a result or a parameter's gradient depends on."""

    def changes(node: Node) -> bool:
        target = "" if node.results else _target(node)
        return target.startswith(GRADIENT) or target in needed

    return needed_nodes(nodes, needed, changes)


def _target(node: Node) -> str:
    """The name that an in-place node writes to: its first operand's."""
    return node.operands[0].name
