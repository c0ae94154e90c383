"""Tells of reads of a model whose step trains a copy of it: its own weights are those
that it was compiled with.

Its classes are watched, and not itself: hooks would be copied and pickled with it.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn

from autopar.passes.capture.forward.user_frames import OURS, TORCH
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.parameters.changed import Copied, Originals

LOG = logging.getLogger("autopar")
# Copies and pickles are made by `__reduce_ex__`, which all of Python's versions have.
NAMES = {"__call__": "forward", "state_dict": "state_dict", "__reduce_ex__": "a copy"}
INSTALLED = f"{os.sep}site-packages{os.sep}"
FIX = (
    "before it, on all ranks: model.load_state_dict(step.state_dict()); or use "
    "step.evaluate(**batch), step.save_pretrained(folder), step.state_dict()"
)
GONE = (
    "keep the step, and before it goes, on all ranks: "
    "model.load_state_dict(step.state_dict())"
)
# Of each module, the steps that have copies of its weights.
WATCHING: WeakKeyDictionary[nn.Module, list[_Reads]] = WeakKeyDictionary()
WATCHED: WeakSet[type[nn.Module]] = WeakSet()


def watch_reads(model: nn.Module, originals: Originals, updates: Updates) -> None:
    """Tells, once, of a read of a model whose step trains a copy; it keeps neither of
    them alive. originals, updates: of the step."""
    updates.copied = originals.copied
    reads = _Reads(ref(originals), ref(updates), originals.copied)
    for module in largest_parts(model):
        _watch(type(module))
        WATCHING.setdefault(module, []).append(reads)


def largest_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yields a model and, in turn, the module in it that has most of its elements: what
    samples is mostly called of what a model with adapters or a loss goes around. Of
    torch's own classes, which all models share, a model alone may be."""
    elements = sum(p.numel() for p in model.parameters())
    part: nn.Module | None = model
    while part is not None:
        yield part
        larger = (
            child
            for child in part.children()
            if not type(child).__module__.startswith("torch.")
            and 2 * sum(p.numel() for p in child.parameters()) > elements
        )
        part = next(larger, None)


@dataclass
class _Reads:
    """A step whose model is watched, while it is there and after it."""

    originals: ref[Originals]
    updates: ref[Updates]
    copied: Copied
    told: bool = False

    @property
    def matters(self) -> bool:
        """Whether it has weights of its own, or had until it was gone."""
        lives = self.updates() is not None
        return not self.told and (lives or self.copied.updated)

    def untrained(self) -> tuple[str, str]:
        """Returns the name of a parameter that the step has trained and the model has
        not, or "", and what helps."""
        originals, updates = self.originals(), self.updates()
        if updates is None:
            return next(iter(self.copied.unwritten()), ""), GONE
        if originals is None:  # it was told already that the model was changed
            return "", ""
        return originals.differing(updates.parameters), FIX


def _watch(kind: type[nn.Module]) -> None:
    """Puts methods in place that look at who calls them."""
    if kind in WATCHED:
        return
    WATCHED.add(kind)
    for name, called in NAMES.items():
        setattr(kind, name, _watched(kind, name, called))


def _watched(kind: type[nn.Module], name: str, called: str) -> Callable[..., Any]:
    own = vars(kind).get(name)

    @wraps(getattr(kind, name))
    def looked_at(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self in WATCHING:
            _look(self, called)
        if own is not None:
            return own(self, *args, **kwargs)
        # What a tracer has put there meanwhile.
        return getattr(super(kind, self), name)(*args, **kwargs)

    return looked_at


def _look(module: nn.Module, called: str) -> None:
    """Tells of a read by others than this project, if no step has these weights."""
    watching = [one for one in WATCHING.get(module, ()) if one.matters]
    reasons = [one.untrained() for one in watching]
    if not reasons or not all(name for name, _ in reasons):
        return
    called, source = _read_by(sys._getframe(2), called)
    if not source:
        return
    for one in watching:
        one.told = True
    name, fix = reasons[-1]
    LOG.warning(
        f"{called} of a {type(module).__name__} reads older weights than its step has, "
        f"as '{name}': a step trains a copy of them; this is told once\n"
        f"  at   {source}\n  fix  {fix}"
    )


def _read_by(frame: FrameType | None, called: str) -> tuple[str, str]:
    """Returns which method of a model reads it, from a frame on outwards, and in which
    line of its user; "" if that is this project itself."""
    while frame is not None:
        if _is_method(frame):
            called = frame.f_code.co_name
        elif not frame.f_code.co_filename.startswith((TORCH, copy.__file__)):
            break
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(OURS):
        return called, ""
    user: FrameType | None = frame
    while user is not None and INSTALLED in user.f_code.co_filename:
        user = user.f_back
    frame = user or frame
    return called, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_method(frame: FrameType) -> bool:
    """Whether it runs one that a watched model's own class has. Locals of others are
    not looked at: a frame keeps what was shown of them."""
    code = frame.f_code
    named = any(hasattr(kind, code.co_name) for kind in WATCHED)
    if not named or not code.co_argcount or code.co_filename.startswith(TORCH):
        return False
    first = frame.f_locals.get(code.co_varnames[0])
    return isinstance(first, nn.Module) and first in WATCHING
