"""What `peers.py` compares, and one rank of it, which makes steps as it is told.

    echo step | python -m examples.benchmarks.peer_runs single/torch-eager tiny folder

A run is named by what is done on how many ranks, by whom and how: `ddp-2/ours-eager`.
A rank reads a word a line: `step` trains and `peak` counts bytes as well; it answers by
a line of JSON. In the directory is kept what makes another start of the run faster.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from examples.benchmarks.gpu_models import batch_of
from examples.benchmarks.live_bytes import peak_allocated
from examples.benchmarks.peer_models import Stage, split_qkv, tensor_parallel
from examples.gpt import GPT, Config

CONFIGS = {
    "tiny": Config(layers=8, width=64, heads=4, context=32, vocab=256),
    "small": Config(layers=8, width=128, heads=4, context=64, vocab=1024),
    "mid": Config(layers=8, width=256, heads=8, context=128, vocab=4096),
    "base": Config(layers=8, width=512, heads=8, context=256, vocab=8192),
}
BATCH, MICROBATCHES = 16, 8

# ids and labels [batch, seq] of the whole batch -> its loss, None where unknown
Step = Callable[[Tensor, Tensor], float | None]
# a model, and the directory of what is kept -> its step
Build = Callable[[GPT, Path], Step]


@dataclass(frozen=True)
class Row:
    """Ways to do the same on so many ranks. goal: by configuration, how much faster the
    best of ours is to be than the best of the others."""

    ranks: int
    runs: Mapping[str, Build]
    goal: Mapping[str, float] = field(default_factory=dict)


# --- what a user would pick -----------------------------------------------------------


def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Fused AdamW, with DTensors in a group of their own, as it refuses a mix."""
    split: dict[bool, list[Tensor]] = {False: [], True: []}
    for parameter in parameters:
        split[isinstance(parameter, DTensor)].append(parameter)
    groups = [{"params": group} for group in split.values() if group]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01, fused=True)


def training(forward_backward: Step, parameters: Iterable[Tensor]) -> Step:
    """Complete a step with the optimizer's part."""
    adamw = optimizer(parameters)

    def step(ids: Tensor, labels: Tensor) -> float | None:
        loss = forward_backward(ids, labels)
        adamw.step()
        adamw.zero_grad()
        return loss

    return step


def single(model: GPT, folder: Path, compiled: bool) -> Step:
    run = torch.compile(model) if compiled else model

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        _, loss = run(ids, labels)
        loss.backward()
        return loss.item()

    return training(forward_backward, model.parameters())


def of_samples(model: nn.Module) -> Step:
    """A step in which each rank takes its own samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        _, loss = model(ids.chunk(ranks)[rank], labels.chunk(ranks)[rank])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return training(forward_backward, model.parameters())


def data_parallel(model: GPT, folder: Path, compiled: bool) -> Step:
    """DistributedDataParallel, its gradients kept in its buckets: one copy less."""
    run = torch.compile(model) if compiled else model
    return of_samples(
        nn.parallel.DistributedDataParallel(run, gradient_as_bucket_view=True)
    )


def compile_blocks(module: GPT | Stage) -> None:
    for block in module.blocks:
        block.compile()


def fully_sharded(model: GPT, folder: Path, compiled: bool, reshard: bool) -> Step:
    """FSDP2, each layer a group of its own: ZeRO-3, or ZeRO-2 if parameters stay whole
    from forward to backward."""
    if compiled:
        compile_blocks(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return of_samples(model)


def dtensor(model: GPT, folder: Path, compiled: bool, sequence: bool) -> Step:
    """DTensor's tensor parallelism over all ranks, with its vocabulary-split loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallel(split_qkv(model), mesh, sequence)
    if compiled:
        compile_blocks(model)

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        with loss_parallel():
            _, loss = model(ids, labels)
            loss.backward()
        return local(loss).item()

    return training(forward_backward, model.parameters())


