"""The training loop behind `autopar run`: one process of torchrun, or a single one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.models.load import LoadedModel, ModelError, load_model
from autopar.planner.planned import compiled, compiled_once, mesh_of
from autopar.plans.store import COMPILED, StoredPlan
from autopar.proof.reference import reference_step
from autopar.runtime.launch.join import check_launch, choose_backend
from autopar.runtime.launch.watchdog import Watchdog, guarded
from autopar.step import Step
from autopar.training.data import Data, open_data
from autopar.training.resume import (
    check_saving,
    claimed,
    is_due,
    learning_rates,
    resume,
    save,
)
from passes.errors import AutoparError
from passes.mesh import MeshError
from passes.plan import PlanError
from passes.program import Program
from passes.ranges import check_range

LABELS = ("labels", "targets")
RANGED = ("steps", "lr", "clip", "seed", "timeout", "warmup", "save_every", "keep")


class OptionError(AutoparError):
    """An option of a run that is out of its range."""


@dataclass(frozen=True)
class RunOptions:
    """data: as `open_data` reads it. clip: greatest gradient norm, 0: as it is.

    reference: train the untouched model beside, on rank 0. as_json: one object a line.
    timeout: seconds that a rank waits for another one. warmup: steps in which the
    learning rate rises to lr. save: a directory for checkpoints, one every `save_every`
    steps (0: none but the last), of which the newest `keep` stay. resume: go on from
    the newest one there, if any. unproved: run a plan that nobody proved. backend: what
    runs functions, in place of the plan's, see `passes.plan.BACKENDS`.
    """

    steps: int = 20
    data: str = "synthetic"
    lr: float = 3e-4
    clip: float = 1.0
    seed: int = 0
    reference: bool = False
    as_json: bool = False
    timeout: float = 300.0
    warmup: int = 0
    save: Path | None = None
    save_every: int = 0
    keep: int = 2
    resume: bool = False
    unproved: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        for name in RANGED:
            check_range(name, getattr(self, name), OptionError)
        check_saving(self)


def run(directory: str | Path, options: RunOptions) -> int:
    """Train for some steps on this rank; returns the exit status."""
    directory = Path(directory)
    mesh, (_, world) = mesh_of(directory), check_launch()
    if world != mesh.size:
        raise MeshError(
            f"plan '{directory}' is for {mesh.size} ranks, but {world} processes run",
            fix=f"torchrun --nproc-per-node {mesh.size} -m autopar run {directory}",
        )
    if world == 1:
        train(compiled(directory, not options.unproved), options)
        return 0
    store, rank, world = next(iter(dist.rendezvous("env://")))
    with Watchdog(store, rank, world) as watchdog:
        return guarded(
            watchdog, lambda: _as_rank(store, rank, world, directory, options)
        )


def _as_rank(
    store: dist.Store, rank: int, world: int, directory: Path, options: RunOptions
) -> None:
    stored = compiled_once(directory, store, rank, world, not options.unproved)
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
    feed = Feed.open(program, loaded, options)
    step.build(**feed.batch(0))
    with claimed(step, options):
        _train(step, feed, loaded, stored, options)


def _train(
    step: Step, feed: Feed, loaded: LoadedModel, stored: StoredPlan, options: RunOptions
) -> None:
    """Goes on from where a checkpoint ended, if there is one."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=options.lr)
    rates = learning_rates(optimizer, options.warmup)
    done = resume(step, optimizer, rates, options)
    first = step.comm.rank == 0
    beside = Reference(loaded, stored, options) if first and options.reference else None
    progress = Progress(options, done, feed.tokens) if first else None
    for warning in stored.warnings if first else ():
        print(f"warning: {warning}", file=sys.stderr)
    if first and done:
        print(f"going on after step {done}", file=sys.stderr)
    following = feed.batch(done)
    for i in range(done, options.steps):
        batch = following
        loss = train_step(step, optimizer, batch, options.clip)
        following = feed.batch(i + 1)  # while a GPU computes
        if progress:
            expected = None
            if beside:
                began = time.perf_counter()
                expected = beside.step(i, batch)
                progress.began += time.perf_counter() - began
            progress.show(i + 1, loss, expected)
        rates.step()
        if is_due(i + 1, options):
            save(i + 1, step, optimizer, rates, options)


def train_step(
    step: Step,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    clip: float,
) -> Tensor:
    """One update of the weights; returns the loss before it, and waits for no GPU."""
    optimizer.zero_grad()
    loss = step(**batch)
    if clip:
        step.clip_grad_norm_(clip)
    optimizer.step()
    return loss


