"""Weights that a model computes of others: low ranks, roundings, parametrizations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import plain_gpt
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class LowRank(nn.Module):
    """As a layer around one, or as what its weight is computed by."""

    def __init__(self, layer: nn.Linear, around: bool) -> None:
        super().__init__()
        if around:
            self.layer = layer.requires_grad_(False)
        sizes = (layer.out_features, 4), (4, layer.in_features)
        self.up, self.down = (
            nn.Parameter(torch.randn(size, dtype=layer.weight.dtype) / 10)
            for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "layer"):
            return self.layer(x) + 2 * (x @ self.down.T @ self.up.T)
        return x.detach() + 2 * self.up @ self.down


class Ternary(nn.Module):
    """Rounds, and lets the gradient through."""

    def forward(self, w: Tensor) -> Tensor:
        scale = w.abs().mean()
        return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


class Scaled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / w.detach().abs().amax(1, keepdim=True)


COMPUTED: list[Callable[[nn.Linear], nn.Module]] = [
    lambda layer: LowRank(layer, around=True),
    lambda layer: parametrize.register_parametrization(
        layer, "weight", LowRank(layer, around=False)
    ),
    lambda layer: parametrize.register_parametrization(layer, "weight", Ternary()),
    lambda layer: parametrize.register_parametrization(layer, "weight", Scaled()),
    parametrizations.weight_norm,
    lambda layer: parametrizations.weight_norm(layer, dim=1),
    lambda layer: parametrizations.spectral_norm(layer).eval(),
    lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2"])
def test_weights_that_are_computed_of_others(mesh: str) -> None:
    case = plain_gpt(layers=2).double()
    layers = [
        (parent, name, layer)
        for path, parent in case.model.named_modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and path
    ]
    assert len(layers) == len(COMPUTED)
    for (parent, name, layer), compute in zip(layers, COMPUTED, strict=True):
        setattr(parent, name, compute(layer))
    case.verify(mesh, 2)
