"""Which optimizers update element by element is known of each, or found out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.parameters.by_element import (
    KNOWN,
    Reach,
    Undecided,
    exchanges,
    reach_of,
)


class Scaled(torch.optim.Optimizer):
    """Steps as long as the parameter is, as LARS and LAMB take."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = float(p.norm() / p.grad.norm())
                    p.add_(p.grad, alpha=-group["lr"] * ratio)


class Averaged(torch.optim.Optimizer):
    """Keeps what it needs beside torch's own attributes."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.means: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.means.setdefault(p, torch.zeros_like(p))
                    p.sub_(mean.lerp_(p.grad, 0.1), alpha=group["lr"])


class Outer(torch.optim.Optimizer):
    """Hands on to another one, as those that look ahead do."""

    def __init__(self, params: Iterable[Tensor], kind: Any = torch.optim.AdamW) -> None:
        params = list(params)
        super().__init__(params, {"lr": 1e-3})
        self.inner = kind(params)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        self.inner.step()


class Locked(Averaged):
    """Cannot be copied."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.made_by = (i for i in range(1))


class Clipped(torch.optim.Optimizer):
    """Clips a parameter's gradient where it is larger than those before, as those do
    that clip updates by their root mean square."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    norm, state = p.grad.norm(), self.state[p]
                    most = state.setdefault("most", norm)
                    p.sub_(p.grad * (most / norm).clamp(max=1), alpha=group["lr"])
                    most.lerp_(norm, 0.01)


class Later(Scaled):
    """Looks at whole parameters after steps by element."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.made, self.start_after = 0, 25

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.made += 1
        if self.made > self.start_after:
            return super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class Adapted(torch.optim.Optimizer):
    """Finds its own rate by how far all parameters went along their gradients, of which
    `lr` is a factor, as D-Adaptation does."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-4})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            rate, along, size = group["d"] * group["lr"], 0.0, 0.0
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sums", torch.zeros_like(p))
                    along += rate * float((sums * p.grad).sum())
                    sums.add_(p.grad, alpha=rate)
                    size += float(sums.abs().sum())
                    p.sub_(p.grad.sign(), alpha=rate)
            group["along"] = along / size
            group["d"] = max(group["d"], along / size)


def derived(kind: Any) -> Any:
    """A class that is not in the table, and so is tried."""
    return type(kind.__name__, (kind,), {})


TRIED = {
    "Scaled": (Scaled, Reach.PARAMETER),
    "Averaged": (Averaged, Reach.ELEMENT),
    "Outer": (Outer, Reach.ELEMENT),
    "Outer of Scaled": (lambda ps: Outer(ps, Scaled), Reach.PARAMETER),
    "Clipped": (Clipped, Reach.PARAMETER),
    "Later": (Later, Reach.PARAMETER),
    "Adapted": (Adapted, Reach.MODEL),
    "Adapted slowly": (lambda ps: Adapted(ps, lr=1e-7), Reach.MODEL),
    "Adafactor": (derived(torch.optim.Adafactor), Reach.PARAMETER),
    "AdamW": (derived(torch.optim.AdamW), Reach.ELEMENT),
}


@pytest.mark.parametrize("name", TRIED)
def test_an_optimizer_is_tried_and_left_as_it_is(name: str) -> None:
    make, reach = TRIED[name]
    ps = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))]
    before = [p.detach().clone() for p in ps]
    optimizer = make(ps)
    # A schedule wraps `step`, and begins with a rate of 0.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: float(i))
    drawn = torch.random.get_rng_state()
    assert reach_of(optimizer, ps) is reach
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert not optimizer.state and all(p.grad is None for p in ps)
    assert all(map(torch.equal, ps, before))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KNOWN, key=str))
def test_what_is_known_is_what_trying_finds(kind: Any) -> None:
    if kind is torch.optim.SparseAdam:
        return  # takes sparse gradients only
    options = {"max_iter": 2} if kind is torch.optim.LBFGS else {}
    ps = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))]
    optimizer = derived(kind)(ps[:1] if kind is torch.optim.Muon else ps, **options)
    assert reach_of(optimizer, ps) is KNOWN[kind]


def test_one_that_cannot_be_tried_may_be_declared() -> None:
    ps = [nn.Parameter(torch.randn(6, 4))]
    with pytest.raises(Undecided, match="generator"):
        reach_of(Locked(ps), ps)
    try:
        autopar.by_element(Locked)
        assert reach_of(Locked(ps), ps) is Reach.ELEMENT
    finally:
        del KNOWN[Locked]


class Sharing(Averaged):
    """Averages gradients over ranks before, as one for data parallel ranks does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step()


class Failing(Sharing):
    """Moves tensors first, and then needs what the backend does not have."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        raise RuntimeError("Work::getFuture not implemented")


def test_one_that_moves_tensors_between_ranks_is_told() -> None:
    ps = [nn.Parameter(torch.randn(6, 4))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = [exchanges(make(ps), ps) for make in (Averaged, Sharing)]
        assert found == [False, True]
        assert exchanges(Failing(ps), ps)
        with pytest.raises(Undecided, match="getFuture"):
            reach_of(Failing(ps), ps)
        assert reach_of(Sharing(ps), ps) is Reach.ELEMENT
    finally:
        dist.destroy_process_group()


@torch.compile(fullgraph=True)
def update_compiled(p: Tensor, grad: Tensor, lr: Tensor) -> None:
    p.sub_(grad.sign() * lr)


class Compiled(torch.optim.Optimizer):
    """Compiles its update by a decorator, as fused kernels are written."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.rate = torch.tensor(0.0)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            self.rate.fill_(group["lr"])
            for p in group["params"]:
                if p.grad is not None:
                    update_compiled(p, p.grad, self.rate)


def test_an_update_that_is_compiled_is_tried_as_it_is_written() -> None:
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = Compiled([p])
    assert not exchanges(optimizer, [p])
    assert reach_of(optimizer, [p]) is Reach.ELEMENT
