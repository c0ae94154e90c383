"""`autopar profile`: what this machine takes for a model's ops, and for messages.

The ranks of a torchrun measure together: all of them the messages between them; and as
many as compute at once the ops, each running the same at the same time, so that what
they share (memory, caches) is shared as in a step.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.machine.backend import missing_compiler
from autopar.machine.hardware import this_cluster
from autopar.machine.machine import busy
from autopar.machine.profile_file import Backends, BackendTimes, Profile
from autopar.measure.compiled import measure_compiled
from autopar.measure.messages import measure_messages
from autopar.measure.ops import Job, make_job, run_job
from autopar.measure.update import measure_update
from autopar.models.load import load_model
from autopar.options import make_plan
from autopar.passes.price.measured import Ops, Point, Timed
from autopar.passes.price.price_layers import cut_layers
from autopar.passes.schedule.footprint import footprint
from autopar.passes.search.by_formula import layer_mesh
from autopar.passes.search.candidates import meshes
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.local_stage import LocalStage
from autopar.planner.choose import SAMPLES
from autopar.planner.planned import batch_for
from autopar.planner.planner import capture_short, make_space
from autopar.progress import tell
from autopar.runtime.launch.join import default_device
from autopar.units import seconds

LOG = logging.getLogger("autopar")
REPEATS = 5
FEW = 4  # samples that backends are compared with
SHARE = 0.5  # of a rank's memory that a measurement may take
T = TypeVar("T")
Watch = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """What to measure. model: its specification, "" for no ops. seq: tokens of a
    sample. samples: the most in a microbatch. seconds: for messages, roughly; 0: none
    of them. repeats: of each op. backends: whether the model is timed as Inductor
    compiles it, too."""

    model: str = ""
    seed: int = 0
    seq: int = 128
    samples: int = SAMPLES
    seconds: float = 10.0
    repeats: int = REPEATS
    backends: bool = True


def measure_here(load: Workload, told: Watch = lambda line: None) -> Profile:
    """Measure with all ranks of the process group, or alone; all ranks get it all.

    told: called with a line on each step.
    """
    device, world = default_device(), _world()
    messages = {}
    if world > 1 and load.seconds:
        told(f"messages between {world} ranks")
        tell("messages")
        messages[world] = measure_messages(world, device, load.seconds)
    timed, update = measure_ops(load, device, told), _measure_update(device)
    compiles = load.backends and load.model and _rank() == 0
    backends = _from_first(measure_backends(load, device, told) if compiles else {})
    if layers := backends.get(device.type):
        gain = layers.beside_products
        timed = {key: replace(t, compiled=gain) for key, t in timed.items()}
    return Profile({busy(world): Ops(timed, update)}, messages, backends=backends)


def measure_backends(load: Workload, device: torch.device, told: Watch) -> Backends:
    """Times both backends on one rank by itself, if Inductor can compile there."""
    if missing := missing_compiler(device):
        told(f"functions are not compiled here: {missing} is not installed")
        return {}
    job = alone(load)
    tell(f"{job.name}, compiled by Inductor")
    took = measure_compiled(job, device, load.repeats)
    if took is None:
        told(f"{job.name}: compiling takes too long to be measured")
        return {}
    eager, inductor = took
    one, other = map(seconds, took)
    told(f"{job.name}: as Python {one}, compiled by Inductor {other}")
    share = run_job(alone(load, outlined=False), device, load.repeats).products
    return {device.type: BackendTimes(eager, inductor, share * eager)}


def alone(load: Workload, outlined: bool = True) -> Job:
    """A forward and backward of few layers and samples on one rank, as it would run;
    if it is not outlined, its statements can be timed."""
    loaded = load_model(load.model, seed=load.seed, device="meta")
    batch = batch_for(loaded, SAMPLES, load.seq)
    of = capture_short(loaded.model, batch)
    samples = min(load.samples, FEW)
    plan = make_plan("", microbatches=max(1, of.batch // samples))
    sizes = {axis: plan.size(axis) for axis in plan.axes}
    whole = cut_layers(of.named, plan, ("",)).whole
    local = differentiate(whole, sizes, dict.fromkeys(sizes, 0))
    known = {**batch, **of.named.traced.literals}
    name = f"{samples} samples on one rank"
    return make_job(name, local, plan.mesh, plan.microbatches, known, outlined)


def measure_ops(load: Workload, device: torch.device, told: Watch) -> dict[str, Timed]:
    """Ops of all jobs, signature -> the mean of the ranks that compute at once."""
    samples: dict[str, list[Timed]] = defaultdict(list)
    source = jobs(load, _world()) if load.model and _rank() == 0 else iter(())
    while job := _from_first(next(source, None)):
        tell(f"ops of {job.name}")
        times = run_job(job, device, load.repeats) if _computes() else None
        for ran in _from_all(times):
            for key, timed in ran.timed.items() if ran else ():
                samples[key].append(timed)
        if times:
            told(f"{job.name}: {times}")
    return {
        key: replace(rows[0], seconds=mean(t.seconds for t in rows))
        for key, rows in samples.items()
    }


def _measure_update(device: torch.device) -> tuple[Point, ...]:
    measured = _from_all(measure_update(device) if _computes() else None)
    by_size = zip(*(points for points in measured if points), strict=True)
    return tuple((same[0][0], mean(s for _, s in same)) for same in by_size)


def jobs(load: Workload, ranks: int) -> Iterator[Job]:
    """A forward and backward of few layers, split in every way in which plans of so
    many ranks split them, and at every size of a microbatch that is a power of two."""
    loaded = load_model(load.model, seed=load.seed, device="meta")
    batch = batch_for(loaded, SAMPLES, load.seq)
    of = capture_short(loaded.model, batch)
    known = {**batch, **of.named.traced.literals}
    space = make_space(of, this_cluster(ranks), SAMPLES)
    limit = this_cluster(busy(ranks)).device.memory * SHARE
    for mesh in sorted({layer_mesh(m) for m in meshes(space)}, key=str):
        most = of.batch // mesh.sample_ranks
        for samples in (s for s in (1, 2, 4, 8, 16) if most % s == 0):
            if samples > load.samples:
                continue
            plan = make_plan(mesh, microbatches=most // samples)
            sizes = {axis: plan.size(axis) for axis in plan.axes}
            whole = cut_layers(of.named, plan, ("",)).whole
            local = differentiate(whole, sizes, dict.fromkeys(sizes, 0))
            name = f"{str(mesh) or 'one rank'}, {samples} samples"
            if bytes_of(local) <= limit:
                yield make_job(name, local, mesh, plan.microbatches, known)
            else:
                LOG.warning("%s does not fit here: its ops are not measured", name)


def bytes_of(local: LocalStage) -> int:
    """What running a stage takes, parameters and gradients included."""
    held = sum(v.bytes for v in (*local.params, *local.grads.values()))
    sizes = footprint(local)
    return held + sizes.residuals + max(sizes.forward_peak, sizes.backward_peak)


# --- what ranks say to each other, if there is another one ----------------------------


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _computes() -> bool:
    """Whether this is one of the ranks that compute at once."""
    return _rank() < busy(_world())


def _from_first(value: T) -> T:
    if _world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def _from_all(value: T) -> list[T]:
    if _world() == 1:
        return [value]
    values: list[Any] = [None] * _world()
    dist.all_gather_object(values, value)
    return values
