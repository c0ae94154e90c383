"""Layers that do the same are captured once: torch.export reads a model with few of
them, and `repeat_layers` makes the graph of the whole one from that.

That they do the same is not guessed. The whole model runs once without data, and what
it calls, layer by layer, must be what it calls with few layers, some of it repeated
(`called`). Where it is not, or cannot be told, the model is captured as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from ..capture.called import Call, Calls
from ..capture.guards import Reading
from ..layers import BEFORE, FIRST, Repeats, longest

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


@contextlib.contextmanager
def only_layers(model: nn.Module, path: str, kept: Sequence[int]) -> Iterator[None]:
    """Within, a list of layers has only these, with numbers from 0 on; without a path
    the model has all."""
    if not path:
        yield
        return
    layers = model.get_submodule(path)
    before = dict(layers._modules)
    every = list(before.values())
    try:
        layers._modules.clear()
        layers._modules.update({str(i): every[n] for i, n in enumerate(kept)})
        yield
    finally:
        layers._modules.clear()
        layers._modules.update(before)


def find_repeats(model: nn.Module, run: Run, put_back: PutBack) -> Repeats | None:
    """What repeats in what a forward calls; None if nothing does.

    run: the model's forward without data, on the meta device or on fake tensors,
    within what it is given, which is told of the batch. put_back: after each,
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
    few = _calls(model, path, own, put_back, repeats.kept)
    expected = [whole[BEFORE], *(whole[FIRST + n] for n in repeats.kept), whole[-1]]
    return repeats if few == expected else None


def _may_repeat(layers: LayerList) -> bool:
    """Whether a list is long enough, and has each layer once, by its number."""
    once = len(list(layers.children())) == len(layers) >= SPARED + 2
    return once and list(layers._modules) == [*map(str, range(len(layers)))]


def _calls(
    model: nn.Module,
    path: str,
    run: Callable[[Watch, Reading], Ran],
    put_back: PutBack,
    kept: Sequence[int] | None = None,
) -> list[list[Call]] | None:
    """What is called before, in each layer, and after the last, in all readings; None
    if the model does not run without data, or its layers not in turn. kept: layers
    that it has, if not all."""
    made: list[list[Call]] = []
    readings = [Reading.SOME]
    for reading in readings:
        calls = Calls(model, path)
        with only_layers(model, path if kept else "", kept or ()):
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
