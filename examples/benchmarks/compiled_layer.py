"""Kernels and bytes of a layer, compiled by Inductor, beside torch.compile's own.

Counts what Inductor's scheduler has after fusion: kernels, products and other calls,
and the bytes that they read and write; nothing is run, and no GPU is needed. Of a
GPT's layer on one rank: forward, and backward with gradients added up over
microbatches, which torch.compile leaves to autograd, a sum in place for each parameter.

    python examples/benchmarks/compiled_layer.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

import autopar  # noqa: E402
from autopar.passes.nested import tensors  # noqa: E402
from autopar.passes.price.cluster import PLAIN  # noqa: E402
from autopar.proof.ranks import local_parameters  # noqa: E402
from autopar.runtime.comm.comm import Comm  # noqa: E402
from autopar.runtime.comm.virtual import run_virtual  # noqa: E402
from autopar.runtime.execute import code_cache  # noqa: E402
from autopar.runtime.execute.code_cache import CodeCache, Compiled  # noqa: E402
from autopar.runtime.execute.executor import Executor  # noqa: E402
from autopar.runtime.execute.inductor import CompiledFunction  # noqa: E402
from examples.gpt import GPT, Block, Config  # noqa: E402


@dataclass
class Count:
    """kernels: calls of compiled or library code. bytes: that they read and write."""

    kernels: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.kernels + other.kernels, self.bytes + other.bytes)

    def __sub__(self, other: Count) -> Count:
        return Count(self.kernels - other.kernels, self.bytes - other.bytes)


# Ops that neither compute nor move anything.
FREE = frozenset({"view", "_unsafe_view", "reshape", "detach", "alias", "transpose"})
FREE |= {"permute", "unbind", "split", "t", "expand", "slice", "select", "squeeze"}
FREE |= {"unsqueeze", "as_strided", "empty", "new_empty", "empty_like"}

SHAPED = frozenset({"new_ones", "new_zeros"})  # which read nothing of their operand


class _Outside(TorchDispatchMode):
    """Counts what runs between compiled functions: each op is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with self:
                return function(*args)

        return counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in FREE:
            made_of = [] if func.overloadpacket.__name__ in SHAPED else [args, kwargs]
            self.count.kernels += 1
            self.count.bytes += sum(x.nbytes for x in tensors([made_of, result]))
        return result


@contextmanager
def counted_graphs() -> Iterator[list[Count]]:
    """Counts each graph that Inductor compiles meanwhile, in their order."""
    lowering = import_module("torch._inductor.graph").GraphLowering
    before: Callable[[Any], Any] = lowering.compile_to_module
    counts: list[Count] = []

    def compile_to_module(graph: Any) -> Any:
        module = before(graph)
        nodes = [n for n in graph.scheduler.nodes if "Nop" not in type(n).__name__]
        counts.append(Count(len(nodes), int(graph.count_bytes()[0])))
        return module

    lowering.compile_to_module = compile_to_module
    try:
        yield counts
    finally:
        lowering.compile_to_module = before


class Counting(CodeCache):
    """Counts what each call of a function runs; graphs: what was compiled so far."""

    def __init__(self, directory: Path, graphs: list[Count]) -> None:
        super().__init__(directory)
        self.graphs, self.count = graphs, Count()
        self.known: dict[Any, Count] = {}
        self.made: dict[Any, Compiled] = {}

    def take(self, function: CompiledFunction, signature: Any, args: Any) -> Any:
        made = function.source, signature
        if made not in self.known:
            seen = len(self.graphs)
            with _disable_current_modes():
                self.made[made] = super().take(function, signature, args)
            (self.known[made],) = self.graphs[seen:]
        own, compiled = self.known[made], self.made[made]

        def counted(*tensors: Tensor) -> Any:
            self.count += own
            with _disable_current_modes():
                return compiled.run(*tensors)

        return replace(compiled, run=counted)


def ours(config: Config, batch: Mapping[str, Tensor], cache: Counting) -> Count:
    """Counts a microbatch's kernels and bytes, forward and backward, on one rank."""
    torch.manual_seed(0)
    model = GPT(config)
    plan = autopar.Plan(autopar.Mesh.parse(""))
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN)
    cache.count = Count()

    def body(comm: Comm) -> Count:
        held = local_parameters(program, comm, dict(model.named_parameters()))
        executor = Executor(program, comm, held, {}, compiled=cache)
        (stage,) = executor.stages.values()
        outside = _Outside()
        for name in ("forward", "backward"):
            stage.module[name] = outside.counting(stage.module[name])
        executor.step(batch)
        return outside.count + cache.count

    (counted,) = run_virtual(program.mesh, 1, body)
    if cache.refused:
        raise RuntimeError("\n".join(cache.refused))
    return counted


def theirs(config: Config, samples: int) -> tuple[Count, Count]:
    """torch.compile of a layer, and what autograd adds of gradients after it."""
    torch.manual_seed(0)
    block = Block(config)
    x = torch.randn(samples, config.context, config.width, requires_grad=True)
    with counted_graphs() as graphs:
        y = torch.compile(block, fullgraph=True, dynamic=False)(x)
        y.backward(torch.ones_like(y))
    added = sum((Count(1, 3 * p.nbytes) for p in block.parameters()), Count())
    return sum(graphs, Count()), added


def measure(config: Config, samples: int) -> tuple[Count, Count, Count]:
    """(ours, theirs without and with sums of gradients), of a layer."""
    tokens = torch.zeros(samples, config.context, dtype=torch.int64)
    batch = {"ids": tokens, "labels": tokens}
    with tempfile.TemporaryDirectory() as folder, counted_graphs() as graphs:
        counts = []
        for layers in (2, 3):  # nothing compiled before is found, as it counts nothing
            code_cache._in_memory.clear()
            cache = Counting(Path(folder, str(layers)), graphs)
            counts.append(ours(replace(config, layers=layers), batch, cache))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/theirs"
        alone, added = theirs(config, samples)
    return counts[1] - counts[0], alone, alone + added


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    a = parser.parse_args()
    config = Config(2, a.width, a.width // 32, a.seq, 128)
    rows = measure(config, a.samples)
    names = "functions compiled", "torch.compile", "the same, gradients added up"
    for name, count in zip(names, rows, strict=True):
        times = rows[0].bytes / count.bytes
        print(
            f"{name:30} {count.kernels:4} kernels {count.bytes / 1e6:8.2f} MB; "
            f"ours has {times:.3f} times the bytes"
        )


if __name__ == "__main__":
    main()
