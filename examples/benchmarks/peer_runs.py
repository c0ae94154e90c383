"""One run of the benchmark: train the GPT with one runtime, print one line of JSON.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m examples.benchmarks.peer_runs ddp2 --config tiny --steps 8
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from examples.benchmarks.live_bytes import peak_bytes
from examples.benchmarks.peer_models import Stage, split_qkv, tensor_parallel
from examples.gpt import GPT, Config

CONFIGS = {
    "tiny": Config(layers=8, width=64, heads=4, context=32, vocab=256),
    "small": Config(layers=8, width=128, heads=4, context=64, vocab=1024),
    "mid": Config(layers=8, width=256, heads=8, context=128, vocab=4096),
    "base": Config(layers=8, width=512, heads=8, context=256, vocab=8192),
}
BATCH, MICROBATCHES, WARM = 16, 8, 2

# ids and labels [batch, seq] of the whole batch -> its loss, None where unknown
Step = Callable[[Tensor, Tensor], float | None]


@dataclass(frozen=True)
class Run:
    """One way to train: on how many ranks, and what turns a model into a step."""

    ranks: int
    build: Callable[[GPT], Step]


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


def single(model: GPT) -> Step:
    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        _, loss = model(ids, labels)
        loss.backward()
        return loss.item()

    return training(forward_backward, model.parameters())


def data_parallel(model: GPT) -> Step:
    """DistributedDataParallel, its gradients kept in its buckets: one copy less."""
    replica = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        _, loss = replica(ids.chunk(ranks)[rank], labels.chunk(ranks)[rank])
        loss.backward()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return training(forward_backward, model.parameters())


def fully_sharded(model: GPT) -> Step:
    """FSDP2, each layer a group of its own: ZeRO-3."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        _, loss = model(ids.chunk(ranks)[rank], labels.chunk(ranks)[rank])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    return training(forward_backward, model.parameters())


def dtensor(model: GPT, sequence: bool) -> Step:
    """DTensor's tensor parallelism over all ranks, with its vocabulary-split loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallel(split_qkv(model), mesh, sequence)

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        with loss_parallel():
            _, loss = model(ids, labels)
            loss.backward()
        return local(loss).item()

    return training(forward_backward, model.parameters())


def pipelining(model: GPT, tensor_ranks: int) -> Step:
    """Two stages under torch's 1F1B, each split over `tensor_ranks` with DTensor."""
    names = ("pp", "tp")
    mesh = init_device_mesh("cpu", (2, tensor_ranks), mesh_dim_names=names)
    group, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    if tensor_ranks > 1:
        split_qkv(model)
    module = Stage(model, index, 2)
    if tensor_ranks > 1:
        tensor_parallel(module, mesh["tp"], sequence=True)
    tied = module.tokens if module.first else module.head
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=flat_cross_entropy)

    def forward_backward(ids: Tensor, labels: Tensor) -> float | None:
        losses: list[Tensor] = []
        with loss_parallel():
            if module.first:
                schedule.step(ids)
            else:
                schedule.step(target=labels, losses=losses)
        add_tied_gradients(tied.weight, group)
        if module.first:
            return None
        return sum(local(loss).item() for loss in losses) / MICROBATCHES

    return training(forward_backward, module.parameters())


def ours(model: GPT, mesh: str, sequence: bool = False, zero: int = 0) -> Step:
    import autopar  # only here: the peers' runs do without it

    compiled = autopar.compile(
        model,
        mesh,
        microbatches=MICROBATCHES if "pp" in mesh else 1,
        schedule="1f1b",
        sequence_parallel=sequence,
        zero=zero,
        example_inputs=dict(
            zip(("ids", "labels"), batch(model.config, 0), strict=True)
        ),
    )

    def forward_backward(ids: Tensor, labels: Tensor) -> float:
        return compiled(ids=ids, labels=labels).item()

    return training(forward_backward, compiled.parameters())


RUNS = {
    "single": Run(1, single),
    "ddp2": Run(2, data_parallel),
    "ours-dp2": Run(2, lambda model: ours(model, "dp=2")),
    "fsdp2": Run(2, fully_sharded),
    "ours-zero3": Run(2, lambda model: ours(model, "dp=2", zero=3)),
    "pipelining2": Run(2, lambda model: pipelining(model, 1)),
    "ours-pp2": Run(2, lambda model: ours(model, "pp=2")),
    "dtensor2": Run(2, lambda model: dtensor(model, sequence=False)),
    "ours-tp2": Run(2, lambda model: ours(model, "tp=2")),
    "dtensor2-sp": Run(2, lambda model: dtensor(model, sequence=True)),
    "ours-tp2-sp": Run(2, lambda model: ours(model, "tp=2", sequence=True)),
    "pipelining2-dtensor2-sp": Run(4, lambda model: pipelining(model, 2)),
    "ours-pp2-tp2-sp": Run(4, lambda model: ours(model, "pp=2,tp=2", sequence=True)),
}


def add_tied_gradients(weight: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the weight that both ends of a pipeline use."""
    if isinstance(weight, DTensor):  # an embedding's gradient comes out whole
        weight.grad = weight.grad.redistribute(placements=weight.placements)
    dist.all_reduce(local(weight.grad), group=group)


def flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch(config: Config, step: int) -> tuple[Tensor, Tensor]:
    """One of four batches in turn, so that the loss falls as the model learns them."""
    chance = torch.Generator().manual_seed(step % 4)
    size = (BATCH, config.context + 1)
    text = torch.randint(config.vocab, size, generator=chance)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def measure(step: Step, config: Config, steps: int) -> dict[str, list[float | None]]:
    """Wall and CPU seconds and the loss of each step; then a step for its bytes.

    The first WARM steps have no seconds. CPU seconds include communication threads.
    """
    wall, cpu, losses = [], [], []
    for index in range(WARM + steps):
        ids, labels = batch(config, index)
        barrier()
        began, worked = time.perf_counter(), time.process_time()
        losses.append(step(ids, labels))
        worked = time.process_time() - worked
        barrier()
        if index >= WARM:
            wall.append(time.perf_counter() - began)
            cpu.append(worked)
    ids, labels = batch(config, 0)
    peak = peak_bytes(lambda: step(ids, labels))
    return {"wall": wall, "cpu": cpu, "losses": losses, "peak": [peak]}


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def gathered(mine: dict[str, list[float | None]]) -> list[dict]:
    if not dist.is_initialized():
        return [mine]
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def report(run: str, everyone: list[dict]) -> str:
    """The JSON of a run from what each of its ranks measured."""
    steps_cpu = zip(*(rank["cpu"] for rank in everyone), strict=True)
    losses = [rank["losses"] for rank in everyone if None not in rank["losses"]]
    result = {
        "run": run,
        "wall": median(everyone[0]["wall"]),
        "cpu": median(sum(seconds) for seconds in steps_cpu),
        "peak": max(rank["peak"][0] for rank in everyone),
        "losses": losses[0],
    }
    return json.dumps(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    run, config = RUNS[options.run], CONFIGS[options.config]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != run.ranks:
        parser.error(f"{options.run} needs {run.ranks} ranks, but there are {ranks}")
    warnings.simplefilter("ignore")  # torch's own, about its own parts
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    step = run.build(GPT(config))
    everyone = gathered(measure(step, config, options.steps))
    if ranks == 1 or dist.get_rank() == 0:
        print(report(options.run, everyone), flush=True)
    if ranks > 1:
        dist.barrier()
        # A gloo thread that lets go of a tensor while Python shuts down aborts the
        # process, about once in ten runs: leave without the shutdown.
        os._exit(0)


if __name__ == "__main__":
    main()
