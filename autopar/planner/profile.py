"""`autopar profile`: what this machine takes for a model's ops, and for messages.

The ranks of a torchrun measure together: all of them the messages between them; and as
many as compute at once the ops, each running the same at the same time, so that what
they share (memory, caches) is shared as in a step.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.machine.backend import missing_compiler
from autopar.machine.hardware import this_cluster
from autopar.machine.machine import busy
from autopar.machine.profile_file import BackendTimes, Profile
from autopar.measure.compiled import measure_compiled
from autopar.measure.messages import measure_messages
from autopar.measure.ops import NO_MESH, Job, make_job, run_job
from autopar.measure.update import measure_update
from autopar.models.load import load_model
from autopar.options import make_plan
from autopar.passes.mesh import Mesh
from autopar.passes.price.measured import Ops, Point, Timed
from autopar.passes.price.price_layers import cut_layers
from autopar.passes.search.by_formula import layer_mesh
from autopar.passes.search.candidates import meshes
from autopar.passes.stage.count_footprint import footprint
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
COMPARED = 10  # how often they are
POWERS = (1, 2, 4, 8, 16)  # samples of microbatches that ops are measured at
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
    layers = Layers(load, world) if load.model and _rank() == 0 else None
    if layers and load.backends:
        backends = _from_first(measure_backends(layers, device, told))
    else:
        backends = _from_first({})
    gains = {mesh: times.beside_products for mesh, times in backends.items()}
    timed = measure_ops(layers, gains, load.repeats, device, told)
    alone = {device.type: backends[NO_MESH]} if NO_MESH in backends else {}
    ops = Ops(timed, _measure_update(device))
    return Profile({busy(world): ops}, messages, backends=alone)


class Layers:
    """A few layers of a workload's model, as plans of so many ranks split them."""

    def __init__(self, load: Workload, ranks: int) -> None:
        self.load = load
        loaded = load_model(load.model, seed=load.seed, device="meta")
        batch = batch_for(loaded, SAMPLES, load.seq)
        self.of = capture_short(loaded.model, batch)
        self.known = {**batch, **self.of.named.traced.literals}
        space = make_space(self.of, this_cluster(ranks), SAMPLES)
        self.meshes = sorted({layer_mesh(m) for m in meshes(space)}, key=str)
        self.limit = this_cluster(busy(ranks)).device.memory * SHARE

    def job(self, mesh: Mesh, samples: int, outlined: bool = False) -> Job | None:
        """A forward and backward of a microbatch of so many samples; None if a batch
        has no such microbatches, or if they do not fit into memory. outlined: as it
        would run; if it is not, its statements can be timed."""
        most = self.of.batch // mesh.sample_ranks
        if samples > self.load.samples or most % samples:
            return None
        plan = make_plan(mesh, microbatches=most // samples)
        whole = cut_layers(self.of.named, plan, ("",)).stages[0]
        local = differentiate(whole, plan.sizes, dict.fromkeys(plan.axes, 0))
        name = f"{str(mesh) or 'one rank'}, {samples} samples"
        if bytes_of(local) > self.limit:
            LOG.warning("%s does not fit here: its ops are not measured", name)
            return None
        return make_job(name, local, mesh, plan.microbatches, self.known, outlined)

    def jobs(self) -> Iterator[Job]:
        """Splits in every way in which plans split them, and at every size of a
        microbatch that is a power of two."""
        every = (self.job(mesh, n) for mesh in self.meshes for n in POWERS)
        return (job for job in every if job is not None)


def measure_backends(
    layers: Layers, device: torch.device, told: Watch
) -> dict[Mesh, BackendTimes]:
    """Times both backends on one rank by itself, if Inductor can compile there, for
    every way to split the layers: collectives part what could be compiled in one."""
    if missing := missing_compiler(device):
        told(f"functions are not compiled here: {missing} is not installed")
        return {}
    backends = {}
    for mesh in layers.meshes:
        few = (n for n in reversed(POWERS) if n <= FEW)
        fits = ((n, layers.job(mesh, n, outlined=True)) for n in few)
        samples, job = next(((n, job) for n, job in fits if job), (0, None))
        if job is None or (apart := layers.job(mesh, samples)) is None:
            continue
        tell(f"{job.name}, compiled by Inductor")
        took = measure_compiled(job, device, COMPARED)
        if took is None:
            told(f"{job.name}: compiling takes too long to be measured")
            break
        share = run_job(apart, device, layers.load.repeats).as_they_are
        eager, inductor = took
        backends[mesh] = BackendTimes(eager, inductor, share * eager)
        one, other = map(seconds, took)
        told(f"{job.name}: as Python {one}, compiled by Inductor {other}")
    return backends


def measure_ops(
    layers: Layers | None,
    gains: Mapping[Mesh, float],
    repeats: int,
    device: torch.device,
    told: Watch,
) -> dict[str, Timed]:
    """Ops of all jobs, signature -> the mean of the ranks that compute at once.

    layers: on the first rank, if there is something to measure. gains: of what is
    compiled, see `Timed.compiled`.
    """
    samples: dict[str, list[Timed]] = defaultdict(list)
    source = layers.jobs() if layers else iter(())
    while job := _from_first(next(source, None)):
        tell(f"ops of {job.name}")
        times = run_job(job, device, repeats) if _computes() else None
        for ran in _from_all(times):
            for key, timed in ran.timed.items() if ran else ():
                compiled = gains.get(job.mesh, 0.0)
                samples[key].append(replace(timed, compiled=compiled))
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


def bytes_of(local: LocalStage) -> int:
    """Bytes for running a stage, parameters and gradients included."""
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
