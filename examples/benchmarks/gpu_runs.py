"""The processes of `gpu.py`: each prints a line of JSON for each thing it has done.

python -m examples.benchmarks.gpu_runs speed gpt2-xl --seconds 10
torchrun --nproc-per-node 2 -m examples.benchmarks.gpu_runs ranks --tiny
"""

from __future__ import annotations

import copy
import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.machine.hardware import cluster_of, this_cluster, with_memory
from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster, ClusterError
from autopar.passes.price.estimate import Estimate
from autopar.passes.program import Program
from autopar.passes.search.by_formula import rough
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import ShortModel, capture_short, make_prices, make_space
from examples.benchmarks.gpu_models import SIZES, TINY, batch_of, make
from examples.benchmarks.live_bytes import peak_allocated
from examples.gpt import Config

# What says most comes first: later ones may find no time.
WAYS = ("eager", "ours-eager", "ours-inductor", "compile-blocks", "compile")
SAMPLES = (16, 8, 4, 2, 1)
ROOM = 0.6  # of the memory that a plan may take on paper: the untouched model has more
WARM, STEPS, SECONDS = 2, 20, 6.0  # of each measurement at most
PRECISION = torch.bfloat16
PLANS = {
    2: (
        {"mesh": "dp=2", "zero": 3},
        {"mesh": "tp=2"},
        {"mesh": "pp=2", "microbatches": 4},
        {"mesh": "cp=2", "context_parallel": "ring"},
    ),
    4: (
        {"mesh": "pp=2,tp=2", "microbatches": 4, "schedule": "zb-h1"},
        {"mesh": "dp=2,tp=2", "zero": 1},
    ),
}
TOLERANCE = 1e-4  # of losses and weights, fp32 sums in another order

Step = Callable[[], Tensor]


Say = Callable[[dict[str, Any]], None]


