"""Programs for batches of other shapes than the first, or that give more of what the
model returns, with the same weights.

A last batch that is short, or sequences of another length, take a program of their own.
The same decisions make it, so that parameters rest in the same places.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compiler import compile_offline
from autopar.local_batches import DataRank
from autopar.models.batches import samples_of
from autopar.passes.errors import AutoparError, BatchError
from autopar.passes.plan import Plan
from autopar.passes.program import Program, dtype_name
from autopar.runtime.agreement.first_rank import on_first_rank
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.rehearse import rehearse

MOST = 8  # programs of a step
LOG = logging.getLogger("autopar")
Shapes = Mapping[str, tuple[int, ...]]
Outputs = Sequence[str]  # names, as of `Step.evaluate`


class OtherShapes:
    """The executors of a step, one for each shape of a batch that came, and for each
    set of outputs that was asked for.

    first: that of the first batch. model: as the first was compiled from; it is kept
    without its weights, and on the rank that compiles only. fixed: fields of a batch
    that are no tensors. loss_fn, prove: as there.
    """

    def __init__(
        self,
        first: Executor,
        model: nn.Module,
        fixed: Mapping[str, Any],
        loss_fn: Callable[..., Any] | None,
        prove: bool,
    ) -> None:
        self._fixed, self._loss_fn, self._prove = fixed, loss_fn, prove
        shapes = {name: shape for name, (shape, _) in first.program.inputs.items()}
        self._executors = {_key(shapes): first}
        self._model: nn.Module | None = None
        self._lacks = "another rank compiles"
        if first.comm.rank == 0:
            try:
                self._model = without_weights(model)
            except Exception as error:  # whatever a model's own copying raises
                self._lacks = f"copy.deepcopy(model): {type(error).__name__}: {error}"

    def find(self, batch: Mapping[str, Any], outputs: Outputs = ()) -> Executor | None:
        """The executor for batches as this one, if there is one, which gives these
        outputs."""
        shapes = {n: tuple(x.shape) for n, x in batch.items() if isinstance(x, Tensor)}
        return self._executors.get(_key(shapes, outputs))

    def fits(self, program: Program, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the names, dtypes and count of dims that a program was
        compiled for, whatever its shapes."""
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        if tensors.keys() != program.inputs.keys():
            return False
        for name, (shape, dtype) in program.inputs.items():
            x = tensors[name]
            if dtype_name(x.dtype) != dtype or x.ndim != len(shape) or not x.numel():
                return False
        others = batch.keys() - tensors.keys()
        return all(n in self._fixed and batch[n] == self._fixed[n] for n in others)

    def make(
        self, like: Executor, batch: Mapping[str, Any], outputs: Outputs = ()
    ) -> Executor:
        """Compile for batches as this one, which `fits`; on all ranks. like: one
        that computes with the same weights. Raises: AutoparError, on all ranks."""
        shapes = {n: tuple(x.shape) for n, x in batch.items() if isinstance(x, Tensor)}
        known = len(self._executors)
        if known == MOST:
            seen = "; ".join(_text(dict(key)) for key, _ in self._executors)
            raise BatchError(
                f"a batch with {_text(shapes)}, after {MOST} other shapes",
                fix=f"pad batches to a shape that was compiled: {seen}",
            )
        if like.comm.rank == 0:
            LOG.info("compiling for %s, the %dth program", _text(shapes), known + 1)
        program = on_first_rank(lambda: self._compile(like.program, batch, outputs))
        comm, mesh = like.comm, program.mesh
        wanted = {ranks for axes in program.groups for ranks in mesh.groups(axes)}
        comm.open_groups(sorted(group for group in wanted if len(group) > 1))
        made = Executor(
            program,
            comm,
            like.parameters,
            like.buffers,
            like.seed,
            like.compiled,
            like.gradients,
        )
        rehearse(made)
        self._executors[_key(shapes, outputs)] = made
        return made

    def _compile(
        self, like: Program, batch: Mapping[str, Any], outputs: Outputs
    ) -> Program:
        if self._model is None:
            raise BatchError(
                "the batch has other shapes than the step was compiled for, or other "
                "outputs are asked for, and the model cannot be kept to compile it "
                f"again: {self._lacks}",
                fix="pad the batch, or compile another step for it",
            )
        values = {
            name: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x
            for name, x in {**self._fixed, **batch}.items()
        }
        plan = for_samples(like.plan, samples_of(batch))
        made = compile_offline(
            self._model,
            values,
            plan,
            self._loss_fn,
            prove=self._prove,
            outputs=outputs,
        )
        differs = [
            name
            for name, spec in like.parameters.items()
            if made.parameters.get(name) != spec
        ]
        if differs or made.buffers.keys() - like.buffers.keys():
            raise AutoparError(
                f"for this batch '{(differs or ['a buffer'])[0]}' would rest otherwise "
                "than for the first one",
                fix="pad the batch, or compile another step for it",
            )
        return made


def for_samples(plan: Plan, samples: int) -> Plan:
    """The plan with as many of its microbatches as so few samples divide into."""
    ranks = DataRank(plan, 0).size
    parts = range(1, plan.microbatches + 1)
    whole = [m for m in parts if plan.microbatches % m == 0]
    fitting = max((m for m in whole if samples % (m * ranks) == 0), default=1)
    if fitting == plan.microbatches:
        return plan
    return replace(plan, microbatches=fitting, order=())


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters on meta, and the same buffers."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    for p in model.parameters():
        meta = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(meta, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


Key = tuple[tuple[tuple[str, tuple[int, ...]], ...], frozenset[str]]


def _key(shapes: Shapes, outputs: Outputs = ()) -> Key:
    return tuple(sorted(shapes.items())), frozenset(outputs)


def _text(shapes: Shapes) -> str:
    return ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
