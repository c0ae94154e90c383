"""Values that code of a model reads where they may be changed: attributes of modules,
entries of configurations, variables around a loss function, globals; and what modules
there are, in which mode.

A program is compiled with the values that they have. Which of them are read is seen
from the names in code, see `names_read`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Number
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.entries import HOLDERS, is_users, is_users_file
from autopar.capture.names_read import Names, Root
from autopar.passes.capture.forward.outside import sample
from autopar.passes.errors import AutoparError
from autopar.unlike_module import ANOTHER_STEP

PLAIN = (Number, str, bytes, Enum, torch.dtype, type(None))
ITSELF = object()
MOST = 1000  # members: what has more is data, and not looked at
MODE = "training"  # of a module
# What torch keeps on modules. The others are of Hugging Face's models, and tell what is
# kept, not what is computed.
NOT_READ = frozenset((*vars(nn.Module()), "gradient_checkpointing", "use_cache"))


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
        """Yields the paths of the values."""
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
                self._refuse(before, now)

    def _refuse(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """A step trains and `evaluate` evaluates, whatever mode the whole model is in;
        but modules that are in another one than it are part of what they compute."""
        model = self._model()
        is_turned = model is not None and model.training is not self._training
        for where in {**before, **now}:
            if is_turned and where.rpartition(".")[2] == MODE:
                continue
            was, is_now = before.get(where), now.get(where)
            grown = isinstance(was, Elements) is not isinstance(is_now, Elements)
            if was == is_now or grown:
                continue
            raise AutoparError(
                f"'{where}' was {was!r} when the step was compiled with it, and is "
                f"{is_now!r} now",
                fix="pass what changes from step to step in the batch, as a tensor; "
                f"or {ANOTHER_STEP}",
            )


def _alive(weak: Callable[[], Any]) -> Any:
    if (thing := weak()) is None:
        raise ReferenceError
    return thing


def _holder(thing: Any) -> Callable[[], Any]:
    """A function that returns a thing while it is alive."""
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
class Kind:
    """The class of a module."""

    of: type[nn.Module]

    def __repr__(self) -> str:
        return f"a {self.of.__name__}"


@dataclass(frozen=True)
class Place:
    """An attribute or a member, and the id of its former value. holder: returns its
    owner, None or ReferenceError if that is gone. name: ITSELF for the holder."""

    holder: Callable[[], Any]
    name: Any
    known: int

    def is_same(self) -> bool:
        """Whether the place still holds the object that was frozen."""
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
    """Reads values below a root by dotted paths. places: all those read last."""

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
            if isinstance(thing, nn.Module) and where:
                values[where] = Kind(type(thing))
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
        """Yields (name, value) of what a thing holds."""
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
        elif isinstance(thing, (nn.Module, *HOLDERS)) or is_users(type(thing)):
            held = getattr(thing, "__dict__", {})
            for name in self.attributes & held.keys():
                yield name, held[name]
            for name in self._of_class(type(thing)):
                if name not in held:
                    yield name, getattr(thing, name, None)
            if isinstance(thing, nn.Module):
                yield MODE, thing.training
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
