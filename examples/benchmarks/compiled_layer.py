"""Kernels and bytes of a layer, compiled by Inductor, beside torch.compile's own.

Counts what Inductor's scheduler has after fusion: kernels, products and other calls,
and the bytes that they read and write; nothing is run, and no GPU is needed. Of a
GPT's layer or a Llama's on one rank: forward, and backward with gradients added up over
microbatches, which torch.compile leaves to autograd, a sum in place for each parameter.

    python examples/benchmarks/compiled_layer.py
    python examples/benchmarks/compiled_layer.py --model llama
    python examples/benchmarks/compiled_layer.py --model gpt-dropout
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

import autopar  # noqa: E402
from autopar.options import make_plan  # noqa: E402
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


@dataclass(frozen=True)
class Layered:
    """A model and one of its layers. model: of so many layers. layer: runs one of two
    by itself, on what needs a gradient."""

    batch: Mapping[str, Tensor]
    model: Callable[[int], nn.Module]
    layer: Callable[[nn.Module], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


def gpt(width: int, seq: int, samples: int, dropout: float = 0.0) -> Layered:
    config = Config(2, width, width // 32, seq, 128, dropout)
    tokens = torch.zeros(samples, seq, dtype=torch.int64)

    def layer(model: nn.Module) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        x = torch.randn(samples, seq, width, requires_grad=True)
        return Block(config), (x,), {}

    return Layered(
        {"ids": tokens, "labels": tokens},
        lambda layers: GPT(replace(config, layers=layers)),
        layer,
    )


def llama(width: int, seq: int, samples: int) -> Layered:
    """Hugging Face's, in 16 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.zeros(samples, seq, dtype=torch.int64)
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4}
    sizes |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    sizes |= {"vocab_size": 128, "max_position_embeddings": seq}

    def model(layers: int) -> nn.Module:
        config = LlamaConfig(num_hidden_layers=layers, **sizes)
        made: nn.Module = LlamaForCausalLM(config).bfloat16()
        return made

    def layer(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        x = torch.randn(samples, seq, width, dtype=torch.bfloat16, requires_grad=True)
        where = made.model.rotary_emb(x, torch.arange(seq)[None])
        return made.model.layers[0], (x,), {"position_embeddings": where}

    return Layered({"input_ids": tokens, "labels": tokens}, model, layer)


MODELS: Mapping[str, Callable[[int, int, int], Layered]] = {
    "gpt": gpt,
    "gpt-dropout": partial(gpt, dropout=0.1),
    "llama": llama,
}


def ours(of: Layered, layers: int, cache: Counting) -> Count:
    """Counts a microbatch's kernels and bytes, forward and backward, on one rank."""
    torch.manual_seed(0)
    model = of.model(layers)
    plan = make_plan("", backend="inductor")
    program = autopar.compile_offline(model, of.batch, plan, cluster=PLAIN)

    def body(comm: Comm) -> Count:
        held = local_parameters(program, comm, dict(model.named_parameters()))
        buffers = dict(model.named_buffers())
        executor = Executor(program, comm, held, buffers, compiled=cache)
        (stage,) = executor.stages.values()
        outside = _Outside()
        for name in ("forward", "backward"):
            stage.module[name] = outside.counting(stage.module[name])
        executor.step(of.batch)
        cache.count = outside.count = Count()  # of a step that finds all in place
        executor.step(of.batch)
        return outside.count + cache.count

    (counted,) = run_virtual(program.mesh, 1, body)
    if cache.refused:
        raise RuntimeError("\n".join(cache.refused))
    return counted


def theirs(of: Layered) -> tuple[Count, Count]:
    """torch.compile of a layer, and what autograd adds of gradients after it."""
    torch.manual_seed(0)
    layer, args, kwargs = of.layer(of.model(2))
    with counted_graphs() as graphs:
        y = torch.compile(layer, fullgraph=True, dynamic=False)(*args, **kwargs)
        y.backward(torch.ones_like(y))
    added = sum((Count(1, 3 * p.nbytes) for p in layer.parameters()), Count())
    return sum(graphs, Count()), added


def measure(of: Layered) -> tuple[Count, Count, Count]:
    """(ours, theirs without and with sums of gradients), of a layer."""
    with tempfile.TemporaryDirectory() as folder, counted_graphs() as graphs:
        counts = []
        for layers in (2, 3):  # nothing compiled before is found, as it counts nothing
            code_cache._in_memory.clear()
            cache = Counting(Path(folder, str(layers)), graphs)
            counts.append(ours(of, layers, cache))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/theirs"
        alone, added = theirs(of)
    return counts[1] - counts[0], alone, alone + added


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="gpt")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4)
    a = parser.parse_args()
    rows = measure(MODELS[a.model](a.width, a.seq, a.samples))
    names = "functions compiled", "torch.compile", "the same, gradients added up"
    for name, count in zip(names, rows, strict=True):
        times = rows[0].bytes / count.bytes
        print(
            f"{name:30} {count.kernels:4} kernels {count.bytes / 1e6:8.2f} MB; "
            f"ours has {times:.3f} times the bytes"
        )


if __name__ == "__main__":
    main()
