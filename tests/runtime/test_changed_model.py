"""A model that is changed after it was compiled is told of: its parameters, buffers and
hooks, of which a step has what there was."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import batch_of, small_model
from processes import RankFailed, run_ranks
from test_updates import plain_model
from torch import Tensor, nn

import autopar
from autopar.passes.errors import AutoparError
from autopar.runtime.parameters.model_buffers import ModelBuffers
from autopar.step import Step


class Pruned(nn.Module):
    """A linear layer with a mask, and a buffer that forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.GELU()
        self.register_buffer("mask", torch.ones(4, 4))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.linear.weight * self.mask, self.linear.bias)
        return self.act(y).square().mean()


X = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}


def pruned() -> tuple[Pruned, Step]:
    torch.manual_seed(0)
    model = Pruned()
    return model, autopar.compile(model, "", example_inputs=X)


def test_a_model_that_is_changed_after_compiling_is_told_of() -> None:
    model = plain_model()
    step = autopar.compile(model, "", example_inputs=batch_of(0))
    other = small_model()
    for p in other.parameters():
        p.data.mul_(0.5)
    model.load_state_dict(other.state_dict())
    with pytest.raises(AutoparError, match=r"step\.load_state_dict\(model\.state_dict"):
        step(**batch_of(0))
    step.load_state_dict(model.state_dict())
    model.get_parameter("norm.weight").requires_grad_(False)
    with pytest.raises(AutoparError, match=r"requires_grad of the model's 'norm\."):
        step(**batch_of(0))
    dict(step.named_parameters())["norm.weight"].requires_grad_(False)
    for p in model.parameters():
        p.data = p.data.clone()  # as when it is moved to another device
    want = model(**batch_of(0))[1].item()
    assert step(**batch_of(0)).item() == pytest.approx(want, rel=1e-5)
    with torch.no_grad():  # from now on it may be trained beside
        model.get_parameter("norm.bias").add_(1.0)
    step(**batch_of(0))


