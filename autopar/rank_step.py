"""A program on one rank: forward and backward of it, and all that training needs.

`autopar.step` makes one of a model and of this process; a proof one for each rank of a
virtual mesh.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from autopar.checkpoints.checkpoint import load, save
from autopar.checkpoints.pretrained import load_pretrained
from autopar.checkpoints.save_pretrained import save_pretrained
from autopar.checkpoints.state import (
    check_state_dict,
    load_state_dict,
    load_training_state,
    state_dict,
    training_state,
)
from autopar.local_batches import DataRank
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.agreement.agreement import Agreement, digests
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.agreement.validate import checked_batch
from autopar.runtime.comm.comm import Comm
from autopar.runtime.execute.executor import Executor
from autopar.runtime.parameters.changed import Originals, check_trained
from autopar.runtime.parameters.gradient_norm import checked_norm, clip_, is_owner
from autopar.runtime.parameters.offload import Host
from autopar.runtime.parameters.whole_updates import WholeUpdates, beside

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)
NO_PARAMETERS: Mapping[str, nn.Parameter] = MappingProxyType({})
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class RankStep:
    """Forward and backward of a program on the rank of `comm`.

    Every rank calls it with the whole global batch, and takes its own part of it; or,
    with local=True, with the samples that it has loaded itself, see `data_rank`.
    """

    comm: Comm
    _agreement: Agreement
    _updates: Updates

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Names of the state dict, and what of it every rank has whole: buffers, and
        # parameters that no stage computes with.
        self.names: list[str] = []
        self.unused: dict[str, Tensor] = {}
        self.configs: tuple[Any, ...] = ()  # that a Hugging Face model has beside it
        self._fixed = NO_FIELDS
        self._executor: Executor | None = None
        self._originals: Originals | None = None
        self._host: Host | None = None

    def start(
        self,
        executor: Executor,
        names: list[str],
        unused: dict[str, Tensor],
        originals: Mapping[str, nn.Parameter] = NO_PARAMETERS,
        fixed: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        """Compute with an executor from now on.

        names: of the state dict. unused: what of it every rank has whole. originals:
        the model's own parameters, of which the executor has parts. fixed: fields of a
        batch that are no tensors, whose values are part of what was compiled.
        """
        program, comm = executor.program, executor.comm
        self.comm, self._executor = comm, executor
        self._agreement = Agreement(comm, program)
        self._host = Host(executor.parameters) if program.plan.offload else None
        parameters, grads = executor.parameters, executor.gradients.by_name
        if self._host is not None:
            parameters, grads = self._host.parameters, self._host.grads
        self._updates = Updates(program, parameters, grads, originals)
        self._originals = Originals(originals, comm.coords)
        self.names, self.unused, self._fixed = names, unused, fixed

    def __call__(self, *, local: bool = False, **batch: Any) -> Tensor:
        """Loss of the global batch, the same on every rank; gradients are in `.grad`.

        local: the batch has this rank's samples only, see `data_rank`. As with
        `loss.backward()`, gradients add to what `.grad` holds: call
        `optimizer.zero_grad()` in between.
        Raises: BatchError, if names, shapes or types are not those compiled for.
        """
        executor = self.executor  # raises if there is nothing to run yet
        with self._begin("step", batch, local) as tensors:
            if self._host is not None:
                self._host.upload()
            loss = executor.step(tensors)
            if self._host is not None:
                self._host.download()
            self._updates.show()
        self._originals = None  # the model may be trained beside, from now on
        return loss

    def evaluate(self, *, local: bool = False, **batch: Any) -> Tensor:
        """Loss of the global batch without dropout, forward only; on every rank.

        The same as of the model in `.eval()`, if dropout is all that this changes.
        local: as for a step.
        """
        executor = self.executor  # raises if there is nothing to evaluate yet
        with self._begin("evaluate", batch, local) as tensors:
            if self._host is not None:
                self._host.upload()
            return executor.evaluate(tensors)

    @contextmanager
    def _begin(
        self, operation: str, batch: Mapping[str, Any], local: bool
    ) -> Iterator[dict[str, Tensor]]:
        """The context of an operation: with the tensors of a global batch that fits,
        and is the same on all ranks. local: `batch` is this rank's part of it."""
        data = self.data
        try:
            inputs = self.program.inputs
            like = data.whole_like(batch, inputs) if local else batch
            tensors = checked_batch(self.program, self._fixed, like)
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
        own = {name: batch[name] for name in tensors}
        part = data.index if local else None
        with self._agree().on_batch(operation, own, self._updates, training, part):
            held = {name: upload(x, self.device) for name, x in own.items()}
            yield data.gather(self.comm, held, inputs) if local else held

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
    def data(self) -> DataRank:
        """Which part of a global batch this rank loads, for `local=True`."""
        return DataRank(self.program.plan, self.comm.rank)

    @property
    def data_rank(self) -> int:
        """Which of `data_ranks` parts of the batch this rank loads with `local=True`;
        ranks that differ in pp, tp or cp alone load the same."""
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
        return self.data.sampler(dataset, shuffle, seed, drop_last)

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
        flats = (
            [b.flat for b in self.executor.gradients.buckets]
            if self._host is None
            else []
        )
        with self._agree().on_clip(checked_norm(max_norm)):
            return clip_(self.program, self.comm, max_norm, grads, flats)

    def gather_for(self, optimizer: Kind) -> Kind:
        """Give an optimizer whole parameters in each update, as Muon needs; see
        `autopar.runtime.parameters.whole_updates`. All ranks must call it; returns the
        optimizer.
        """
        self._agree()("gather_for")
        program, held = self.program, dict(self.named_parameters())
        self.comm.open_groups(beside(program, rank) for rank in self.everyone())
        made = WholeUpdates(program, self.comm, held, optimizer)
        self._updates.whole[optimizer] = made
        return optimizer

    def gathers(self, optimizer: torch.optim.Optimizer) -> WholeUpdates | None:
        """What gives an optimizer whole parameters, after `gather_for`."""
        return self._updates.whole.get(optimizer)

    def owns(self, name: str) -> bool:
        """Whether this rank is the first of those that hold the same part of it."""
        return is_owner(self.program, self.comm, name)

    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.program.mesh.size))

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers on the CPU, by the model's own names.

        All ranks must call it, and all get everything; with rank0_only, rank 0 alone,
        and the others nothing. Loads into the plain model.
        """
        self._agree()("state_dict")
        return state_dict(self, rank0_only)

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

    def load_pretrained(
        self, folder: str | os.PathLike[str], *, strict: bool = True
    ) -> None:
        """Take weights from a folder of safetensors, as Hugging Face has them.

        All ranks must call it; each reads its own parts alone. Names may have another
        prefix, as those of a base model have; values are converted to the model's
        dtypes. strict: each parameter is there; else those that are not stay. Nothing
        is changed if it fails. Raises: CheckpointError, ModelMismatch on all ranks.
        """
        self._agree()("load_pretrained", {("argument", "strict"): strict})
        load_pretrained(self, Path(folder), strict)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        tokenizer: Any = None,
        *,
        shard_bytes: int = 5 << 30,
    ) -> Path:
        """Write what Hugging Face's `from_pretrained` reads, to a new folder.

        All ranks must call it, on any disk that rank 0 has. With a Hugging Face model
        its configuration comes with the weights; so does a tokenizer that is given. A
        file has shard_bytes at most, or one tensor, and rank 0 holds so much beside its
        share. Returns the folder. Raises: CheckpointError on all ranks.
        """
        self._agree()("save_pretrained")
        return save_pretrained(self, Path(folder), tokenizer, shard_bytes)

    def _agree_on(self, operation: str, optimizer: object) -> None:
        given = "not given" if optimizer is None else "given"
        self._agree()(operation, {("argument", "optimizer"): given})


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on a device. A GPU takes it when it comes to it: the host does not wait."""
    ahead = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if ahead else x).to(device, non_blocking=ahead)
