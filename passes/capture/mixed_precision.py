"""The precision that a model computes in, where it is lower than its parameters'.

Under torch.autocast products do, and what is added up stays wide; an embedding's rows
have its own precision, and so has the residual stream. A `Stream` is the model with its
parameters in half the bits, so that all of it is, but what the model itself makes wider
(as many norms and losses do): how Megatron-LM trains, and FSDP with param_dtype. Either
way an optimizer updates the parameters as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..builder import Builder
from ..capture.lower_precision import CAST
from ..graph import Graph, Node, Value
from ..graph_text import DTYPES
from ..ops.op import OPS


@dataclass(frozen=True)
class Stream:
    """Parameters of float32 are cast to a dtype; buffers and inputs stay as they are,
    as with FSDP2's MixedPrecisionPolicy."""

    dtype: torch.dtype


Lowering: TypeAlias = torch.dtype | Stream | None
"""A dtype is of torch.autocast; None: the model as it is."""


def low_dtype(lowering: Lowering) -> torch.dtype | None:
    """The dtype that products compute in; None: that of their operands."""
    return lowering.dtype if isinstance(lowering, Stream) else lowering


def wants_one_dtype(function: str) -> bool:
    """Whether a function of torch, by its name, wants operands of one dtype."""
    op = OPS.get(f"aten.{function.removesuffix('_')}")
    return op is not None and (op.autocast == "equal" or op.name == "aten.complex")


class OneDtype(TorchFunctionMode):
    """Gives the functions that want one the widest dtype of their operands, where they
    would raise: autocast does so for few, on CUDA for more than on the CPU. What is
    written into keeps its dtype, and the rest gets that."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not wants_one_dtype(name):
            return func(*args, **kwargs)
        operands = (*args, *kwargs.values())
        reals = [x for x in operands if isinstance(x, Tensor) and x.is_floating_point()]
        first = reals[:1] if name.endswith("_") else reals
        dtype = max((x.dtype for x in first), key=lambda d: d.itemsize, default=None)

        others = [x for x in reals if x.dtype is not dtype]

        def cast(x: Any) -> Any:
            return x.to(dtype) if any(x is other for other in others) else x

        return func(*map(cast, args), **{k: cast(x) for k, x in kwargs.items()})


@contextlib.contextmanager
def autocast(lowering: Lowering, device: str) -> Iterator[torch.dtype | None]:
    """Autocast within, to the dtype; off for a `Stream`, and for None."""
    dtype = None if isinstance(lowering, Stream) else lowering
    own = OneDtype() if dtype else contextlib.nullcontext()
    with torch.autocast(device, dtype, enabled=dtype is not None), own:
        yield dtype


@contextlib.contextmanager
def parameters_in(model: nn.Module, lowering: Lowering) -> Iterator[None]:
    """A model whose parameters of float32 are those of a `Stream` within."""
    own: dict[nn.Parameter, torch.Tensor] = {}
    dtype = lowering.dtype if isinstance(lowering, Stream) else None
    if dtype:
        own = {p: p.data for p in model.parameters() if p.dtype is torch.float32}
    gradients = {p: p.grad for p in own}
    try:
        for p, x in own.items():
            p.grad, p.data = None, x.to(dtype)
        yield
    finally:
        for p, x in own.items():
            p.data, p.grad = x, gradients[p]


def keep_wide(graph: Graph, wide: Mapping[str, torch.dtype]) -> Graph:
    """Parameters in their own dtypes, each cast once to what it was traced in.

    wide: name -> the dtype that a parameter has.
    """
    params = {v.name: replace(v, dtype=wide.get(v.name, v.dtype)) for v in graph.params}
    traced = {v.name: v.dtype for v in graph.params}
    builder = Builder.beside(graph.sources)
    builder.taken.update(v.name for n in graph.nodes for v in n.results)
    low: dict[str, Value] = {}

    def read(node: Node, v: Value) -> Value:
        dtype = traced.get(v.name)
        if dtype is None or params[v.name].dtype is dtype:
            return v
        if v.name not in low:
            cast = (params[v.name], dtype)
            low[v.name] = builder.emit(
                CAST, cast, v.shape, dtype, node.location, DTYPES[dtype]
            )
        return low[v.name]

    for node in graph.nodes:
        builder.nodes.append(node.substitute(partial(read, node)))
    nodes = tuple(builder.nodes)
    return replace(graph, params=tuple(params.values()), nodes=nodes).verify()
