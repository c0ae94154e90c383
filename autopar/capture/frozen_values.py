"""Values that code of a model reads where they may be changed: attributes of modules,
entries of configurations, variables around a loss function, globals.

A program is compiled with the values that they have. Which of them are read is seen
from the names in the code that forward and the loss function reach.
"""

from __future__ import annotations

import argparse
import dis
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import (
    CodeType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.left_as_found import OTHERS, is_users
from autopar.passes.capture.outside import sample
from autopar.passes.errors import AutoparError

GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
NAMED = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, type(None))
SPACES = (argparse.Namespace, SimpleNamespace)
GETTERS = frozenset(("getattr", "hasattr"))
TENSORS = frozenset(dir(Tensor))
ITSELF = object()
MOST = 1000  # members: what has more is data, and not looked at
# What torch keeps on modules. A step trains and `evaluate` evaluates, whatever mode the
# model is in. The others are of Hugging Face's models, and tell what is kept, not what
# is computed.
NOT_READ = frozenset((*vars(nn.Module()), "gradient_checkpointing", "use_cache"))


@dataclass(frozen=True)
class Root:
    """Where values are looked for. where: of messages, "" of the model itself. thing:
    what is there now; raises ReferenceError, if it is gone. own: only its methods read
    its attributes. fresh: it is made anew each time."""

    where: str
    thing: Callable[[], Any]
    own: bool = False
    fresh: bool = False


class FrozenValues:
    """All that a model's code reads, and a loss function's beside it, as it is when
    this is made. It keeps no model alive."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._model, self._training = weakref.ref(model), model.training
        names = Names()
        for thing in (model, *functions):
            names.follow(thing)
        roots = [Root("", partial(_alive, weakref.ref(model))), *names.roots()]
        for function in functions:
            holder = getattr(function, "__self__", function)  # of a method
            name = getattr(function, "__qualname__", type(function).__name__)
            roots.append(Root(name, partial(_itself, holder), own=True))
        self._reader = _Reader(names)
        before = [(root, self._reader.read(root)) for root in roots]
        self._before = [(root, values) for root, values in before if values]

    def __iter__(self) -> Iterator[str]:
        """Their paths."""
        for _, values in self._before:
            yield from values

    def check(self, thorough: bool = True) -> None:
        """Raises AutoparError, if a value has changed. thorough: or one has come."""
        if not self._training and (model := self._model()) and model.training:
            raise AutoparError(
                "the model was in eval() when the step was compiled, without dropout, "
                "and is in train() now",
                fix="call model.train() before the step is compiled",
            )
        if not thorough and all(place.is_same() for place in self._reader.places):
            return
        self._reader.places.clear()
        for root, before in self._before:
            try:
                now = self._reader.read(root)
            except ReferenceError:
                continue
            if now != before:
                _refuse(before, now)


def _refuse(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for where in {**before, **now}:
        was, is_now = before.get(where), now.get(where)
        if isinstance(was, Elements) is isinstance(is_now, Elements) and was != is_now:
            raise AutoparError(
                f"'{where}' was {was!r} when the step was compiled with it, and is "
                f"{is_now!r} now",
                fix="pass what changes from step to step in the batch, as a tensor; or "
                "compile another step where it changes, and load what was trained: "
                "other.load_state_dict(step.state_dict())",
            )


def _alive(weak: Callable[[], Any]) -> Any:
    if (thing := weak()) is None:
        raise ReferenceError
    return thing


def _holder(thing: Any) -> Callable[[], Any]:
    """Returns what returns a thing while it is alive."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return partial(_itself, thing)


def _itself(thing: Any) -> Any:
    return thing