def here() -> torch.device:
    """The GPU that all processes share, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- what is predicted ----------------------------------------------------------------


def cluster_here() -> tuple[Cluster, bool]:
    """One device of the kind that is here, and whether its speed is known."""
    try:
        return this_cluster(1), True
    except ClusterError:
        memory = torch.cuda.get_device_properties(0).total_memory
        return with_memory(cluster_of("1xA100-40GB"), memory), False


def on_paper(of: ShortModel, cluster: Cluster, samples: int, fused: bool) -> Estimate:
    """fused: as compiled code does, elementwise operations in a row are one kernel."""
    cluster = replace(cluster, device=replace(cluster.device, fused=fused))
    prices = make_prices(of, cluster)
    one = Candidate(Mesh.parse(""), samples, 1, "1f1b", 1, 0, "none", ())
    priced = rough(one, make_space(of, cluster, samples), prices)
    assert priced is not None, "one stage has layers"
    return run_on_paper(priced[-1], prices, cluster)


def predict(of: ShortModel, samples: tuple[int, ...]) -> dict[str, Any]:
    """The most samples that fit, and what a step of them is to take."""
    cluster, known = cluster_here()
    room = ROOM * cluster.device.memory
    for count in samples:
        eager = on_paper(of, cluster, count, fused=False)
        if eager.peak <= room or count == samples[-1]:
            break
    fused = on_paper(of, cluster, count, fused=True)
    peak = cluster.device.flops.get("bfloat16")  # the CPU of the table has none
    return {
        "samples": count,
        "flops": eager.flops,
        "peak flops": peak if known else None,
        "seconds": {"ours-eager": eager.seconds, "ours-inductor": fused.seconds}
        if known
        else {},
        "bytes": eager.peak,
    }


# --- what is measured -----------------------------------------------------------------


def untouched(model: nn.Module, batch: dict[str, Tensor], way: str) -> Step:
    device = here()
    model = copy.deepcopy(model).to(device)
    if way == "compile-blocks":
        for block in model.blocks:
            block.compile()
    run = torch.compile(model) if way == "compile" else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        on_device = {k: x.to(device, non_blocking=True) for k, x in batch.items()}
        with torch.autocast(device.type, PRECISION):
            _, loss = run(**on_device)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def ours(model: nn.Module, batch: dict[str, Tensor], way: str) -> Step:
    """Compiles a step; both backends run one program, made and proved for the first."""
    backend, program = way.removeprefix("ours-"), _programs.get(id(model))
    if program is None:
        plan = autopar.Plan(Mesh.parse(""), precision="bf16")
        program = autopar.compile_offline(model, batch, plan)
        _programs[id(model)] = program
    step = autopar.compile(
        copy.deepcopy(model),
        program.mesh,
        program=replace(program, plan=replace(program.plan, backend=backend)),
        device=here(),
        cache_dir=Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ours",
        example_inputs=batch,
    )
    adamw = torch.optim.AdamW(step.parameters(), lr=1e-4, fused=True)

    def whole() -> Tensor:
        loss = step(**batch)
        adamw.step()
        adamw.zero_grad()
        return loss

    return whole


_programs: dict[int, Program] = {}  # of the model of this process


def measure(step: Step) -> dict[str, float]:
    """Times some steps: median seconds, and the most bytes alive."""
    device = here()
    for _ in range(WARM):
        step()
    wait(device)
    began = time.perf_counter()
    step()
    wait(device)
    count = int(SECONDS / (time.perf_counter() - began))
    count = max(3, min(STEPS, count))
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        took = [b - a for a, b in pairwise(marks)]
        return {"seconds": median(took), "bytes": peak_allocated(step)}
    torch.cuda.reset_peak_memory_stats(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    wait(device)
    took = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    most = torch.cuda.max_memory_allocated(device)
    return {"seconds": median(took), "bytes": most}


def speed(say: Say, name: str, tiny: bool, ways: Sequence[str]) -> None:
    """Train a model in each way, from the same weights; the batch stays the same."""
    config = (TINY if tiny else SIZES)[name]
    model = make(config)
    of = capture_short(model, batch_of(config, 2), precision="bf16")
    predicted = predict(of, (4,) if tiny else SAMPLES)
    say({"model": name, "predicted": predicted})
    batch = batch_of(config, predicted["samples"])
    if torch.cuda.is_available():
        batch = {k: x.pin_memory() for k, x in batch.items()}
    for way in ways:
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            measured: dict[str, Any] = trained(model, batch, way)
        except Exception as error:  # what has no memory or no compiler is told
            line = (str(error).strip().splitlines() or [""])[0]
            measured = {"skipped": f"{type(error).__name__}: {line}"}
        say({"model": name, "way": way, **measured})


def trained(model: nn.Module, batch: dict[str, Tensor], way: str) -> dict[str, float]:
    if way not in WAYS:
        raise ValueError(f"'{way}' is none of {', '.join(WAYS)}")
    began = time.perf_counter()
    step = (ours if way.startswith("ours") else untouched)(model, batch, way)
    loss = step().item()
    first = time.perf_counter() - began
    return {"first": first, "loss": loss, **measure(step)}


# --- ranks of one device --------------------------------------------------------------


def single(config: Config, batch: dict[str, Tensor]) -> tuple[list[float], nn.Module]:
    """Losses of two steps of the untouched model, and the model after them."""
    model = make(config).to(here())
    update, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        _, loss = model(**{k: x.to(here()) for k, x in batch.items()})
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses, model


def ranks(say: Say, tiny: bool) -> None:
    """Runs each plan of this many ranks on one device, beside a single process."""
    dist.init_process_group("gloo")
    config = TINY["gpt2-xl"] if tiny else Config(4, 256, 8, 256, 1024)
    assert isinstance(config, Config)
    batch = batch_of(config, 8)
    expected, model = single(config, batch)
    weights = {name: x.cpu() for name, x in model.state_dict().items()}
    for options in PLANS[dist.get_world_size()]:
        own = dict(options)
        step = autopar.compile(
            make(config), own.pop("mesh"), device=here(), example_inputs=batch, **own
        )
        update, losses = torch.optim.SGD(step.parameters(), lr=0.1), []
        for _ in range(2):
            losses.append(step(**batch).item())
            update.step()
            update.zero_grad()
        state = step.state_dict()
        off = {
            "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
            "weights": max(
                (x - weights[name]).abs().max().item() for name, x in state.items()
            ),
        }
        if dist.get_rank() == 0:
            plan = ", ".join(f"{k}={v}" for k, v in options.items() if k != "mesh")
            name = f"{options['mesh']} {plan}".strip()
            say({"plan": name, **off, "equal": max(off.values()) < TOLERANCE})
    dist.barrier()


def serve(
    writer: Connection, variables: Mapping[str, str], task: tuple[Any, ...]
) -> None:
    """Be one process of a job. task: a function's name, and what it is given."""
    warnings.simplefilter("ignore")  # torch's own, about its own parts
    os.environ.update(variables)
    name, *arguments = task
    try:
        {"speed": speed, "ranks": ranks}[name](writer.send, *arguments)
    except BaseException:
        writer.send({"failed": traceback.format_exc()[-1000:]})
    writer.close()
    os._exit(0)  # see `peer_runs.py`
