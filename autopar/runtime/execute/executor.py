"""The executor: runs one rank's part of a program, action by action.

It interprets the rank's list of the schedule, the same list that the checker and the
simulator read. Messages begin before they are needed and are waited for when they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor, nn

from autopar.passes.mesh import PIPELINE
from autopar.passes.program import Program
from autopar.passes.schedule.exchanges import Exchange, exchanges, in_turn, of_kinds
from autopar.passes.schedule.messages import apart, send_completions
from autopar.passes.schedule.schedule import Action, Kind
from autopar.runtime.comm.comm import Comm, Incoming, Outgoing
from autopar.runtime.comm.own_rows import Field
from autopar.runtime.comm.step_state import StepState
from autopar.runtime.execute.code_cache import CodeCache
from autopar.runtime.execute.emitted import fields_read
from autopar.runtime.execute.gradient_buckets import Gradients
from autopar.runtime.execute.inductor import compile_functions
from autopar.runtime.execute.loss_scale import LossScale
from autopar.runtime.execute.outputs import Outputs
from autopar.runtime.execute.running_stage import Batch, RunningStage, load_module
from autopar.runtime.execute.tf32 import in_tf32
from autopar.runtime.execute.unused import Unused, nothing_left_of_failures
from autopar.runtime.execute.written_buffers import WrittenBuffers
from autopar.runtime.parameters.changed import check_data, check_kind, kind_of
from autopar.runtime.parameters.stack import make_stacks


class Executor:
    """Runs a program on the rank of `comm`.

    parameters: the rank's shards by the model's names; gradients appear in `.grad`.
    buffers: whole, by name. compiled: where functions compiled by Inductor are kept;
    None: they run as they are written. gradients: those of another executor of the same
    parameters, to share. overlaps, an attribute: whether parameters come
    and gradients leave while stages compute; without it, before and after they do.
    """

    def __init__(
        self,
        program: Program,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        seed: int = 0,
        compiled: CodeCache | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.program, self.comm, self.compiled = program, comm, compiled
        plan = program.plan
        self.state = StepState(plan.microbatches, frozenset(plan.zigzag))
        comm.state = self.state
        self.parameters, self.buffers = dict(parameters), dict(buffers)
        self.seed, self.steps = seed, 0
        self.loss_scale = LossScale() if plan.scales_loss else None
        self.pp = comm.coords.get(PIPELINE, 0)
        self.actions = program.schedule.ranks[self.pp]
        self._send_completions = send_completions(program.schedule, self.pp)
        self._order = exchanges(program.schedule)[self.pp] if comm.in_turn else ()
        self.overlaps = True
        self._unused = Unused()
        self.stacks = make_stacks(program, self.parameters)
        self.gradients = Gradients(program, comm, self.parameters, gradients)
        self.stages = {i: self._start(i) for i in program.stages_of(comm.rank)}
        # After it, nothing is added to the gradients of a stage any more.
        self._last = {a.stage: a for a in self.actions if a.kind in (Kind.B, Kind.W)}
        # Where a stage computes with a parameter: its tensors and its name there.
        places = [
            (stage.tensors, own, name)
            for index, stage in self.stages.items()
            for own, name in program.stages[index].names.items()
        ]
        held, stacks = self.parameters, {stack.name: stack for stack in self.stacks}
        self._bound = [(t, own, n, held[n]) for t, own, n in places if n in held]
        self._stacked = [(t, own, stacks[n]) for t, own, n in places if n in stacks]
        self.written = WrittenBuffers(program, self.buffers, comm.device)
        self.set_up()
        self.outputs = Outputs(program, comm)
        self.metrics: dict[str, Tensor] = {}  # of the last step or evaluation

    # --- before the first step -----------------------------------------------------

    def _start(self, index: int) -> RunningStage:
        program = self.program
        key = program.module_of(self.comm.rank, index)
        module = load_module(program.modules[key], f"autopar.emitted.{key}")
        if self.compiled is not None:
            compile_functions(module, program.modules[key], self.compiled)
        names = program.stages[index].names
        stacks = {stack.name: stack.tensor for stack in self.stacks}
        tensors: dict[str, Tensor] = {}
        for own, name in names.items():
            held = self.parameters.get(name, stacks.get(name))
            tensors[own] = self.buffers[name] if held is None else held.detach()
        declared = {**module["PARAMETERS"], **module["BUFFERS"]}
        assert declared.keys() == names.keys(), "a module declares all it reads"
        for own, (shape, dtype) in declared.items():
            kind = tuple(shape), dtype, tensors[own].device
            check_kind(names[own], tensors[own], kind)
        for name in module["LITERALS"]:
            tensors[name] = program.literals[name].to(self.comm.device)
        grads = {n: self.gradients.tensors[names[n]] for n in module["TRAINED"]}
        return RunningStage(module, tensors, grads)

    @torch.no_grad()
    def set_up(self) -> None:
        """Compute what depends on buffers and constants alone; again if they change."""
        self.comm.state = self.state
        self.written.read()
        for stage in self.stages.values():
            stage.constants = stage.module["setup"](self.comm, stage.tensors)

    def go_on_from(self, other: Executor) -> None:
        """Continues the training of another executor with the same parameters and
        buffers."""
        self.seed, self.steps = other.seed, other.steps
        self.loss_scale = other.loss_scale
        self.set_up()

    @cached_property
    def reads(self) -> Mapping[str, bool]:
        """See `fields_read`."""
        return fields_read(self.program, self.comm.rank)

    # --- one step ------------------------------------------------------------------

    def leave_nothing(self) -> None:
        """Puts gradients back after a step that failed, and drops what it made."""
        self._unused = Unused()
        for stage in self.stages.values():
            stage.clear()
        self.gradients.put_back()

    @torch.no_grad()
    @nothing_left_of_failures
    def step(self, batch: Mapping[str, Field]) -> Tensor:
        """Forward and backward of the whole batch; returns the loss, on every rank.

        Gradients are added to what is in `.grad`, as by `loss.backward()`. Where the
        loss is scaled and they overflow, all are None, so that optimizers do nothing.
        """
        self._begin_gradients()
        self.state.key = (self.seed << 32) + self.steps
        if self.loss_scale:
            self.state.scale = self.loss_scale.scale
        self._play(self.actions, batch)
        self._end_reductions()
        self.steps += 1
        if self.loss_scale is None:
            self.gradients.hand_over()
            return self._loss()[0]
        flats = (bucket.flat for bucket in self.gradients.buckets)
        loss, count = self._loss(self.loss_scale.unscale_(flats))
        overflowed = bool(count)  # on this rank or another
        self.loss_scale.update(overflowed)
        self.gradients.hand_over(overflowed)
        return loss

    @torch.no_grad()
    @nothing_left_of_failures
    def evaluate(self, batch: Mapping[str, Field]) -> Tensor:
        """The loss of the whole batch without dropout; changes `metrics`, `outputs`,
        and buffers that forward writes to."""
        forward = (Kind.F, Kind.SEND_F, Kind.RECV_F)
        self.state.evaluating = True
        self.state.key = (self.seed << 32) + self.steps
        try:
            self._play([a for a in self.actions if a.kind in forward], batch)
        finally:
            self.state.evaluating = False
        self._free_batch()
        return self._loss()[0]

    def multiplying(self) -> AbstractContextManager[None]:
        """Products as the plan has them."""
        return in_tf32(self.program.plan.tf32 and self.comm.device.type == "cuda")

    def rebind(self) -> None:
        """Compute with the memory that parameters have now, where `p.data = ...` gave
        them other. Raises: ParameterError, if it is none to compute with."""
        for tensors, own, name, p in self._bound:
            if not p.is_set_to(used := tensors[own]):
                check_data(name, p, kind_of(used))
                tensors[own] = p.detach()
        for stack in self.stacks:
            stack.rebind()
        for tensors, own, stack in self._stacked:
            tensors[own] = stack.tensor

    def _play(self, actions: Sequence[Action], batch: Mapping[str, Field]) -> None:
        """Run the actions in turn."""
        if self.written.since_read():
            self.set_up()
        self.outputs.clear()
        self.comm.state = self.state  # other executors may have run meanwhile
        for stage in self.stages.values():
            stage.batch = Batch((k, batch[k]) for k in stage.module["INPUTS"])
            of_step = self.comm, stage.tensors, stage.constants
            stage.batch.begin(stage.module["prologue"], *of_step)
            if not self.overlaps:
                stage.batch.end()
        with self.multiplying():
            for action, begins in self._with_messages(actions):
                for messages in begins:
                    self._exchange(messages)
                self._run(action)
        for stage in self.stages.values():
            stage.batch.end()
        self.comm.flush()
        self._unused.leaving.clear()

    def _free_batch(self) -> None:
        """Let go of what prologues made, parameters that they gathered included."""
        for stage in self.stages.values():
            stage.batch = Batch()

    def _begin_gradients(self) -> None:
        """Clears all gradients, also those of gathered parameters."""
        for stage in self.stages.values():
            for name, (shape, dtype) in stage.module["WHOLE_GRADIENTS"].items():
                whole = torch.zeros(shape, dtype=dtype, device=self.comm.device)
                stage.grads[name] = whole
        self.gradients.begin()

    @contextmanager
    def _reducing(self, action: Action) -> Iterator[None]:
        """The context of a backward: in the last one gradients leave as they are
        ready."""
        if self._last[action.stage] == action:
            late = self._unused.late[action.stage].append
            ready = partial(self._ready, action.stage)
            self.state.on_ready = ready if self.overlaps else late
            self.stages[action.stage].begin_epilogue(self.comm)
        try:
            yield
        finally:
            self.state.on_ready = None

    def _ready(self, stage: int, gradients: Sequence[Tensor]) -> None:
        """A stage will not add to them any more in this step."""
        self.stages[stage].go_on(gradients)
        self.gradients.ready(stage, gradients)

    def _end_reductions(self) -> None:
        """Scatters and reduces the gradients that are left, and waits for all."""
        for index, stage in self.stages.items():
            self.state.on_ready = partial(self._ready, index)
            for gradients in self._unused.late.pop(index, ()):
                self._ready(index, gradients)
            stage.end_epilogue()
        self.state.on_ready = None
        self._free_batch()
        self.gradients.end_reductions()

    # --- actions -------------------------------------------------------------------

    def _run(self, action: Action) -> None:
        kind = action.kind
        if kind.is_recv:
            tensor = "x" if kind is Kind.RECV_F else "dy"
            key = tensor, action.stage, action.microbatch
            arriving = self._unused.arriving.pop(action)
            self._unused.outputs[key] = tuple(work.wait() for work in arriving)
            for send in self._send_completions.get(action, ()):
                for work in self._unused.leaving.pop(send, ()):
                    work.wait()
        elif kind is Kind.F:
            self._forward(action)
        elif kind is Kind.I:
            self._backward(action)
        elif not kind.is_send:
            with self._reducing(action):
                if kind is Kind.B:
                    self._backward(action)
                else:
                    self._weight_half(action)

    def _forward(self, action: Action) -> None:
        stage, i = self.stages[action.stage], action.microbatch
        self.state.microbatch = i
        xs = self._unused.outputs.pop(("x", action.stage, i), ())
        made, residuals = stage.module["forward"](
            self.comm, stage.tensors, stage.constants, stage.batch, *xs
        )
        made = self.outputs.take(action.stage, i, made)
        if not self.state.evaluating:
            stage.residuals[i] = residuals
        if action.stage == len(self.program.stages) - 1:
            self._unused.losses.append(made[-1])
        else:
            self._hand_on("x", action.stage, action.stage + 1, i, made)

    def _backward(self, action: Action) -> None:
        """B or I: what the stage before waits for; B adds up weights' gradients too."""
        stage, i = self.stages[action.stage], action.microbatch
        whole = action.kind is Kind.B
        self.state.microbatch = i
        dys = self._unused.outputs.pop(("dy", action.stage, i), ())
        made = stage.module["backward" if whole else "backward_input"](
            *self._held(stage), stage.residuals.pop(i), *dys
        )
        if not whole:
            made, stage.weight_residuals[i] = made
        if action.stage > 0:
            self._hand_on("dy", action.stage, action.stage - 1, i, made)

    def _held(self, stage: RunningStage) -> tuple[object, ...]:
        """The arguments of every part of a backward."""
        return self.comm, stage.tensors, stage.grads, stage.constants, stage.batch

    def _weight_half(self, action: Action) -> None:
        stage, i = self.stages[action.stage], action.microbatch
        self.state.microbatch = i
        stage.module["backward_weight"](
            *self._held(stage), stage.weight_residuals.pop(i)
        )

    def _hand_on(
        self, tensor: str, stage: int, to: int, i: int, made: tuple[Tensor, ...]
    ) -> None:
        """Hands tensors to the next stage on this rank, or to the send."""
        if to in self.stages:
            self._unused.outputs[tensor, to, i] = made
        else:
            self._unused.outputs[f"send {tensor}", stage, i] = made

    def _with_messages(
        self, actions: Sequence[Action]
    ) -> Iterator[tuple[Action, list[Exchange]]]:
        """Yields each action, and the messages that begin before it."""
        if not self.comm.in_turn:
            return apart(actions)
        return in_turn(actions, of_kinds(self._order, {a.kind for a in actions}))

    def _exchange(self, messages: Exchange) -> None:
        """Begin messages, together."""
        sends = {a: self._outgoing(a) for a in messages if a.kind.is_send}
        receives = {a: self._incoming(a) for a in messages if a.kind.is_recv}
        leaving, arriving = self.comm.exchange(
            [one for rows in sends.values() for one in rows],
            [one for rows in receives.values() for one in rows],
        )
        gone, come = iter(leaving), iter(arriving)
        for send, out in sends.items():
            self._unused.leaving[send] = list(islice(gone, len(out)))
        for recv, into in receives.items():
            self._unused.arriving[recv] = list(islice(come, len(into)))

    def _incoming(self, action: Action) -> list[Incoming]:
        table = "RECEIVES" if action.kind is Kind.RECV_F else "D_SENDS"
        rows = (row for row in self.stages[action.stage].module[table] if row)
        peer = self._peer(action)
        return [
            (shape, dtype, peer, self._tag(action.partner, n))
            for n, (shape, dtype) in enumerate(rows)
        ]

    def _outgoing(self, action: Action) -> list[Outgoing]:
        tensor = "send x" if action.kind is Kind.SEND_F else "send dy"
        tensors = self._unused.outputs.pop((tensor, action.stage, action.microbatch))
        peer = self._peer(action)
        return [(x, peer, self._tag(action, n)) for n, x in enumerate(tensors)]

    def _peer(self, action: Action) -> int:
        pp = self.program.schedule.peer(action)
        return self.program.mesh.rank({**self.comm.coords, PIPELINE: pp})

    def _tag(self, send: Action, n: int) -> int:
        """A number for each message of a step, the same on both ends."""
        backward = send.kind is Kind.SEND_B
        place = (send.stage * 2 + backward) * self.program.schedule.microbatches
        return (place + send.microbatch) * 16 + n

    def _loss(self, count: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """Returns the loss of the whole batch, and the sum of a number over ranks."""
        program = self.program
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        if self._unused.losses:
            total += torch.stack(self._unused.losses).double().sum()
            for axis, size in program.mesh.stage_axes:
                if axis not in program.loss_pending:
                    total /= size
        self._unused.losses.clear()
        two = torch.stack([total, torch.zeros_like(total) + count])
        shares = torch.cat([two, *self.outputs.shares()])
        self.comm.reduce_ranks_(shares, self.comm.everyone)
        self.metrics, sums = self.outputs.told(shares[2:])
        self.written.update(sums)
        return shares[0].to(getattr(torch, program.loss_dtype)), shares[1]
