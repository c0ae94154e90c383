"""A program in float64: what it computes is compared without room for rounding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from autopar.passes.builder import with_values
from autopar.passes.capture.mixed_precision import Lowering, low_dtype
from autopar.passes.graph import Graph, Node
from autopar.passes.program import ParameterSpec, Program

# What every real number is computed in.
DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
PLAIN = (Tensor, torch.nn.Parameter)
FLOATS = re.compile(r"torch\.(?:float32|float16|bfloat16)\b")
COMPLEX = re.compile(r"torch\.complex64\b")


def in_double(x: Tensor) -> Tensor:
    """Casts to double precision; integers and booleans stay as they are."""
    return x.to(DOUBLE.get(x.dtype, x.dtype))


def tree_in_double(tree: Any) -> Any:
    """Converts tensors and dtypes in nested containers to float64."""

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return DOUBLE.get(x, x)
        return in_double(x) if isinstance(x, Tensor) else x

    return tree_map(leaf, tree)


def forward_dtype(model: torch.nn.Module, precision: Lowering) -> torch.dtype:
    """The dtype that forward runs in, with which it may compare that of a table."""
    return low_dtype(precision) or next(model.parameters()).dtype


@contextmanager
def held_in_double(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Has those of a dtype in float64, with the same values."""
    own = [(x, x.data) for x in tensors if x.dtype == dtype and type(x) in PLAIN]
    try:
        for x, data in own:
            x.data = in_double(data)
        yield
    finally:
        for x, data in own:
            x.data = data


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **named: Any
) -> Tensor:
    """Products of groups, as `aten._grouped_mm` has them, which takes no float64: of
    rows (2D x 3D), columns (3D x 2D), or what is summed over (2D x 2D); groups end at
    `offs`. What is in none is 0."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    spans = [slice(*span) for span in zip([0, *ends], ends, strict=False)]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    if a.ndim == 2:
        rows = [a[span] @ b[group] for group, span in enumerate(spans)]
        return torch.cat([*rows, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
    columns = [a[group] @ b[:, span] for group, span in enumerate(spans)]
    rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
    return torch.cat([*columns, rest], dim=1)


def program_in_double(program: Program) -> Program:
    """The same program, with every real number in float64. Casts stay, as copies. What
    forward asked of its buffers, it has not asked of these."""

    def name(dtype: str) -> str:
        dtype_named = getattr(torch, dtype)
        return str(DOUBLE.get(dtype_named, dtype_named)).removeprefix("torch.")

    def spec(old: ParameterSpec) -> ParameterSpec:
        return replace(old, dtype=name(old.dtype))

    return replace(
        program,
        plan=replace(program.plan, precision="model"),
        modules={key: _text_in_double(text) for key, text in program.modules.items()},
        tensors={k: spec(v) for k, v in program.tensors.items()},
        buffers={k: spec(v) for k, v in program.buffers.items()},
        known={},
        inputs={k: (shape, name(d)) for k, (shape, d) in program.inputs.items()},
        literals={k: in_double(x) for k, x in program.literals.items()},
        updates={k: _graph_in_double(graph) for k, graph in program.updates.items()},
        loss_dtype=name(program.loss_dtype),
        outputs={
            k: replace(out, dtype=name(out.dtype)) for k, out in program.outputs.items()
        },
    )


def _graph_in_double(graph: Graph) -> Graph:
    def with_arguments(node: Node) -> Node:
        args, kwargs = tree_in_double((node.args, {**node.kwargs}))
        return replace(node, args=args, kwargs=kwargs)

    graph = replace(graph, nodes=tuple(map(with_arguments, graph.nodes)))
    return with_values(graph, lambda v: replace(v, dtype=DOUBLE.get(v.dtype, v.dtype)))


def _text_in_double(text: str) -> str:
    text = COMPLEX.sub("torch.complex128", FLOATS.sub("torch.float64", text))
    # What a cast makes may be written into.
    return text.replace(".to(torch.float64)", ".to(torch.float64, copy=True)")
