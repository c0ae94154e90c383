"""The API: `compile` a model for a mesh, and call the step that comes out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture.frozen_values import FrozenValues
from autopar.checkpoints.own_form import OwnForm, own_state
from autopar.checkpoints.save_pretrained import configs_of
from autopar.checkpoints.state import remember
from autopar.compiler import compile_offline, proved
from autopar.local_batches import DataRank
from autopar.machine.backend import resolve_backend
from autopar.machine.profile_file import read_profile
from autopar.module_calls import by_name, fields_in_order
from autopar.options import Options, check_arguments, make_plan
from autopar.other_shapes import OtherShapes, shapes_of, without_padding
from autopar.own_modes import own_modes
from autopar.passes.capture.forward.outside import outside_tensors
from autopar.passes.plan import AUTO, Plan, PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.planner.choose import choose_plan
from autopar.planner.request import PlanRequest, plan_request
from autopar.rank_step import RankStep
from autopar.runtime.agreement.agreement import Agreement
from autopar.runtime.agreement.first_rank import on_first_rank
from autopar.runtime.agreement.roll_call import ANOTHER_SHAPE, NOTHING
from autopar.runtime.agreement.validate import (
    BatchError,
    check_model,
    check_same,
    fixed_fields,
)
from autopar.runtime.comm.host_comm import engine
from autopar.runtime.execute.code_cache import CodeCache
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.rehearse import rehearse
from autopar.runtime.launch.join import (
    await_here,
    check_own_gpu,
    default_device,
    join,
    read_device,
)
from autopar.runtime.launch.nodes import straddling, this_node
from autopar.runtime.parameters.initialize import empty_state, local_state
from autopar.unlike_module import check_model_given

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on

TIMEOUT = timedelta(minutes=10)
LOG = logging.getLogger("autopar")
UNPROVED = "nobody proved that this plan computes what the model does (prove=False)"


def compile(
    model: nn.Module,
    mesh: Any = None,
    *,
    devices: Cluster | str | int | None = None,
    loss_fn: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    plan: Plan | str | None = None,
    program: Program | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    timeout: timedelta = TIMEOUT,
    prove: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    pretrained: str | os.PathLike[str] | None = None,
    **options: Unpack[Options],
) -> Step:
    """Compile an unmodified model into a training step over a mesh of devices.

    model: returns its loss, `(logits, loss)`, an output with `.loss`, or a dict, whose
    "loss" is trained, or else the sum of its scalars, see `Step.metrics`; or give
    `loss_fn(output, batch)`, which may return these. Modules initialise `meta` weights.
    mesh: a `torch.distributed.DeviceMesh` with named dims, or text as `"pp=2,tp=2"`; or
    sizes of axes that may mean anything, as (4, 2); or what `devices` may be.
    devices: how many of this machine's, or a `Cluster` of them (`"8xA100-80GB"`): the
    planner finds the best plan for the first batch. What mesh and options decide stays.
    example_inputs: a batch to compile with now; else the first call compiles.
    plan, program: decisions or a whole program made before, instead of the options.
    plan="auto": the planner decides what mesh and options leave open.
    seed: of dropout masks, and of weights that start on meta.
    device: to compute on; if not given this process's GPU, if there is one.
    prove: that the plan computes what the model does, before anything runs, see
    `autopar.proof.prove_program`; without it, each run warns that nobody did.
    cache_dir: where code that Inductor compiled is kept, if not as a temporary file.
    pretrained: a folder of safetensors with the weights of a model that was made in
    `autopar.on_meta()`: no rank has all of them, see `Step.load_pretrained`.
    options: `microbatches=4`, `zero=3` ...: see `autopar.options.Options`.

    Raises: AutoparError.
    """
    check_model_given(model)
    check_arguments(plan, program, loss_fn, seed, timeout)
    if isinstance(example_inputs, tuple | list):
        example_inputs = by_name(fields_in_order(model.forward), example_inputs, {})
    if not isinstance(example_inputs, Mapping | None):
        kind = type(example_inputs).__name__
        raise BatchError(
            f"example_inputs is a {kind}",
            fix="give the fields of a batch: {'ids': ..., 'labels': ...}, or in the "
            "order of what forward takes, (ids, labels)",
        )
    plan = plan if program is None else program.plan
    step = Step(
        model,
        _decided(mesh, devices, plan, options),
        loss_fn,
        seed,
        device,
        timeout,
        program,
        prove,
        cache_dir,
        pretrained,
    )
    if example_inputs is not None:
        step.build(**example_inputs)
    return step


def _decided(
    mesh: Any, devices: Any, plan: Plan | str | None, options: Options
) -> Plan | PlanRequest:
    """A plan, or what one is chosen for once there is a batch."""
    if plan is None or isinstance(plan, str):
        request = plan_request(mesh, options, plan == AUTO, devices)
        return request or make_plan(mesh, **options)
    if options:
        raise PlanError(
            f"the plan is given, and so is {next(iter(options))}=",
            fix="change the plan: dataclasses.replace(plan, ...), or give no plan",
        )
    return plan


class Step(RankStep):
    """Forward and backward of a compiled model on this rank; made by `compile`.

    Every rank calls it with the whole global batch, and takes its own part of it; or,
    with local=True, with the samples that it has loaded itself, see `data_rank`.
    """

    _shapes: OtherShapes

    def __init__(
        self,
        model: nn.Module,
        decided: Plan | PlanRequest,
        loss_fn: Callable[..., Any] | None,
        seed: int,
        device: torch.device | str | None,
        timeout: timedelta,
        program: Program | None,
        prove: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        pretrained: str | os.PathLike[str] | None = None,
    ) -> None:
        chosen = None if device is None else read_device(device)
        if isinstance(decided, Plan):
            join(f"mesh '{decided.mesh}'", decided.mesh.size, timeout)
        else:
            join(f"cluster '{decided.cluster}'", decided.cluster.devices, timeout)
        super().__init__(chosen or default_device())
        check_own_gpu(self.device, timeout)
        self._model: nn.Module | None = model
        self.training, self._order = model.training, fields_in_order(model.forward)
        # A plan, or what one is chosen for once there is a batch.
        self._decided, self._loss_fn = decided, loss_fn
        self._seed, self._timeout = seed, timeout
        self._given, self._prove = program, prove
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._pretrained = pretrained
        # Whether the last batch had this rank's samples only.
        self._local = False
        # The global batch that came last, if it was padded.
        self._unpadded: Mapping[str, Any] | None = None

    @own_modes()
    def _fit(
        self,
        batch: Mapping[str, Any],
        local: bool,
        outputs: Sequence[str] = (),
        evaluating: bool = False,
    ) -> dict[str, Any]:
        """Compile for batches of these shapes and outputs, unless that was done: for
        up to eight, which all compute with the same weights. The first is `build`.
        Returns the batch, padded where a program for a larger one computes it."""
        if self._executor is None:
            self.build(local=local, **batch)
        inputs = self.program.inputs
        like = self.data.whole_like(batch, inputs) if local else batch
        if not self._shapes.fits(self.program, like):
            return dict(batch)  # whoever begins with it says why
        current = self.executor
        if evaluating:
            if self._shapes.differs is None:
                self._agree()("evaluate", NOTHING)  # then all ranks wait for the first
            evaluating = self._shapes.evaluates_otherwise(current, like)
        fitting = self._shapes.find(like, outputs, evaluating)
        if fitting is not current or local != self._local:
            self._change(batch, like, local, outputs, evaluating, fitting)
        is_padded = shapes_of(like) != shapes_of(self.program)
        self._unpadded = like if is_padded else None
        return self._shapes.padded(batch, like, self.program)

    def _without_padding(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._unpadded is None:
            return outputs
        parts = self.data.size if self._local else 1
        return without_padding(outputs, self.program, self._unpadded, parts)

    def _change(
        self,
        batch: Mapping[str, Any],
        like: Mapping[str, Any],
        local: bool,
        outputs: Sequence[str],
        evaluating: bool,
        fitting: Executor | None,
    ) -> None:
        """Compute with another program from now on, the one found or a new one."""
        current = self.executor
        # All ranks change to it together: none waits for messages of other sizes.
        shapes = {n: list(x.shape) for n, x in batch.items() if isinstance(x, Tensor)}
        facts = {("shape", name): shape for name, shape in shapes.items()}
        arguments = {("argument", "local"): local, ("argument", "outputs"): [*outputs]}
        self._agree()(ANOTHER_SHAPE, {**arguments, **facts})
        self._local = local
        executor = fitting or self._shapes.make(current, like, outputs, evaluating)
        if executor is not current:
            executor.go_on_from(current)
            self._executor = executor

    @property
    def data(self) -> DataRank:
        if self._executor is None and isinstance(self._decided, Plan):
            rank = dist.get_rank() if dist.is_initialized() else 0
            return DataRank(self._decided, rank)
        return super().data

    @own_modes()
    def build(self, *, local: bool = False, **batch: Any) -> Step:
        """Compile for batches like this one (only shapes and types matter).

        local: the batch has this rank's samples only. The plan says how many parts a
        batch has, so that it cannot be one that is chosen for the batch.
        """
        if self._executor is not None:
            return self
        assert self._model is not None
        if local:
            batch = self.data.whole_like(batch)
        fixed, self._compiled_training = fixed_fields(batch), self._model.training
        await_here("step.build()", self._timeout)
        compiled = self._given
        if compiled is not None and (compiled.proof or not self._prove):
            program = compiled
        else:
            with outside_tensors() as read:
                program = on_first_rank(lambda: self._compile(batch))
            self._outside = tuple(read.values())
        functions = [] if self._loss_fn is None else [self._loss_fn]
        self._values = FrozenValues(self._model, *functions)
        check_model(program, self._model)
        comm = engine(self.device)(
            program.mesh,
            program.plan.microbatches,
            groups=(*program.groups, DataRank(program.plan, 0).axes),
            rank_groups=program.reduction_groups(),
            device=self.device,
            timeout=self._timeout,
        )
        Agreement(comm, program).on_build(self._seed, self._given, fixed)
        own = self._pretrained is None
        check_same(self._model, comm, program, weights=own)
        held = (program, self._model, comm.rank, self.device)
        parameters, buffers = (
            local_state(*held, self._seed) if own else empty_state(*held)
        )
        # What the first rank measured: replicas compute alike.
        measured = comm.broadcast_object(dict(read_profile().backends))
        backend, note = resolve_backend(program.plan.backend, self.device, measured)
        inductor = backend == "inductor"
        cache = CodeCache(self._cache_dir, f"rank {comm.rank}") if inductor else None
        executor = Executor(program, comm, parameters, buffers, self._seed, cache)
        rehearse(executor)
        names, unused = remember(self._model, program, buffers)
        self.start(executor, names, unused, self._model, fixed)
        self.configs = configs_of(self._model)
        self.form = OwnForm.of(self._model, own_state(self._model))
        if self._pretrained is not None:
            self._load_pretrained(self._pretrained, strict=True, empty=True)
        self._shapes = OtherShapes(
            executor, self._model, fixed, self._loss_fn, self._prove
        )
        notes = program.remarks if program.proof else (*program.remarks, UNPROVED)
        over = straddling(program.mesh, this_node().ranks)
        for line in filter(None, (*notes, over, note)) if comm.rank == 0 else ():
            LOG.warning(line)
        for optimizer in self._awaiting:
            self.prepare(optimizer)
        self._awaiting.clear()
        self._model = None  # the whole weights are free to go
        return self

    def _compile(self, batch: Mapping[str, Any]) -> Program:
        model, plan = self._model, self._decided
        assert model is not None
        if self._given is not None:
            check_model(self._given, model)
            return proved(self._given, model, batch, self._loss_fn)
        if isinstance(plan, PlanRequest):
            plan = choose_plan(model, plan, batch, self._loss_fn)
        return compile_offline(model, batch, plan, self._loss_fn, prove=self._prove)

    @property
    def plan(self) -> Plan:
        """The decisions; complete (cuts included) once the step is compiled.

        Raises: AutoparError if they are still to be chosen, by the first batch.
        """
        decided = self._decided if self._executor is None else self.program.plan
        return decided if isinstance(decided, Plan) else self.program.plan
