"""Random numbers that a capture does not see: those of Python and of NumPy, and torch's
own where its generator is used outside of the graph. What is drawn would be a constant
of the program, the same in each step.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from autopar.passes.capture.forward.user_frames import is_users
from autopar.passes.errors import CaptureError

STDLIB = sysconfig.get_path("stdlib") + os.sep
UINT8 = torch.uint8
PACKAGES = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Generator:
    """A source of random numbers. read: where it is in its sequence; write: go there.
    peek: the same as read, or a part of it, where tensors may be fake."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    peek: Callable[[], Any] | None = None

    def place(self) -> Any:
        """Returns the state's position, or the whole state where there is no cheaper
        reading."""
        return (self.peek or self.read)()


def generators(held: Mapping[str, Any]) -> list[Generator]:
    """The random generators that all code shares, and those that a model holds."""
    generators = [
        Generator("Python's", random.getstate, random.setstate),
        Generator(
            "torch's",
            lambda: bytes(torch.get_rng_state().numpy()),
            lambda x: torch.set_rng_state(torch.frombuffer(bytearray(x), dtype=UINT8)),
            torch.initial_seed,
        ),
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append(_of_numpy("NumPy's", numpy.random))
    for where, one in held.items():
        name = f"the model's '{where}'"
        if isinstance(one, random.Random):
            generators.append(Generator(name, one.getstate, one.setstate))
        else:
            generators.append(_of_numpy(name, one))
    return generators


def _of_numpy(name: str, one: Any) -> Generator:
    """A Generator, a RandomState, or the module that acts as one. States hold arrays,
    and are compared as they are pickled."""
    if hasattr(one, "get_state"):
        return Generator(
            name,
            lambda: pickle.dumps(one.get_state()),
            lambda state: one.set_state(pickle.loads(state)),
        )

    def write(state: bytes) -> None:
        one.bit_generator.state = pickle.loads(state)

    return Generator(name, lambda: pickle.dumps(one.bit_generator.state), write)


def is_generator(thing: Any) -> bool:
    """Whether it is one that Python code draws from; torch's are refused by `trace`."""
    if isinstance(thing, random.Random):
        return True
    of_numpy = type(thing).__module__.startswith("numpy.random")
    return of_numpy and hasattr(thing, "random") and not isinstance(thing, type)


class Chance:
    """The generators that a forward may draw from, and where they were."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.all = generators(held)
        self.before = [g.read() for g in self.all]

    def moved(self) -> Generator | None:
        """The first generator whose state has changed."""
        pairs = zip(self.all, self.before, strict=True)
        return next((g for g, state in pairs if g.read() != state), None)

    def put_back(self) -> None:
        for g, state in zip(self.all, self.before, strict=True):
            g.write(state)

    def refuse(self, run: Callable[[], object]) -> None:
        """Raises CaptureError if a generator has moved, with the line that moved it,
        which is looked for in another run. All are where they were afterwards."""
        which = self.moved()
        if which is None:
            return
        self.put_back()
        source = find_line(which, run)
        self.put_back()
        raise CaptureError(
            f"forward moves {which.name} generator of random numbers: what it draws "
            "there would be the same in every step and on every rank",
            source=source,
            fix="pass in the batch what is decided by chance (torch.where takes one of "
            "two values); for dropout use nn.Dropout or F.dropout",
        )


def find_line(which: Generator, run: Callable[[], object]) -> str:
    """`file:line` of the first line of a user after which a generator has moved; "" if
    it is not found."""
    state, last, line = which.place(), "", ""

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal last, line
        file = frame.f_code.co_filename
        if line or not _is_model(file):
            return None
        if last and which.place() != state:
            line = last
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
    return line


def _is_model(file: str) -> bool:
    """Whether lines of a file are looked at: not those of Python's own library, nor of
    methods that it makes for classes, whose file has a name as what follows `-c`."""
    if file == "<string>" or not is_users(file):
        return False
    return PACKAGES in file or not file.startswith(STDLIB)
