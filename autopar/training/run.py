"""The training loop behind `autopar run`: one process of torchrun, or a single one."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar import progress
from autopar.models.load import LoadedModel, load_model
from autopar.passes.mesh import MeshError
from autopar.passes.plan import PlanError
from autopar.planner.compile_planned import compiled, compiled_once, made_once
from autopar.planner.planned import mesh_of
from autopar.plans.store import COMPILED, StoredPlan
from autopar.runtime.agreement.fail_together import on_first
from autopar.runtime.launch.first_then_all import first_then_all
from autopar.runtime.launch.guarded import guarded
from autopar.runtime.launch.join import choose_backend
from autopar.runtime.launch.meet import meet, open_store
from autopar.runtime.launch.nodes import check_launch, starts_again, torchrun_for
from autopar.runtime.launch.spare import await_end, end_spares
from autopar.runtime.launch.watchdog import Watchdog
from autopar.step import Step
from autopar.terminal import command
from autopar.training.data.feed import Feed, prepare_data
from autopar.training.evaluation import Evaluation
from autopar.training.nonfinite import EVERY, FirstNonFinite, is_finite
from autopar.training.optimizer import make_optimizer, set_learning_rate
from autopar.training.options import RunOptions
from autopar.training.reference import Reference
from autopar.training.reports.log import Log
from autopar.training.reports.metrics import Clock, Meter
from autopar.training.reports.profile import Profile
from autopar.training.reports.progress import Progress
from autopar.training.reports.report import Report, Writer
from autopar.training.reports.trackers import TensorBoard, WandB
from autopar.training.resume import check_progress, claimed, is_due, resume, save
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
    if world == 1 and "RANK" not in os.environ:
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


def check_world(directory: Path, world: int, spare: bool = False) -> int:
    """Returns the ranks of a plan. Raises MeshError unless so many processes run.

    spare: there may be more, as where nodes come and go.
    """
    mesh = mesh_of(directory)
    if world < mesh.size or (world > mesh.size and not spare):
        raise MeshError(
            f"plan '{directory}' is for {mesh.size} ranks, but {world} processes run",
            fix=f"{torchrun_for(mesh.size)} -m autopar run {command(directory)}",
        )
    return mesh.size


def _as_rank(
    store: dist.Store,
    rank: int,
    world: int,
    plan: str | Path | Callable[[], Path],
    options: RunOptions,
) -> None:
    if rank == 0 and starts_again():
        check_progress(options)
    directory = Path(made_once(plan, store, rank) if callable(plan) else plan)
    ranks = check_world(directory, world, callable(plan) and starts_again())
    stored = compiled_once(directory, store, rank, world, not options.unproved)
    first_then_all(store, rank, world, lambda: prepare_data(options))
    if rank >= ranks:
        return await_end(store)
    wait = timedelta(seconds=options.timeout)
    dist.init_process_group(
        choose_backend(), store=store, rank=rank, world_size=ranks, timeout=wait
    )
    train(stored, options)
    dist.barrier()
    dist.destroy_process_group()
    end_spares(store, rank, world - ranks)


def train(stored: StoredPlan, options: RunOptions) -> None:
    """The loop, on every rank alike; rank 0 prints."""
    program = stored.program
    if not (program.proof or options.unproved):
        again = command(
            *("autopar", "compile", stored.model_spec),
            *("--plan", stored.directory, "-o", stored.directory),
        )
        raise PlanError(
            f"nobody proved that plan '{stored.directory}' does what its model does",
            fix=f"compile it again: {again}; or run it with --unproved",
        )
    if options.backend is not None:
        program = replace(program, plan=replace(program.plan, backend=options.backend))
    with _shown():
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
        feed.check_length()
        if options.eval_data:
            held_out = Feed.open(program, loaded, options.to_evaluate)
        if options.epochs:
            options = options.of_steps(feed.steps_of(options.epochs))
        evaluation = Evaluation(held_out, options)
        step.build(**feed.batch(0))
    with claimed(step, options):
        with _shown():
            progress.tell("reading data, and a checkpoint to go on from")
            training = Training(step, feed, evaluation, loaded, stored, options)
        training.run()


def _shown() -> AbstractContextManager[object]:
    """Shows, on rank 0, the work before the first step."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    return progress.Progress("run") if first else nullcontext()