# --- values -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Elements:
    """What a tensor held when it was first seen, as far as some elements tell: what is
    written into it later is seen elsewhere. One of another shape is a cache that has
    grown: of that nothing is known."""

    shape: tuple[int, ...]
    elements: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elements) and (
            self.shape != other.shape or self.elements == other.elements
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        first = f" that begins with {self.elements[0]!r}" if self.elements else ""
        return f"a tensor of shape {self.shape}{first}"


@dataclass(frozen=True)
class Place:
    """An attribute or a member, and the id of what was there. holder: what has it, None
    or ReferenceError if that is gone. name: ITSELF for the holder."""

    holder: Callable[[], Any]
    name: Any
    known: int

    def is_same(self) -> bool:
        try:
            holder = self.holder()
        except ReferenceError:
            return True
        if self.name is ITSELF:
            return id(holder) == self.known
        return holder is None or id(_member(holder, self.name)) == self.known


def _member(holder: Any, name: Any) -> Any:
    if isinstance(holder, dict):
        return dict.get(holder, name)
    if isinstance(holder, (list, tuple, deque)):
        return holder[name] if name < len(holder) else None
    return getattr(holder, name, None)


class _Reader:
    """Reads what is at a root, by dotted paths. places: all that was read last."""

    def __init__(self, names: Names) -> None:
        self.names, self.attributes = names, frozenset(names.any - NOT_READ)
        self.places: list[Place] = []
        self._of_classes: dict[type, list[str]] = {}
        self._tensors: dict[int, tuple[Callable[[], Any], Elements]] = {}

    def read(self, root: Root) -> dict[str, Any]:
        """Returns values by their paths. Raises: ReferenceError, if it is gone."""
        values: dict[str, Any] = {}
        thing = root.thing()
        if not root.fresh:
            self.places.append(Place(root.thing, ITSELF, id(thing)))
        self._look(root.where, thing, values, set(), root)
        return values

    def _look(
        self,
        where: str,
        thing: Any,
        values: dict[str, Any],
        seen: set[int],
        root: Root | None = None,
    ) -> None:
        """root: whose thing it is."""
        if isinstance(thing, PLAIN):
            values[where] = thing
        elif isinstance(thing, Tensor):
            if not isinstance(thing, nn.Parameter) and not thing.is_meta:
                values[where] = self._elements(thing)
        elif id(thing) not in seen:
            seen.add(id(thing))
            holder = root.thing if root is not None and root.fresh else _holder(thing)
            for name, value in self._within(thing):
                if root is not None and root.own and name not in self.names.own:
                    continue
                if not isinstance(thing, partial):  # which nobody changes
                    self.places.append(Place(holder, name, id(value)))
                self._look(f"{where}.{name}".lstrip("."), value, values, seen)

    def _elements(self, x: Tensor) -> Elements:
        if (known := self._tensors.get(id(x))) is not None and known[0]() is x:
            return known[1]
        elements = Elements(tuple(x.shape), tuple(sample(x).tolist()))
        self._tensors[id(x)] = weakref.ref(x), elements
        return elements

    def _within(self, thing: Any) -> Iterator[tuple[Any, Any]]:
        """What a thing holds, by name."""
        if isinstance(thing, partial):
            yield from enumerate(thing.args)
            yield from thing.keywords.items()
        elif isinstance(thing, dict) and len(thing) <= MOST:
            for key, value in list(dict.items(thing)):
                if not isinstance(key, str) or key in self.names.keys:
                    yield key, value
        elif isinstance(thing, (list, tuple, deque)) and len(thing) <= MOST:
            yield from enumerate(thing)
        elif isinstance(thing, ModuleType):
            names = self.attributes & vars(thing).keys() if is_users_file(thing) else ()
            for name in names:
                if isinstance(vars(thing)[name], PLAIN):
                    yield name, vars(thing)[name]
        elif isinstance(thing, (nn.Module, *SPACES)) or is_users(type(thing)):
            held = getattr(thing, "__dict__", {})
            for name in self.attributes & held.keys():
                yield name, held[name]
            for name in self._of_class(type(thing)):
                if name not in held:
                    yield name, getattr(thing, name, None)
            if isinstance(thing, nn.Module):
                yield from thing._modules.items()

    def _of_class(self, type_: type) -> list[str]:
        """Names of values on a class, and of what has a slot on its objects."""
        if type_ not in self._of_classes:
            kinds = (*PLAIN, MemberDescriptorType)
            self._of_classes[type_] = [
                name
                for base in type_.__mro__
                if is_users(base)
                for name in self.attributes & vars(base).keys()
                if isinstance(vars(base)[name], kinds)
            ]
        return self._of_classes[type_]


def is_users_file(file: ModuleType) -> bool:
    """Whether a module of Python is of the user's code."""
    package = file.__name__.partition(".")[0]
    return package not in OTHERS and package not in sys.stdlib_module_names


# --- names --------------------------------------------------------------------------


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
        """Notes what a function reads; returns the globals that are the user's."""
        called = []
        first = next(iter(function.__code__.co_varnames), None)
        for code in _codes(function.__code__):
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
                    if is_users(thing) or isinstance(thing, nn.Module):
                        called.append(thing)
                loads = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
                before = step.argval if loads else None
                before = before[-1] if isinstance(before, tuple) else before
        return called


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
