"""Writes of forward to the model's buffers: counters of tokens, running averages.

What a buffer has after a step follows from what it had before, and from the whole
batch. So the graph computes it as an output. What reads it after a write reads a value
as any other, which microbatches share out, or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...builder import Builder
from ...errors import CaptureError
from ...graph import Graph, Node, Value, short

# Adds to elements of its first operand that others of its operands choose.
ADDS_TO = ("aten.index_add", "aten.scatter_add", "aten.index_put")

# What to do about a model that keeps what no step can.
OUTSIDE = (
    "compute it anew in each forward; leave it out by `if not "
    "torch.compiler.is_exporting():` before it; or register it as a buffer, in which "
    "forward may add up or average what it computes"
)
# And about one that confines its parameters.
AFTERWARDS = (
    "leave it out of forward (by model.eval(), where it is for training alone), and do "
    "it after optimizer.step(), under torch.no_grad(), to the parameters that are "
    "trained: dict(step.named_parameters())"
)


@dataclass(frozen=True)
class Functional:
    """A graph without writes. updated: of each buffer that it writes to, what that has
    after it; the graph's last outputs are these."""

    graph: Graph
    updated: Mapping[str, Value]


def after_step(buffer: str) -> str:
    """The name of the output that holds a buffer's value after a step."""
    return f"{buffer} after"


def refuse_write(kind: str, name: str, node: Node) -> NoReturn:
    """Refuses a write to what lasts. kind: "parameter", "buffer" or "constant"."""
    raise CaptureError(
        f"'{short(node.op)}' changes the model's {kind} '{name}' in forward, which has "
        "no meaning when ranks run different microbatches",
        source=str(node.location),
        fix=AFTERWARDS if kind == "parameter" else OUTSIDE,
    )


def sum_apart(builder: Builder, node: Node) -> list[Node]:
    """A node that makes what a buffer has; where it adds to chosen elements, the sum of
    what it adds is made before, of which ranks and microbatches have parts."""
    if node.name not in ADDS_TO or node.arg("accumulate") is False:
        return [node]
    buffer, *rest = node.args
    nodes: list[Node] = []

    def emit(
        op: str, args: tuple[Any, ...], shape: tuple[int, ...], of: Value, **named: Any
    ) -> Value:
        out = builder.value("added", shape, of.dtype)
        nodes.append(Node(op, args, named, (out,), node.location))
        return out

    index, source = node.arg("index"), node.arg("source") or node.arg("src")
    rows, plain = buffer.shape[:1], _is_plain(node, index, source)
    flat, real = len(buffer.shape) == 1, buffer.dtype.is_floating_point
    by_row = node.name == "aten.index_add" and len(buffer.shape) == 2
    if plain and (flat or (by_row and real)):  # of integers GPUs have no products
        count, *width = source.shape
        both = count, *rows
        chosen = emit("aten.one_hot.default", (index, *rows), both, index)
        chosen = emit("aten.to.dtype", (chosen, source.dtype), both, source)
        if flat:
            column = emit(
                "aten.reshape.default", (source, (count, 1)), (count, 1), source
            )
            chosen = emit("aten.mul.Tensor", (chosen, column), both, source)
            dtype = {"dtype": source.dtype}
            added = emit("aten.sum.dim_IntList", (chosen, (0,)), rows, source, **dtype)
        else:
            turned = emit("aten.t.default", (chosen,), (*rows, count), source)
            shape = *rows, *width
            added = emit("aten.mm.default", (turned, source), shape, source)
    else:
        zeros = emit("aten.zeros_like.default", (buffer,), buffer.shape, buffer)
        added = emit(node.op, (zeros, *rest), buffer.shape, buffer, **node.kwargs)
    return [
        *nodes,
        Node("aten.add.Tensor", (buffer, added), {}, node.outs, node.location),
    ]


def _is_plain(node: Node, index: Any, source: Any) -> bool:
    """Whether a row of the source is added for each index, along the first dim."""
    both = isinstance(index, Value) and isinstance(source, Value)
    if not both or node.arg("dim") != 0 or node.arg("alpha") not in (None, 1):
        return False
    return len(index.shape) == 1 and index.shape == source.shape[:1]
