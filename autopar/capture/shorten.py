"""A model with few of its layers: all that is needed to know what each costs.

GPTs are lists of equal blocks, or of a short pattern of them (local and global
attention in turn, experts in every other). What the planner needs of a hundred of them
it learns from three.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from itertools import product
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor, nn

from autopar.passes.capture.find_repeats import LayerList, find_list, with_layers
from autopar.passes.layers import Layers

Result = TypeVar("Result")
Kinds = Sequence[Hashable] | None
Function = BuiltinFunctionType | FunctionType
COUNT = 0, 1  # layers are numbered from here on
NUMBERED = object()
KEPT = 3  # repeats of the pattern: the first, one inside, and the last


def of_few_layers(
    model: nn.Module,
    body: Callable[[Layers], Result | None],
    kinds: Callable[[str], Kinds] = lambda path: None,
) -> tuple[Layers | None, Result | None]:
    """What `body` gives while the model has only `KEPT` repeats of its layers, and
    these; the model itself is as before afterwards. (None, None) if it has no list of
    layers that repeats as often, or does not run with few. kinds: see `find_layers`."""
    layers = find_layers(model, kinds)
    if layers is None:
        return None, None
    few = range(layers.kept)
    result = with_layers(model, layers.path, few, lambda: body(layers))
    return (None if result is None else layers), result


def find_layers(
    model: nn.Module, kinds: Callable[[str], Kinds] = lambda path: None
) -> Layers | None:
    """The list of modules with most of the parameters, if its pattern repeats.

    kinds: by path of a list, what each layer does when the model runs, where known:
    attributes do not tell that forward does more in some layers.
    """
    path = find_list(model, lambda layers: _pattern("", layers) is not None)
    modules = model.get_submodule(path)
    if not isinstance(modules, LayerList):
        return None
    layers = _pattern(path, modules)
    if layers is not None and layers.kept < layers.total and (own := kinds(path)):
        return _pattern(path, modules, own)
    return layers


def _pattern(path: str, modules: LayerList, kinds: Kinds = None) -> Layers | None:
    """The pattern that repeats over all of the layers but a few before it: twice, or
    as often as is kept, and then in part. Of several the one of which fewest are kept.
    """
    total = len(modules)
    if not total or len({*map(id, modules)}) < total:
        return None  # layers that run several times are priced as they are
    facts = without_index([find_facts(layer) for layer in modules])
    alike = _numbers([frozenset(own.items()) for own in facts])
    done = _numbers(kinds or ())
    best: Layers | None = None
    for before, period in product(range(total // 2), range(1, total // 2 + 1)):
        times, rest = divmod(total - before, period)
        kept = min(before + KEPT * period + rest, total)
        if times < (KEPT if before or rest else 2) or (best and kept >= best.kept):
            continue
        # The first run is priced by itself; what comes after layers is not known of the
        # last one.
        inside = done[before + period : -1]
        if _repeats(alike[before:], period) and _repeats(inside, period):
            best = Layers(path, total, period, kept, before)
            if kept <= KEPT:
                break
    return best


def _numbers(layers: Sequence[Hashable]) -> list[int]:
    """The numbers of kinds of layers: equal layers have equal numbers."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(layer, len(known)) for layer in layers]


def _repeats(layers: Sequence[int], period: int) -> bool:
    return layers[period:] == layers[: max(0, len(layers) - period)]


Facts = dict[tuple[str, str], object]  # (module path, attribute) -> value

# What nn.Module itself keeps: hooks, and tables of what is looked at one by one.
OF_MODULES = frozenset(vars(nn.Module()))
SINGLE = bool | int | float | complex | str | Function | Enum | torch.dtype | type(None)


def find_facts(module: nn.Module) -> Facts:
    """What a module computes by: classes, sizes and plain attributes, functions among
    them, and lists, sets, tables and dataclasses of these."""
    facts: Facts = {}
    for path, part in module.named_modules():
        facts[path, "class"] = type(part)
        for name, value in vars(part).items():
            if name == "training" or name not in OF_MODULES:
                with suppress(TypeError, RecursionError):  # or lists within themselves
                    facts[path, name] = _plain(value)
        for name, x in (*part._parameters.items(), *part._buffers.items()):
            if isinstance(x, Tensor):
                facts[path, name] = (tuple(x.shape), x.dtype, x.requires_grad)
    return facts


def _plain(value: object) -> Hashable:
    """A hashable form of a plain value. Raises TypeError for others."""
    if isinstance(value, SINGLE):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_plain, value))
    if isinstance(value, dict):
        return tuple((_plain(k), _plain(v)) for k, v in value.items())
    if is_dataclass(value) or isinstance(value, SimpleNamespace):
        return type(value), _plain(vars(value))
    raise TypeError(f"a {type(value).__name__}")


def without_index(layers: list[Facts]) -> list[Facts]:
    """An attribute that is the layer's own number, from 0 or 1 on, or a name that has
    it, in each that has one and in two at least, makes no difference. A flag is no
    number, though `False == 0`."""
    values: dict[tuple[str, str], list[tuple[int, object]]] = defaultdict(list)
    for i, facts in enumerate(layers):
        for key, value in facts.items():
            values[key].append((i, value))

    def are_numbers(own: list[tuple[int, object]]) -> bool:
        plain = ({_unnumbered(x, i + first) for i, x in own} for first in COUNT)
        return len({x for _, x in own}) > 1 and min(map(len, plain)) == 1

    index = {key for key, own in values.items() if are_numbers(own)}
    return [{k: v for k, v in facts.items() if k not in index} for facts in layers]


def _unnumbered(x: object, number: int) -> object:
    """x with a layer's number in it replaced; x itself, if it has none."""
    if type(x) is int and x == number:
        return NUMBERED
    if isinstance(x, str):
        return re.sub(rf"(?<!\d){number}(?!\d)", "#", x)
    return x
