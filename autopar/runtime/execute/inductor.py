"""Emitted functions compiled by Inductor: each once, for all layers, microbatches,
virtual ranks and restarts.

An emitted module calls functions that take tensors and return tensors, with collectives
between them (see `passes.emit.outline`). `compile_functions` puts a `CompiledFunction`
in the place of each; the module's text stays as it is, and so does what runs between.
A function is traced to ATen operations on tensors without data, compiled for the shapes
and strides that it is called with, and kept in a directory, where the next process
finds it by what it was made of: nothing is traced again then.

Writing over an argument costs Inductor nothing: the last operation of the fused kernel
stores there. Only where that argument shares its memory with another one could kernels
run in an order that shows: such a call runs as it is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.passes.emit.names import ENTRIES
from autopar.runtime.execute.code_cache import CodeCache, Compiled, Signature
from autopar.runtime.kernels import for_inductor

PLACE = re.compile(r"  # .*?(\S+\.py:\d+)")


def compile_functions(module: dict[str, Any], text: str, cache: CodeCache) -> None:
    """Replace the functions that an emitted module calls by compiled ones.

    module: names that its text made. cache: where compiled code is kept.
    """
    functions = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name not in ENTRIES
    ]
    for node in functions:
        end = node.body[-1]
        if isinstance(end, ast.Return):
            place = PLACE.search(ast.get_source_segment(text, node) or "")
            module[node.name] = CompiledFunction(
                module[node.name],
                ast.unparse(node),
                place[1] if place else "of no line of the model",
                not isinstance(end.value, ast.Tuple),
                cache,
            )


class CompiledFunction:
    """An emitted function, compiled at its first call for each signature.

    plain: the function as written, which runs where Inductor refuses it. source: its
    text without comments. place: its first line of the model. single: whether it
    returns one tensor, and not several.
    """

    def __init__(
        self,
        plain: FunctionType,
        source: str,
        place: str,
        single: bool,
        cache: CodeCache,
    ) -> None:
        self.plain, self.source, self.place = plain, source, place
        self.single, self.cache, self.name = single, cache, plain.__name__
        self.ready: dict[Signature, Compiled | None] = {}

    def __call__(self, *args: Any) -> Any:
        signature = _signature(args)
        if signature not in self.ready:
            self._prepare(signature, args)
        compiled = self.ready.get(signature)
        if compiled is None:
            return self.plain(*args)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if compiled.writes and _share_memory(tensors, compiled.writes):
            self.cache.refuse(
                f"{self.name} ({self.place}) writes over an argument that shares its "
                "memory with another one, and runs as it is written"
            )
            return self.plain(*args)
        results = [*compiled.run(*tensors)]
        for i in compiled.nothing:
            results.insert(i, None)
        return results[0] if self.single else results

    def _prepare(self, signature: Signature, args: tuple[Any, ...]) -> None:
        if any(_differ(known, signature) for known in self.ready):
            self.cache.refuse(
                f"{self.name} ({self.place}) is given other shapes in each step, and "
                "runs as it is written: Inductor compiles it for one"
            )
            return
        try:
            compiled = self.cache.take(self, signature, args)
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            self.cache.refuse(
                f"Inductor refuses {self.name} ({self.place}), which runs as it is "
                f"written: {type(error).__name__}: {line}"
            )
            compiled = None
        self.ready[signature] = compiled

    def traced(
        self, args: tuple[Any, ...]
    ) -> tuple[torch.fx.GraphModule, list[Tensor], list[int], list[int]]:
        """(its ATen operations on tensors alone, what else it is given being fixed;
        tensors without data as it is given; numbers of those that it writes over, and
        of results that are None, as masks of dropout are while evaluating)."""
        names = {**self.plain.__globals__, "kernels": for_inductor}
        plain = FunctionType(self.plain.__code__, names, self.name)

        nothing: list[int] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            remaining = iter(tensors)
            every = [next(remaining) if isinstance(a, Tensor) else a for a in args]
            results = plain(*every)
            results = [results] if self.single else results
            nothing[:] = [i for i, x in enumerate(results) if x is None]
            return [x for x in results if x is not None]

        # Tensors of their own for all arguments: that some are views of one tensor in
        # the call at hand says nothing of the next.
        with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in args
                if isinstance(x, Tensor)
            ]
            before = [x._version for x in fakes]
            graph = make_fx(on_tensors)(*fakes)
        known = zip(fakes, before, strict=True)
        written = [i for i, (x, version) in enumerate(known) if x._version != version]
        for node in graph.graph.nodes:
            if "val" in node.meta:  # by which Inductor finds the mode
                node.meta["example_value"] = node.meta["val"]
        return graph, fakes, written, nothing


def _signature(args: tuple[Any, ...]) -> Signature:
    """The signature of arguments that a function is compiled for."""
    return tuple(
        [
            (a.shape, a.stride(), a.dtype, a.device)
            if isinstance(a, Tensor)
            else (type(a), a)
            for a in args
        ]
    )


def _differ(one: Signature, other: Signature) -> bool:
    """Whether an argument has two shapes; a mask may be there or not."""
    pairs = zip(one, other, strict=True)
    return any(len(a) == len(b) == 4 and a[0] != b[0] for a, b in pairs)


def _share_memory(tensors: list[Tensor], written: Sequence[int]) -> bool:
    """Whether one of those written shares memory with any other one."""
    owners = [x.untyped_storage().data_ptr() for x in tensors]
    return any(owners.count(owners[i]) > 1 for i in written)
