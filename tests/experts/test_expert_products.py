"""Weights that each row looks up, `w[chosen]`, times that row: in the letters of einsum
and as many matrices, they are held and split by experts, and are never copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import WIDTH, Stack, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize

EXPERTS, CHOSEN, HIDDEN = 4, 2, 24
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def letters(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    """w [e, n, k], x [t, k], chosen [t, 2] -> [t, 2, n], as of gpt-fast."""
    return torch.einsum("ti,taoi->tao", x, w[chosen])


def weights_first(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    """As of OpenAI's gpt_oss."""
    return torch.einsum("beck,bk->bec", w[chosen, ...], x)


def other_order(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("taoi,it->oat", w[chosen], x.T).permute(2, 1, 0)


def stored_turned(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    return torch.einsum("ti,taio->tao", x, w.mT[chosen])


def of_samples(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    x, chosen = x.unflatten(0, (2, -1)), chosen.unflatten(0, (2, -1))
    return torch.einsum("bsi,bsaoi->bsao", x, w[chosen]).flatten(0, 1)


def columns(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    return (w[chosen] @ x[:, None, :, None]).squeeze(-1)


def rows(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    return (x[:, None, None] @ w.mT[chosen]).squeeze(2)


def one_batch(w: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    copies = x.repeat_interleave(CHOSEN, 0)[..., None]
    return torch.bmm(w[chosen].flatten(0, 1), copies).view(*chosen.shape, -1)


PRODUCTS = (
    *(letters, weights_first, other_order, stored_turned),
    *(of_samples, columns, rows, one_batch),
)


class Mixture(nn.Module):
    """times: how rows meet the weights of their experts; back: how they do again, of
    y [t, 2, n]."""

    def __init__(self, times: Product) -> None:
        super().__init__()
        self.times = times
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(CHOSEN)
        y = F.silu(self.times(self.up, flat, chosen))
        y = torch.einsum("tao,taio->tai", y, self.down[chosen])
        return x + torch.einsum("tai,ta->ti", y, weight).view_as(x)


class Biased(Mixture):
    """With a bias of each expert, `b[chosen]`."""

    def __init__(self, times: Product) -> None:
        super().__init__(times)
        self.bias_up = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        self.bias_down = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(CHOSEN)
        y = F.silu(self.times(self.up, flat, chosen) + self.bias_up[chosen])
        y = torch.einsum("tao,taio->tai", y, self.down[chosen])
        y = self.bias_down[chosen] + y
        return x + torch.einsum("tai,ta->ti", y, weight).view_as(x)


class RowByRow(Biased):
    """A row for each expert that a token chose, through both products."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(CHOSEN)
        e, y = chosen.flatten(), flat.repeat_interleave(CHOSEN, 0)[..., None]
        y = F.silu(torch.bmm(self.up[e], y)[..., 0] + self.bias_up[e])
        y = torch.bmm(self.down[e], y[..., None]).squeeze(-1) + self.bias_down[e]
        return x + (y.unflatten(0, (-1, CHOSEN)) * weight[..., None]).sum(1).view_as(x)


class OfOthers(Biased):
    """Biases that are not of the experts whose weights a row meets."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).topk(CHOSEN).indices
        y = self.times(self.up, flat, chosen) + self.bias_up[chosen.flip(-1)]
        return x + (y @ self.down[0].T).mean(1).view_as(x)


class SumOfChosen(Mixture):
    """Their sum, and what each row would be with the experts of all: not one product
    for each row and expert, but the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).topk(CHOSEN).indices
        y = torch.einsum("ti,taoi->to", flat, self.up[chosen])
        z = torch.einsum("ti,saoi->tsao", flat, self.up[chosen[:3]])
        y = torch.einsum("to,taio->tai", y + z.mean((1, 2)), self.down[chosen])
        return x + y.mean(1).view_as(x)


def cross_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def case(*layers: nn.Module) -> Case:
    """A language model with these layers."""
    torch.manual_seed(0)
    made = iter(layers)
    model = Stack(lambda: next(made), len(layers))
    return Case(randomize(model), token_batch(4, 6), cross_entropy).double()


@pytest.mark.slow
def test_weights_of_experts_are_split_in_all_words() -> None:
    program = case(*map(Mixture, PRODUCTS)).proved("ep=2,tp=2")
    for number, product in enumerate(PRODUCTS):
        up, down = (f"blocks.{number}.{name}" for name in ("up", "down"))
        assert program.parameters[up].pattern == "experts/ep ffn/tp embed", product
        assert program.parameters[down].pattern == "experts/ep embed ffn/tp", product


def test_no_row_has_a_copy_of_its_weights() -> None:
    (text,) = set(case(Mixture(letters)).compile("ep=2").modules.values())
    assert "expert_linear" in text and "index(" not in text


@pytest.mark.parametrize("product", [letters, columns, one_batch])
def test_biases_of_experts_are_split_as_their_weights(product: Product) -> None:
    one = case(Biased(product))
    for mesh in ("ep=2", "dp=2,tp=2"):
        one.verify(mesh)
    (text,) = set(one.compile("ep=2").modules.values())
    assert "aten.index" not in text


def test_rows_stay_with_their_experts_for_the_bias() -> None:
    one = case(RowByRow(letters))
    one.verify("ep=2")
    (text,) = set(one.compile("ep=2").modules.values())
    forward, _, _ = text.partition("def backward(")
    assert forward.count("c.combine(") == 1, "they go home after both products"


def test_biases_of_other_experts_are_looked_up() -> None:
    one = case(OfOthers(letters))
    one.verify("ep=2")
    ops = [node.op for node in normalize(one.trace()).graph.nodes]
    assert ops.count("autopar.expert_linear") == 1


def test_products_of_more_than_a_row_and_its_expert_are_left_as_they_are() -> None:
    one = case(SumOfChosen(letters))
    one.verify("dp=2,tp=2")
    ops = [node.op for node in normalize(one.trace()).graph.nodes]
    assert ops.count("autopar.expert_linear") == 1, "only the last is of rows alone"
