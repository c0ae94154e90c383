"""Checkpoints of `autopar run`: when to save, and how a run goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from autopar.checkpoints.checkpoint import load
from autopar.checkpoints.checkpoint_files import latest
from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.sole_writer import sole_writer
from autopar.runtime.agreement.fail_together import on_first
from autopar.step import Step
from autopar.training.options import RunOptions

# Options that training follows from; a run that goes on must have them as before.
SAME = (
    *("seed", "clip", "ema", "beta1", "beta2", "weight_decay"),
    *("lr", "lr_schedule", "warmup", "min_lr", "decay_ratio"),
)

# How often ranks are started from one checkpoint; and the file that counts it.
STARTS, COUNT = 10, "starts.json"


def is_due(done: int, options: RunOptions) -> bool:
    """Whether to save after so many steps."""
    if options.save is None:
        return False
    every = options.save_every or options.steps
    return done % every == 0 or done == options.steps


def check_progress(options: RunOptions) -> None:
    """Count this start of ranks that torchrun starts again, on rank 0 alone. Raises
    CheckpointError after STARTS in a row that came to no checkpoint; the next one
    counts anew."""
    directory = options.save
    if directory is None or not options.resume:
        return
    newest, file = latest(directory), directory / COUNT
    after = newest.name if newest is not None else "the beginning"
    known: Any = None
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    same = isinstance(known, list) and known[:1] == [after] and len(known) == 2
    starts = known[1] + 1 if same else 1
    if starts > STARTS:
        file.unlink()
        raise CheckpointError(
            f"ranks were started {STARTS} times after {after}, and never came to the "
            "next checkpoint",
            fix="see above what ended them; or save before they fail: a smaller "
            "--save-every",
        )
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([after, starts]))


@contextmanager
def claimed(step: Step, options: RunOptions) -> Iterator[None]:
    """Keep other runs from the directory of checkpoints for as long as this one lasts.

    Raises: CheckpointError on all ranks.
    """
    with ExitStack() as held:
        if (directory := options.save) is not None:
            on_first(step.comm, lambda: held.enter_context(sole_writer(directory)))
        yield


def save(
    done: int,
    step: Step,
    optimizer: Optimizer,
    options: RunOptions,
    about: Mapping[str, Any],
) -> None:
    """Writes a checkpoint after so many steps. about: more values to store."""
    assert options.save is not None, "a save is due only if there is a place for it"
    extra = {"done": done, "options": trained_by(options, step), **about}
    step.save(
        options.save,
        optimizer,
        extra=extra,
        keep=options.keep,
        asynchronous=options.async_save,
    )


def resume(
    step: Step, optimizer: Optimizer, options: RunOptions, data: Mapping[str, str]
) -> int:
    """Go on from the newest checkpoint, if so asked and there is one; returns the
    number of steps done, which is the position in the data too.

    data: name and digest of what is trained on. Raises: CheckpointError if that run had
    other options or data, or if the directory has checkpoints of a run that this one
    does not go on from.
    """
    if options.save is None:
        return 0
    directory = options.save
    checkpoint = on_first(step.comm, lambda: latest(directory))
    if checkpoint is None:
        return 0
    if not options.resume:
        raise CheckpointError(
            f"there is a checkpoint already: '{checkpoint}'",
            fix="add --resume to go on from it, or give another --save directory",
        )
    wanted = trained_by(options, step)
    extra = load(
        checkpoint,
        step,
        optimizer,
        lambda extra: check_before(checkpoint, wanted, data, options.other_data, extra),
    )
    return int(extra["done"])


def trained_by(options: RunOptions, step: Step) -> dict[str, Any]:
    """Returns what training follows from by name: values of options, and the samples of
    a step; steps too, where the learning rate follows."""
    names = SAME if options.lr_schedule == "constant" else (*SAME, "steps")
    values = {name: getattr(options, name) for name in names}
    batch = step.program.batch_extent
    return {**values, "eval_fraction": options.held_out, "global_batch": batch}


def check_before(
    checkpoint: Path,
    wanted: Mapping[str, Any],
    data: Mapping[str, str],
    other_data: bool,
    extra: Any,
) -> None:
    """Raises CheckpointError for options that are not as before, and for other data,
    which may lie elsewhere. wanted: see `trained_by`."""
    if not isinstance(extra, dict) or not {"options", "done", "data"} <= set(extra):
        raise CheckpointError(
            f"checkpoint '{checkpoint}' is not one of `autopar run`, or of an "
            "earlier one",
            fix="give the --save directory of an earlier run",
        )
    flags = {name: f"--{name.replace('_', '-')}" for name in wanted}
    before = extra["options"]
    if new := [flag for name, flag in flags.items() if name not in before]:
        raise CheckpointError(
            f"the run in '{checkpoint}' is of an earlier version, without "
            f"{', '.join(new)}",
            fix="start anew with another --save",
        )
    others = [name for name, now in wanted.items() if before[name] != now]
    if others:
        had = {name: f"{flags[name]} {before[name]}" for name in others}
        changes = [f"{had[name]}, but this has {wanted[name]}" for name in others]
        raise CheckpointError(
            f"the run in '{checkpoint}' had {'; '.join(changes)}",
            fix=f"go on with {' '.join(had.values())}, or start anew with another "
            "--save",
        )
    if not other_data and extra["data"]["digest"] != data["digest"]:
        raise CheckpointError(
            f"the run in '{checkpoint}' was trained on {extra['data']['name']}, and "
            f"the tokens of {data['name']} are others",
            fix="give the same data, start anew with another --save, or go on with "
            "this: --other-data",
        )