def pipelining(
    model: GPT, folder: Path, compiled: bool, name: str, tensor_ranks: int
) -> Step:
    """torch's schedule of a name, each stage split over `tensor_ranks` by DTensor."""
    shape = (dist.get_world_size() // tensor_ranks, tensor_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))
    ends = [dist.new_group(column[[0, -1]].tolist()) for column in mesh.mesh.T]
    rank, last = mesh["pp"].get_local_rank(), shape[0] - 1
    several = name != "1F1B"
    indices = range(rank, shape[0] * (1 + several), shape[0])
    if tensor_ranks > 1:
        split_qkv(model)
    modules = [Stage(model, i, shape[0] * (1 + several)) for i in indices]
    for module in modules:
        if tensor_ranks > 1:
            tensor_parallel(module, mesh["tp"], sequence=True)
        if compiled:
            compile_blocks(module)
    stages = [
        PipelineStage(
            module, i, module.count, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        for i, module in zip(indices, modules, strict=True)
    ]
    schedule = get_schedule_class(name)(
        stages if several else stages[0], MICROBATCHES, loss_fn=flat_cross_entropy
    )

    def forward_backward(ids: Tensor, labels: Tensor) -> float | None:
        losses: list[Tensor] = []
        asked = {"target": labels, "losses": losses} if rank == last else {}
        with loss_parallel():
            schedule.step(*([ids] if rank == 0 else []), **asked)
        if rank in (0, last):
            tied = modules[0].tokens if rank == 0 else modules[-1].head
            add_tied_gradients(tied.weight, ends[mesh["tp"].get_local_rank()])
        if rank != last:
            return None
        return sum(local(loss).item() for loss in losses) / MICROBATCHES

    every = (p for module in modules for p in module.parameters())
    return training(forward_backward, every)


def add_tied_gradients(weight: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the weight that both ends of a pipeline use."""
    if isinstance(weight, DTensor):  # an embedding's gradient comes out whole
        weight.grad = weight.grad.redistribute(placements=weight.placements)
    dist.all_reduce(local(weight.grad), group=group)


def flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- ours -----------------------------------------------------------------------------


def ours(model: GPT, folder: Path, **options: object) -> Step:
    """The plan that the first start made and proved is taken by later ones."""
    import autopar  # only here: the peers' runs do without it
    from autopar.plans.store import load_plan, save_plan

    plan = folder / "plan"
    source = {"program": load_plan(plan).program} if plan.exists() else options
    example = dict(zip(("ids", "labels"), batch(model.config, 0), strict=True))
    compiled = autopar.compile(
        model,
        options.pop("mesh"),
        example_inputs=example,
        cache_dir=folder / "compiled",
        **source,
    )
    if compiled.comm.rank == 0 and not plan.exists():
        save_plan(compiled.program, plan, "examples/gpt.py")

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        return compiled(ids=ids, labels=labels).item()

    return training(forward_backward, compiled.parameters())


# --- all of them ----------------------------------------------------------------------


def torchs(build: Callable[..., Step], **options: object) -> dict[str, Build]:
    return {
        f"torch-{name}": partial(build, compiled=name == "compile", **options)
        for name in ("eager", "compile")
    }


def both(mesh: str, **options: object) -> dict[str, Build]:
    return {
        f"ours-{name}": partial(ours, mesh=mesh, backend=name, **options)
        for name in ("eager", "inductor")
    }


def pipelines(ranks: int) -> dict[str, Build]:
    """The last two schedules have two stages a rank."""
    stacks = torchs(pipelining, name="1F1B", tensor_ranks=1)
    stacks |= both(f"pp={ranks}", microbatches=MICROBATCHES)
    for name, theirs, our in (
        ("interleaved", "Interleaved1F1B", "interleaved"),
        ("zero-bubble", "InterleavedZeroBubble", "zb-v"),
    ):
        (stacks[f"torch-{name}"], _) = torchs(
            pipelining, name=theirs, tensor_ranks=1
        ).values()
        (stacks[f"ours-{name}"], _) = both(
            f"pp={ranks}", microbatches=MICROBATCHES, schedule=our, stages_per_rank=2
        ).values()
    return stacks


def on_ranks(n: int) -> dict[str, Row]:
    whole = {"sequence_parallel": False}
    rows = {
        "ddp": (1.0, torchs(data_parallel) | both(f"dp={n}")),
        "zero3": (1.1, torchs(fully_sharded, reshard=True) | both(f"dp={n}", zero=3)),
        "zero2": (1.1, torchs(fully_sharded, reshard=False) | both(f"dp={n}", zero=2)),
        "tp": (1.25, torchs(dtensor, sequence=False) | both(f"tp={n}", **whole)),
        "tp-sp": (1.25, torchs(dtensor, sequence=True) | both(f"tp={n}")),
        "pp": (1.05, pipelines(n)),
    }
    small = {"tp": 1.6, "tp-sp": 1.6}
    return {
        f"{name}-{n}": Row(n, runs, {"mid": goal, "small": small.get(name, goal)})
        for name, (goal, runs) in rows.items()
    }


ROWS = {
    "single": Row(1, torchs(single) | both(""), {"mid": 1.0, "small": 1.0}),
    **on_ranks(2),
    **on_ranks(4),
    "pp-tp-4": Row(
        4,
        torchs(pipelining, name="1F1B", tensor_ranks=2)
        | both("pp=2,tp=2", microbatches=MICROBATCHES),
        {"mid": 1.5, "small": 2.0},
    ),
}


# --- one rank -------------------------------------------------------------------------


def batch(config: Config, step: int) -> tuple[Tensor, Tensor]:
    """One of four batches in turn, so that the loss falls as the model learns them."""
    drawn = batch_of(config, BATCH, seed=step % 4)
    return drawn["ids"], drawn["labels"]


def build(name: str, config: Config, folder: Path) -> Step:
    row, run = name.split("/")
    torch.manual_seed(0)
    return ROWS[row].runs[run](GPT(config), folder)


def answer(word: str, step: Step, number: int, config: Config) -> dict:
    """Seconds from when all ranks are there until the last is done, CPU seconds of this
    one, threads included, and the loss."""
    inputs, result = batch(config, number), {}

    def run() -> None:
        result["loss"] = step(*inputs)

    barrier()
    began, worked = time.perf_counter(), time.process_time()
    if word == "peak":
        result["peak"] = peak_allocated(run)
    else:
        run()
    result["cpu"] = time.process_time() - worked
    barrier()
    return result | {"wall": time.perf_counter() - began}


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("config", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, about its own parts
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    config = CONFIGS[options.config]
    step = build(options.run, config, options.folder)
    for number, line in enumerate(sys.stdin):
        result = answer(line.strip(), step, number, config)
        print(json.dumps(result), flush=True)
    barrier()
    # A gloo thread that lets go of a tensor while Python shuts down aborts the process,
    # about once in ten runs: leave without the shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
