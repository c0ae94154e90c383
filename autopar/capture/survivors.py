"""Fake tensors that are left when a capture is over, and who holds them.

A capture's own are gone or held by torch. Another one is kept by code that will take it
for a tensor with numbers later.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from autopar.capture.entries import is_users
from autopar.capture.left_as_found import Cached
from autopar.passes.errors import CaptureError

SHAPES = "torch.fx.experimental.symbolic_shapes"
CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType)
FAKE = "fake tensor"  # in errors of torch about one
STEPS = 5  # from a tensor to who holds it, through containers
FIX = (
    "let forward keep no tensors between calls: make what stays as it is in __init__, "
    "or call the model once before compile, so that it is there; return what is to be "
    "read after a step beside the loss, as {'loss': loss, 'name': value}"
)


@contextmanager
def only_new() -> Iterator[None]:
    """Lets the garbage collector look at new objects only."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def left_over() -> tuple[list[Any], set[int]]:
    """Fake tensors that more than captured graphs hold (their nodes, and torch's list
    of their inputs), and the ids of the dicts in which nodes do. Within `only_new`: of
    what was made since."""
    gc.collect()
    alive = gc.get_objects()
    metas = [x.meta for x in alive if type(x) is fx.Node]
    held: Counter[int] = Counter()
    for value in (v for meta in metas for v in meta.values()):
        held.update(map(id, value if isinstance(value, list | tuple) else (value,)))
    inputs = sys.modules[SHAPES].TrackedFake  # an export has imported it, with sympy
    held.update(id(x.fake) for x in alive if type(x) is inputs)
    probe = object()
    one, *tensors = [probe, *(x for x in alive if isinstance(x, FakeTensor))]
    del alive, probe
    counts = [(x, sys.getrefcount(x)) for x in (one, *tensors)]
    usual = counts[0][1]  # of something that only these lists hold
    left = [x for x, n in counts[1:] if n > usual + held[id(x)]]
    return left, set(map(id, metas))


def refuse_held(left: list[Any], graphs: set[int]) -> None:
    """Raises CaptureError that names who, if not torch, holds one of these tensors.

    graphs: the ids of dicts that do not count.
    """
    if left and (holder := _find_holder(left, graphs)) is not None:
        raise CaptureError(
            f"{holder} has kept a tensor that forward made while it was captured, "
            "which has no numbers in it",
            fix=FIX,
        )


def _find_holder(left: list[Any], graphs: set[int]) -> str | None:
    """Climb from tensors to what refers to them, through containers."""
    passed = {id(left)} | graphs
    climbing: list[Any] = list(left)
    for _ in range(STEPS):
        passed.add(id(climbing))
        referrers = gc.get_referrers(*climbing)
        passed.update(map(id, climbing))
        above: list[Any] = []
        for x in referrers:
            if id(x) in passed or isinstance(x, FrameType):
                continue
            if isinstance(x, Cached):
                x.cache_clear()
            elif (name := _name(x, climbing)) is not None:
                return name
            elif type(x) in CONTAINERS or isinstance(x, dict):
                above.append(x)
        passed.add(id(referrers))
        climbing = above
        if not climbing:
            break
    return None


def _name(x: Any, held: list[Any]) -> str | None:
    """The name of a holder of the user's; None for containers and others' objects."""
    if isinstance(x, FunctionType):
        return f"the function '{x.__qualname__}'" if is_users(x) else None
    if isinstance(x, dict) and "__spec__" in x and "__name__" in x:
        ids = {id(h) for h in held}
        names = [k for k, v in x.items() if id(v) in ids]
        file = type("", (), {"__module__": x["__name__"]})
        if not is_users(file) or not names:
            return None
        return f"the global '{names[0]}' of {x['__name__']}"
    if isinstance(x, type):
        return f"the class '{x.__qualname__}'" if is_users(x) else None
    if isinstance(x, (*CONTAINERS, ModuleType, BuiltinFunctionType)):
        return None
    is_ours = isinstance(x, FakeTensor | fx.Node) or not is_users(type(x))
    return None if is_ours else f"an object of the class '{type(x).__qualname__}'"
