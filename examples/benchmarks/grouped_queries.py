"""What a layer with grouped queries moves and holds, counted from compiled programs.

    python examples/benchmarks/grouped_queries.py

Layers of Llama 3 8B (Grattafiori 2024, table 3) in bfloat16, for one sample: all heads
of queries with keys of their own, and as they are, sharing them. Nothing is run.
"""

import sys
from functools import cache
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the passes are found from any directory

from autopar.models.load import load_model  # noqa: E402
from autopar.options import make_plan  # noqa: E402
from autopar.passes.capture.trace import trace  # noqa: E402
from autopar.passes.mesh import Mesh  # noqa: E402
from autopar.passes.pipeline import compile_program  # noqa: E402
from autopar.passes.plan import Plan  # noqa: E402
from autopar.passes.price.cluster import PLAIN  # noqa: E402
from autopar.passes.program import Program  # noqa: E402
from autopar.passes.shard.sharding import local_extent  # noqa: E402
from autopar.passes.traced import Traced  # noqa: E402

HEADS, KV_HEADS, WIDTH, FFN, VOCAB, SEQ = 32, 8, 4096, 14336, 128256, 8192
MB = 1e6


@cache
def captured(layers: int, kv_heads: int) -> Traced:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQ,
    }
    spec = "hf:llama?" + ",".join(f"{name}={value}" for name, value in sizes.items())
    model = load_model(spec, device="meta").model.bfloat16()
    ids = torch.zeros(1, SEQ, dtype=torch.int64)
    return trace(model, {"input_ids": ids, "labels": ids.clone()})


def pair(plan: Plan, kv_heads: int) -> tuple[Program, Program]:
    """Compiles two layers, and one."""
    two, one = (
        compile_program(captured(layers, kv_heads), plan, PLAIN) for layers in (2, 1)
    )
    return two, one


def of_a_layer(plan: Plan, kv_heads: int) -> tuple[float, float]:
    """MB that collectives of a layer take in, forward and backward; MB that it keeps
    for the backward."""
    two, one = pair(plan, kv_heads)
    sent = [sum(c.bytes for c in p.communication) for p in (two, one)]
    kept = [p.stages[0].footprint.residuals for p in (two, one)]
    return (sent[0] - sent[1]) / MB, (kept[0] - kept[1]) / MB


def attention_weights(program: Program, mesh: Mesh) -> float:
    """MB of q, k, v and o that a rank holds."""
    size = 0
    sizes, first = dict(mesh.axes), dict.fromkeys(dict(mesh.axes), 0)
    for name, spec in program.parameters.items():
        if ".0.self_attn." in name:
            rank = 2
            for factors, slots in zip(spec.factors, spec.slots, strict=True):
                for extent, axes in zip(factors, slots, strict=True):
                    rank *= local_extent(extent, axes, sizes, first)
            size += rank
    return size / MB


def context_parallel() -> None:
    rows = []
    for method in ("gather", "ring", "ulysses"):
        plan = make_plan("cp=4", context_parallel=method)
        apart, shared = of_a_layer(plan, HEADS), of_a_layer(plan, KV_HEADS)
        rows.append((method, apart[0], shared[0], apart[1], shared[1]))
    print(f"a layer on cp=4: {HEADS} heads of queries, {HEADS} or {KV_HEADS} of keys\n")
    head = ("cp", f"MB moved, {HEADS}", KV_HEADS, f"MB kept, {HEADS}", KV_HEADS)
    print(tabulate(rows, map(str, head), floatfmt=".1f"))


def tensor_parallel() -> None:
    """tp=16, as it is, and without an axis for the queries that share keys."""
    rows = []
    for text in ("tp=8", "tp=16", "tp=16 alone"):
        plan = make_plan(text.partition(" ")[0])
        if "alone" in text:
            split = {axis: dims for axis, dims in plan.split.items() if axis != "qp"}
            plan = Plan(plan.mesh, split=split)
        program = pair(plan, 4)[1]
        moved, kept = of_a_layer(plan, 4)
        weights = attention_weights(program, program.mesh)
        rows.append((text, str(program.mesh), weights, moved, kept))
    print("\na layer with 4 heads of keys, of 8 queries each\n")
    head = ("asked for", "seen as", "MB of q, k, v, o on a rank", "MB moved", "MB kept")
    print(tabulate(rows, head, floatfmt=".1f"))


def main() -> None:
    context_parallel()
    tensor_parallel()


if __name__ == "__main__":
    main()
