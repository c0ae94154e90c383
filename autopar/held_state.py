"""A rank's part of a program: its parameters, state dicts of them, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from autopar.checkpoints.checkpoint import load, save, start_saving
from autopar.checkpoints.own_form import OwnForm
from autopar.checkpoints.pending_save import PendingSave
from autopar.checkpoints.pretrained import load_pretrained
from autopar.checkpoints.save_pretrained import save_pretrained
from autopar.checkpoints.state import (
    IncompatibleKeys,
    by_source,
    check_state_dict,
    load_state_dict,
    load_training_state,
    state_dict,
    training_state,
)
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.agreement.agreement import Agreement, digests
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.agreement.validate import check_known
from autopar.runtime.comm.comm import Comm
from autopar.runtime.execute.executor import Executor
from autopar.runtime.parameters.ema import Ema
from autopar.runtime.parameters.model_buffers import ModelBuffers
from autopar.runtime.parameters.offload import Host
from autopar.runtime.parameters.prepare import prepare
from autopar.runtime.parameters.shards import is_owner
from autopar.runtime.parameters.whole_updates import WholeUpdates
from autopar.unlike_module import refuse_attribute

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


class HeldState:
    """The parameters of a program on the rank of `comm`, for optimizers and files."""

    comm: Comm
    _agreement: Agreement
    _updates: Updates

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []  # of the state dict
        self._whole: dict[str, Tensor] = {}
        self.form: OwnForm | None = None  # that a model has whose hooks make it
        self.configs: tuple[Any, ...] = ()  # that a Hugging Face model has beside it
        self._executor: Executor | None = None
        self._awaiting: list[torch.optim.Optimizer] = []  # see `prepare`
        self._host: Host | None = None
        self._saving: PendingSave[Any] | None = None
        self._ema: Ema | None = None
        self._model_buffers: ModelBuffers | None = None

    if not TYPE_CHECKING:  # where any other name is an error anyway

        def __getattr__(self, name: str) -> NoReturn:
            refuse_attribute(self, name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AutoparError(
            "a step cannot be copied: its parameters are this rank's, as its processes",
            fix="for averages of weights, as of AveragedModel: step.start_ema(0.999), "
            "and step.ema.update() after each optimizer.step()",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise AutoparError(
            "a step cannot be pickled: it has parts of the weights, and its processes",
            fix="step.save(folder, optimizer), or torch.save(step.state_dict(), file)",
        )

    def start_ema(self, decay: float) -> Ema:
        """Begin an exponential moving average of the weights, `step.ema`; see
        `autopar.runtime.parameters.ema`. All ranks must call it.

        `step.ema.update()` belongs after each `optimizer.step()`; `with
        step.ema.applied():` evaluates, saves and exports averages. Checkpoints have it
        beside the weights; to load one with it, start it first.
        Raises: AutoparError.
        """
        self._agree()("start_ema", {("argument", "decay"): decay})
        self._ema = Ema(lambda: dict(self.named_parameters()), decay)
        return self._ema

    @property
    def ema(self) -> Ema:
        """The average that was started. Raises: AutoparError if none was."""
        if self._ema is None:
            raise AutoparError(
                "no average of the weights was started",
                fix="call step.start_ema(0.999) before the first update",
            )
        return self._ema

    @property
    def has_ema(self) -> bool:
        """Whether an average of the weights was started."""
        return self._ema is not None

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """The averages of this rank's parameters, by name; none before they start."""
        return {} if self._ema is None else self._ema.averages

    @property
    def executor(self) -> Executor:
        """The compiled step's executor. Raises AutoparError before it is compiled."""
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
    def unused(self) -> dict[str, Tensor]:
        """The part of the state dict that every rank has whole, on the CPU: persistent
        buffers, and parameters that no stage computes with."""
        buffers = self.executor.buffers
        return {n: buffers.get(n, x).cpu() for n, x in self._whole.items()}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields this rank's shards, for any torch.optim optimizer; see `offload`."""
        yield from dict(self.named_parameters(recurse=recurse)).values()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with the model's own names; `h.0.attn.qkv[0:32].weight` is part of
        one that the model cuts into pieces, each sharded by itself.

        As of a module, and in the model's order, by which optimizers store their state
        and averages are paired. prefix: put before all names. recurse: whether those of
        submodules are among them.
        """
        held = self.executor if self._host is None else self._host
        places = {name: i for i, name in enumerate(self.names)}
        source = {n: spec.part.source for n, spec in self.program.parameters.items()}
        last = len(places)
        for name in sorted(held.parameters, key=lambda n: places.get(source[n], last)):
            if recurse or "." not in name:
                yield f"{prefix}.{name}" if prefix else name, held.parameters[name]

    def prepare(self, optimizer: Kind) -> Kind:
        """Give an optimizer of the model's parameters this rank's parts of them.

        Groups, their options and what it has stored so far stay, as if one device had
        it. Of a step that the first batch compiles, it has them from then on. Returns
        the optimizer. Raises: AutoparError, for parameters of another model.
        """
        if self._executor is None:
            self._awaiting.append(optimizer)
            return optimizer
        program, held = self.program, dict(self.named_parameters())
        prepare(optimizer, program, self.comm.coords, held, self._updates.name_of)
        return optimizer

    def gathers(self, optimizer: torch.optim.Optimizer) -> WholeUpdates | None:
        """The object that gives an optimizer whole parameters, after `gather_for`."""
        return self._updates.whole.get(optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, or sets them to zeros, as a module does."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def owns(self, name: str) -> bool:
        """Whether this rank is the first of those with the same part of a parameter."""
        return is_owner(self.program, self.comm.coords, name)

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers on the CPU, by the model's own names.

        All ranks must call it, and all get everything; with rank0_only, rank 0 alone,
        and the others nothing. Loads into the plain model.
        """
        self._agree()("state_dict")
        return state_dict(self, rank0_only)

    def load_state_dict(
        self, state: Mapping[str, Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        """Take this rank's shards from whole tensors by the model's own names.

        All ranks must call it, with the same values. strict: whether all parameters
        must be there, and nothing that the model has not. Returns the names that are
        missing and unexpected. Raises: ModelMismatch for them if strict, and for shapes
        that differ; nothing is changed then.
        """
        keys = None
        try:
            if self.form is not None:
                state, keys = self.form.read(state, self.names, strict)
            state = by_source(self, state)
            differing = check_state_dict(self, state, strict and keys is None)
        except AutoparError as error:
            self._agree().refuse("load_state_dict", error)
            raise
        self._agree()("load_state_dict", digests("state", state))
        load_state_dict(self, state)
        return differing if keys is None else keys

    @torch.no_grad()
    def set_whole(self, state: Mapping[str, Tensor]) -> None:
        """Take what every rank has whole: buffers, and what no stage computes with.

        Raises ModelMismatch, see `check_known`.
        """
        check_known(self.program, state)
        for table in (self.executor.buffers, self._whole):
            for name, value in table.items():
                if name in state:
                    value.copy_(state[name])
        if self._model_buffers is not None:
            self._model_buffers.write()
        self.executor.set_up()

    def training_state(self) -> dict[str, Any]:
        """The state to resume from beside weights: plain values, alike on all ranks.

        Dropout follows from seed and count of steps: there is no generator to keep.
        """
        return training_state(self.executor)

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        load_training_state(self.executor, state)

    @overload
    def save(
        self,
        directory: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        keep: int | None = None,
        asynchronous: Literal[False] = False,
    ) -> Path: ...

    @overload
    def save(
        self,
        directory: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        keep: int | None = None,
        asynchronous: bool,
    ) -> Path | PendingSave[Any]: ...

    def save(
        self,
        directory: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path | PendingSave[Any]:
        """Write a checkpoint, for any other mesh too: see
        `autopar.checkpoints.checkpoint.save`.

        asynchronous: it returns once values are copied to the host's memory, which must
        have room for a rank's share; a thread writes them. The checkpoint counts when
        all of it is on disk: `.result()` of what is returned waits for that. One is
        written at a time: another save waits for it. What goes wrong is raised by
        `.result()`, else by the next step or save.
        """
        self._agree_on("save", optimizer)
        self.finish_saving()
        if not asynchronous:
            return save(Path(directory), self, optimizer, extra=extra, keep=keep)
        self._saving = start_saving(
            Path(directory), self, optimizer, extra=extra, keep=keep
        )
        return self._saving

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written asynchronously, if one is.

        Raises: CheckpointError if it could not be written, on all ranks.
        """
        if (saving := self._saving) is not None:
            self._saving = None
            saving.result()

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
        is changed if it fails, so a rank needs room for its share once more; not so
        `autopar.compile(..., pretrained=folder)`. Raises: CheckpointError,
        ModelMismatch on all ranks.
        """
        self._load_pretrained(folder, strict, empty=False)

    def _load_pretrained(
        self, folder: str | os.PathLike[str], strict: bool, *, empty: bool
    ) -> None:
        self._agree()("load_pretrained", {("argument", "strict"): strict})
        load_pretrained(self, Path(folder), strict, empty=empty)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        tokenizer: Any = None,
        *,
        shard_bytes: int = 50 * 10**9,
    ) -> Path:
        """Write what Hugging Face's `from_pretrained` reads, to a new folder.

        All ranks must call it, on any disk that rank 0 has. With a Hugging Face model
        its configuration comes with the weights; so does a tokenizer that is given. A
        file has shard_bytes at most, or one tensor; each rank holds a tensor beside its
        share. Returns the folder. Raises: CheckpointError on all ranks.
        """
        self._agree()("save_pretrained")
        return save_pretrained(self, Path(folder), tokenizer, shard_bytes)

    def _agree_on(self, operation: str, optimizer: object) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            error = AutoparError(
                f"the optimizer to {operation} is a {type(optimizer).__name__}",
                fix="give an optimizer itself; one has groups with other options, and "
                "of several each is saved in a folder of its own",
            )
            self._agree().refuse(operation, error)
            raise error
        state = "not given" if optimizer is None else "given"
        self._agree()(operation, {("argument", "optimizer"): state})
