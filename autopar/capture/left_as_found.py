"""A model is left as it was found: what its forward changes while it is captured is put
back, whether on modules, in objects and containers that they hold, on classes, in the
variables of closures, among the globals of their files, or in caches of functions.

While a model is captured its tensors are fake ones, without numbers. What forward keeps
for later (a mask, a rotary table) would then be such a tensor, and the model wrong from
there on, without a word.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.chance import is_generator
from autopar.capture.entries import (
    HOLDERS,
    enter,
    entries_of,
    is_users,
    leave_out,
    names_of,
    refill,
)

Cached = type(lru_cache(lambda: None))
NUMBERS = (bool, int, float, str)
LISTS = (list, deque)
MOST = 100_000  # members: what has more is data, and not looked at


@dataclass(frozen=True)
class Change:
    """An entry that is not what it was, see `entries_of`, or all members of another
    container (key None). where: `blocks.0.attn.cache`."""

    where: str
    container: Any
    key: Any
    before: Any
    after: Any

    @property
    def place(self) -> tuple[int, Any]:
        """Identity of the container, and the key in it."""
        return id(self.container), self.key

    def make(self, times: int = 1) -> Any:
        """Makes the change again, a number's so many times; returns the new value."""
        value = self.after
        kinds = {type(self.before), type(value)}
        if times > 1 and kinds <= {int, float}:
            value = self.before + times * (value - self.before)
        if self.key is None:
            refill(self.container, value)
        else:
            enter(self.container, self.key, value)
        return value


@dataclass
class Container:
    """The former members of a list or a set, or the entries of what has these. owner:
    the class of the object whose attributes a dict holds, which may have defaults."""

    where: str
    container: Any
    members: dict[Any, Any] | list[Any] | set[Any]
    owner: type | None = None

    def changes(self) -> list[Change]:
        """Returns members that were added, removed or replaced since."""
        if isinstance(self.members, dict):
            now = entries_of(self.container)
            return [
                Change(
                    f"{self.where}.{key}".lstrip("."),
                    self.container,
                    key,
                    self._before(key),
                    now.get(key),
                )
                for key in {**self.members, **now}
                if self.members.get(key, self) is not now.get(key, self)
                and not str(key).startswith("__")
            ]
        before, after = list(self.members), list(self.container)
        same = len(before) == len(after)
        same = same and all(a is b for a, b in zip(before, after, strict=True))
        return [] if same else [Change(self.where, self.container, None, before, after)]

    def _before(self, key: Any) -> Any:
        assert isinstance(self.members, dict), "others have no keys"
        if key in self.members or self.owner is None:
            return self.members.get(key)
        return getattr(self.owner, key, None)

    def put_back(self) -> None:
        if not isinstance(self.members, dict):
            refill(self.container, self.members)
            return
        now = entries_of(self.container)
        for key in [k for k in now if k not in self.members]:
            if not str(key).startswith("__"):
                leave_out(self.container, key)
        for key, value in self.members.items():
            if now.get(key, self) is not value:
                enter(self.container, key, value)


