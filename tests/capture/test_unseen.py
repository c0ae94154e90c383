"""What a capture does not see: derivatives that are none, and hooks on gradients.

A program's gradients are the derivatives of what was captured of forward. So wherever
autograd would do something else, the program is right all the same, or the model is
refused with the name and the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError


class Square(torch.autograd.Function):
    """By hand, and right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * dy


class Gated(torch.autograd.Function):
    """Takes several operands, in the newer form; a result has no gradient."""

    @staticmethod
    def forward(x: Tensor, gate: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return scale * x * gate.sigmoid(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, gate, ctx.scale = inputs
        ctx.save_for_backward(x, gate)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gate = ctx.saved_tensors
        s = gate.sigmoid()
        return ctx.scale * dy * s, ctx.scale * dy * x * s * (1 - s), None


class Mapped(torch.autograd.Function):
    """A forward and a backward as they are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


class Binary(torch.autograd.Function):
    """A straight-through estimator as they are written; its backward writes in place,
    and what forward keeps outside of `save_for_backward` has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.gate = gate
        return x.sign() * gate, x.argmax(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        dx = dy * ctx.gate
        dx[x.abs() > 1] = 0
        return dx, 0.1 * dy * x.sign()


class Clipped(torch.autograd.Function):
    """Has the derivative of forward, but for large numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * (ctx.saved_tensors[0].abs() < 10)


class Logarithm(torch.autograd.Function):
    """Not a number for half of all numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.log()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy / x + 0 * x.sqrt()


class Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Penalty(torch.autograd.Function):
    """A loss of its own for y: what some mixtures balance their experts with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.wanted, ctx.shape = y.requires_grad, y.shape
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        return dy, dy.new_full(ctx.shape, 0.1) if ctx.wanted else None


class Noticed(torch.autograd.Function):
    """Gradients of its own beside those that it is given, for the same argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy + 0.1 * ctx.saved_tensors[0].sin()


class Without(torch.autograd.Function):
    """Turns gradients off within, where they are off anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Scan(torch.autograd.Function):
    """h[:, t] = a[:, t] h[:, t - 1] + x[:, t], in place of what it has read."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        product, h, step = a.clone(), x.clone(), 1
        while step < h.shape[1]:
            h[:, step:] += product[:, step:] * h[:, :-step]
            product[:, step:] *= product[:, :-step].clone()
            step *= 2
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (a, h), dh = ctx.saved_tensors, dy.clone()
        for t in range(h.shape[1] - 1, 0, -1):
            dh[:, t - 1] += a[:, t] * dh[:, t]
        da = torch.zeros_like(a)
        da[:, 1:] = dh[:, 1:] * h[:, :-1]
        return da, dh


def hooked(x: Tensor) -> Tensor:
    y = x.tanh()
    y.register_hook(lambda dy: 2 * dy)
    return y


def penalized(x: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x + dx


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return Square.apply(x.detach()) + x


def of_some_rows(x: Tensor) -> Tensor:
    """Without rows, y wants no gradient."""
    y, mask = torch.zeros_like(x), x.sum(-1) > 0
    if mask.any():
        y[mask] += x[mask].tanh()
    return Penalty.apply(y, x.sum((1, 2)))


def mapped(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return x - mean


# What stands between two layers: x [b, s, 32] -> the same.
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "square": Square.apply,
    "gated": lambda x: Gated.apply(x, x.flip(-1), 0.5)[0],
    "in place": Doubled.apply,
    "written over": lambda x: Scan.apply(x.sigmoid(), x),
    "of positives": lambda x: Logarithm.apply(x.exp()),
    "straight through": lambda x: Mapped.apply(x, torch.round, lambda dy: dy),
    "reversed": lambda x: Mapped.apply(x, lambda x: x.view_as(x), torch.neg),
    "scaled": lambda x: Mapped.apply(x, lambda x: x * 1, lambda dy: 0.1 * dy),
    "binary": lambda x: Binary.apply(x, x.flip(-1).tanh())[0],
    "clipped where numbers are large": lambda x: Clipped.apply(20 * x),
    "a loss of its own": lambda x: Penalty.apply(x, x.sum((1, 2))),
    "a loss of its own for what has no gradient": lambda x: Penalty.apply(x, x.data),
    "a loss of its own beside rows that may be none": of_some_rows,
    "a gradient of its own": Noticed.apply,
    "no gradient": lambda x: x + Mapped.apply(x, torch.tanh, lambda dy: None),
    "without gradient within": Without.apply,
    "of no gradient": without_gradient,
    "reentrant checkpoint": lambda x: checkpoint(F.gelu, x, use_reentrant=True),
    "checkpoint": lambda x: checkpoint(F.gelu, x, use_reentrant=False),
    "data": lambda x: x * x.data.sigmoid(),
}
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "clipped": lambda x: Mapped.apply(x, lambda x: x * 1, lambda dy: dy.clamp(-1, 1)),
    "clipped far off": lambda x: Mapped.apply(
        x, lambda x: x * 1, lambda dy: dy.clamp(-1e6, 1e6)
    ),
    "the sign of a gradient": lambda x: Mapped.apply(x, lambda x: x * 1, torch.sign),
    "no gradient within a vmap": torch.vmap(mapped),
    "a hook on a tensor": hooked,
    "a derivative": penalized,
}


class Between(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mid, self.what = nn.Linear(WIDTH, WIDTH), what

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = {**RIGHT, **WRONG, **FIXED}[self.what](self.mid(self.embed(input_ids)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Checkpointed(Between):
    """Within a checkpoint a module, dropout, and a function with a derivative of its
    own, which needs what the checkpoint keeps."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__("scaled")
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = checkpoint(self.within, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def within(self, x: Tensor) -> Tensor:
        x = Gated.apply(self.mid(x), x.sin(), 0.5)[0]
        return F.dropout(self.mid(x.exp()), 0.3) * x


# As the errors' fixes say it.
FIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "straight through, by operations": lambda x: x + (x.round() - x).detach(),
    "scaled, by operations": lambda x: 0.1 * x + (0.9 * x).detach(),
    "reversed, by operations": lambda x: -x + (2 * x).detach(),
}


def between(what: str) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Between(what)), token_batch(seq=4, ignored="none")).double()


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("what", [*RIGHT, *FIXED])
def test_what_has_the_derivative_of_its_forward_is_part_of_the_graph(what):
    between(what).verify("dp=2", 2)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("what", WRONG)
def test_what_has_another_gradient_is_refused_with_its_line(what):
    with pytest.raises(CaptureError, match=r"\n  at   test_unseen\.py:\d+\n  fix  "):
        between(what).trace()


def test_a_function_that_cannot_be_tried_is_refused():
    def strict(x: Tensor) -> Tensor:
        if x.shape != (8, 4, WIDTH) or x.dtype is torch.float64:
            raise ValueError("of another kind")
        return x * 1

    case = between("square")
    WRONG["strict"] = lambda x: Mapped.apply(x, strict, lambda dy: dy)
    case.model.what = "strict"
    try:
        with pytest.raises(
            CaptureError, match=r"could not be tried .* of another kind"
        ):
            trace(case.model.float(), case.batch)
    finally:
        del WRONG["strict"]


HOOKS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "parameter": (
        r"parameter 'mid\.weight'",
        lambda m: m.mid.weight.register_hook(torch.neg),
    ),
    "accumulated": (
        r"parameter 'mid\.weight'",
        lambda m: m.mid.weight.register_post_accumulate_grad_hook(print),
    ),
    "backward": (
        r"module 'mid' \(Linear\)",
        lambda m: m.mid.register_full_backward_hook(print),
    ),
    "before backward": (
        r"module 'mid' \(Linear\)",
        lambda m: m.mid.register_full_backward_pre_hook(print),
    ),
    "everywhere": (
        r"all modules",
        lambda m: nn.modules.module.register_module_full_backward_hook(print),
    ),
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("where", HOOKS)
def test_hooks_on_gradients_are_refused_by_name(where):
    says, register = HOOKS[where]
    case = between("square")
    handle = register(case.model)
    try:
        with pytest.raises(CaptureError, match=rf"{says}.*\n  fix  remove it"):
            trace(case.model, case.batch)
    finally:
        handle.remove()
    trace(case.model, case.batch)


def test_hooks_on_forwards_are_part_of_the_graph():
    case = between("data")
    case.model.mid.register_forward_hook(lambda module, given, out: out * 3)
    case.model.head.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    traced = trace(case.model, case.batch)
    assert {"aten.mul.Tensor", "aten.add.Tensor"} <= {n.op for n in traced.graph.nodes}


def test_an_object_that_is_no_tensor_is_refused_with_its_line():
    def drawn(x: Tensor) -> Tensor:
        noise = torch.zeros(3).normal_(generator=torch.Generator().manual_seed(0))
        return x + noise.sum()

    WRONG["drawn"] = drawn
    try:
        with pytest.raises(
            CaptureError, match=r"(?i)generator.*\n  at .*test_unseen\.py:"
        ):
            trace(between("drawn").model, between("drawn").batch)
    finally:
        del WRONG["drawn"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_what_they_run(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = randomize(Checkpointed(reentrant))
    case = Case(model, token_batch(seq=4, ignored="none")).double()
    case.verify("pp=1,tp=2", 2)
