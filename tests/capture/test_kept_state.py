"""What one forward keeps in Python and the next one computes with is refused: a step
begins each time as the first forward did. What is the same in each step, or not read,
is no state."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.passes.errors import CaptureError

VOCAB, WIDTH, SEQ = 16, 8, 4
Mix = Callable[["Keeping", Tensor], Tensor]


class Keeping(nn.Module):
    """mix: x [batch, seq, width] -> as large, with what is kept."""

    last: Tensor | None = None
    calls = 0

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList()
        self.head = nn.Linear(WIDTH, VOCAB)
        self.kept: Tensor | None = None
        self.memory = torch.zeros(2, SEQ, WIDTH)
        self.count = torch.zeros(())
        self.several: list[Tensor] = []
        self.numbers = itertools.count()
        self.by_name: dict[str, Tensor | tuple[Tensor, int]] = {}

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.mix(self, self.embed(ids))
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def before(self: Keeping, x: Tensor) -> Tensor:
    y = x if self.kept is None else x + self.kept
    self.kept = x.detach()
    return y


def recurrent_memory(self: Keeping, x: Tensor) -> Tensor:
    y = x + self.memory.mean(1, keepdim=True)
    self.memory = y.detach()
    return y


def grows(self: Keeping, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * self.count


def by_length(self: Keeping, x: Tensor) -> Tensor:
    self.several.append(x.detach().mean())
    return x * len(self.several)


def moving_average(self: Keeping, x: Tensor) -> Tensor:
    old, n = self.by_name.get("mean", (torch.zeros(WIDTH), 0))
    mean = old + 0.1 * (x.detach().mean((0, 1)) - old)
    self.by_name["mean"] = (mean, n)
    return x - mean


def on_its_class(self: Keeping, x: Tensor) -> Tensor:
    y = x if Keeping.last is None else x + Keeping.last
    Keeping.last = x.detach()
    return y


def counts_on_its_class(self: Keeping, x: Tensor) -> Tensor:
    Keeping.calls += 1
    return x * Keeping.calls


STATES = (
    before, recurrent_memory, grows, by_length, moving_average, on_its_class,
    counts_on_its_class,
)  # fmt: skip


@pytest.mark.parametrize("layers", [0, 9])  # of which few are captured
@pytest.mark.parametrize("mix", STATES)
def test_state_is_refused_by_name(mix: Mix, layers: int) -> None:
    model, batch = made(mix)
    model.layers.extend(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
    with pytest.raises(CaptureError, match=r"computes .*with it .*next"):
        capture_model(model, batch)
    assert model.kept is Keeping.last is None and Keeping.calls == 0
    assert not (model.several or model.by_name or model.count)


def table(self: Keeping, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = torch.linspace(0.5, 1.5, SEQ)[:, None].cos()
    self.kept = self.kept.to(x.device)
    return x * self.kept


def written_table(self: Keeping, x: Tensor) -> Tensor:
    if self.kept is None:
        self.kept = torch.zeros(SEQ, SEQ)
        self.kept[:, 0] = 1
        self.kept[1:, 1:].fill_(0.5)
    return self.kept @ x


def piece_of_table(self: Keeping, x: Tensor) -> Tensor:
    if "table" not in self.by_name:
        both = torch.arange(2.0 * SEQ).chunk(2)
        self.by_name["table"] = both[0][:, None]
    return x * self.by_name["table"]


def balance(self: Keeping, x: Tensor) -> Tensor:
    self.by_name.clear()
    self.by_name["balance"] = x.square().mean()
    return x + self.by_name["balance"]


def listed(self: Keeping, x: Tensor) -> Tensor:
    self.several.append(x.detach().norm())
    return x


def last(self: Keeping, x: Tensor) -> Tensor:
    if self.kept is not None and self.kept.shape != x.shape:
        raise ValueError
    self.kept = x.detach()
    return x + self.kept


@pytest.mark.parametrize(
    "mix", [table, written_table, piece_of_table, balance, listed, last]
)
def test_what_is_the_same_each_time_is_no_state(mix: Mix) -> None:
    capture_model(*made(mix))


def fails_with_it(self: Keeping, x: Tensor) -> Tensor:
    if self.kept is not None:
        raise ValueError("no more")
    self.kept = x.detach()
    return x


def fails_with_a_constant(self: Keeping, x: Tensor) -> Tensor:
    if self.several:
        raise ValueError("no more")
    self.several.append(torch.ones(()))
    return x


def fails_later(self: Keeping, x: Tensor) -> Tensor:
    self.kept = x.detach()
    if next(self.numbers):
        raise ValueError("no more")
    return x


def counts_and_fails_later(self: Keeping, x: Tensor) -> Tensor:
    Keeping.calls += 1
    return fails_later(self, x)


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        (fails_with_it, "forward keeps 'kept' and computes"),
        (fails_with_a_constant, "forward keeps 'several' and computes"),
        (fails_later, "ValueError: no more"),
        (counts_and_fails_later, "ValueError: no more"),
    ],
)
def test_an_error_is_of_what_is_kept_where_it_needs_that(mix: Mix, told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture_model(*made(mix))


def with_a_function(self: Keeping, x: Tensor) -> Tensor:
    """As Hugging Face's models note that their hooks are there."""
    if "ready" not in vars(self):
        self.ready, self.turn = True, torch.tanh
    return self.turn(x)


def test_what_is_kept_with_a_function_is_not_made_again_without_it() -> None:
    capture_model(*made(with_a_function))


def test_a_cache_that_lasts_is_not_written_to_by_what_is_trained() -> None:
    def cached(self: Keeping, x: Tensor) -> Tensor:
        self.memory[:] = x
        return self.memory

    model, batch = made(cached)
    with pytest.raises(CaptureError, match="lasts from step to step"):
        capture_model(model, batch)
    assert not model.memory.requires_grad


def made(mix: Mix) -> tuple[Keeping, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {name: torch.randint(VOCAB, (2, SEQ)) for name in ("ids", "labels")}
    return Keeping(mix), batch
