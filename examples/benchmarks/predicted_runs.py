"""The ranks of `predicted.py`: run plans in turns, and measure steps and bytes, and in
each round the machine.

    torchrun --nproc-per-node 2 -m examples.benchmarks.predicted_runs JOB RESULT \\
        PROFILES

JOB: a JSON file of `Job`s. RESULT: of `Measured`, in their order, written by rank 0.
PROFILES: files, one a round, to which it adds what it measured of the machine then.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.machine.profile_file import Profile, save_profile
from autopar.models.load import load_model
from autopar.passes.plan import Plan
from autopar.planner.planned import batch_for
from autopar.planner.profile import Workload, measure_here
from examples.benchmarks.live_bytes import peak_bytes

WAIT = timedelta(minutes=3)  # of a rank for another one
MESSAGES = 4.0  # seconds of a round that messages are measured for
STEPS = 3  # of a plan, in a round
TOLERANCE = 1e-3  # of a loss, fp32 sums in another order, after some updates


@dataclass(frozen=True)
class Job:
    """A plan to run. model: its specification. plan: as JSON."""

    model: str
    seq: int
    samples: int
    plan: str


@dataclass(frozen=True)
class Measured:
    """seconds: of each round's step. peaks: bytes of live tensors of each rank."""

    seconds: list[float]
    peaks: list[int]
    loss: float


class Trainer:
    """A plan's step with its optimizer, as `autopar run` has them."""

    def __init__(self, job: Job) -> None:
        loaded = load_model(job.model)
        self.batch = batch_for(loaded, job.samples, job.seq)
        plan = Plan.from_json(job.plan)
        self.step = autopar.compile(
            loaded.model, plan.mesh, plan=plan, example_inputs=self.batch, timeout=WAIT
        )
        self.optimizer = torch.optim.AdamW(self.step.parameters(), lr=1e-4)

    def __call__(self) -> Tensor:
        loss = self.step(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def prepare(job: Job) -> tuple[Trainer, int]:
    """A trainer after two steps, and the most bytes alive in the second of them."""
    gc.collect()
    gc.freeze()  # what other trainers have alive does not count
    trainer = Trainer(job)
    trainer()
    return trainer, peak_bytes(trainer)


def timed(trainer: Trainer) -> tuple[float, float]:
    """Seconds of the median step after another of the same plan, from when all ranks
    are there until the last is done; the last one's loss."""
    loss = trainer()
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        begin = time.perf_counter()
        loss = trainer()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return median(seconds), float(loss)


def measure_machine(jobs: list[Job]) -> Profile:
    """What `autopar profile` measures for the models, in fewer repeats, but for
    backends."""
    profile = Profile()
    for i, job in enumerate({job.model: job for job in jobs}.values()):
        messages = MESSAGES if i == 0 else 0.0
        of = Workload(job.model, 0, job.seq, job.samples, messages, 1, backends=False)
        profile = profile.with_more(measure_here(of))
    return profile


def measure(jobs: list[Job], profiles: list[Path]) -> list[Measured]:
    """The machine and then all plans, a few steps each in turn, so that a slow minute
    weighs on all."""
    trainers, peaks = [], []
    for job in jobs:
        trainer, peak = prepare(job)
        trainers.append(trainer)
        everyone: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everyone, peak)
        peaks.append(everyone)
    table = []
    for path in profiles:
        profile = measure_machine(jobs)
        if dist.get_rank() == 0:
            save_profile(profile, path)
        table.append([timed(trainer) for trainer in trainers])
    measured = []
    for i, peak in enumerate(peaks):
        column = [row[i] for row in table]
        measured.append(Measured([s for s, _ in column], peak, column[-1][1]))
    check_losses(jobs, measured)
    return measured


def check_losses(jobs: list[Job], results: list[Measured]) -> None:
    """All plans of a model train alike. Raises RuntimeError."""
    by_model: dict[str, list[float]] = {}
    for job, measured in zip(jobs, results, strict=True):
        by_model.setdefault(job.model, []).append(measured.loss)
    for model, losses in by_model.items():
        if not max(losses) - min(losses) < TOLERANCE:
            raise RuntimeError(f"plans of {model} disagree about the loss: {losses}")


def main() -> None:
    source, target, *profiles = map(Path, sys.argv[1:])
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=WAIT)
    jobs = [Job(**entry) for entry in json.loads(source.read_text())]
    results = measure(jobs, profiles)
    if dist.get_rank() == 0:
        target.write_text(json.dumps([asdict(m) for m in results]))
    dist.barrier()
    # A gloo thread that lets go of a tensor while Python shuts down aborts the process,
    # about once in ten runs: leave without the shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
