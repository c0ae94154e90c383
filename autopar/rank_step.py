"""A program on one rank: forward and backward of it, and all that training needs.

`autopar.step` makes one of a model and of this process; a proof one for each rank of a
virtual mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from types import MappingProxyType
from typing import Any, overload
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from autopar.capture.frozen_values import FrozenValues
from autopar.held_state import HeldState, Kind
from autopar.local_batches import Batch, DataRank, batches, fields_of_samples
from autopar.module_calls import ModuleCalls, by_name
from autopar.passes.capture.forward.outside import Outside
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import PIPELINE
from autopar.runtime.agreement.agreement import Agreement
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.agreement.validate import (
    check_known,
    check_wants_none,
    checked_batch,
    checked_outputs,
)
from autopar.runtime.comm.own_rows import Field
from autopar.runtime.execute.backward import LEFT, LOST, STEPPED, Backward
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.untrained_reads import watch_reads
from autopar.runtime.parameters.changed import Originals, check_trained
from autopar.runtime.parameters.gradient_norm import checked_norm, clip_, gradient_norms
from autopar.runtime.parameters.model_buffers import ModelBuffers
from autopar.runtime.parameters.offload import Host
from autopar.runtime.parameters.whole_updates import WholeUpdates, all_beside
from autopar.unlike_module import StepLoss

LOG = logging.getLogger("autopar")
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class RankStep(ModuleCalls, HeldState):
    """Forward and backward of a program on the rank of `comm`.

    Every rank calls it with the whole global batch, and takes its own part of it; or,
    with local=True, with the samples that it has loaded itself, see `data_rank`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._fixed = NO_FIELDS
        self._originals: Originals | None = None
        self._trained = False  # in this process
        self._backward: Backward | None = None  # of the last step
        # What the program has the values of: tensors, on the rank that compiled it.
        self._outside: tuple[Outside, ...] = ()
        self._values: FrozenValues | None = None
        self._eager = torch.compiler.disable(_call, reason="a step is compiled already")

    def start(
        self,
        executor: Executor,
        names: list[str],
        unused: dict[str, Tensor],
        model: nn.Module | None = None,
        fixed: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        """Compute with an executor from now on.

        names: of the state dict. unused: what of it every rank has whole. model:
        of whose parameters the executor has parts. fixed: fields of a batch that are no
        tensors, whose values are part of what was compiled.
        """
        program, comm = executor.program, executor.comm
        self.comm, self._executor = comm, executor
        self._agreement = Agreement(comm, program)
        self._host = Host(executor.parameters) if program.plan.offload else None
        parameters, grads = executor.parameters, executor.gradients.by_name
        if self._host is not None:
            parameters, grads = self._host.parameters, self._host.grads
        originals = {} if model is None else dict(model.named_parameters())
        for name, p in parameters.items():
            # Marks for optimizers, as `_no_weight_decay`.
            if (of := originals.get(program.parameters[name].part.source)) is not None:
                vars(p).update(vars(of))
        self._updates = Updates(program, parameters, grads, originals, comm.coords)
        here = ref(self)

        def norm() -> Tensor | None:
            return None if (step := here()) is None else step.clip_grad_norm_(inf)

        self._updates.norm = norm
        if model is not None:
            self._originals = Originals(model, program, comm.coords)
            watch_reads(model, self._originals, self._updates)
            self._model_buffers = ModelBuffers(model, executor.buffers)
        self.names, self._whole, self._fixed = names, unused, fixed

    def __call__(self, *positional: Any, local: bool = False, **batch: Any) -> Tensor:
        """Loss of the global batch, the same on every rank; gradients are in `.grad`.

        The first call of a step that `compile` made compiles, and so does a batch of
        other shapes; one that does not divide over the ranks is padded to one that was
        compiled, if the loss can leave out what is more. local: the batch has this
        rank's samples only, see `data_rank`.
        Gradients add to what `.grad` holds: call `optimizer.zero_grad()` in between.
        `loss.backward()` may stay in a loop, and makes them those of what it is called
        on, as `loss / n`.
        Raises: BatchError, if names or types are not those compiled for.
        """
        batch = by_name(self._order, positional, batch)
        if torch.is_grad_enabled() or self.training:
            return self._eager(self._step, batch, local)
        return self._eager(self._evaluate, batch, local, None)

    def _step(self, batch: Mapping[str, Any], local: bool) -> Tensor:
        batch = self._fit(batch, local)
        executor = self.executor  # raises if there is nothing to run yet
        if self._updates.left_gradients() and self.comm.rank == 0:
            LOG.warning(LEFT)
        if (last := self._backward) is not None:
            last.end(STEPPED)
            if last.is_lost and self.comm.rank == 0:
                LOG.warning(LOST)
        with self._begin("step", batch, local) as tensors:
            if self._host is not None:
                self._host.upload()
            before = self.skipped
            loss = executor.step(tensors)
            if self._host is not None:
                self._host.download()
            self._updates.show(overflowed=self.skipped > before)
        self._trained = True
        self._backward = Backward(executor, self._host, self._updates, last)
        self._updates.on_update = self._backward.on_update
        return StepLoss.of(loss, self._backward)

    def _check_values(self, steps: int) -> None:
        """Raises AutoparError if what was compiled with its value has another now; what
        only elements of a tensor show is looked at in the steps 1, 2, 4, 8 ..."""
        thorough = steps & (steps - 1) == 0
        for tensor in self._outside:
            if tensor.changed(thorough):
                tensor.refuse()
        if self._values is not None:
            self._values.check(thorough)

    @overload
    def evaluate(
        self, *positional: Any, local: bool = ..., outputs: None = ..., **batch: Any
    ) -> Tensor: ...

    @overload
    def evaluate(
        self, *positional: Any, local: bool = ..., outputs: Sequence[str], **batch: Any
    ) -> dict[str, Tensor]: ...

    def evaluate(
        self,
        *positional: Any,
        local: bool = False,
        outputs: Sequence[str] | None = None,
        **batch: Any,
    ) -> Tensor | dict[str, Tensor]:
        """Loss of the global batch of the model in `.eval()`, forward only; on every
        rank. If that is more than a step without dropout, it is compiled at first. What
        forward writes to buffers in that mode, it writes.

        local, other shapes: as for a step. outputs: names of what else the model
        returns, as "logits", or "hidden_states.3" of a tuple in its output; of a tuple
        "0". With them comes a dict of "loss" and of these, whole and for the global
        batch (in its order), on every rank's device: logits have samples x tokens x
        vocabulary elements there. Each set of names takes a program of its own.
        Raises: CaptureError, for a name that the model does not return.
        """
        batch = by_name(self._order, positional, batch)
        return self._eager(self._evaluate, batch, local, outputs)

    def _evaluate(
        self, batch: Mapping[str, Any], local: bool, outputs: Sequence[str] | None
    ) -> Tensor | dict[str, Tensor]:
        names = checked_outputs(outputs)
        batch = self._fit(batch, local, names, evaluating=True)
        executor = self.executor
        with self._begin("evaluate", batch, local) as tensors:
            if self._host is not None:
                self._host.upload()
            loss = executor.evaluate(tensors)
            if outputs is None:
                return loss
            wholes = self._without_padding(executor.outputs.wholes(names))
            return {"loss": loss, **wholes}

    def _fit(
        self,
        batch: Mapping[str, Any],
        local: bool,
        outputs: Sequence[str] = (),
        evaluating: bool = False,
    ) -> dict[str, Any]:
        """Compute with a program for such a batch and outputs from now on. There is one
        alone, where a step is no process of its own. Returns what it takes."""
        return dict(batch)

    def _without_padding(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the batch as it was given."""
        return outputs

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The other scalars of a model or loss function that returns a dict, of the
        last step or evaluation: of the global batch, the same on every rank."""
        return self.executor.metrics

    @contextmanager
    def _begin(
        self, operation: str, batch: Mapping[str, Any], local: bool
    ) -> Iterator[dict[str, Field]]:
        """Checks a global batch, and runs an operation with the fields of it that this
        rank reads. local: `batch` is this rank's part of it."""
        data = self.data
        try:
            if self._saving is not None and self._saving.done():
                self.finish_saving()
            self._check_autocast()
            if operation == "step":
                self._check_trains()
                check_wants_none(batch)
            self._check_values(self.executor.steps)
            like = data.whole_like(batch, self.program.inputs) if local else batch
            tensors = checked_batch(self.program, self._fixed, like)
            check_trained(self.program, self._updates.parameters)
            if self._model_buffers is not None:
                self._model_buffers.read()
            check_known(self.program, self.executor.written.since_read())
            self._check_originals()
            if self._host is None:
                self.executor.rebind()
            else:
                self._host.check()
        except AutoparError as error:
            self._agree().refuse(operation, error)
            raise
        held = self.training_state(), self.executor.buffers
        own = {name: batch[name] for name in tensors}
        samples = fields_of_samples(own, self.program.inputs)
        part = (data.index, samples) if local else None
        plain = torch.autocast(self.device.type, enabled=False)
        with plain, self._agree().on_batch(operation, own, self._updates, held, part):
            yield data.fields(self.executor, own, local)
        if self._model_buffers is not None:
            self._model_buffers.write()

    def _check_originals(self) -> None:
        """Raises AutoparError for a model that was changed. Once a step has trained, it
        may be used beside: then it is told, once, and looked at where it was written
        to, and in the steps 1, 2, 4, 8 ..."""
        steps = self.executor.steps
        if self._originals is None:
            return
        if self._trained and steps & (steps - 1) and not self._originals.written():
            return
        held = self._updates.parameters, self.executor.buffers
        try:
            self._originals.check(*held, self._trained)
        except AutoparError as error:
            if not self._trained:
                raise
            self._originals = None
            coords = self.comm.coords.items()
            if not any(place for axis, place in coords if axis != PIPELINE):
                LOG.warning(
                    f"{error.message}: the step goes on as it was compiled, and tells "
                    f"this once. {error.fix}"
                )

    def _check_autocast(self) -> None:
        """Raises AutoparError under an autocast that the plan knows nothing of."""
        kind, planned = self.device.type, self.program.plan.dtype
        if not torch.is_autocast_enabled(kind):
            return
        if (dtype := torch.get_autocast_dtype(kind)) != planned:
            name = "fp16" if dtype == torch.float16 else "bf16"
            raise AutoparError(
                f"the step is called under torch.autocast of {dtype}, but its plan "
                + (f"computes in {planned}" if planned else "casts nothing"),
                fix=f'compile with precision="{name}", and leave autocast out',
            )

    # --- what optimizers and checkpoints need --------------------------------------

    @property
    def data(self) -> DataRank:
        """The part of a global batch that this rank loads, for `local=True`."""
        return DataRank(self.program.plan, self.comm.rank)

    @property
    def data_rank(self) -> int:
        """The number of this rank's part of `data_ranks` parts of a batch, with
        `local=True`; ranks that differ in pp, tp or cp alone load the same."""
        return self.data.index

    @property
    def data_ranks(self) -> int:
        """The parts that the batch has: ranks along dp, fsdp and ep."""
        return self.data.size

    def sampler(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> DistributedSampler[Any]:
        """The samples of a dataset that this rank loads, for
        `DataLoader(dataset, batch_size, sampler=...)` and `local=True`.

        Each of the data ranks has as many. Call its `set_epoch` to shuffle anew. Like
        `torch.utils.data.DistributedSampler`, of the ranks that share the batch.
        """
        ranks = self.data_ranks, self.data_rank
        return DistributedSampler(dataset, *ranks, shuffle, seed, drop_last)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """A loader's batches, for as long as every rank has one.

        `for batch in step.batches(loader): step(local=True, **batch)`; all ranks must
        call it. Ranks stop after as many, the fewest that a loader's len() tells.
        Raises, on all ranks: RanksDisagree, where the loader of one ends before, or
        raises an error.
        """
        yield from batches(self._agree(), loader)

    @property
    def loss_scale(self) -> float:
        """The factor that the next backward starts with; 1 but for precision="fp16"."""
        held = self.executor.loss_scale
        return held.scale if held else 1.0

    @property
    def skipped(self) -> int:
        """Steps whose gradients overflowed in float16, and were left out."""
        held = self.executor.loss_scale
        return held.skipped if held else 0

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that their global 2-norm is at most max_norm.

        Returns the norm before; each element of the model counts once, however many
        ranks hold it. Follows torch.nn.utils.clip_grad_norm_.
        """
        grads = self._gradients()
        flats = (
            [b.flat for b in self.executor.gradients.buckets]
            if self._host is None
            else []
        )
        with self._agree().on_clip(checked_norm(max_norm)):
            return clip_(self.program, self.comm, max_norm, grads, flats)

    def gradient_norms(self) -> dict[str, Tensor]:
        """The 2-norm of each gradient, by the model's own names: of whole parameters,
        the same on every rank. What has no gradient is left out.

        All ranks must call it; one message adds up what they hold, in float64.
        """
        self._agree()("gradient_norms")
        return gradient_norms(self.program, self.comm, self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        """The shards of gradients that this rank holds, by name."""
        return {n: p.grad for n, p in self.named_parameters() if p.grad is not None}

    def gather_for(self, optimizer: Kind) -> Kind:
        """Give an optimizer whole parameters in each update, as Muon needs; see
        `autopar.runtime.parameters.whole_updates`. All ranks must call it; returns the
        optimizer.
        """
        self._agree()("gather_for")
        program, held = self.program, dict(self.named_parameters())
        self.comm.open_groups(all_beside(program))
        made = WholeUpdates(program, self.comm, held, optimizer)
        self._updates.whole[optimizer] = made
        return optimizer


def _call(operation: Callable[..., Any], *args: Any) -> Any:
    return operation(*args)