@dataclass
class AsFound:
    """All that is within reach of a model, as it was when this was made."""

    containers: list[Container] = field(default_factory=list)
    cached: list[tuple[Any, int]] = field(default_factory=list)
    tensors: list[tuple[Tensor, bool]] = field(default_factory=list)
    generators: dict[str, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    # By the id of an object's attributes, its class.
    owners: dict[int, type] = field(default_factory=dict)
    packages: set[str] | None = None  # of whose objects is looked at what they hold

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Any = None) -> AsFound:
        """loss_fn: a function that is called beside the model."""
        made = cls()
        made.visit("", model)
        types = {c for m in model.modules() for c in type(m).__mro__ if is_users(c)}
        files = {type_.__module__ for type_ in types}
        if loss_fn is not None:
            made.visit(getattr(loss_fn, "__qualname__", "loss_fn"), loss_fn)
            if is_users(loss_fn):
                files.add(loss_fn.__module__)
        # Beyond the model itself, what is the model's own code alone.
        made.packages = {name.partition(".")[0] for name in files}
        for type_ in sorted(types, key=lambda c: c.__qualname__):
            made.visit_class(type_)
        for name in sorted(files):
            if (file := sys.modules.get(name)) is not None:
                made.visit_file(file)
        return made

    def visit(self, where: str, thing: Any) -> None:
        """Notes the contents of a thing, and what these hold."""
        waiting = [(where, thing)]
        while waiting:
            where, thing = waiting.pop()
            if isinstance(thing, NUMBERS) or thing is None or id(thing) in self.seen:
                continue
            self.seen.add(id(thing))
            waiting += self._within(where, thing)

    def _within(self, where: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, (dict, *LISTS, set)) and len(thing) > MOST:
            return
        if isinstance(thing, Tensor):
            self.tensors.append((thing, thing.requires_grad))
        elif is_generator(thing):
            self.generators[where] = thing
        elif isinstance(thing, Cached):
            self.cached.append((thing, thing.cache_info().misses))
        elif isinstance(thing, dict):
            entries = entries_of(thing)
            owner = self.owners.get(id(thing))
            self.containers.append(Container(where, thing, entries, owner))
            for key, value in entries.items():
                yield f"{where}.{key}".lstrip("."), value
            yield from self._held_by(where, thing)
        elif isinstance(thing, (*LISTS, set)):
            members = set(thing) if isinstance(thing, set) else list(thing)
            self.containers.append(Container(where, thing, members))
            for i, value in enumerate(members):
                yield f"{where}.{i}", value
            yield from self._held_by(where, thing)
        elif isinstance(thing, tuple):
            for i, value in enumerate(thing):
                yield f"{where}.{i}", value
        elif isinstance(thing, FunctionType):
            if self._is_near(thing):
                yield where, vars(thing)
                yield from self._entries_in(where, thing)
                yield where, thing.__defaults__
                yield where, thing.__kwdefaults__
        elif isinstance(thing, MethodType):
            yield where, thing.__self__
            yield where, thing.__func__
        elif isinstance(thing, partial):
            yield f"{where}.func", thing.func
            yield f"{where}.args", thing.args
            yield f"{where}.keywords", thing.keywords
        elif isinstance(thing, nn.Module):
            self.owners[id(vars(thing))] = type(thing)
            yield where, vars(thing)
            for table in ("_parameters", "_buffers", "_modules"):
                yield where, vars(thing)[table]  # first, so that names are the model's
        elif not isinstance(thing, (type, ModuleType)):
            yield from self._held_by(where, thing)

    def _held_by(self, where: str, thing: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an object."""
        if isinstance(thing, HOLDERS) or self._is_near(type(thing)):
            held = getattr(thing, "__dict__", None)
            self.owners[id(held)] = type(thing)
            yield where, held
            if not isinstance(thing, dict):
                yield from self._entries_in(where, thing)

    def _entries_in(self, where: str, thing: Any) -> Iterator[tuple[str, Any]]:
        """The variables of a closure, or what an object has in slots."""
        if names_of(thing):
            entries = entries_of(thing)
            self.containers.append(Container(where, thing, entries))
            for name, value in entries.items():
                yield f"{where}.{name}".lstrip("."), value

    def _is_near(self, thing: Any) -> bool:
        """Whether it is looked into a function, or an object of a class."""
        package = str(thing.__module__).partition(".")[0]
        return is_users(thing) and (not self.packages or package in self.packages)

    def visit_class(self, type_: type) -> None:
        """Notes the attributes of a class, and what these hold."""
        entries = entries_of(type_)
        self.seen.add(id(type_))
        self.containers.append(Container(type_.__qualname__, type_, entries))
        for name, value in entries.items():
            where = f"{type_.__qualname__}.{name}"
            self.visit(where, getattr(value, "__func__", value))

    def visit_file(self, file: ModuleType) -> None:
        """Notes the globals of a file, and what they hold."""
        entries = {k: v for k, v in vars(file).items() if not k.startswith("__")}
        self.containers.append(Container(file.__name__, vars(file), entries))
        for name, value in entries.items():
            if not isinstance(value, type):
                self.visit(f"{file.__name__}.{name}", value)
            elif value.__module__ == file.__name__ and id(value) not in self.seen:
                self.visit_class(value)

    def changes(self) -> list[Change]:
        """The entries of containers that have changed."""
        return [
            change for container in self.containers for change in container.changes()
        ]

    def put_back(self) -> None:
        """Make everything what it was. A function's cache that has grown is emptied: it
        fills again."""
        for container in self.containers:
            if container.changes():
                container.put_back()
        for function, misses in self.cached:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for tensor, wants in self.tensors:
            if not tensor.is_leaf and not wants:
                tensor.detach_()  # what wants one was written to it
            elif tensor.requires_grad != wants:
                tensor.requires_grad_(wants)


def counters(changes: list[Change]) -> list[Change]:
    """The changes from a number to a number, or a text to a text."""
    return [
        c
        for c in changes
        if isinstance(c.before, NUMBERS) and isinstance(c.after, NUMBERS)
    ]


@contextmanager
def left_as_found(
    model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Iterator[AsFound]:
    """Puts back what forwards change."""
    as_found = AsFound.of(model, loss_fn)
    try:
        with buffers_kept(model):
            yield as_found
    finally:
        as_found.put_back()


@contextmanager
def buffers_kept(
    model: nn.Module, written: dict[str, Tensor] | None = None
) -> Iterator[None]:
    """Restores the buffers that forwards with numbers write to. written: gets what they
    wrote, by name."""
    before = [
        (module._buffers, name, f"{path}.{name}".lstrip("."), b, b._version, b.clone())
        for path, module in model.named_modules()
        for name, b in module._buffers.items()
        if b is not None and not b.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for table, name, path, b, version, value in before:
                if table[name] is b and b._version == version:
                    continue
                if written is not None and table[name] is not None:
                    written[path] = table[name].detach().clone()
                table[name] = b
                b.copy_(value)