@dataclass(frozen=True)
class Feed:
    """Batches of tokens, as the fields that a program was compiled for."""

    data: Data
    program: Program
    shifts_labels: bool

    @classmethod
    def open(cls, program: Program, loaded: LoadedModel, options: RunOptions) -> Feed:
        vocab = loaded.vocab or vocab_of(program)
        return cls(
            open_data(options.data, vocab, options.seed), program, loaded.shifts_labels
        )

    @property
    def tokens(self) -> int:
        """In one batch."""
        shapes = [shape for shape, _ in self.program.inputs.values()]
        return shapes[0][0] * shapes[0][1]

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tokens, and as labels those after them (or themselves, if the model shifts).

        Raises ModelError for a field that is neither, nor an attention mask.
        """
        made = {}
        for name, (shape, dtype) in self.program.inputs.items():
            if len(shape) != 2 or not dtype.startswith("int"):
                raise ModelError(
                    f"the model takes '{name}', {dtype}{list(shape)}, but "
                    "`autopar run` has only tokens to give",
                    fix="write the training loop yourself, with autopar.compile",
                )
            kind = getattr(torch, dtype)
            ids, following = self.data.batch(step, *shape)
            if name == "attention_mask":
                made[name] = torch.ones(shape, dtype=kind)
            elif name in LABELS and not self.shifts_labels:
                made[name] = following.to(kind)
            else:
                made[name] = ids.to(kind)
        return made


def vocab_of(program: Program) -> int:
    """The extent of the dim named vocab, without what pads it; some parameter may have
    that too. Raises ModelError if no parameter has it."""
    found = [
        size
        for spec in program.parameters.values()
        for names, sizes in zip(spec.dims, spec.factors, strict=True)
        for name, size in zip(names, sizes, strict=True)
        if name == "vocab"
    ]
    if found:
        return min(found)
    raise ModelError(
        "no parameter of the model has a dim that is its vocabulary",
        fix="write the training loop yourself, with autopar.compile",
    )


class Reference:
    """The untouched model on one device, trained in the same way."""

    def __init__(
        self, loaded: LoadedModel, stored: StoredPlan, options: RunOptions
    ) -> None:
        if loaded.on_meta:
            raise ModelError(
                f"'{loaded.spec}' is too big for one device to compare with",
                fix="run without --reference",
            )
        self.model: nn.Module = loaded.model
        self.seed, self.clip = stored.seed, options.clip
        self.precision = stored.program.plan.dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.rates = learning_rates(self.optimizer, options.warmup)

    def step(self, i: int, batch: Mapping[str, Tensor]) -> float:
        """One update; returns the loss before it."""
        key = (self.seed << 32) + i
        loss, grads = reference_step(
            self.model, batch, key=key, precision=self.precision
        )
        for name, p in self.model.named_parameters():
            p.grad = grads.get(name)
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.rates.step()
        return loss.item()


class Progress:
    """One live line on a terminal; else a line every PAUSE seconds, or JSON lines.

    Only for a line a loss is read, which waits for a GPU. done: steps made before.
    tokens: in a step; how many a second, since the line before.
    """

    LIVE, PAUSE = 0.1, 2.0

    def __init__(self, options: RunOptions, done: int, tokens: int) -> None:
        self.options, self.tokens = options, tokens
        self.live = sys.stdout.isatty() and not options.as_json
        self.pause = 0.0 if options.as_json else self.LIVE if self.live else self.PAUSE
        self.printed = float("-inf")
        self.began, self.shown = time.perf_counter(), done

    def show(self, step: int, loss: Tensor, reference: float | None) -> None:
        last = step == self.options.steps
        if not last and time.monotonic() - self.printed < self.pause:
            return
        self.printed, value = time.monotonic(), loss.item()
        tokens = self.tokens * (step - self.shown)
        speed = tokens / (time.perf_counter() - self.began)
        self._print(step, value, reference, speed)
        self.began, self.shown = time.perf_counter(), step

    def _print(
        self, step: int, loss: float, reference: float | None, speed: float
    ) -> None:
        last = step == self.options.steps
        if self.options.as_json:
            row = {"step": step, "loss": loss, "tokens_per_second": speed}
            if reference is not None:
                row["reference_loss"] = reference
            print(json.dumps(row), flush=True)
            return
        text = f"step {step}/{self.options.steps}  loss {loss:.5f}"
        if reference is not None:
            text += f"  single device {reference:.5f}"
        text += f"  {speed:,.0f} tokens/s"
        if self.live:
            print(f"\r{text:<78}", end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)
