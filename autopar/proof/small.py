"""A model and its plan made small: few layers, few ranks, small extents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.passes.capture.lower_precision import lower_precision
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.mesh import PIPELINE, TIME
from autopar.passes.ops.op import is_view
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import Plan
from autopar.passes.program import Program
from autopar.passes.proof.choose_sizes import (
    WHERE_POSSIBLE,
    NotShrunk,
    Order,
    choose_sizes,
)
from autopar.passes.proof.extents import Bound, Extent, Extents, Product, size_of
from autopar.passes.proof.find_extents import find_extents
from autopar.passes.proof.shrink import SMALL_NUMBER, Shrinker
from autopar.passes.proof.shrink_plan import (
    ChosenLayers,
    find_longest,
    find_splits,
    shrink_plan,
    small_sizes,
)
from autopar.passes.shard.cut_weights import cut_weights
from autopar.passes.shard.propagate import Sharded, propagate
from autopar.passes.traced import Traced
from autopar.proof.chosen_layers import all_layers, find_chosen_layers, with_few_layers
from autopar.proof.values import real_values

MESHES = 8  # that are looked at for small extents
MOST = 1e8  # parameters of what is small, times its ranks, of some 70 bytes each
VALUES = 2e9  # numbers that what is small makes, of 8 bytes each


@dataclass(frozen=True)
class Runnable:
    """A captured model, its program, and what its parameters and buffers are like: real
    values of their shapes, on the CPU, of those that are known. few: the layers that
    are left. sizes: extent, or number that positions are compared with -> small one;
    empty if all are as they were. positions: where dims are cut, and products
    that are split as one, large and small.
    factors: of each parameter what extents each dim is a product of, before it was made
    small."""

    traced: Traced
    program: Program
    like: Mapping[str, Tensor]
    few: ChosenLayers
    sizes: Mapping[Extent, int]
    positions: frozenset[tuple[int, int]] = frozenset()
    factors: Mapping[str, tuple[Product, ...]] = field(default_factory=dict)


def whole(program: Program, model: nn.Module, traced: Traced) -> Runnable:
    """The program at full size, to run."""
    like = {name: x.cpu() for name, x in real_values(model).items()}
    return Runnable(traced, program, like, all_layers(program), {})


def make_small(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    traced: Traced | None = None,
    few: ChosenLayers | None = None,
) -> Runnable:
    """Captures the model with few layers, shrinks it, and compiles its small plan.

    traced: the model with all of them, if that is captured. few: the layers, if they
    are chosen.

    Raises NotShrunk; AutoparError of the passes.
    """
    how = (program.plan.lowering, program.wanted, program.metric_names)

    def capture() -> tuple[Traced, Mapping[str, Tensor]]:
        return capture_model(model, batch, loss_fn, *how), real_values(model)

    def whole() -> tuple[Traced, Mapping[str, Tensor]]:
        return (traced, real_values(model)) if traced else capture()

    few = few or find_chosen_layers(model, program)
    few, (captured, like) = with_few_layers(model, program, few, capture, whole)
    plan = program.plan
    large = {TIME: plan.microbatches, **dict(plan.mesh.axes)}
    sharded = _propagated(
        captured, shrink_plan(plan, few, {**large, **_stages(plan, few)})
    )
    axes, shrinker, small = _shrink(plan, few, sharded, captured)
    extents, sizes = shrinker.extents, shrinker.sizes
    own = shrink_plan(plan, few, axes)
    made = compile_program(small, own, even=False)
    held = {v.name for v in (*small.graph.params, *small.graph.buffers)}
    with torch.no_grad():
        real = captured.stacked(like).items()
        less = {k: shrinker.tensor(k, x).cpu() for k, x in real if k in held}
        like = small.apart(less)
    factors = {v.name: extents.factors[v.name] for v in small.graph.params}
    positions = extents.positions(sizes) | {
        (size_of(product), prod(sizes[n] for n in product))
        for product in extents.products
    }
    sizes = {**{Extent(n): m for n, m in shrinker.compared.items()}, **sizes}
    return Runnable(small, made, like, few, sizes, positions, factors)


def _shrink(
    plan: Plan, few: ChosenLayers, sharded: Sharded, captured: Traced
) -> tuple[dict[str, int], Shrinker, Traced]:
    """(ranks of each axis, what made the graph small, the small one). Extents that an
    op has by its arguments, as a Fourier transform has, stay as they are. Raises
    NotShrunk."""
    of = sharded.named.dims, find_splits(sharded), plan.loss_chunks
    apart = find_extents(captured, *of)
    united, problem = apart.united, None
    for extents, orders in (
        (united, WHERE_POSSIBLE),
        (united, [Order.DIFFERENT]),
        (apart, [Order.DIFFERENT]),
        (apart, [Order.NONE]),
    ):
        try:
            return _shrink_by(orders, extents, plan, few, sharded, captured)
        except NotShrunk as error:
            problem = error
    assert problem is not None
    raise problem


def _shrink_by(
    orders: Sequence[Order],
    extents: Extents,
    plan: Plan,
    few: ChosenLayers,
    sharded: Sharded,
    captured: Traced,
) -> tuple[dict[str, int], Shrinker, Traced]:
    while True:
        longest = find_longest(sharded, extents)
        axes, sizes = _choose(plan, few, longest, extents, orders)
        shrinker = Shrinker(extents, sizes)
        try:
            small = shrinker.graph(captured)
        except NotShrunk as error:
            if not error.extents:
                raise
            # That they are one and the same may not have been seen.
            odd = {extent.size for extent in error.extents}
            alike = [n for n in extents.sizes if n.size in odd and not n.stays]
            one = len(alike) == len(odd)
            extents = extents.keep(error.extents) if one else extents.unite(alike)
            continue
        ranks = prod(n for axis, n in axes.items() if axis != TIME)
        held = sum(v.numel for v in small.graph.params) * ranks
        made = [v for n in small.graph.nodes if not is_view(n) for v in n.results]
        values = sum(v.numel for v in made)
        if held <= MOST and values <= VALUES:
            return axes, shrinker, small
        stay = [str(n) for n, m in sizes.items() if n.size == m > SMALL_NUMBER]
        why = ", as arguments of ops say some of its sizes: " if stay else ""
        raise NotShrunk(
            f"the small model is not small ({held:,} parameters on all ranks, "
            f"{values:,} numbers made){why}{', '.join(stay)}"
        )


def _choose(
    plan: Plan,
    few: ChosenLayers,
    longest: frozenset[Bound],
    extents: Extents,
    orders: Sequence[Order],
) -> tuple[dict[str, int], dict[Extent, int]]:
    """(ranks of each axis, small extents): on the fewest ranks for which there are
    some; with the longest dims still the longest, and windows less than what they are
    of, if there are. Raises NotShrunk."""
    problem = None
    split = [*extents.sizes, *extents.products.values()]
    meshes = [*islice(small_sizes(plan, few, split), MESHES)]
    windows = extents.most | extents.windows
    ways = dict.fromkeys((windows | longest, windows, extents.most))
    for most, axes in product(ways, meshes):
        large = {axis: plan.size(axis) for axis in axes}
        known = extents.sizes, extents.sums, large, axes, extents.products
        try:
            return axes, choose_sizes(*known, most, orders)
        except NotShrunk as error:
            problem = problem or error
    assert problem is not None, "there is a small mesh"
    raise problem


def _stages(plan: Plan, few: ChosenLayers) -> dict[str, int]:
    """The pipeline ranks that run the stages that are kept: {axis: size}."""
    return {PIPELINE: len(few.stages) // plan.stages_per_rank} if few.path else {}


def _propagated(traced: Traced, plan: Plan) -> Sharded:
    """How all that ranks have is split, and the pieces of weights."""
    lowered = lower_precision(traced, tables=bool(plan.parameter_axes))
    named = name_dims(normalize(lowered, plan.loss_chunks))
    return cut_weights(propagate(named, plan))
