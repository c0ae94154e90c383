"""Small losses that ask, drawn at random: where they are captured, loss and gradients
of the graph are the model's, whatever the answers are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from interpret import interpret, sources_of
from models_that_ask import Loss, batches, case_of, smooth, total
from torch import Tensor, nn

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.traced import Traced

Term = Callable[[Tensor, Tensor, Tensor], Tensor]
MASKS: tuple[Term, ...] = (
    lambda x, y, m: m,
    lambda x, y, m: ~m,
    lambda x, y, m: m & (y > 3),
    lambda x, y, m: y > 8,
    lambda x, y, m: x.argmax(-1) == y,
)
QUESTIONS: tuple[Term, ...] = (
    lambda x, y, m: m.any(),
    lambda x, y, m: m.sum().item() > 0,
    lambda x, y, m: m.sum() > 2,
    lambda x, y, m: not m.any(),
    lambda x, y, m: len(x[m]) > 0,
    lambda x, y, m: x[m].numel() == 0,
    lambda x, y, m: x.mean() > 0,
    lambda x, y, m: (x * m[..., None]).norm() > 0,
    lambda x, y, m: torch.isnan(x[m].mean()),
)
TERMS: tuple[Term, ...] = (
    lambda x, y, m: x[m].square().mean(),
    lambda x, y, m: F.cross_entropy(x[m], y[m]),
    lambda x, y, m: total(x, y, m) / m.sum(),
    lambda x, y, m: total(x, y, m) / max(m.sum().item(), 1),
    lambda x, y, m: x.sum() * 0,
    lambda x, y, m: torch.tensor(0.0, dtype=x.dtype),
    lambda x, y, m: (x.square().sum(-1) * m).sum().sqrt(),
    lambda x, y, m: ((x.square().sum(-1) * m).sum() / m.sum()).log(),
    lambda x, y, m: 1 / (x.abs() * m[..., None]).sum(),
    lambda x, y, m: (x * m[..., None]).norm(),
    lambda x, y, m: m.sum().rsqrt() * x.mean(),
    lambda x, y, m: x[m].softmax(-1).amax(-1).mean(),
    lambda x, y, m: smooth(x),
)
USES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda base, v: base + v,
    lambda base, v: v,
    lambda base, v: base * (1 + v),
    lambda base, v: torch.where(v > 0, base, v),
)
BASES: tuple[Term, ...] = (lambda x, y, m: smooth(x), total)


def draw(chance: random.Random) -> Loss:
    """One or two questions about masks; one within the other, or behind it."""
    first, second = (
        [chance.choice(of) for of in (MASKS, QUESTIONS, MASKS, TERMS, TERMS, USES)]
        for _ in range(2)
    )
    base, depth = chance.choice(BASES), chance.choice((0, 0, 1, 2))

    def loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        value = base(x, y, mask)
        for n, part in enumerate((first, second)[: 1 + bool(depth)]):
            of, asks, among, yes, no, use = part
            if asks(x, y, of(x, y, mask)):
                value = use(value, yes(x, y, among(x, y, mask)))
            elif n or depth == 1:
                value = use(value, no(x, y, among(x, y, mask)))
            else:
                return value * 2
        return value

    return loss


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    params = [*model.parameters()]
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in params]
    return [*torch.autograd.grad(loss, params, materialize_grads=True)]


def as_captured(
    traced: Traced, model: nn.Module, batch: Mapping[str, Tensor]
) -> Tensor:
    values = interpret(traced.graph, sources_of(traced, model, batch))
    return values[traced.graph.outputs[0].name]


@pytest.mark.matrix(quick=8, daily=24)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_captured_of_a_drawn_loss_is_it_under_all_answers(seed: int) -> None:
    model, example, _ = case_of(draw(random.Random(seed)))
    try:
        traced = trace(model, example)
    except CaptureError:
        return
    for batch in batches():
        wanted = model(**batch)
        if not torch.isfinite(wanted):  # nor is a gradient of it
            continue
        loss = as_captured(traced, model, batch)
        torch.testing.assert_close(loss, wanted)
        grads, own = gradients(model, loss), gradients(model, wanted)
        torch.testing.assert_close(grads, own, equal_nan=True)
