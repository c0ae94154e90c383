"""The API: `compile` a model for a mesh, and call the step that comes out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.checkpoints.checkpoint import load, save
from autopar.checkpoints.state import (
    check_state_dict,
    load_state_dict,
    load_training_state,
    remember,
    state_dict,
    training_state,
)
from autopar.compiler import compile_offline, proved
from autopar.options import Options, check_arguments, make_plan
from autopar.planner.asked import Asked, wanted
from autopar.planner.choose import choose_plan
from autopar.runtime.agreement import Agreement, digests
from autopar.runtime.changed import Originals, check_trained
from autopar.runtime.executor import Executor
from autopar.runtime.first_rank import on_first_rank
from autopar.runtime.gradient_norm import checked_norm, clip_, is_owner
from autopar.runtime.initialize import local_state
from autopar.runtime.join import await_here, default_device, join
from autopar.runtime.match import check_model, check_same, checked_batch
from autopar.runtime.offload import Host
from autopar.runtime.process_groups import ProcessComm
from autopar.runtime.updates import Updates
from autopar.runtime.whole_updates import WholeUpdates, beside
from passes.errors import AutoparError
from passes.plan import AUTO, Plan, PlanError
from passes.program import Program

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
TIMEOUT = timedelta(minutes=10)
LOG = logging.getLogger("autopar")
UNPROVED = "nobody proved that this plan computes what the model does (prove=False)"


def compile(
    model: nn.Module,
    mesh: Any,
    *,
    loss_fn: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    plan: Plan | str | None = None,
    program: Program | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    timeout: timedelta = TIMEOUT,
    prove: bool = True,
    **options: Unpack[Options],
) -> Step:
    """Compile an unmodified model into a training step over a mesh of devices.

    model: returns its loss, `(logits, loss)` or an output with `.loss`; or give
    `loss_fn(output, batch)`. Weights on `meta` are made by the modules' initialisers.
    mesh: a `torch.distributed.DeviceMesh` with named dims, or text as `"pp=2,tp=2"`. Or
    a number of devices, or a `Cluster` of them (`"8xA100-80GB"`), or sizes of axes that
    may mean anything, as (4, 2): the planner finds the plan that is best for the first
    batch. What options decide stays decided.
    example_inputs: a batch to compile with now; else the first call compiles.
    plan, program: decisions or a whole program made before, instead of the options.
    plan="auto": the planner decides what mesh and options leave open.
    seed: of dropout masks, and of weights that start on meta.
    device: to compute on; if not given this process's GPU, if there is one.
    prove: that the plan computes what the model does, before anything runs, see
    `autopar.proof.prove_program`; without it, each run warns that nobody did.
    options: `microbatches=4`, `zero=3` ...: see `autopar.options.Options`.

    Raises: AutoparError.
    """
    check_arguments(plan, program, loss_fn, seed, timeout)
    if program is not None:
        plan = program.plan
    decided: Plan | Asked
    if plan is None or isinstance(plan, str):
        decided = wanted(mesh, options, auto=plan == AUTO) or make_plan(mesh, **options)
    elif options:
        raise PlanError(
            f"the plan is given, and so is {next(iter(options))}=",
            fix="change the plan: dataclasses.replace(plan, ...), or give no plan",
        )
    else:
        decided = plan
    step = Step(model, decided, loss_fn, seed, device, timeout, program, prove)
    if example_inputs is not None:
        step.build(**example_inputs)
    return step


class Step:
    """Forward and backward of a compiled model on this rank; made by `compile`.

    Every rank calls it with the whole global batch, and takes its own part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        decided: Plan | Asked,
        loss_fn: Callable[..., Any] | None,
        seed: int,
        device: torch.device | str | None,
        timeout: timedelta,
        program: Program | None,
        prove: bool = True,
    ) -> None:
        self._model: nn.Module | None = model
        # A plan, or what one is chosen for once there is a batch.
        self._decided, self._loss_fn = decided, loss_fn
        self._seed, self._timeout = seed, timeout
        self._given, self._prove = program, prove
        # Names of the state dict, and what of it every rank has whole: buffers, and
        # parameters that no stage computes with.
        self.names: list[str] = []
        self.unused: dict[str, Tensor] = {}
        # Fields that are no tensors: their values are part of what was compiled.
        self._fixed: dict[str, Any] = {}
        self._executor: Executor | None = None
        self._originals: Originals | None = None
        self._host: Host | None = None
        join(decided, timeout)
        self.device = torch.device(device) if device else default_device()

    def __call__(self, **batch: Any) -> Tensor:
        """Loss of the global batch, the same on every rank; gradients are in `.grad`.

        The first call compiles. As with `loss.backward()`, gradients add to what
        `.grad` holds: call `optimizer.zero_grad()` in between.
        Raises: BatchError, if names, shapes or types are not those compiled for.
        """
        if self._executor is None:
            self.build(**batch)
        assert self._executor is not None
        with self._begin("step", batch) as tensors:
            if self._host is not None:
                self._host.upload()
            loss = self._executor.step(tensors)
            if self._host is not None:
                self._host.download()
            self._updates.show()
        self._originals = None  # the model may be trained beside, from now on
        return loss

    def evaluate(self, **batch: Any) -> Tensor:
        """Loss of the global batch without dropout, forward only; on every rank.

        The same as of the model in `.eval()`, if dropout is all that this changes.
        """
        executor = self.executor  # raises if there is nothing to evaluate yet
        with self._begin("evaluate", batch) as tensors:
            if self._host is not None:
                self._host.upload()
            return executor.evaluate(tensors)

    def build(self, **batch: Any) -> Step:
        """Compile for batches like this one (only shapes and types matter)."""
        if self._executor is not None:
            return self
        assert self._model is not None
        await_here("step.build()", self._timeout)
        given = self._given
        if given is not None and (given.proof or not self._prove):
            program = given
        else:
            program = on_first_rank(lambda: self._compile(batch))
        check_model(program, self._model)
        self.comm = ProcessComm(
            program.mesh,
            program.plan.microbatches,
            groups=program.groups,
            rank_groups=program.reduction_groups(),
            messages=program.messages(),
            device=self.device,
            timeout=self._timeout,
        )
        self._agreement = Agreement(self.comm, program)
        self._fixed = {k: v for k, v in batch.items() if not isinstance(v, Tensor)}
        self._agreement.on_build(self._seed, self._given, self._fixed)
        check_same(self._model, self.comm, program)
        parameters, buffers = local_state(
            program, self._model, self.comm.rank, self.device, self._seed
        )
        self._executor = Executor(program, self.comm, parameters, buffers, self._seed)
        self._host = Host(parameters) if program.plan.offload else None
        held = self._executor if self._host is None else self._host
        originals = dict(self._model.named_parameters())
        self._updates = Updates(program, held.parameters, held.grads, originals)
        self._originals = Originals(originals, self.comm.coords)
        self.names, self.unused = remember(self._model, program, buffers)
        notes = program.notes if program.proof else (*program.notes, UNPROVED)
        for note in notes if self.comm.rank == 0 else ():
            LOG.warning(note)
        self._model = None  # the whole weights are free to go
        return self

    def _compile(self, batch: Mapping[str, Any]) -> Program:
        model, plan = self._model, self._decided
        assert model is not None
        if self._given is not None:
            check_model(self._given, model)
            return proved(self._given, model, batch, self._loss_fn)
        if isinstance(plan, Asked):
            plan = choose_plan(model, plan, batch, self._loss_fn)
        return compile_offline(model, batch, plan, self._loss_fn, prove=self._prove)

    @contextmanager
    def _begin(
        self, operation: str, batch: Mapping[str, Any]
    ) -> Iterator[dict[str, Tensor]]:
        """The context of an operation: with the tensors of a batch that fits, and is
        the same on all ranks."""
        try:
            tensors = checked_batch(self.program, self._fixed, batch)
            check_trained(self.program, self._updates.parameters)
            if self._originals is not None:
                self._originals.check(self.program, self._updates.parameters)
            if self._host is None:
                self.executor.rebind()
            else:
                self._host.check()
        except AutoparError as error:
            self._agree().refuse(operation, error)
            raise
        training = self.training_state()
        with self._agree().on_batch(operation, tensors, self._updates, training):
            yield {name: x.to(self.device) for name, x in tensors.items()}

    # --- what optimizers and checkpoints need --------------------------------------

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            raise AutoparError(
                "the step is not compiled yet",
                fix="give compile example_inputs=, or call step.build(**batch) first",
            )
        return self._executor

    def _agree(self) -> Agreement:
        """How an operation begins. Raises AutoparError if nothing is compiled yet."""
        assert self.executor is not None, "it raises"
        return self._agreement

    @property
    def program(self) -> Program:
        return self.executor.program

    @property
    def plan(self) -> Plan:
        """The decisions; complete (cuts included) once the step is compiled.

        Raises: AutoparError if they are still to be chosen, by the first batch.
        """
        decided = self._decided if self._executor is None else self.program.plan
        return decided if isinstance(decided, Plan) else self.program.plan

    @property
    def loss_scale(self) -> float:
        """What the next backward starts with; 1 but for precision="fp16"."""
        held = self.executor.loss_scale
        return held.scale if held else 1.0

    @property
    def skipped(self) -> int:
        """Steps whose gradients overflowed in float16, and were left out."""
        held = self.executor.loss_scale
        return held.skipped if held else 0

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's shards, for any torch.optim optimizer; see `offload`."""
        yield from dict(self.named_parameters()).values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with the model's own names; `h.0.attn.qkv[0:32].weight` is part of
        one that the model cuts into pieces, which rest each by itself."""
        held = self.executor if self._host is None else self._host
        yield from held.parameters.items()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global 2-norm is at most max_norm.

        Returns the norm before; each element of the model counts once, however many
        ranks hold it. Follows torch.nn.utils.clip_grad_norm_.
        """
        grads = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        flats = [b.flat for b in self.executor.buckets] if self._host is None else []
        with self._agree().on_clip(checked_norm(max_norm)):
            return clip_(self.program, self.comm, max_norm, grads, flats)

    def gather_for(self, optimizer: Kind) -> Kind:
        """Give an optimizer whole parameters in each update, as Muon needs; see
        `autopar.runtime.whole_updates`. All ranks must call it; returns the optimizer.
        """
        self._agree()("gather_for")
        program, held = self.program, dict(self.named_parameters())
        self.comm.open_groups(beside(program, rank) for rank in self.everyone())
        WholeUpdates(program, self.comm, held, optimizer)
        self._updates.whole.add(optimizer)
        return optimizer

    def owns(self, name: str) -> bool:
        """Whether this rank is the first of those that hold the same part of it."""
        return is_owner(self.program, self.comm, name)

    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.program.mesh.size))

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers on the CPU, by the model's own names.

        All ranks must call it, and all get everything. Loads into the plain model.
        """
        self._agree()("state_dict")
        return state_dict(self)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shards from whole tensors by the model's own names.

        All ranks must call it, with the same values. Raises: ModelMismatch for missing
        and unexpected names, and for shapes that differ; nothing is changed then.
        """
        try:
            check_state_dict(self, state)
        except AutoparError as error:
            self._agree().refuse("load_state_dict", error)
            raise
        self._agree()("load_state_dict", digests("state", state))
        load_state_dict(self, state)

    @torch.no_grad()
    def set_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take what every rank has whole: buffers, and what no stage computes with."""
        for table in (self.executor.buffers, self.unused):
            for name, value in table.items():
                if name in state:
                    value.copy_(state[name])
        self.executor.set_up()

    def training_state(self) -> dict[str, Any]:
        """What the step goes on from, beside weights: plain values, alike on all ranks.

        Dropout follows from seed and count of steps: there is no generator to keep.
        """
        return training_state(self.executor)

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        load_training_state(self.executor, state)

    def save(
        self,
        directory: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint, for any other mesh too: see
        `autopar.checkpoints.checkpoint.save`."""
        self._agree_on("save", optimizer)
        return save(Path(directory), self, optimizer, extra=extra, keep=keep)

    def load(
        self,
        directory: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Any:
        """Go on from a checkpoint; returns `extra`: see
        `autopar.checkpoints.checkpoint.load`."""
        self._agree_on("load", optimizer)
        return load(Path(directory), self, optimizer)

    def _agree_on(self, operation: str, optimizer: object) -> None:
        given = "not given" if optimizer is None else "given"
        self._agree()(operation, {("argument", "optimizer"): given})
