"""The examples that ops are declared with, at several sizes."""

import functools
import random
from collections.abc import Callable

import torch
from graphs import bools, ints, node, x

from autopar.passes.dims.probe import letter_extents
from autopar.passes.graph import Node
from autopar.passes.ops.notation import Equation
from autopar.passes.ops.op import Op

SEEDS = range(3)
Example = Callable[[int, int, int, int], Node]  # of extents a < b < c < d


def declared(op: Op) -> list[Example]:
    """The examples of an op's declaration."""

    def example(text: str) -> Example:
        form, _, arguments = text.partition("(")
        name = f"{op.name}.{form}" if form else op.name
        names = {"x": x, "ints": ints, "bools": bools, "torch": torch}
        call = eval(f"lambda make, a, b, c, d: make({arguments}", names)
        return lambda *sizes: call(functools.partial(node, name), *sizes)

    return [example(text.strip()) for text in op.examples.split(";") if text]


def draws(example: Example) -> list[Node]:
    """The example at several sizes."""
    found = []
    for seed in SEEDS:
        sizes = sorted(random.Random(seed).sample(range(2, 8), 4))
        found.append(example(*sizes))
    return found


def splittable(one: Node, rule: Equation) -> list[str]:
    extents = letter_extents(one, rule)
    return [a for a in rule.roles if extents.get(a, 1) > 1]
