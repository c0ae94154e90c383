"""Save and load a step with its optimizer: under one mesh, and then under any other.

A checkpoint is one of `torch.distributed.checkpoint`, with the model's own names:

    model.<name>                             parameters and persistent buffers, whole
    ema.<name>                               averages of parameters, if there are any
    optimizer.state.<name>.exp_avg           state, as torch's get_optimizer_state_dict
    optimizer.stacked.<name>.exp_avg         a row of what is stored of a whole group
    optimizer.param_groups.<i>.lr            options; `params` are names
    training                                 what the step itself goes on from
    extra                                    what the caller gave

Each rank writes and reads its own shards, so no rank ever holds a whole parameter. Of
random numbers the step itself needs none but its seed and its count of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from autopar.checkpoints import checkpoint_files as files
from autopar.checkpoints.checkpoint_files import Manifest
from autopar.checkpoints.dcp import CheckpointError, Key, State, Write, pack, text
from autopar.checkpoints.dcp import read as read_pieces
from autopar.checkpoints.dcp import write as write_pieces
from autopar.checkpoints.held import (
    STACKED,
    STATE,
    ema_targets,
    model_pieces,
    model_targets,
    optimizer_pieces,
    optimizer_targets,
    read_targets,
)
from autopar.checkpoints.memory import Memory
from autopar.checkpoints.open_checkpoint import (
    METADATA,
    Saved,
    of_memory,
    open_checkpoint,
    saved_groups,
)
from autopar.checkpoints.optimizer_state import (
    Group,
    check_groups,
    check_made,
    join_parts,
    local_groups,
    made_with,
    merge_groups,
    set_state,
)
from autopar.checkpoints.pending_save import PendingSave, in_memory
from autopar.checkpoints.sole_writer import sole_writer
from autopar.checkpoints.state import tied_names
from autopar.checkpoints.stored import check_alike, facts, stack_rows
from autopar.passes.ranges import check_range
from autopar.runtime.agreement.fail_together import joined_on_first, on_all, on_first
from autopar.runtime.agreement.validate import check_names
from autopar.runtime.parameters.whole_updates import is_cut
from autopar.version import VERSION

if TYPE_CHECKING:
    from autopar.held_state import HeldState

TRAINING, EXTRA, EMA = ("training",), ("extra",), ("ema_updates",)
Written = tuple[list[Any], dict[str, str]]
"""What DCP has to know of a rank's files, and their checksums."""
LOG = logging.getLogger("autopar")


# --- saving ------------------------------------------------------------------------


