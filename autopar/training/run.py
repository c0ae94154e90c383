"""The training loop behind `autopar run`: one process of torchrun, or a single one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.models.load import LoadedModel, load_model
from autopar.passes.mesh import MeshError
from autopar.passes.plan import PlanError
from autopar.planner.planned import compiled, compiled_once, made_once, mesh_of
from autopar.plans.store import COMPILED, StoredPlan
from autopar.runtime.agreement.fail_together import on_first
from autopar.runtime.launch.first_then_all import first_then_all
from autopar.runtime.launch.join import choose_backend
from autopar.runtime.launch.meet import meet, open_store
from autopar.runtime.launch.nodes import check_launch, torchrun_for
from autopar.runtime.launch.watchdog import Watchdog, guarded
from autopar.step import Step
from autopar.training.evaluation import Evaluation
from autopar.training.feed import Feed, open_run_data
from autopar.training.log import Log
from autopar.training.metrics import Clock, Meter
from autopar.training.nonfinite import EVERY, FirstNonFinite, is_finite
from autopar.training.optimizer import make_optimizer, set_learning_rate
from autopar.training.options import RunOptions
from autopar.training.progress import Progress
from autopar.training.reference import Reference
from autopar.training.report import Report, Writer
from autopar.training.resume import claimed, is_due, resume, save
from autopar.training.sample import Origin, Sampling, sample_text

NOT_THERE = (
    "see why they did not start, or start torchrun on each node; where nodes need "
    "longer for it, give a longer --timeout"
)


def run(plan: str | Path | Callable[[], Path], options: RunOptions) -> int:
    """Train for some steps on this rank; returns the exit status.

    plan: the directory of one, or what rank 0 makes one by, on a disk that ranks share.
    """
    _, world = check_launch()
    if world == 1:
        directory = plan() if callable(plan) else Path(plan)
        check_world(directory, world)
        train(compiled(directory, not options.unproved), options)
        return 0
    if not callable(plan):
        check_world(Path(plan), world)
    wait = timedelta(seconds=options.timeout)
    opened, rank, world = open_store(wait)
    store = meet(opened, rank, world, "autopar run", wait, NOT_THERE)
    with Watchdog(store, rank, world) as watchdog:
        return guarded(watchdog, lambda: _as_rank(store, rank, world, plan, options))


def check_world(directory: Path, world: int) -> None:
    """Raises MeshError unless the plan is for so many processes."""
    mesh = mesh_of(directory)
    if world != mesh.size:
        raise MeshError(
            f"plan '{directory}' is for {mesh.size} ranks, but {world} processes run",
            fix=f"{torchrun_for(mesh.size)} -m autopar run {directory}",
        )


def _as_rank(
    store: dist.Store,
    rank: int,
    world: int,
    plan: str | Path | Callable[[], Path],
    options: RunOptions,
) -> None:
    directory = Path(made_once(plan, store, rank) if callable(plan) else plan)
    check_world(directory, world)
    stored = compiled_once(directory, store, rank, world, not options.unproved)
    first_then_all(store, rank, world, lambda: open_run_data(options))
    wait = timedelta(seconds=options.timeout)
    dist.init_process_group(
        choose_backend(), store=store, rank=rank, world_size=world, timeout=wait
    )
    train(stored, options)
    dist.barrier()
    dist.destroy_process_group()


def train(stored: StoredPlan, options: RunOptions) -> None:
    """The loop, on every rank alike; rank 0 prints."""
    program = stored.program
    if not (program.proof or options.unproved):
        raise PlanError(
            f"nobody proved that plan '{stored.directory}' does what its model does",
            fix=f"compile it again: autopar compile {stored.model_spec} --plan "
            f"{stored.directory} -o {stored.directory}; or run it with --unproved",
        )
    if options.backend is not None:
        program = replace(program, plan=replace(program.plan, backend=options.backend))
    loaded = load_model(stored.model_spec, seed=stored.seed)
    step = autopar.compile(
        loaded.model,
        program.mesh,
        program=program,
        prove=not options.unproved,
        seed=stored.seed,
        timeout=timedelta(seconds=options.timeout),
        cache_dir=stored.directory / COMPILED,
    )
    feed, held_out = Feed.open(program, loaded, options).split(options.held_out)
    evaluation = Evaluation(held_out, options)
    step.build(**feed.batch(0))
    with claimed(step, options):
        _train(step, feed, evaluation, loaded, stored, options)


def _train(
    step: Step,
    feed: Feed,
    evaluation: Evaluation,
    loaded: LoadedModel,
    stored: StoredPlan,
    options: RunOptions,
) -> None:
    """Goes on from where a checkpoint ended, if there is one."""
    specs = step.program.parameters
    optimizer = make_optimizer(
        ((p, len(specs[name].shape)) for name, p in step.named_parameters()), options
    )
    data = {"name": feed.data.name, "digest": feed.data.digest()}
    done = resume(step, optimizer, options, data)
    origin = Origin.of(step.program, stored.model_spec, stored.seed, options.tokenizer)
    about = {"data": data, "origin": origin.to_data()}
    first = step.comm.rank == 0
    beside = Reference(loaded, stored, options) if first and options.reference else None
    report = Report(Meter.of(step, feed.tokens), writers(step, done, options))
    if first:
        odd = (*stored.warnings, *feed.warnings())
        told = [f"warning: {warning}" for warning in odd]
        told += [f"going on after step {done}"] if done else []
        print("".join(f"{line}\n" for line in told), end="", file=sys.stderr)
    nonfinite = FirstNonFinite()
    following = feed.batch(done)
    for i in range(done, options.steps):
        batch = following
        rate = set_learning_rate(optimizer, i, options)
        loss, norm = train_step(step, optimizer, batch, options)
        following = feed.batch(i + 1)  # while a GPU computes
        with report.left_out():
            expected = beside.step(i, batch) if beside else None
        report.step(i + 1, loss, norm, rate, expected)
        evaluated, saved = evaluation.is_due(i + 1), is_due(i + 1, options)
        if options.on_nonfinite == "stop":
            nonfinite.add(i + 1, loss, norm)
            last = i + 1 == options.steps
            if evaluated or saved or last or (i + 1) % EVERY == 0:
                nonfinite.check()
        if evaluated:
            with report.left_out():
                report.evaluation(i + 1, evaluation.loss(step))
        if saved:
            save(i + 1, step, optimizer, options, about)
    step.finish_saving()
    if options.sample_prompt is not None:
        _sample(step, loaded, origin, options.sample_prompt, options.json)


def _sample(
    step: Step, loaded: LoadedModel, origin: Origin, prompt: str, as_json: bool
) -> None:
    """Print what the trained model goes on with, on rank 0; all ranks must call it."""
    state = step.state_dict(rank0_only=True)

    def write() -> None:
        sampling = Sampling()
        text = sample_text(loaded, state, origin, prompt, sampling, step.device)
        print(json.dumps({"sample": text}) if as_json else text, flush=True)

    on_first(step.comm, write)


def writers(step: Step, done: int, options: RunOptions) -> list[Writer]:
    """Who is told, on rank 0; nobody on others. Raises AutoparError on all ranks for a
    log that cannot be written."""
    found: list[Writer] = [Progress(options, done)]
    if options.log_file is not None:
        log = Log(options.log_file, options.log_every, options.steps, Clock(done))
        on_first(step.comm, log.open)
        found.append(log)
    return found if step.comm.rank == 0 else []


def train_step(
    step: Step,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    options: RunOptions,
) -> tuple[Tensor, Tensor]:
    """One update of the weights; returns the loss before it, and the norm of all
    gradients as they were. Waits for no GPU, unless what is not finite is skipped."""
    optimizer.zero_grad()
    loss = step(**batch)
    norm = step.clip_grad_norm_(options.clip or math.inf)
    if options.on_nonfinite != "skip" or is_finite(loss, norm):
        optimizer.step()
    return loss, norm