def test_a_model_that_is_changed_while_a_step_trains_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by what normalises its weights after each update. That it is given what was
    trained, to sample with, is no change."""
    model, batch = plain_model(), batch_of(0)
    step = autopar.compile(model, "", example_inputs=batch)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for i in range(10):
        step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        if i < 2 or i % 3 == 0:  # now and then, as to evaluate it
            model.load_state_dict(step.state_dict())
    assert "copy of its own" not in caplog.text
    for _ in range(3):
        model.get_parameter("norm.weight").detach().mul_(0.5)
        step(**batch)
    told = [r for r in caplog.records if "copy of its own" in r.getMessage()]
    assert len(told) == 1
    assert "the model's 'norm.weight' was changed after" in told[0].getMessage()


def replace(model: Pruned) -> None:
    model.mask = model.mask * 0.5


def another_layer(model: Pruned) -> None:
    model.linear = nn.Linear(4, 4)


CHANGES: list[tuple[Callable[[Pruned], Any], str]] = [
    (replace, "the model's 'mask' was changed"),
    (another_layer, r"the model's 'linear\.\w+' was changed"),
    (
        lambda m: m.act.register_forward_hook(print),
        "put on the module 'act' after",
    ),
    (lambda m: m.register_forward_pre_hook(print), "put on the model after"),
    (
        lambda m: m.linear.weight.register_hook(torch.neg),
        r"'linear\.weight' has a hook on its gradient",
    ),
    (
        lambda m: m.act.register_full_backward_hook(print),
        r"'act' \(GELU\) has a hook on its backward",
    ),
]


@pytest.mark.matrix(quick=5)
@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_before_the_first_step_a_change_is_refused(change, says) -> None:
    model, step = pruned()
    change(model)
    with pytest.raises(AutoparError, match=says):
        step(**X)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_later_a_change_is_told_of(change, says, caplog) -> None:
    model, step = pruned()
    step(**X)
    change(model)
    for _ in range(3):
        step(**X)
    texts = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    [told] = [text for text in texts if "goes on as it was compiled" in text]
    assert re.search(says, told)


def test_what_is_advised_gives_a_step_a_buffer() -> None:
    model, step = pruned()
    step(**X)
    model.mask = model.mask * 0.5
    step.load_state_dict({**step.state_dict(), "mask": model.mask})
    assert step(**X).item() == pytest.approx(model(**X).item())


def test_a_step_has_the_buffers_of_the_model() -> None:
    """What is written to them, as when weights are pruned step by step, counts."""
    model, step = pruned()
    for i in range(3):
        model.mask[i] = 0
        assert step(**X).item() == pytest.approx(model(**X).item())
    assert torch.equal(step.state_dict()["mask"], model.mask)


def test_buffers_on_two_devices_are_kept_alike() -> None:
    """Here by a copy on the same one."""
    model, _ = pruned()
    held = {"mask": model.mask.clone(), "seen": model.seen}
    both = ModelBuffers(model, held)
    model.mask[0] = 0
    both.read()
    assert torch.equal(held["mask"], model.mask)
    held["mask"][1] = 2
    both.write()
    assert torch.equal(model.mask[:2, 0], torch.tensor([0.0, 2.0]))
    model.mask[2] = 3
    both.write()  # what a loop writes is not lost, if a step wrote nothing
    both.read()
    assert torch.equal(held["mask"][:3, 0], torch.tensor([0.0, 2.0, 3.0]))
    del model  # while the step goes on
    both.read()


def test_buffers_are_written_to_alike_on_all_ranks() -> None:
    with pytest.raises(RankFailed, match="the buffer 'mask' is not the same on"):
        run_ranks(write_by_rank, 2, seconds=100)


def write_by_rank() -> None:
    torch.manual_seed(0)
    model = Pruned()
    step = autopar.compile(model, "dp=2", example_inputs=X)
    step(**X)
    model.mask[torch.distributed.get_rank()] = 0
    step(**X)


def test_a_buffer_that_forward_does_not_read_may_change(caplog) -> None:
    model, step = pruned()
    step(**X)
    model.seen += 1
    step(**X)
    assert "changed" not in caplog.text


MODULES: list[tuple[Callable[[Pruned], Any], str]] = [
    (lambda m: setattr(m, "act", nn.ReLU()), "'act' was a GELU .* is a ReLU now"),
    (lambda m: setattr(m, "act", nn.Identity()), "is a Identity now"),
    (lambda m: m.act.eval(), r"'act\.training' was True .* and is False now"),
]


@pytest.mark.parametrize(("change", "says"), MODULES)
def test_a_module_that_computes_otherwise_is_refused(change, says) -> None:
    model, step = pruned()
    step(**X)
    step(**X)
    model.eval()  # as a whole it may be in any mode
    step(**X)
    model.train()
    change(model)
    with pytest.raises(AutoparError, match=says):
        step(**X)


class Sparse(Pruned):
    """With a sparse table that sampling alone may read, as Whisper's heads."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.heads.to_dense() if self.read else x)


def test_a_sparse_buffer_is_no_matter_where_forward_does_not_read_it() -> None:
    model = Sparse(read=False)
    step = autopar.compile(model, "", example_inputs=X)
    torch.testing.assert_close(step(**X), model(**X))
    with pytest.raises(AutoparError, match="forward reads 'heads', which is a sparse"):
        autopar.compile(Sparse(read=True), "", example_inputs=X)


class Confined(nn.Module):
    """Confines its weights, when it trains, to what they begin within, as Gemma 3n."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.proj.weight.data.clamp_(-0.5, 0.5)
        return (self.proj(x) - 3 * x[:, :4]).square().mean()


def test_weights_that_forward_confines_are_confined_after_an_update() -> None:
    torch.manual_seed(0)
    model, batch = Confined(), {"x": torch.randn(6, 5)}
    with pytest.raises(AutoparError, match=r"'clamp_' changes .*(?s:.*)model\.eval"):
        autopar.compile(model, "", example_inputs=batch)
    step = autopar.compile(copy.deepcopy(model).eval(), "", example_inputs=batch)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (step, model))
    for _ in range(3):
        want = model(**batch)
        theirs.zero_grad()
        want.backward()
        assert step(**batch).item() == pytest.approx(want.item(), rel=1e-5)
        theirs.step()
        ours.step()
        ours.zero_grad()
        with torch.no_grad():
            dict(step.named_parameters())["proj.weight"].clamp_(-0.5, 0.5)
    assert model.proj.weight.abs().max() > 0.5  # as the last update left it
