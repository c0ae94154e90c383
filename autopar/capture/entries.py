"""Entries of what holds state: a dict, a class, a closure, an object with slots."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections import UserDict, UserList
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

# Of Python's own classes those whose objects hold what users put there.
HOLDERS = (SimpleNamespace, Namespace, UserDict, UserList, threading.local)
# Of these packages nothing is put back: they know what they keep.
OTHERS = frozenset({"torch", "numpy", "builtins", "autopar", "functools"})
UNASSIGNED = object()


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a dict, the variables of a closure, the attributes that a class
    has, but for Python's, or an object in slots."""
    if isinstance(container, dict):
        return dict(dict.items(container))  # a class of its own may do it otherwise
    if isinstance(container, FunctionType):
        contents = {k: _content(cell) for k, cell in _cells(container).items()}
        return {k: v for k, v in contents.items() if v is not UNASSIGNED}
    if isinstance(container, type):
        own = vars(container).items()
        return {name: value for name, value in own if not name.startswith("__")}
    slots = names_of(container)
    return {k: getattr(container, k) for k in slots if hasattr(container, k)}


def enter(container: Any, key: Any, value: Any) -> None:
    """Sets an entry."""
    if isinstance(container, dict):
        container[key] = value
    elif isinstance(container, FunctionType):
        _cells(container)[key].cell_contents = value
    elif isinstance(container, type):
        setattr(container, key, value)
    else:
        object.__setattr__(container, key, value)  # also where it is frozen


def leave_out(container: Any, key: Any) -> None:
    """Removes an entry."""
    if isinstance(container, dict):
        del container[key]
    elif isinstance(container, FunctionType):
        del _cells(container)[key].cell_contents
    elif isinstance(container, type):
        delattr(container, key)
    else:
        object.__delattr__(container, key)


def names_of(container: FunctionType | object) -> tuple[str, ...]:
    """Names of the variables of a closure, or of an object's slots."""
    if isinstance(container, FunctionType):
        return container.__code__.co_freevars
    return tuple(
        name
        for owner in type(container).__mro__
        if is_users(owner)
        for name, value in vars(owner).items()
        if isinstance(value, MemberDescriptorType) and not name.startswith("__")
    )


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(names_of(function), function.__closure__ or (), strict=True))


def refill(container: Any, members: Any) -> None:
    """Replaces the members of a list, a set, or a subclass of these."""
    container.clear()
    add = getattr(container, "extend", None) or container.update
    add(members)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return UNASSIGNED


def is_users(thing: Any) -> bool:
    """Whether a class or function is of the user's code, not of torch or Python."""
    return _of_users(str(getattr(thing, "__module__", None)))


def is_users_file(file: ModuleType) -> bool:
    """Whether a module of Python is of the user's code."""
    return _of_users(file.__name__)


def _of_users(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in OTHERS and package not in sys.stdlib_module_names