class Training:
    """Runs the steps, from the last checkpoint on, if there is one."""

    def __init__(
        self,
        step: Step,
        feed: Feed,
        evaluation: Evaluation,
        loaded: LoadedModel,
        stored: StoredPlan,
        options: RunOptions,
    ) -> None:
        self.step, self.feed, self.evaluation = step, feed, evaluation
        self.loaded, self.options = loaded, options
        self.first = step.comm.rank == 0
        specs = step.program.parameters
        held = ((p, len(specs[n].shape)) for n, p in step.named_parameters())
        self.optimizer = make_optimizer(held, options)
        if options.ema:
            step.start_ema(options.ema)
        data = {"name": feed.data.name, "digest": feed.data.digest()}
        self.origin = Origin.of(stored, loaded, options)
        self.about = {"data": data, "origin": self.origin.to_data()}
        self.done = resume(step, self.optimizer, options, data)
        self.beside: Reference | None = None
        if self.first and options.reference:
            self.beside = Reference(loaded, stored, options)
        told = writers(step, self.done, options)
        self.report = Report(Meter.of(step, feed.tokens), told)
        self.profile = Profile.of(step, stored, options, self.done)
        self.nonfinite = FirstNonFinite()
        if self.first:
            self._warn(stored.warnings)

    def _warn(self, warnings: Sequence[str]) -> None:
        lines = [f"warning: {warning}" for warning in warnings]
        lines += [f"going on after step {self.done}"] if self.done else []
        print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr)

    def run(self) -> None:
        """Make all steps that are left."""
        batch = self.feed.batch(self.done)
        for i in range(self.done, self.options.steps):
            loss, norm, rate = self._train(i, batch)
            following = self.feed.batch(i + 1)  # while a GPU computes
            with self.report.left_out():
                expected = self.beside.step(i, batch) if self.beside else None
            self.report.step(i + 1, loss, norm, rate, expected, self.step.metrics)
            self._look(i + 1, loss, norm)
            batch = following
        self.step.finish_saving()
        self.report.close()
        if self.options.sample_prompt is not None:
            self._sample(self.options.sample_prompt)

    def _train(
        self, i: int, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, float]:
        """One step, counted from 0; returns loss, norm of gradients, learning rate."""
        rate = set_learning_rate(self.optimizer, i, self.options)
        if self.profile is not None:
            self.profile.begin(i + 1)
        loss, norm = train_step(self.step, self.optimizer, batch, self.options)
        if self.options.ema:
            self.step.ema.update()
        if self.profile is not None:
            profiled = self.profile.end(i + 1)
            if profiled is not None and self.first:
                print(profiled, file=sys.stderr)
        return loss, norm, rate

    def _look(self, done: int, loss: Tensor, norm: Tensor) -> None:
        """Evaluates and saves after so many steps, if that is due. Raises:
        NonFiniteError."""
        options, step = self.options, self.step
        evaluated, saved = self.evaluation.is_due(done), is_due(done, options)
        if options.on_nonfinite == "stop":
            self.nonfinite.add(done, loss, norm)
            if evaluated or saved or done == options.steps or done % EVERY == 0:
                self.nonfinite.check()
        if evaluated:
            with self.report.left_out():
                self.report.evaluation(done, self.evaluation.losses(step))
        if saved:
            save(done, step, self.optimizer, options, self.about)

    def _sample(self, prompt: str) -> None:
        """Print what the trained model goes on with, on rank 0."""
        state = self.step.state_dict(rank0_only=True)

        def write() -> None:
            how, device = Sampling(), self.step.device
            text = sample_text(self.loaded, state, self.origin, prompt, how, device)
            line = json.dumps({"sample": text}) if self.options.json else text
            print(line, flush=True)

        on_first(self.step.comm, write)


def writers(step: Step, done: int, options: RunOptions) -> list[Writer]:
    """The writers of a run's reports on rank 0; none on others. Raises AutoparError on
    all ranks for a log that cannot be written."""
    writers: list[Writer] = [Progress(options, done)]
    if options.log_file is not None:
        log = Log(options.log_file, options.log_every, options.steps, Clock(done))
        on_first(step.comm, log.open)
        writers.append(log)
    trackers: list[TensorBoard | WandB] = []
    if options.tensorboard is not None:
        trackers.append(TensorBoard(options, done))
    if options.wandb is not None:
        trackers.append(WandB(options, done))
    for tracker in trackers:
        on_first(step.comm, tracker.open)
    return [*writers, *trackers] if step.comm.rank == 0 else []


def train_step(
    step: Step,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    options: RunOptions,
) -> tuple[Tensor, Tensor]:
    """Updates the weights once; returns the loss before, and the norm of all gradients
    before clipping. Waits for no GPU, unless steps that are not finite are skipped."""
    optimizer.zero_grad()
    loss = step(**batch)
    norm = step.clip_grad_norm_(options.clip or math.inf)
    if options.on_nonfinite != "skip" or is_finite(loss, norm):
        optimizer.step()
    return loss, norm
