"""Names that code reads: attributes, keys of dicts, variables around functions, and
globals, as byte code tells: that of a model's forward, of a loss function, and of the
user's functions which they call.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from autopar.capture.entries import is_users, is_users_file

GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
NAMED = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
GETTERS = frozenset(("getattr", "hasattr"))
TENSORS = frozenset(dir(Tensor))


@dataclass(frozen=True)
class Root:
    """A place where values are looked for. where: its name in messages, "" for the
    model itself. thing: its present value; raises ReferenceError, if it is gone. own:
    only its methods read its attributes. fresh: it is made anew each time."""

    where: str
    thing: Callable[[], Any]
    own: bool = False
    fresh: bool = False


class Names:
    """What code reads, of functions and those of the user's that they call.

    own: names of attributes of the object whose method the code is; attributes: those
    of others; keys: texts, as keys of dicts are, and names of variables around
    functions. globals: a file and a variable that is read -> the file's variables.
    """

    def __init__(self) -> None:
        self.own: set[str] = set()
        self.attributes: set[str] = set()
        self.keys: set[str] = set()
        self.globals: dict[tuple[str, str], dict[str, Any]] = {}
        self._functions: dict[CodeType, FunctionType] = {}
        self._types: set[type] = set()

    @property
    def any(self) -> set[str]:
        """Names of attributes, of any object but a tensor."""
        return self.own | (self.attributes - TENSORS)

    def follow(self, thing: Any) -> None:
        """Reads a function, or all modules of a model, and the user's that it calls."""
        self._read([thing])
        known = -1
        while known < len(self._functions):
            known = len(self._functions)
            for type_ in tuple(self._types):
                named = self.any & vars(type_).keys()
                self._read([vars(type_)[name] for name in named])

    def roots(self) -> Iterator[Root]:
        """The variables around functions, and the globals that they name."""
        for function in self._functions.values():
            if function.__closure__ and is_users(function):
                cells = partial(_cells, function)
                yield Root(function.__qualname__, cells, fresh=True)
        for (file, name), variables in self.globals.items():
            yield Root(f"{file}.{name}", partial(variables.get, name))

    def _read(self, waiting: list[Any]) -> None:
        """Reads functions, and what they call, until none waits."""
        while waiting:
            thing = waiting.pop()
            holder = getattr(thing, "__self__", thing)  # of a method
            if isinstance(holder, nn.Module):
                waiting += holder.children()
                waiting += (v for v in vars(holder).values() if is_users(type(v)))
            if isinstance(holder, nn.Module) or is_users(type(holder)):
                self._types.update(type(holder).__mro__)
            function = _function(thing)
            if function is None or function.__code__ in self._functions:
                continue
            self._functions[function.__code__] = function
            waiting += _cells(function).values()
            waiting += self._read_code(function)

    def _read_code(self, function: FunctionType) -> list[Any]:
        """Notes names that a function reads; returns the user's globals it reads."""
        called = []
        first = next(iter(function.__code__.co_varnames), None)
        for code in codes(function.__code__):
            texts = set(_texts(code.co_consts))
            self.keys.update(code.co_freevars, texts)
            if not GETTERS.isdisjoint(code.co_names):
                self.own |= texts
            before: Any = None
            for step in dis.get_instructions(code):
                if step.opname in NAMED:
                    (self.own if before == first else self.attributes).add(step.argval)
                elif step.opname in GLOBAL and is_users(function):
                    key = function.__module__, step.argval
                    self.globals[key] = function.__globals__
                    thing = function.__globals__.get(step.argval)
                    if isinstance(thing, ModuleType):
                        called += _named_in(thing, code)
                    elif is_users(thing) or isinstance(thing, nn.Module):
                        called.append(thing)
                loads = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
                before = step.argval if loads else None
                before = before[-1] if isinstance(before, tuple) else before
        return called


def _named_in(file: ModuleType, code: CodeType) -> list[Any]:
    """The values that code names of a user's file, as `conf.scale`."""
    held = vars(file) if is_users_file(file) else {}
    named = (held[name] for name in code.co_names if name in held)
    return [thing for thing in named if is_users(thing)]


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


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of functions within it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from codes(value)


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
