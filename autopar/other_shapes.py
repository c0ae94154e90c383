"""Programs for batches of other shapes than the first, that give more of what the model
returns, or compute what it does in eval mode, with the same weights.

A last batch that is short, or sequences of another length, take a program of their own.
The same decisions make it, so that parameters are sharded alike. A batch that does not
divide over the ranks is padded to one that was compiled, if the loss can leave out what
is more; and so is each once there are as many programs that give the same as are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.eval_mode import differs_in_eval_mode, in_eval_mode
from autopar.capture.weightless import without_weights
from autopar.compiler import compile_offline
from autopar.local_batches import DataRank, fields_of_samples
from autopar.models.batches import samples_of
from autopar.passes.errors import AutoparError, BatchError
from autopar.passes.plan import Plan
from autopar.passes.program import Program, dtype_name
from autopar.proof.padding import Fills, find_fills, pad
from autopar.runtime.agreement.first_rank import on_first_rank
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.gradient_buckets import rest_otherwise
from autopar.runtime.execute.rehearse import rehearse
from autopar.unlike_module import ANOTHER_STEP

MOST = 8  # programs of a step that give the same
LARGEST = (
    "make rows of one length, as by packing; or compile with the largest batch, "
    "step.build(**largest): others are padded to it then"
)
ONE_LENGTH = "pad rows to one length, and cut the outputs to what the batch had"
PADDED_BY_USER = f"pad the batch, or {ANOTHER_STEP}"
LOG = logging.getLogger("autopar")
Shapes = Mapping[str, tuple[int, ...]]
Outputs = Sequence[str]  # names, as of `Step.evaluate`


class OtherShapes:
    """The executors of a step, one for each shape of a batch that came, and for each
    set of outputs that was asked for; those that evaluate are others, if the model in
    eval mode is more than a step without dropout.

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
        self._plan, shapes = first.program.plan, shapes_of(first.program)
        self._samples = samples_of(
            {name: torch.empty(s, device="meta") for name, s in shapes.items()}
        )
        self._executors = {_key(shapes): first}
        # What batches of some shapes are padded to.
        self._targets: dict[Key, Shapes] = {}
        self._fills: dict[frozenset[tuple[str, int]], Fills] = {}
        self.differs: bool | None = None  # see `evaluates_otherwise`
        self._model: nn.Module | None = None
        self._lacks = "another rank compiles"
        if first.comm.rank == 0:
            try:
                self._model, self._loss_fn = without_weights(model, loss_fn)
            except Exception as error:  # whatever a model's own copying raises
                self._lacks = f"copy.deepcopy(model): {type(error).__name__}: {error}"

    def find(
        self, batch: Mapping[str, Any], outputs: Outputs = (), evaluating: bool = False
    ) -> Executor | None:
        """The executor for batches as this one, if there is one, which gives these
        outputs. evaluating: as the model in eval mode."""
        shapes = shapes_of(batch)
        target = self._targets.get(_key(shapes, outputs, evaluating), shapes)
        return self._executors.get(_key(target, outputs, evaluating))

    def evaluates_otherwise(self, like: Executor, batch: Mapping[str, Any]) -> bool:
        """Whether the model in eval mode computes something else than a step without
        dropout; on all ranks. It is looked at once."""
        if self.differs is None:
            values = self._zeros(batch, shapes_of(batch))
            lowering, rank = like.program.plan.lowering, like.comm.rank

            def compare() -> bool:
                if self._model is not None:
                    return differs_in_eval_mode(
                        self._model, values, self._loss_fn, lowering
                    )
                LOG.warning(
                    "evaluating is a step without dropout, whatever else .eval() "
                    "changes: the model cannot be kept to look at it: %s",
                    self._lacks,
                )
                return False

            self.differs = on_first_rank(compare)
            if self.differs and rank == 0:
                LOG.info("evaluating is another program: what .eval() computes")
        return self.differs

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
        self,
        like: Executor,
        batch: Mapping[str, Any],
        outputs: Outputs = (),
        evaluating: bool = False,
    ) -> Executor:
        """Compile for batches as this one, which `fits`, or for what it is padded to;
        on all ranks. like: one that computes with the same weights. evaluating: as the
        model in eval mode. Raises: AutoparError, on all ranks."""
        asked = _key(shapes_of(batch), outputs, evaluating)
        shapes = self._target(like, batch, asked)
        key = _key(shapes, outputs, evaluating)
        if (made := self._executors.get(key)) is not None:
            return made
        if len(self._alike(key)) >= MOST:
            raise BatchError(
                f"a batch with {_text(shapes)}, after {MOST} other shapes",
                fix=ONE_LENGTH if outputs else LARGEST,
            )
        if like.comm.rank == 0:
            known = len(self._executors) + 1
            LOG.info("compiling for %s, the %dth program", _text(shapes), known)
        zeros = self._zeros(batch, shapes)
        program = on_first_rank(
            lambda: self._compile(like.program, zeros, outputs, evaluating)
        )
        comm, mesh = like.comm, program.mesh
        wanted = {ranks for axes in program.groups for ranks in mesh.groups(axes)}
        wanted.update(program.reduction_groups())
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
        self._executors[key] = made
        return made

    # --- what is padded --------------------------------------------------------------

    def padded(
        self, batch: Mapping[str, Any], whole: Mapping[str, Any], program: Program
    ) -> dict[str, Any]:
        """A batch, or this rank's part of the `whole` one, as the program takes it."""
        wanted, now = shapes_of(program), shapes_of(whole)
        if wanted == now:
            return dict(batch)
        shapes = {}
        for name, shape in wanted.items():
            parts = now[name][0] // len(batch[name]) if shape else 1
            shapes[name] = (shape[0] // parts, *shape[1:]) if shape else ()
        return pad(batch, shapes, self._fills[_padded_dims(now, wanted)])

    def _alike(self, key: Key) -> list[Shapes]:
        """The shapes of programs with the outputs that this key has."""
        return [
            dict(sizes) for sizes, *gives in self._executors if (*gives,) == key[1:]
        ]

    def _target(self, like: Executor, batch: Mapping[str, Any], key: Key) -> Shapes:
        """The shapes that this batch is computed with: its own, or what it is padded
        to. Raises: BatchError, where it has to be padded and cannot."""
        if (known := self._targets.get(key)) is not None:
            return known
        shapes, ranks = dict(key[0]), DataRank(like.program.plan, 0).size
        rows = {(n, 0) for n in fields_of_samples(batch, like.program.inputs)}
        samples = max((shapes[name][0] for name, _ in rows), default=1)
        alike, every = self._alike(key), [dict(sizes) for sizes, *_ in self._executors]
        full = len(alike) >= MOST
        # A single sample is computed by all ranks alike.
        uneven = samples > 1 and samples % ranks
        # Of outputs it is known which samples were padded, and nothing else.
        only_rows = bool(key[1]) or not full
        larger = [
            sizes
            for sizes in (alike if full else every)
            if (full or uneven)
            and all(_covers(size, shapes[name]) for name, size in sizes.items())
            and (not only_rows or _padded_dims(shapes, sizes) <= rows)
        ]
        if not larger:
            return shapes
        target = min(larger, key=lambda sizes: sum(map(prod, sizes.values())))
        if target != shapes:
            try:
                self._find_fills(like.program, batch, target)
            except BatchError:
                if full:
                    raise
                target = shapes  # some ranks have a sample more than others
        if target != shapes:
            LOG.info("batches with %s become %s", _text(shapes), _text(target))
        self._targets[key] = target
        return target

    def _find_fills(
        self, program: Program, batch: Mapping[str, Any], target: Shapes
    ) -> Fills:
        """How the batch is padded. Raises: BatchError, on all ranks."""
        shapes = shapes_of(batch)
        dims = _padded_dims(shapes, target)
        if dims in self._fills:
            return self._fills[dims]
        values = self._zeros(batch, shapes)

        def find() -> Fills:
            return find_fills(self._kept(), program, values, dims, self._loss_fn)

        try:
            self._fills[dims] = on_first_rank(find)
        except AutoparError as error:
            raise BatchError(
                f"a batch with {_text(shapes)}, which data ranks cannot share or which "
                f"has no program of its own, cannot be padded to {_text(target)}: "
                f"{error.message}",
                fix=error.fix or PADDED_BY_USER,
            ) from error
        return self._fills[dims]

    # --- what is compiled ------------------------------------------------------------

    def _zeros(self, batch: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
        """A batch of these shapes, with the fields that are no tensors."""
        return {
            name: torch.zeros(shapes[name], dtype=x.dtype)
            if isinstance(x, Tensor)
            else x
            for name, x in {**self._fixed, **batch}.items()
        }

    def _kept(self) -> nn.Module:
        if self._model is None:
            raise BatchError(
                "the batch has other shapes than the step was compiled for, or other "
                "outputs are asked for, and the model cannot be kept to compile it "
                f"again: {self._lacks}",
                fix=PADDED_BY_USER,
            )
        return self._model

    def _compile(
        self,
        like: Program,
        values: Mapping[str, Any],
        outputs: Outputs,
        evaluating: bool,
    ) -> Program:
        model, samples = self._kept(), samples_of(values)
        plan = for_samples(self._plan, samples, self._samples)
        with in_eval_mode(model) if evaluating else nullcontext():
            made = compile_offline(
                model,
                values,
                plan,
                self._loss_fn,
                prove=self._prove,
                outputs=outputs,
                even=False,
            )
        if evaluating:  # what it does not compute with rests as it did
            own, before = made.tensors, like.tensors
            idle = {n: s for n, s in before.items() if n in own and not own[n].stages}
            made = replace(made, tensors={**own, **idle})
        differs = rest_otherwise(made, like)
        if differs or made.buffers.keys() - like.buffers.keys():
            raise AutoparError(
                f"for this batch, or to evaluate, '{(differs or ['a buffer'])[0]}' "
                "would rest otherwise than for the first one",
                fix=PADDED_BY_USER,
            )
        return made


def for_samples(plan: Plan, samples: int, usual: int) -> Plan:
    """The plan with as many microbatches as divide these samples and its own number;
    with others, where a rank would compute more at once than of `usual` samples."""
    ranks, own = DataRank(plan, 0).size, plan.microbatches
    if own == 1:
        return plan
    whole = [m for m in range(1, samples + 1) if samples % m == 0]
    most = ceil(usual / (own * ranks))
    fitting = [m for m in whole if ceil(samples / (m * ranks)) <= most]
    alike = [m for m in fitting if own % m == 0]
    parts = max(alike) if alike else min(fitting)
    return plan if parts == own else replace(plan, microbatches=parts, order=())


Key = tuple[tuple[tuple[str, tuple[int, ...]], ...], frozenset[str], bool]


def _key(shapes: Shapes, outputs: Outputs = (), evaluating: bool = False) -> Key:
    return tuple(sorted(shapes.items())), frozenset(outputs), evaluating


def shapes_of(batch: Mapping[str, Any] | Program) -> dict[str, tuple[int, ...]]:
    """Field -> shape, for the tensors of a batch or of a program's inputs."""
    if isinstance(batch, Program):
        return {name: shape for name, (shape, _) in batch.inputs.items()}
    return {n: tuple(x.shape) for n, x in batch.items() if isinstance(x, Tensor)}


def without_padding(
    outputs: Mapping[str, Tensor],
    program: Program,
    whole: Mapping[str, Any],
    parts: int,
) -> dict[str, Tensor]:
    """The outputs of a padded batch, cut to the batch as it was.

    whole: the global batch before. parts: its number of parts that were padded one by
    one. Raises: BatchError, where the cut is not known.
    """
    wanted, now = shapes_of(program), shapes_of(whole)
    dims, samples = _padded_dims(now, wanted), fields_of_samples(whole, program.inputs)
    sizes = {(wanted[name][0], now[name][0]) for name in samples}
    only_rows = dims <= {(name, 0) for name in samples} and len(sizes) == 1
    cut = {}
    for name, x in outputs.items():
        place = _dim_of_samples(program, name, samples) if only_rows else None
        if x.ndim and place is None:
            raise BatchError(
                f"of '{name}' it is not known what belongs to a batch that was padded",
                fix="leave the batch out, as DataLoader(drop_last=True) does, or ask "
                "for outputs in which the samples are a dim",
            )
        cut[name] = x
        if place is not None:
            [(rows, own)] = sizes
            x = x.unflatten(place, (parts, rows // parts, -1))
            x = x.narrow(place + 1, 0, own // parts)
            cut[name] = x.flatten(place, place + 2)
    return cut


def _dim_of_samples(program: Program, name: str, samples: list[str]) -> int | None:
    """The dim of an output that is split as samples are, or begins as they do."""
    spec, rows = program.outputs[name], program.inputs[samples[0]][0][0]
    axes = set(DataRank(program.plan, 0).axes)
    axes = {axis for axis in axes if program.mesh.axis_size(axis) > 1}
    for dim, (factors, slots) in enumerate(zip(spec.factors, spec.slots, strict=True)):
        if factors[:1] == (rows,) and (axes & {*slots[0]} if axes else dim == 0):
            return dim
    return None


def _covers(large: tuple[int, ...], small: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(large, small, strict=True))


def _padded_dims(small: Shapes, large: Shapes) -> frozenset[tuple[str, int]]:
    """(field, dim) of those dims in which they differ."""
    return frozenset(
        (name, dim)
        for name, shape in large.items()
        for dim, size in enumerate(shape)
        if size != small[name][dim]
    )


def _text(shapes: Shapes) -> str:
    return ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
