"""Random numbers that a capture does not see: those of Python and of NumPy, and torch's
own where its generator is used outside of the graph. What is drawn would be a constant
of the program, the same in each step.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from passes.capture.user_frames import is_users
from passes.errors import CaptureError

STDLIB = sysconfig.get_path("stdlib") + os.sep
PACKAGES = f"{os.sep}site-packages{os.sep}"

State = dict[str, Any]


def states() -> State:
    """Of each generator: where it is in its sequence."""
    found: State = {"Python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["NumPy"] = numpy.random.get_state()
    return found


def moved(before: State, now: State) -> str | None:
    """The first generator that is not where it was."""
    for name, state in before.items():
        if name == "torch":
            same = torch.equal(state, now[name])
        elif name == "NumPy":
            same = _plain(state) == _plain(now[name])
        else:
            same = state == now[name]
        if not same:
            return name
    return None


def _plain(state: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, keys, *rest = state
    return (kind, keys.tobytes(), *rest)


def set_states(state: State) -> None:
    """Put all generators back to where they were."""
    random.setstate(state["Python"])
    torch.set_rng_state(state["torch"])
    if "NumPy" in state:
        sys.modules["numpy"].random.set_state(state["NumPy"])


def refuse_chance(before: State, run: Callable[[], object]) -> None:
    """Raises CaptureError if a generator has moved, with the line that moved it, which
    is looked for in another run. All are where they were afterwards."""
    which = moved(before, states())
    if which is None:
        return
    set_states(before)
    source = find_line(which, run)
    set_states(before)
    raise CaptureError(
        f"forward moves {which}'s generator of random numbers: what it draws there "
        "would be the same in every step and on every rank",
        source=source,
        fix="pass in the batch what is decided by chance (torch.where takes one of two "
        "values); for dropout use nn.Dropout or F.dropout",
    )


def find_line(which: str, run: Callable[[], object]) -> str:
    """`file:line` of the first line of a user after which a generator has moved; "" if
    it is not found."""
    state, last, found = _place(which), "", ""

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal last, found
        file = frame.f_code.co_filename
        if found or not _is_model(file):
            return None
        if last and _place(which) != state:
            found = last
            return None
        if event != "call":
            last = f"{os.path.basename(file)}:{frame.f_lineno}"
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(tracing)
    return found


def _place(which: str) -> object:
    """Where a generator is. Torch's own state cannot be read amid fake tensors: of it,
    what it was seeded with."""
    if which == "torch":
        return torch.initial_seed()
    if which == "NumPy":
        return _plain(sys.modules["numpy"].random.get_state())
    return random.getstate()


def _is_model(file: str) -> bool:
    """Whether lines of a file are looked at: not those of Python's own library."""
    if not is_users(file):
        return False
    return PACKAGES in file or not file.startswith(STDLIB)
