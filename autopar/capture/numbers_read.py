"""Numbers and texts that code of a model reads where they may be changed: attributes of
modules, entries of configurations, variables around a loss function, globals of files.

A program is compiled with the values that they have. Which of them are read is seen
from the names in the code that forward and the loss function reach.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from autopar.capture.left_as_found import NUMBERS, AsFound, Container, is_users
from autopar.passes.errors import AutoparError

GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
NAMED = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
# A step trains and `evaluate` evaluates, whatever mode the model is in; the others are
# of Hugging Face's models, and tell what is kept, not what is computed.
NOT_READ = frozenset(("training", "gradient_checkpointing", "use_cache"))


@dataclass(frozen=True)
class Number:
    """where: `blocks.0.gate.temperature`. now: what it is, or None where it has gone
    with what held it."""

    where: str
    before: Any
    now: Callable[[], Any]

    def check(self) -> None:
        """Raises AutoparError, if it has changed."""
        now = self.now()
        if now is None or (now == self.before and type(now) is type(self.before)):
            return
        raise AutoparError(
            f"'{self.where}' was {self.before!r} when the step was compiled with it, "
            f"and is {now!r} now",
            fix="pass what changes from step to step in the batch, as a tensor without "
            "dims; or compile another step where it changes",
        )


class NumbersRead:
    """All of a model, and of a loss function beside it, as they are when this is
    made. It keeps no module alive."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        as_found, names = AsFound.of(model, *functions), _Names()
        types = {base for m in model.modules() for base in type(m).__mro__}
        for module in model.modules():
            names.follow(module)
        for function in functions:
            names.follow(function)
        names.follow_methods(types)
        self.numbers = (
            *_in_containers(as_found, names),
            *_on_classes(as_found, names),
            *_around(names),
        )

    def check(self) -> None:
        """Raises AutoparError, if one of them has changed."""
        for number in self.numbers:
            number.check()


class _Names:
    """What code reads, of functions and those of the user's that they call.

    words: names of attributes and of variables around functions, and texts, as keys of
    dicts are. globals: names in a file, with its name.
    """

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.globals: dict[tuple[str, str], dict[str, Any]] = {}
        self.functions: dict[CodeType, FunctionType] = {}

    def follow(self, thing: Any) -> None:
        """Reads a function, or a module's forward, and the user's that it calls."""
        waiting = [thing]
        while waiting:
            function = _function(waiting.pop())
            if function is None or function.__code__ in self.functions:
                continue
            self.functions[function.__code__] = function
            waiting += _cells(function).values()
            for code in _codes(function.__code__):
                self.words.update(code.co_freevars, _texts(code.co_consts))
                for step in dis.get_instructions(code):
                    if step.opname in NAMED:
                        self.words.add(step.argval)
                    elif step.opname in GLOBAL and is_users(function):
                        key = function.__module__, step.argval
                        self.globals[key] = function.__globals__
                        called = function.__globals__.get(step.argval)
                        waiting += [called] if is_users(called) else []

    def follow_methods(self, types: Iterable[type]) -> None:
        """Reads methods and properties of classes whose names are read."""
        known = -1
        while known < len(self.functions):
            known = len(self.functions)
            for type_ in types:
                for name in self.words & vars(type_).keys():
                    self.follow(vars(type_)[name])

    def reads(self, key: Any, value: Any) -> bool:
        """Whether an entry is a number, and code names it."""
        known = not isinstance(key, str) or (key in self.words and key not in NOT_READ)
        return known and isinstance(value, NUMBERS)

    def reach(self, where: str, files: Iterable[str]) -> bool:
        """Whether a list or dict may be read, by its path from the model or a file."""
        for file in files:
            if where.startswith(f"{file}."):
                return (file, where[len(file) + 1 :].partition(".")[0]) in self.globals
        name = where.rpartition(".")[2]
        return name.isdecimal() or name in self.words


def _function(thing: Any) -> FunctionType | None:
    """The Python function that a call of a thing runs, if there is one."""
    if isinstance(thing, nn.Module):
        thing = thing.forward
    for name in ("__func__", "func", "fget", "__wrapped__"):  # methods, partials ...
        if not isinstance(thing, (FunctionType, type)):
            thing = getattr(thing, name, thing)
    if not isinstance(thing, (FunctionType, type)) and callable(thing):
        thing = type(thing).__call__
    return thing if isinstance(thing, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions within it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for one in value:
            yield from _texts(one)


def _cells(function: FunctionType) -> dict[str, Any]:
    """The variables around a function that have values."""
    values = {}
    closure = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
        with suppress(ValueError):  # not assigned yet
            values[name] = cell.cell_contents
    return values


def _in_containers(as_found: AsFound, names: _Names) -> Iterator[Number]:
    """Yields those of attributes, dicts and lists; not the globals of files."""
    modules = {id(vars(file)): name for name, file in list(sys.modules.items())}
    files = [modules[id(c.container)] for c in as_found.containers if _id(c) in modules]
    for one in as_found.containers:
        owner = as_found.owners.get(_id(one))
        if _id(one) in modules or isinstance(one.members, set):
            continue
        if owner is None and not names.reach(one.where, files):
            continue
        members = one.members
        entries = dict(members if isinstance(members, dict) else enumerate(members))
        for key, value in entries.items():
            if names.reads(key, value):
                now = _entry(_holder(one.container, owner), key)
                yield Number(f"{one.where}.{key}".lstrip("."), value, now)


def _id(container: Container) -> int:
    return id(container.container)


def _holder(container: Any, owner: Any) -> Callable[[], Any]:
    """Returns what returns the container: not keeping alive whose attributes it has."""
    try:
        weak = weakref.ref(owner)
    except TypeError:
        return lambda: container
    return lambda: None if (alive := weak()) is None else vars(alive)


def _entry(holder: Callable[[], Any], key: Any) -> Callable[[], Any]:
    def now() -> Any:
        with suppress(KeyError, IndexError, TypeError):
            return holder()[key]

    return now


def _on_classes(as_found: AsFound, names: _Names) -> Iterator[Number]:
    for type_, entries in as_found.classes:
        for name, value in entries.items():
            if not name.startswith("__") and names.reads(name, value):
                now = partial(getattr, type_, name, None)
                yield Number(f"{type_.__qualname__}.{name}", value, now)


def _around(names: _Names) -> Iterator[Number]:
    """Yields those of variables around functions, and of globals that they name."""
    for function in names.functions.values():
        for name, value in _cells(function).items() if is_users(function) else ():
            if isinstance(value, NUMBERS):
                now = partial(lambda f, n: _cells(f).get(n), function, name)
                yield Number(f"{function.__qualname__}: {name}", value, now)
    for (file, name), read in names.globals.items():
        if isinstance(value := read.get(name), NUMBERS):
            yield Number(f"{file}.{name}", value, partial(read.get, name))
