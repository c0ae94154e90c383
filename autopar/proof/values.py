"""Weights, buffers and batches that a model is proved on: drawn ones; if it makes
nothing of these, its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.passes.capture.rows.input_ranges import find_input_ranges
from autopar.passes.graph import Value
from autopar.passes.traced import Traced
from autopar.proof.draw_values import draw_batch, draw_parameters

STEPS = 2  # that a proof takes
DRAWS = 3  # of weights and batches, until the model gives finite numbers

ByName: TypeAlias = dict[str, Tensor]


def draw_values(
    traced: Traced,
    like: Mapping[str, Tensor],
    batch: Mapping[str, Any],
    number: int,
    own: bool = True,
) -> Iterator[tuple[ByName, ByName]]:
    """The model's weights and inputs, by name, on the CPU: drawn ones, of which the
    first have a sample without labels, and a query that sees nothing; then the batch's
    own, if `own` and it has all, and with these the model's weights.

    like: what weights are drawn like, see `draw_parameters`. number: even ones draw for
    one step, odd ones for the next, see `draw_batch`.
    """
    inputs = _specs(traced.graph.inputs)
    params = _specs(tuple(traced.parameters.values()))
    ranges = find_input_ranges(traced.graph)
    real = {
        name: x.cpu()
        for name, x in batch.items()
        if isinstance(x, Tensor) and not x.is_meta
    }
    for draw in range(DRAWS):
        chosen, gentle = number + STEPS * draw, bool(number % STEPS or draw)
        weights = draw_parameters(params, chosen, like)
        yield weights, draw_batch(inputs, ranges, chosen, real, gentle=gentle)
    if not own or not set(inputs) <= set(real):
        return
    yield weights, real
    if set(params) <= set(like):
        yield {name: like[name] for name in params}, real


def values_of_buffers(
    values: tuple[Value, ...], like: Mapping[str, Tensor], seed: int
) -> ByName:
    """Buffers as the model has them; those without values are drawn. Floats among these
    are positive, as decays, frequencies and variances are."""
    missing = {v.name: (v.shape, v.dtype) for v in values if v.name not in like}
    drawn = {
        name: x.abs() if x.is_floating_point() else x
        for name, x in draw_batch(missing, {}, seed).items()
    }
    return {v.name: like.get(v.name, drawn.get(v.name, torch.empty(0))) for v in values}


def real_values(model: nn.Module) -> ByName:
    """Parameters and buffers that have values, by name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x.detach() for name, x in named.items() if not x.is_meta}


def _specs(values: tuple[Value, ...]) -> dict[str, Any]:
    return {v.name: (v.shape, v.dtype) for v in values}
