"""A model with some of its layers taken out: what is left stands for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn

from autopar.capture.shorten import find_facts, without_index
from autopar.passes.capture.find_repeats import find_list, with_layers
from autopar.passes.layers import number_in
from autopar.passes.plan import Plan
from autopar.passes.program import Program
from autopar.passes.proof.shrink_plan import ChosenLayers, choose_layers

Result = TypeVar("Result")
PLAIN = bool | int | float | str
KEPT = 3  # repeats of a pattern that a stage keeps: the first, one inside, the last


def with_few_layers(
    model: nn.Module,
    program: Program,
    few: ChosenLayers,
    capture: Callable[[], Result],
    whole: Callable[[], Result],
) -> tuple[ChosenLayers, Result]:
    """What `capture` gives of a model with only a few layers, and these; what `whole`
    does of the model as it is, if none is left out, or if it does not run with few: a
    forward may count on how many there are."""
    layers = [*model.get_submodule(few.path).children()] if few.path else []
    if len(few.order) < len(layers):
        result = with_layers(model, few.path, few.order, capture)
        if result is not None:
            return few, result
        few = all_layers(program)
    return few, whole()


def find_chosen_layers(
    model: nn.Module, program: Program, kept: int = KEPT
) -> ChosenLayers:
    """Which layers and stages of a program are enough to prove it. kept: repeats of a
    pattern that a stage keeps, one more with ZeRO-3."""
    plan, whole = program.plan, all_layers(program)
    path = find_list(model, lambda layers: len(layers) > 1)
    if not path:
        return whole
    layers = model.get_submodule(path)
    numbers = [[number_in(path, m) for m in s.layers if m] for s in program.stages]
    if any(own and set(own) == {None} for own in numbers):
        return whole  # a stage of other layers alone
    begins = (next(iter(s.layers), "") for s in program.stages[1:])
    if any(first and number_in(path, first) is None for first in begins):
        return whole  # a stage begins with what comes before a layer
    by_stage = [sorted({n for n in own if n is not None}) for own in numbers]
    facts = without_index([find_facts(layer) for layer in layers.children()])
    kinds = [
        (sorted(facts[i].items(), key=str), _decided(plan, f"{path}.{i}"))
        for i in range(len(facts))
    ]
    few = choose_layers(path, kinds, by_stage, plan, kept + (plan.zero == 3))
    alike = all(
        [own[n] for n in few.order] == own[: len(few.order)]
        for own in _told_by_number(model, len(layers))
    )
    return few if alike else whole


def all_layers(program: Program) -> ChosenLayers:
    """None is left out."""
    return ChosenLayers("", tuple(range(len(program.stages))), ())


def _told_by_number(model: nn.Module, count: int) -> Iterator[list[object]]:
    """What a model, or its configuration, lists of each layer: it looks there by the
    number that a layer has when it runs. A list of all numbers tells nothing."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for own in getattr(holder, "__dict__", {}).values():
                if isinstance(own, list | tuple) and len(own) == count:
                    # Tensors, and all that may not be compared, are only themselves.
                    told: list[object] = [
                        x if isinstance(x, PLAIN) else id(x) for x in own
                    ]
                    if told != [*range(count)]:
                        yield told


def _decided(plan: Plan, layer: str) -> object:
    """The decisions of a plan on one layer, by its number."""
    tables = [plan.hints, plan.recompute_layers, *plan.op_shardings.values()]
    return [
        (key[len(layer) :], value)
        for table in tables
        for key, value in sorted(table.items())
        if key == layer or key.startswith((f"{layer}.", f"{layer}:"))
    ]
