"""Layers that do the same are captured once: torch.export reads a model with few of
them, and `repeat_layers` makes the graph of the whole one from that.

That they do the same is not guessed. The whole model runs once without data, and what
it calls, layer by layer, must be what it calls with few layers, some of it repeated
(`called`). Where it is not, or cannot be told, the model is captured as it is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from ..capture.called import Call, Calls
from ..capture.forward.guards import Reading
from ..errors import CaptureError
from ..layers import BEFORE, FIRST, Repeats, longest

RESULTS = 4  # from here on a call has the shapes and dtypes of its results
SPARED = 4  # layers that it must spare at least

Watch = Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Ran:
    """A forward without data. names, tensors: what a capture would have as outputs.
    others: how else it is to be read."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    others: tuple[Reading, ...]


Run = Callable[[bool, Watch, Reading], Ran]
PutBack = Callable[[], None]
LayerList: TypeAlias = nn.ModuleList | nn.Sequential
Narrowed = Callable[[], contextlib.AbstractContextManager[None]]
Result = TypeVar("Result")
COUNTS = re.compile("layer|block|depth", re.IGNORECASE)  # what says how many there are


def find_list(model: nn.Module, fits: Callable[[LayerList], bool]) -> str:
    """The path of the list of layers that holds most of the parameters, of those that
    fit; "" if there is none. Of a list with gaps (None) nobody knows the layers."""
    sizes = {
        path: sum(p.numel() for p in module.parameters())
        for path, module in model.named_modules()
        if isinstance(module, LayerList)
        and None not in module._modules.values()
        and fits(module)
    }
    return max(sizes, key=sizes.__getitem__, default="")


def with_layers(
    model: nn.Module,
    path: str,
    kept: Sequence[int],
    body: Callable[[], Result | None],
) -> Result | None:
    """What `body` gives while a list of layers has only these, see `ways_to_narrow`;
    None where it gives nothing then, or is refused."""
    for within in ways_to_narrow(model, path, kept):
        with contextlib.suppress(CaptureError):
            with within():
                result = body()
            if result is not None:
                return result
    return None


def ways_to_narrow(
    model: nn.Module, path: str, kept: Sequence[int]
) -> Iterator[Narrowed]:
    """Yields contexts in which a list of layers has only these. A forward may go
    through them by a number of its own (`range(self.n_layer)`): the second way is for
    where it does not run in the first."""
    yield partial(only_layers, model, path, kept)
    if _counts(model, path):
        yield partial(only_layers, model, path, kept, counted=True)


@contextlib.contextmanager
def only_layers(
    model: nn.Module, path: str, kept: Sequence[int], counted: bool = False
) -> Iterator[None]:
    """Cuts a list of layers down to those `kept`, numbered from 0, while it lasts.
    counted: cut the numbers of layers that the model holds as well."""
    layers = model.get_submodule(path)
    before = dict(layers._modules)
    every = list(before.values())
    counts = _counts(model, path) if counted else []
    try:
        layers._modules.clear()
        layers._modules.update({str(i): every[n] for i, n in enumerate(kept)})
        for table, name in counts:
            table[name] = len(kept)
        yield
    finally:
        for table, name in counts:
            table[name] = len(every)
        layers._modules.clear()
        layers._modules.update(before)


def _counts(model: nn.Module, path: str) -> list[tuple[dict[str, Any], str]]:
    """Finds the numbers of a model or its configuration that by name and value count
    the layers of a list: (table, key) of each."""
    total = len([*model.get_submodule(path).children()])
    tables = {
        id(table): table
        for module in model.modules()
        for holder in (vars(module), *vars(module).values())
        if isinstance(table := getattr(holder, "__dict__", holder), dict)
    }
    return [
        (table, name)
        for table in tables.values()
        for name, value in table.items()
        if type(value) is int and value == total and COUNTS.search(str(name))
    ]


def find_repeats(model: nn.Module, run: Run, put_back: PutBack) -> Repeats | None:
    """The repetition in what a forward calls; None if there is none.

    run: the model's forward without data, on the meta device or on fake tensors, within
    the context that it gets, which records the batch. put_back: undoes, after each,
    everything that it changed.
    """
    path = find_list(model, _may_repeat)
    if not path:
        return None
    for meta in (True, False):  # the one is faster, the other takes more models
        own = partial(run, meta)
        whole = _calls(model, path, own, put_back)
        if whole:
            break
    repeats = whole and longest(path, [tuple(layer) for layer in whole[FIRST:-1]])
    if not whole or not repeats or repeats.spared < SPARED:
        return None
    few = None
    for within in ways_to_narrow(model, path, repeats.kept):
        few = few or _calls(model, path, own, put_back, within)
    expected = [whole[BEFORE], *(whole[FIRST + n] for n in repeats.kept), whole[-1]]
    return repeats if few == expected else None


def layer_kinds(
    model: nn.Module, path: str, run: Run, put_back: PutBack
) -> list[Hashable] | None:
    """The calls of each layer of a list and their shapes, which determine its cost;
    None where they are not known. run, put_back: see `find_repeats`."""
    for meta in (True, False):
        if parts := _calls(model, path, partial(run, meta), put_back):
            return [
                tuple((call[0], *call[RESULTS:]) for call in part)
                for part in parts[FIRST:-1]
            ]
    return None


def _may_repeat(layers: LayerList) -> bool:
    """Whether a list is long enough, and has each layer once, by its number."""
    once = len(list(layers.children())) == len(layers) >= SPARED + 2
    return once and list(layers._modules) == [*map(str, range(len(layers)))]


def _calls(
    model: nn.Module,
    path: str,
    run: Callable[[Watch, Reading], Ran],
    put_back: PutBack,
    within: Narrowed = contextlib.nullcontext,
) -> list[list[Call]] | None:
    """What is called before, in each layer, and after the last, in all readings; None
    if the model does not run without data, or its layers not in turn. within: a
    context for each, which `put_back` may undo."""
    made: list[list[Call]] = []
    readings = [Reading.SOME]
    for reading in readings:
        calls = Calls(model, path)
        with within():
            try:
                ran = run(calls.layer_by_layer, reading)
                calls.parts[-1].append(calls.described(ran.names, ran.tensors))
            except Exception:
                return None  # who captures the model as it is will be told
            finally:
                put_back()
        readings += ran.others if reading == Reading.SOME else ()
        made = made or [[] for _ in calls.parts]
        for part, more in zip(made, calls.parts, strict=True):
            part += more
    return made