def save(
    directory: str | Path,
    step: HeldState,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write `directory/step-<number of steps done>`, and give its path.

    All ranks must call it, on a disk that they share. A kill at any moment leaves the
    checkpoints that were complete before. extra: plain values of rank 0, as
    `scheduler.state_dict()` or torch.get_rng_state(). keep: of the newest checkpoints
    so many, if given. Raises: CheckpointError on all ranks.
    """
    with ExitStack() as held:
        begun = _begin(directory, step, optimizer, extra, keep, held)
        return joined_on_first(step.comm, begun.write_own, begun.finish)


def start_saving(
    directory: str | Path,
    step: HeldState,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> PendingSave:
    """The same, of a copy of all values in the host's memory, while training goes on.

    The checkpoint has its name, and so is the newest, when all ranks have written
    theirs. `torch.distributed.checkpoint.async_save` is not used: it plans within a
    process group of its own, and ours are written by box, see `dcp`.
    Raises: CheckpointError on all ranks for what goes wrong until values are copied.
    """
    with ExitStack() as held:
        begun = _begin(directory, step, optimizer, extra, keep, held, in_memory)
        return PendingSave(step.comm, begun.write_own, begun.finish, held.pop_all())


@dataclass(frozen=True)
class _Begun:
    """A save of which each rank is to write its part, and rank 0 to finish it."""

    folder: Path
    rank: int
    made: Write
    manifest: Manifest
    keep: int | None

    def write_own(self) -> Written:
        results = self.made.write_own()
        paths = self.folder.glob(f"__{self.rank}_*")
        return results, {path.name: files.checksum(path) for path in paths}

    def finish(self, written: list[Written]) -> Path:
        self.made.finish([results for results, _ in written])
        sums = {name: value for _, own in written for name, value in own.items()}
        sums[METADATA] = files.checksum(self.folder / METADATA)
        files.write_manifest(self.folder, replace(self.manifest, files=sums))
        final = files.publish(self.folder)
        newest = files.complete(final.parent)[-1]
        if newest != final:
            LOG.warning("'%s' is there too, and will be taken for newer", newest)
        if self.keep is not None:
            files.prune(final.parent, self.keep, final)
        return final


def _begin(
    directory: str | Path,
    step: HeldState,
    optimizer: Optimizer | None,
    extra: Any,
    keep: int | None,
    held: ExitStack,
    copy: Callable[[State], State] | None = None,
) -> _Begun:
    """held: keeps other processes from writing there, on rank 0. copy: of what this
    rank writes, made before anything is."""
    if keep is not None:
        check_range("keep", keep, CheckpointError)
    executor, root = step.executor, Path(directory)
    comm, count = executor.comm, executor.steps
    state = _state_of(step, optimizer, extra)
    tied, made = tied_names(step), {} if optimizer is None else made_with(optimizer)

    def begin() -> Path:
        held.enter_context(sole_writer(root))
        return files.begin(root, count)

    if copy is not None:
        on_all(comm, lambda: state.update(copy(state)))
    folder = on_first(comm, begin)
    mesh, made_by = str(step.program.mesh), (VERSION, torch.__version__)
    manifest = Manifest(*made_by, count, mesh, tied, {}, made)
    return _Begun(
        folder, comm.rank, Write(folder, state, _keys(tied), comm), manifest, keep
    )


def save_in_memory(memory: Memory, step: HeldState, optimizer: Optimizer) -> None:
    """Does the same, for ranks that share memory."""
    state = _state_of(step, optimizer, None)
    write_pieces(memory, state, _keys(tied_names(step)), step.comm)


def _state_of(step: HeldState, optimizer: Optimizer | None, extra: Any) -> State:
    """The state that this rank writes; all ranks must call it."""
    comm, state = step.comm, model_pieces(step)
    plain: dict[Key, Any] = {TRAINING: step.training_state(), EXTRA: extra}
    if step.has_ema:
        plain[EMA] = step.ema.updates
    if optimizer is not None:
        plain |= _options(_all_groups(step, optimizer))
        check_alike(on_all(comm, lambda: facts(step, optimizer)))
        on_all(comm, lambda: state.update(optimizer_pieces(step, optimizer)))
    # Values are packed by the rank that writes them.
    written = plain if comm.rank == 0 else {}
    on_all(comm, lambda: state.update(_packed(written)))
    return state


def _keys(tied: Mapping[str, str]) -> dict[Key, Key]:
    return {("model", alias): ("model", name) for alias, name in tied.items()}


def _all_groups(step: HeldState, optimizer: Optimizer) -> list[Group]:
    """The groups of all ranks' parameters; checked, on all ranks."""
    by_rank = on_all(step.comm, lambda: _local_groups(step, optimizer))
    groups = merge_groups(by_rank, list(step.program.parameters))
    parts = {name: spec.part for name, spec in step.program.parameters.items()}
    return join_parts(groups, {name: part.source for name, part in parts.items()})


def _local_groups(step: HeldState, optimizer: Optimizer) -> list[Group]:
    held, program = dict(step.named_parameters()), step.program
    cut = {name for name in held if is_cut(program, name)}
    return local_groups(optimizer, held, cut, step.gathers(optimizer))


def _options(groups: list[Group]) -> dict[Key, Any]:
    return {
        ("optimizer", "param_groups", i, option): value
        for i, group in enumerate(groups)
        for option, value in {**group.options, "params": list(group.names)}.items()
    }


def _packed(plain: Mapping[Key, Any]) -> State:
    return {key: pack(key, value) for key, value in plain.items()}


# --- loading -----------------------------------------------------------------------


def load(
    directory: str | Path,
    step: HeldState,
    optimizer: Optimizer | None = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """Go on from a checkpoint: that of the directory, or the newest in it.

    All ranks must call it; returns what was given to `save` as extra. The mesh may be
    another one than it was saved under. With it come the count of steps and the seed,
    so that training goes on bitwise as it would have on the same plan, and up to
    rounding on another. Values are converted to the dtypes of the step. Everything is
    read and checked before anything is changed, a checksum of each file included. (DCP
    keeps its metadata as a pickle: load only what you trust.) check: called with what
    was given as extra, before anything else of it is compared.
    Raises: CheckpointError or ModelMismatch on all ranks.
    """
    return _restore(
        open_checkpoint(directory, step.executor.comm), step, optimizer, check
    )


def load_from_memory(memory: Memory, step: HeldState, optimizer: Optimizer) -> None:
    """The same from what `save_in_memory` holds."""
    _restore(of_memory(memory, optimizer), step, optimizer)


def _restore(
    saved: Saved,
    step: HeldState,
    optimizer: Optimizer | None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    comm = step.comm
    _check_model(step, saved)
    averaged = step.has_ema
    keys: list[Key] = [TRAINING, EXTRA, *([EMA] if averaged else [])]
    if averaged and EMA not in saved.held:
        raise CheckpointError(
            f"checkpoint '{saved.folder}' has no averages of the weights",
            fix="load it first, and call step.start_ema(decay) then",
        )
    if optimizer is not None:
        keys += [key for key in saved.held if key[:2] == ("optimizer", "param_groups")]
        if not any(key[0] == "optimizer" for key in keys):
            raise CheckpointError(
                f"checkpoint '{saved.folder}' was saved without an optimizer",
                fix="load it without one, and train on with a fresh one",
            )
    for key in keys:
        if key not in saved.held:
            raise files.damaged(saved.folder, f"it has no '{text(key)}'")
    plain = read_pieces(saved.store, dict.fromkeys(keys, b""), comm)
    trained = plain[TRAINING]
    if not isinstance(trained, dict) or not {"steps", "seed"} <= set(trained):
        raise files.damaged(saved.folder, f"its '{text(TRAINING)}' is no step's state")
    if check is not None:
        check(plain[EXTRA])
    groups = saved_groups(saved.folder, plain)
    wanted = {**model_targets(step), **ema_targets(step)}
    if optimizer is not None:
        check_groups(groups, _all_groups(step, optimizer))
        on_all(comm, lambda: check_made(saved.manifest.optimizer, optimizer))
        on_all(comm, lambda: wanted.update(optimizer_targets(step, saved.held)))
    restored = read_targets(step, saved.store, wanted)
    if optimizer is not None:
        local = _local_groups(step, optimizer)
        state, rows = _entries(restored, STATE), _entries(restored, STACKED)
        on_all(comm, lambda: state.update(stack_rows(local, rows)))
    _set_model(step, restored)
    for name, average in step.averages.items():
        average.copy_(restored["ema", name])
    if averaged:
        step.ema.updates = plain[EMA]
    if optimizer is not None:
        set_state(optimizer, local, groups, state)
    step.load_training_state(plain[TRAINING])
    return plain[EXTRA]


def _entries(restored: Mapping[Key, Any], kind: Key) -> dict[str, dict[str, Any]]:
    """The entries of one kind in an optimizer's restored state, by parameter."""
    state: dict[str, dict[str, Any]] = {}
    for key, value in restored.items():
        if key[:2] == kind:
            state.setdefault(str(key[2]), {})[str(key[3])] = value
    return state


def _check_model(step: HeldState, saved: Saved) -> None:
    """Compare names and shapes; the same on all ranks."""
    held = {str(key[1]): v.size for key, v in saved.held.items() if key[0] == "model"}
    shapes = {n: tuple(t.shape) for n, t in step.unused.items()}
    shapes |= step.program.shapes
    known = {*step.names, *shapes}  # a model's own state dict may leave some out
    check_names("the checkpoint", "step.save", shapes, known, held)


@torch.no_grad()
def _set_model(step: HeldState, read: Mapping[Key, Any]) -> None:
    step.set_whole({n: read["model", n] for n in step.unused})
    for name, p in step.named_parameters():
        p.copy_(read["model", name])
