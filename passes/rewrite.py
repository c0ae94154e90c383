"""A forward sweep that replaces nodes by rules: the engine under `normalize`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from .builder import Builder, prune
from .graph import Graph, Location, Node, Value, bare, resolve
from .ops.evaluate import results_like
from .ops.random import awaits_number

Rule = Callable[["Rewriter", Node], "Value | tuple[Value | None, ...] | None"]

# A constant larger than this many elements is not evaluated while compiling.
LARGEST_CONSTANT = 2**26


class Rewriter:
    """Builds a new graph node by node; rules see operands that are rewritten already.

    A rule returns the value that takes the place of the node's result, or None to
    keep the node as it is.
    """

    def __init__(self, graph: Graph, literals: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.builder = Builder.beside(graph.sources)
        self.made: dict[str, Node] = {}
        self.replaced: dict[str, Value] = {}
        self._constants: dict[str, torch.Tensor | None] = dict(literals)
        # What `passes.capture.normalize.causal_masks` found of masks, by name.
        self.windows: dict[str, int | None] = {}
        self.readers: Counter[str] = Counter()  # of what is rewritten so far
        self.where = Location()

    def run(self, rules: Mapping[str, Rule]) -> Graph:
        """Apply the rule of each node's op (looked up by `aten.name` or full name)."""
        readers = Counter(
            v.name
            for node in self.graph.nodes
            if node.results  # asserts are dropped
            for v in node.operands
        )
        readers.update(v.name for v in self.graph.outputs)
        for node in self.graph.nodes:
            node = node.substitute(lambda v: self.replaced.get(v.name, v))
            self.where = node.location
            rule = rules.get(node.op) or rules.get(node.name)
            new = rule(self, node) if rule else None
            if new is None:
                new = self.keep(node)
            elif isinstance(new, Value):
                new = (new,)
            for old, fresh in zip(node.outs, new, strict=False):
                if old is not None and fresh is not None:
                    self.replaced[old.name] = fresh
                    self.readers[fresh.name] += readers[old.name]
        outputs = tuple(self.replaced.get(v.name, v) for v in self.graph.outputs)
        nodes = tuple(self.builder.nodes)
        graph = replace(self.graph, nodes=nodes, outputs=outputs)
        return prune(graph, awaits_number).verify()

    def keep(self, node: Node) -> tuple[Value | None, ...]:
        """Copy a node over, under the names it had where they are free."""
        outs = tuple(
            None if v is None else Value(self.builder.name(v.name), v.shape, v.dtype)
            for v in node.outs
        )
        node = Node(node.op, node.args, node.kwargs, outs, node.location)
        self.builder.nodes.append(node)
        self.made.update((v.name, node) for v in node.results)
        return outs

    def emit(
        self,
        op: str,
        *args: Any,
        name: str | None = None,
        where: Location | None = None,
        like: Value | None = None,
        **kwargs: Any,
    ) -> Value:
        """Append a node; returns its only result, of the shape and dtype that torch
        gives it, or of those of `like`.

        where: it stands in the model; None: where the node does that is replaced.
        """
        if like is None:
            (like,) = results_like(op, args, kwargs)
            assert like is not None, f"{op} makes a tensor"
        out = self.builder.value(name or bare(op), like.shape, like.dtype)
        node = Node(op, args, kwargs, (out,), where or self.where)
        self.builder.nodes.append(node)
        self.made[out.name] = node
        return out

    def like(self, node: Node, op: str, *args: Any) -> Value:
        """A new value with the shape and precision of a node's result."""
        return self.emit(op, *args, like=node.out)

    def again(self, node: Node, /, **changed: Any) -> Value:
        """A node once more, where it stands, with other arguments, by name."""
        new = node.with_args(**changed)
        return self.emit(new.op, *new.args, where=new.location, **new.kwargs)

    def reshape(self, x: Value, shape: Iterable[int]) -> Value:
        """`x` seen with another shape, or what had that shape before it was a view."""
        shape = tuple(shape)
        source: Value | None = x
        while source is not None:
            if source.shape == shape:
                return source
            view = self.producer(source, "aten.reshape")
            source = view.operands[0] if view else None
        seen = Value("", shape, x.dtype)
        return self.emit("aten.reshape.default", x, shape, like=seen, name="view")

    def expand(self, x: Value, shape: Iterable[int]) -> Value:
        """`x` repeated to a shape that it broadcasts to."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        return self.emit("aten.expand.default", x, shape)

    def transpose(self, x: Value, *dims: int) -> Value:
        """`x` with two dims swapped, or what `x` was before they were."""
        before = self.producer(x, "aten.transpose")
        if before is not None:
            source, *swapped = before.named("self dim0 dim1")
            swaps = [{d % len(x.shape) for d in pair} for pair in (swapped, dims)]
            if swaps[0] == swaps[1]:
                return source
        return self.emit("aten.transpose.int", x, *dims)

    def producer(self, x: Any, *ops: str) -> Node | None:
        """The node that made `x`, if its op is one of `ops` (without overload)."""
        node = self.made.get(x.name) if isinstance(x, Value) else None
        if node is not None and node.name in ops:
            return node
        return None

    def is_read_once(self, x: Value) -> bool:
        """Whether one node alone of the graph as it was reads `x`, as it is now."""
        return self.readers[x.name] == 1

    def constant(self, x: Value) -> torch.Tensor | None:
        """The tensor that `x` always is, or None if it depends on data or is large."""
        if x.name not in self._constants:
            self._constants[x.name] = self._evaluate(x)
        return self._constants[x.name]

    def _evaluate(self, x: Value) -> torch.Tensor | None:
        node = self.made.get(x.name)
        if node is None or not node.is_aten:
            return None
        known = {v.name: self.constant(v) for v in node.operands}
        if any(t is None for t in known.values()) or x.numel > LARGEST_CONSTANT:
            return None
        node = node.substitute(lambda v: known[v.name])
        result = resolve(node.op)(*node.args, **node.kwargs)
        if isinstance(result, torch.Tensor):
            return result
        return result[[v == x for v in node.outs].index(True)]


def expand_as(rewriter: Rewriter, node: Node) -> Value:
    """Expands the first operand to the result's shape."""
    return rewriter.expand(node.operands[0], node.out.shape)


def broadcast_tensors(rewriter: Rewriter, node: Node) -> tuple[Value | None, ...]:
    """Expands each operand to the shape of all."""
    pairs = zip(node.operands, node.outs, strict=True)
    return tuple(rewriter.expand(x, out.shape) if out else None for x, out in pairs)
