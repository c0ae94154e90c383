"""Capturing a live model: what `trace` reads, and what only a live process shows."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from autopar.capture.chance import Chance
from autopar.capture.kept_state import State, refuse_state, same
from autopar.capture.left_as_found import AsFound, Change, counters
from autopar.capture.methods_shown import methods_shown
from autopar.capture.survivors import FAKE, left_over, only_new, refuse_held
from autopar.capture.unusable_tensors import refuse_unusable
from autopar.passes.capture.find_repeats import find_repeats, layer_kinds
from autopar.passes.capture.forward.kept_values import KeptValues
from autopar.passes.capture.forward.scripted import refuse_scripted
from autopar.passes.capture.mixed_precision import Lowering
from autopar.passes.capture.trace import run_without_data, trace
from autopar.passes.errors import CaptureError
from autopar.passes.replaced import replaced
from autopar.passes.traced import Traced
from autopar.progress import tell

# Steps after which a model does what it does later: longer than what it waits for, and
# a prime, so that what it does every so many steps shows.
LONG = 1_000_003


def capture_model(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    precision: Lowering = None,
    outputs: Sequence[str] = (),
    metrics: Collection[str] | None = None,
) -> Traced:
    """Capture `model(**batch)` down to its loss, see `trace`, and leave the model as it
    was.

    Raises: CaptureError, also where forward draws random numbers outside of the graph,
    counts in Python what it computes with, or keeps tensors that cannot be put back; or
    has two parameters in the same memory.
    """

    tell("capturing the model")
    refuse_scripted(model)
    refuse_unusable(model)
    as_found = AsFound.of(model, loss_fn)
    chance = Chance(as_found.generators)

    call = model, batch, loss_fn, precision, outputs, metrics
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def put_back() -> None:
        as_found.put_back()
        chance.put_back()

    def run(kept: KeptValues | None = None) -> Traced:
        # Of a model that it cannot capture, torch prints the graph so far.
        with contextlib.redirect_stderr(io.StringIO()):
            return trace(*call, repeats=repeats, kept=kept)

    state = State(as_found, own)
    failed: CaptureError | None = None

    with methods_shown(model), only_new(), unlogged():
        try:
            repeats = find_repeats(model, partial(run_without_data, *call), put_back)
            with first_changes(model, as_found) as changed:
                traced = run(state.kept)
            as_found.put_back()
            chance.refuse(run)
            as_found.put_back()
            refuse_counters(model, as_found, changed, traced, run)
            as_found.put_back()
            refuse_state(state, run)
        except CaptureError as error:
            if FAKE not in error.message:
                raise
            failed = error  # one of another run, which somebody keeps
        finally:
            as_found.put_back()
        left = left_over()
    refuse_held(*left)
    if failed is not None:
        raise failed
    return traced


def kinds_of_layers(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    precision: Lowering,
    path: str,
) -> list[Hashable] | None:
    """See `layer_kinds`; the model is left as it was."""
    as_found = AsFound.of(model, loss_fn)
    chance = Chance(as_found.generators)

    def put_back() -> None:
        as_found.put_back()
        chance.put_back()

    call = model, batch, loss_fn, precision, (), None
    try:
        with methods_shown(model), unlogged():
            return layer_kinds(model, path, partial(run_without_data, *call), put_back)
    finally:
        as_found.put_back()


def unlogged() -> contextlib.AbstractContextManager[None]:
    """Stops torch's log of why an op has no shapes: torch raises that as well, and a
    model is tried in more than one way."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    return replaced(log, "disabled", True)


@contextlib.contextmanager
def first_changes(model: nn.Module, before: AsFound) -> Iterator[list[Change]]:
    """Counters that the first forward within has changed; torch.export runs more than
    one, and puts some of them back."""
    changed: list[Change] = []
    calls = 0

    def note(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            changed.extend(counters(before.changes()))

    handle = model.register_forward_hook(note)
    try:
        yield changed
    finally:
        handle.remove()


def refuse_counters(
    model: nn.Module,
    as_found: AsFound,
    changed: list[Change],
    traced: Traced,
    run: Callable[[], Traced],
) -> None:
    """Raises CaptureError where the next forward would compute something else, or one
    that comes long after it: what waits for a number of steps sees it."""
    if not changed:
        return
    for change in changed:
        change.make()
    with first_changes(model, as_found) as again:
        try:
            later = run()
        except CaptureError as error:  # more was changed with it, as a module
            as_found.put_back()
            run()  # which fails in its own way, if it is not that
            raise computed_with(changed[0], "next time", once=True) from error
    then = {change.place: change.after for change in again}
    counts = [c for c in changed if then.get(c.place, c.after) != c.after]
    if not same(traced, later):
        raise computed_with(changed[0], "next time", once=not counts)
    as_found.put_back()
    values = [change.make(LONG) for change in counts]
    try:
        is_same = not counts or same(traced, run())
    except Exception:  # forward never gets there
        return
    if not is_same:
        raise computed_with(counts[0], f"when it is {values[0]!r}")


def computed_with(change: Change, when: str, once: bool = False) -> CaptureError:
    """The error about a loss that depends on a value which forward changes. once: and
    then no more, as where the first forward keeps what later ones read."""
    fix = "pass in the batch, as a tensor, what changes from step to step"
    if once:
        fix = "run forward once before you compile the model: model(**batch)"
    return CaptureError(
        f"forward changes '{change.where}' from {change.before!r} to "
        f"{change.after!r}, and computes something else with it {when}",
        fix=fix,
    )
