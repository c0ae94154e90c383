"""Parameters that a model stacks are one in a program, and each one to its user."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.rows.join_weights import enclosing, spanning
from autopar.passes.capture.trace import trace

COUNT = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.gain = nn.Parameter(torch.ones(WIDTH))


class Stacks(nn.Module):
    """add: of what its layers have, to x [batch, seq, embed], given weights for each
    token [batch, seq, 4]."""

    def __init__(self, add: Callable[[Stacks, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.gate = nn.Linear(WIDTH, COUNT)
        self.layers = nn.ModuleList(Layer() for _ in range(COUNT))
        self.add = add

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.add(self, x, self.gate(x).softmax(-1))
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())


def numbers(m: Stacks, x: Tensor, gate: Tensor) -> Tensor:
    scales = torch.stack([layer.scale for layer in m.layers])
    gains = torch.stack([layer.gain for layer in m.layers]).mean(0)
    for i, layer in enumerate(m.layers):
        x = x + layer.linear(x) * scales[i] * gains
    return x


def all_experts(m: Stacks, x: Tensor, gate: Tensor) -> Tensor:
    weights = torch.stack([layer.linear.weight for layer in m.layers])
    return torch.einsum("bsd,ekd,bse->bsk", x, weights, gate)


def looked_up(m: Stacks, x: Tensor, gate: Tensor) -> Tensor:
    weights = torch.stack([layer.linear.weight for layer in m.layers])
    share, chosen = gate.max(-1)
    y = torch.einsum("bsd,bskd->bsk", x, weights[chosen])
    return y * share[..., None]


JOINED = {
    numbers: {"layers[0:4].scale": (4,), "layers[0:4].gain": (4, WIDTH)},
    all_experts: {"layers[0:4].linear.weight": (4, WIDTH, WIDTH)},
    looked_up: {"layers[0:4].linear.weight": (4, WIDTH, WIDTH)},
}


def build(add: Callable[[Stacks, Tensor, Tensor], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Stacks(add)), token_batch(4, 8, ignored="none")).double()


@pytest.mark.parametrize("add", JOINED)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("ep=2", {}), ("tp=2", {}), ("dp=2", {"zero": 3}), ("dp=2", {"zero": 1})],
)
def test_loss_and_gradients_are_the_model_s(add, mesh, options) -> None:
    one = build(add)
    shapes = {v.name: v.shape for v in trace(one.model, one.batch).graph.params}
    assert shapes.items() >= JOINED[add].items()
    one.verify(mesh, 1, **options)


def test_what_is_read_elsewhere_too_stays_apart() -> None:
    def both(m: Stacks, x: Tensor, gate: Tensor) -> Tensor:
        return all_experts(m, x, gate) + m.layers[0].linear(x)

    def beside(m: Stacks, x: Tensor, gate: Tensor) -> Tensor:
        """Stacked along another dim too."""
        turned = torch.stack([layer.linear.weight for layer in m.layers], dim=1)
        return all_experts(m, x, gate) + torch.einsum("bsd,deh->bsh", x, turned)

    one, other, frozen = build(both), build(beside), build(all_experts)
    frozen.model.layers[1].linear.weight.requires_grad_(False)
    for case in (one, other, frozen):
        traced = trace(case.model, case.batch)
        told = any("are frozen then" in line for line in traced.remarks)
        assert not traced.joined and told is (case is frozen)
        case.verify("tp=2", 1)


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["e.0.w", "e.1.w", "e.2.w"], "e[0:3].w"),
        (["e.expert_0.w", "e.expert_1.w"], "e.expert_[0:2].w"),
        (["w0", "w1"], "w[0:2]"),
        (["e.1.w", "e.0.w"], None),
        (["e.0.w", "e.2.w"], None),
        (["a.w", "b.w"], None),
        (["e.0.w", "e.1.v"], None),
    ],
)
def test_names_span_numbers(names: list[str], joined: str | None) -> None:
    assert spanning(names) == joined


@pytest.mark.parametrize(
    ("paths", "around"),
    [
        (["l.0.e.0.w", "l.0.e.1.w"], "l.0.e[0:2].w"),
        (["l.0.e.a.w", "l.0.e.b.w"], "l.0.e"),
        (["l.0.e.w", "l.0"], "l.0"),
        (["a", "b"], ""),
    ],
)
def test_what_paths_are_all_in(paths: list[str], around: str) -> None:
    assert enclosing(paths) == around
