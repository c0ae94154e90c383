"""A model with a batch, compiled, proved and run beside itself; captured once of all
that are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autopar
from autopar.capture.shorten import find_facts
from autopar.passes.capture.mixed_precision import Lowering
from autopar.passes.capture.trace import trace
from autopar.passes.mesh import Mesh, usual_split
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.traced import Traced
from autopar.planner.planner import ShortModel, capture_short
from autopar.proof.expected import TOLERANCE
from autopar.proof.prove_program import prove_program
from autopar.proof.ranks import StepInputs, local_parameters, run_steps
from autopar.proof.verification import Verification
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.routing_replay import RoutingReplay
from autopar.runtime.execute.executor import Executor
from autopar.step import Step
from autopar.verify import verify


class Case(NamedTuple):
    """A model, a batch for it, and how its loss is found (None: it returns it)."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss_fn: Callable[[Any, Mapping[str, Any]], Tensor] | None = None

    def double(self) -> Case:
        """In float64; floating fields of the batch too."""
        batch = {
            k: v.double() if v.is_floating_point() else v for k, v in self.batch.items()
        }
        return Case(self.model.double(), batch, self.loss_fn)

    def compile(self, mesh: str, microbatches: int = 1, **options: Any) -> Program:
        made = plan(mesh, microbatches, **options)
        return compile_program(self.trace(made.lowering), made, PLAIN)

    def proved(self, mesh: str, microbatches: int = 1, **options: Any) -> Program:
        """What `compile` gives, with its proof; once of all that are alike."""
        made = plan(mesh, microbatches, **options)
        key = (self._kind(made.lowering), repr(made))
        if key not in PROVED:
            traced = self.trace(made.lowering)
            program = compile_program(traced, made, PLAIN)
            given = (self.model, self.batch, traced, self.loss_fn)
            PROVED[key] = replace(program, proof=prove_program(program, *given))
        return PROVED[key]

    def step(self, program: Program | None = None, **options: Any) -> Step:
        """A step of this rank of a program; without one, alone, with these options."""
        program = program or self.proved("tp=1", **options)
        return autopar.compile(
            self.model,
            program.mesh,
            program=program,
            loss_fn=self.loss_fn,
            example_inputs=self.batch,
        )

    def trace(self, precision: Lowering = None) -> Traced:
        """The captured model; captured once of all that are alike."""
        key = self._kind(precision)
        if key not in TRACED:
            TRACED[key] = trace(self.model, self.batch, self.loss_fn, precision)
        return TRACED[key]

    def short(self, **options: Any) -> ShortModel:
        """Captured for planning; once of all that are alike."""
        key = self._kind(None), repr(sorted(options.items()))
        if key not in SHORT:
            given = self.model, self.batch, self.loss_fn
            SHORT[key] = capture_short(*given, **options)
        return SHORT[key]

    def _kind(self, precision: Lowering) -> Hashable:
        return fingerprint(self.model), *shapes(self.batch), self.loss_fn, precision

    def verify(
        self,
        mesh: str,
        microbatches: int = 1,
        tolerance: float | None = None,
        drawn: bool = False,
        **options: Any,
    ) -> Verification:
        """Compile, run all ranks, compare with the model; raises if it differs. Weights
        of cases are random, and their batches made for what is tested.

        A model in float64 may differ by 1e-10, even where it computes in float32: ranks
        mostly do as one does. tolerance: where that is too strict.
        """
        program = self.compile(mesh, microbatches, **options)
        if next(self.model.parameters()).dtype is torch.float64:
            tolerance = tolerance or TOLERANCE[torch.float64]
        given = (self.model, self.batch, self.loss_fn)
        return verify(program, *given, 3, tolerance, drawn).check()


def on_rank(program: Program, comm: Comm, model: nn.Module) -> Executor:
    """What runs a program on a rank, with its shares of a model's parameters."""
    held = local_parameters(program, comm, dict(model.named_parameters()))
    return Executor(program, comm, held, dict(model.named_buffers()))


def run_all_ranks(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    seed: int = 0,
    replay: RoutingReplay | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on the virtual mesh: the loss, and whole gradients by name.

    replay: what routers are told to choose.
    Raises VerificationFailed when ranks that should agree do not.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
    step = StepInputs(dict(model.named_parameters()), tensors, replay)
    (result,) = run_steps(program, dict(model.named_buffers()), [step], seed)
    return result.loss, dict(result.gradients)


TRACED: dict[Hashable, Traced] = {}
SHORT: dict[Hashable, ShortModel] = {}
PROVED: dict[Hashable, Program] = {}


def fingerprint(model: nn.Module) -> Hashable:
    """All that a capture of a model depends on: its classes and plain attributes, which
    parameters are one, and what is trained. Values of parameters are not among it."""
    tensors = [*model.named_parameters(remove_duplicate=False)]
    tensors += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    tied = [first.setdefault(id(x), name) for name, x in tensors]
    facts = sorted(find_facts(model).items(), key=str)
    # With the private ones, as which implementation of attention or experts it is.
    config = vars(model.config) if hasattr(model, "config") else {}
    return (*facts, *tied, str(config))


def shapes(batch: Mapping[str, Any]) -> list[Hashable]:
    return [
        (name, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (name, x)
        for name, x in batch.items()
    ]


def plan(
    mesh: str, microbatches: int = 1, sequence_parallel: bool = True, **options: Any
) -> Plan:
    """A plan for a mesh given as text; options are fields of Plan."""
    split = usual_split()
    if not sequence_parallel:
        for axis in ("tp", "qp"):
            split[axis] = tuple(dim for dim in split[axis] if dim != "seq")
    return Plan(Mesh.parse(mesh), microbatches, **{"split": split, **options})
