"""lower_precision: what torch.autocast would do as a model runs, as casts in the graph.

Products compute in half the bits, and what adds up or takes powers in float32, as in
Micikevicius 2018, section 3. Parameters stay as they are, the master copy that an
optimizer updates; each is cast once, however often it is read. What ops compute
in (`Op.autocast`) is as of autocast on CUDA, on all devices; but a mean is a sum, which
may be pending over ranks, so it is wide too, and a grouped product is a product, which
torch's autocast does not know (https://github.com/pytorch/pytorch/issues/174763).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..builder import Builder, prune
from ..errors import CaptureError
from ..graph import Graph, Location, Node, Value
from ..graph_text import DTYPES
from ..ops.evaluate import results_like
from ..ops.op import is_view, op_of
from ..ops.random import awaits_number
from ..traced import Traced

CAST = "aten.to.dtype"


def lower_precision(traced: Traced, tables: bool = False) -> Traced:
    """Write the casts of the regions where autocast is on; float64 stays as it is.

    tables: whether embeddings too are looked up in low precision, which autocast does
    not do, their rows going on in the table's own. Where ranks hold shares of a table,
    half the bytes are gathered then, and but once if the output layer shares it.

    Before: values made under autocast have the dtypes that it gave them on the device
    where the model was traced. After: each op's results have the dtypes that follow
    from its operands alone.
    """
    if not traced.autocast:
        return traced
    return replace(traced, graph=_Lowering(traced, tables).run())


class _Lowering:
    def __init__(self, traced: Traced, tables: bool) -> None:
        self.tables = tables
        self.graph, self.autocast = traced.graph, traced.autocast
        self.builder = Builder.beside(self.graph.sources)
        made = (v.name for n in self.graph.nodes for v in n.results)
        self.builder.taken.update(made)
        self.now: dict[str, Value] = {}  # name in the traced graph -> in the new one
        self.casts: dict[tuple[str, torch.dtype], Value] = {}
        # What is seen of parameters -> the node that makes it.
        self.views: dict[str, Node | None] = {v.name: None for v in traced.graph.params}

    def run(self) -> Graph:
        for old in self.graph.nodes:
            if not old.results:
                continue  # asserts that a dtype is as it was traced
            node = old.substitute(lambda v: self.now.get(v.name, v))
            if old.op == "aten.cat.default":
                node = _without_empty(node)
            dtype = self.autocast.get(old.results[0].name)
            node = _typed(node if dtype is None else self.lowered(node, dtype))
            self.builder.nodes.append(node)
            self.now.update((v.name, v) for v in node.results)
            part = is_view(node) or node.name == "aten.index"
            if part and node.operands[0].name in self.views:
                # Its cast comes before, once for all parts of a weight.
                self.views.update((v.name, node) for v in node.results)
            if old.name == "aten.embedding":
                wide = self.cast(node.out, old.operands[0].dtype, node.location)
                self.now[old.out.name] = wide
        outputs = tuple(self.now.get(v.name, v) for v in self.graph.outputs)
        nodes = tuple(self.builder.nodes)
        graph = replace(self.graph, nodes=nodes, outputs=outputs)
        return prune(graph, awaits_number).verify()

    def lowered(self, node: Node, dtype: torch.dtype) -> Node:
        """The node on operands of the dtype that autocast has for its op."""
        op, chosen = op_of(node), node.operands
        if op.autocast == "low":
            chosen = chosen[: op.lowered]
        elif self.tables and node.name == "aten.embedding":
            chosen = chosen[:1]
        elif op.autocast == "wide":
            dtype = torch.float32
        elif op.autocast == "equal":
            floats = [v.dtype for v in node.operands if v.dtype.is_floating_point]
            dtype = max(floats, key=lambda d: d.itemsize, default=dtype)
        else:
            return node
        return node.substitute(
            lambda v: self.cast(v, dtype, node.location) if v in chosen else v
        )

    def cast(self, v: Value, dtype: torch.dtype, where: Location) -> Value:
        """The value in another precision, one for all of its readers."""
        wide = v.dtype is torch.float64
        if not v.dtype.is_floating_point or wide or v.dtype is dtype:
            return v
        if (v.name, dtype) not in self.casts:
            if (view := self.views.get(v.name)) is not None:
                self.cast_before(view, dtype)
            else:
                self.casts[v.name, dtype] = self.builder.emit(
                    CAST, (v, dtype), v.shape, dtype, where, DTYPES[dtype]
                )
        return self.casts[v.name, dtype]

    def cast_before(self, view: Node, dtype: torch.dtype) -> None:
        """Repeats a view on a cast of its operand."""
        source = view.operands[0]
        low = self.cast(source, dtype, view.location)
        new = view.substitute(lambda v: low if v == source else v)
        outs = tuple(
            None if v is None else self.builder.value(v.name, v.shape, dtype)
            for v in view.outs
        )
        self.builder.nodes.append(replace(new, outs=outs))
        for old, cast in zip(view.outs, outs, strict=True):
            if old is not None and cast is not None:
                self.casts[old.name, dtype] = cast


def _without_empty(node: Node) -> Node:
    """A fresh key/value cache, of no elements in float32, makes nothing else wider."""
    pieces = tuple(v for v in node.arg("tensors") if v.shape != (0,))
    return node.with_args(tensors=pieces) if pieces else node


def _typed(node: Node) -> Node:
    """The node with the dtypes that its results have outside of autocast."""
    if not node.operands:
        return node
    try:
        made = results_like(node.op, node.args, node.kwargs)
    except Exception as error:
        types = ", ".join(v.type for v in node.operands)
        raise CaptureError(
            f"{node.op} cannot run on {types}: {type(error).__name__}: {error}",
            source=str(node.location),
            fix="cast its operands to float32 in the model, as x.float()",
        ) from error
    outs = tuple(
        None if v is None or like is None else replace(v, dtype=like.dtype)
        for v, like in zip(node.outs, made, strict=True)
    )
    return replace(node, outs=outs)
