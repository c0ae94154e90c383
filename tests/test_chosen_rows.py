"""Rows that the data choose, in the words of public mixtures of experts and losses:
what is computed with all rows is what their own are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError

EXPERTS, CHOSEN = 3, 2


class Experts(nn.Module):
    """add: what experts add to x [rows, 32], given the experts that rows chose, and
    their weights [rows, 2]."""

    def __init__(self, add: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.SiLU()).append(
                nn.Linear(48, WIDTH)
            )
            for _ in range(EXPERTS)
        )
        self.add, self.name = add, add.__name__

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, chosen = self.router(rows).topk(CHOSEN)
        return x + self.add(self, rows, weight.softmax(-1), chosen).view_as(x)


def in_place(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = (chosen[..., None] == torch.arange(EXPERTS)).permute(2, 0, 1)
    for mask, expert in zip(masks, m.experts, strict=True):
        row, place = torch.where(mask)
        y[row] += weight[row, place, None] * expert(x[row])
    return y


def one_hot(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    masks = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        place, row = torch.where(masks[e])
        mine = expert(x[None, row].reshape(-1, WIDTH)) * weight[row, place, None]
        y.index_add_(0, row, mine)
    return y


def copies(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, flat = x.repeat_interleave(CHOSEN, 0), chosen.flatten()
    y = torch.empty_like(x)
    for e, expert in enumerate(m.experts):
        y[flat == e] = expert(x[flat == e])
    return (y.view(*weight.shape, -1) * weight[..., None]).sum(1)


def of_samples(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, y = x.unflatten(0, (4, -1)), torch.zeros_like(x).unflatten(0, (4, -1))
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1).unflatten(0, (4, -1))
        share = (weight * (chosen == e)).sum(-1).unflatten(0, (4, -1))
        y[mask] += expert(x[mask]) * share[mask][:, None]
    return y


def scattered(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row = (chosen == e).any(-1).nonzero().squeeze(-1)
        share = (weight * (chosen == e)).sum(-1).index_select(0, row)
        mine = expert(x.index_select(0, row)) * share[:, None]
        y = y.scatter_add(0, row[:, None].expand(-1, WIDTH), mine)
    return y


def of_one_mask(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A mask that is written to is another one."""
    y, mask = torch.zeros_like(x), chosen[:, 0] == 0
    y[mask] += m.experts[0](x[mask])
    mask |= chosen[:, 1] == 1
    y[mask] += m.experts[1](x[mask])
    return y


def several(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Of one row several elements may be chosen."""
    row, place = torch.where(chosen > 0)
    return torch.zeros_like(x).index_add(0, row, x[row] * weight[row, place, None])


def if_any(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += expert(x[mask]) * (weight * (chosen == e)).sum(-1)[mask][:, None]
    return y


def if_not_none(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        if not (mask := chosen == e).any():
            continue
        row = mask.any(-1).nonzero(as_tuple=False).squeeze(-1)
        if row.numel() == 0:
            continue
        place = mask[row].int().argmax(-1, keepdim=True)
        share = weight.index_select(0, row).gather(-1, place)
        y.index_add_(0, row, expert(x.index_select(0, row)) * share)
    return y


def if_counted(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = x
    for e, expert in enumerate(m.experts):
        if (chosen == e).sum() > 0:
            y = y + expert(x) * (weight * (chosen == e)).sum(-1, keepdim=True)
    return y


def if_in(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number in torch.unique(chosen.flatten()):
        e = int(number.item())
        row, place = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, place, None]
    return y


def if_in_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e, count in enumerate(counts):
        if count == 0:
            continue
        row, place = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, place, None]
    return y


# Whether there are rows, of a mask and of their places.
WORDS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda mask, rows: mask.any().item(),
    lambda mask, rows: mask.sum().item() > 0,
    lambda mask, rows: int(mask.sum()) > 0,
    lambda mask, rows: not mask.sum().eq(0),
    lambda mask, rows: not ~mask.any(),
    lambda mask, rows: torch.count_nonzero(mask) > 0,
    lambda mask, rows: mask.max(),
    lambda mask, rows: len(rows),
    lambda mask, rows: rows.shape[0] != 0,
    lambda mask, rows: rows.size(0) >= 1,
]


def in_words(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for asks in WORDS:
        mask = (chosen == 1).any(-1)
        rows = torch.argwhere(mask)[:, 0]
        if asks(mask, rows):
            y.index_copy_(0, rows, m.experts[1](x[rows]) + y[rows])
    return y


def of_two(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """One row is not the same as several."""
    x = x.clone()
    mask = chosen[:, 0] == 1
    if len(x[mask]) > 1:
        x[mask] = 2 * x[mask]
    return x


def of_length(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    rows = x[chosen[:, 0] == 1]
    return x + rows.sum(0) / (len(rows) + 1)


def else_nothing(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """So that all parameters have gradients, if they are 0."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = chosen == e
        if mask.any():
            row = mask.any(-1).nonzero().flatten()
            y.index_add_(0, row, expert(x[row]) * weight[mask].view(-1, 1))
        else:
            y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return y


def by_masks(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask, new = (chosen == e).any(-1), torch.zeros_like(x)
        if mask.any():
            new[mask] = expert(x[mask])
            new = y.clone() + new
            y = y.masked_scatter(mask[:, None], new[mask])
    return y


def different(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    return x / len(torch.unique(chosen))


def of_each(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for number in chosen.unique():
        x = x + number
    return x


def moved(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    chosen += 1
    for number in chosen.unique():
        x = x + (chosen == number).any(-1, keepdim=True) * m.experts[int(number) - 1](x)
    return x


def split(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    return torch.cat([rows for rows in x.repeat(CHOSEN, 1).split(counts)])[: len(x)]


def weighed(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for e, amount in enumerate(torch.bincount(chosen.flatten(), weight.flatten())):
        x = x + amount * m.experts[e](x)
    return x


def themselves(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[mask] += m.experts[0](x[mask])
    return x


def more(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[mask] += m.experts[0](x[mask])
    return x + 1e-3


def others(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x[~mask] += m.experts[0](x[~mask])
    return x


def summed(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return x + x[mask].mean(0)


def guarded(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What is done if there are rows is more than to change these."""

    def add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        x, mask = x.clone(), chosen[:, 0] == 1
        return change(m, x, mask) if mask.any() else x

    return add


def if_first(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, mask = x.clone(), chosen[:, 0] == 1
    return themselves(m, x, mask) if mask[0] else x


def if_positive(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    total = x.sum()
    return x + total if total > 0 else x


def never_chosen(minlength: int) -> Callable[..., Tensor]:
    """The last expert is never chosen, and counts are no longer than asked for."""

    def add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        chosen = (m.router(x) - 99 * torch.arange(EXPERTS)).topk(CHOSEN).indices
        counts = torch.bincount(chosen.flatten(), minlength=minlength)
        return x + counts.to(x.dtype).mean()

    return add


def if_in_short_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    for e, count in enumerate(torch.bincount(chosen.flatten()).tolist()):
        if count:
            x = x + m.experts[e](x) * (chosen == e).any(-1, keepdim=True)
    return x


class Chosen(nn.Module):
    """Layers of experts, and a loss over chosen tokens."""

    def __init__(
        self, loss: Callable[..., Tensor], *adds: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Experts(add) for add in adds)
        self.loss, self.name = loss, loss.__name__

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(x), labels)


def of_all(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[labels > 9], labels[labels > 9])


def looked_up(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels of tokens that were not chosen are no places of a table."""
    labels = torch.where(labels > 9, labels, -100)
    chosen = labels != -100
    own = logits.log_softmax(-1)[chosen].gather(-1, labels[chosen][:, None])
    return -own.mean()


def after_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    """The last row has none after it."""
    rows, last = logits.flatten(0, 1), labels.numel() - 1
    mask = (labels.flatten() > 9) & (torch.arange(last + 1) < last)
    place = mask.nonzero().squeeze(-1)
    return rows[place + 1].square().mean() + of_all(logits, labels)


def in_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses of chosen rows, each a mean or divided by how many there are."""
    mask = labels > 9
    x, y = logits[mask], labels[mask]
    first, wanted = x[:, 0], (y % 2).to(x.dtype)
    return (
        F.mse_loss(first, wanted)
        + F.binary_cross_entropy_with_logits(first, wanted)
        + F.kl_div(x.log_softmax(-1), x.detach().softmax(-1) / 2, reduction="batchmean")
        + F.cross_entropy(x, y, reduction="none").mean()
        + F.normalize(x, dim=-1).sum() / x.shape[0]
        + x.std(-1).sum() / x.numel()
        + x.logsumexp(-1).square().mean()
    )


def of_all_rows(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.flatten() > 9
    places = torch.arange(labels.numel(), dtype=torch.int32)[chosen]
    thirds = torch.arange(labels.numel(), dtype=logits.dtype)[chosen] / 3
    x = logits.flatten(0, 1)[chosen]
    return x.norm() + x.max() + (x[:, 0] * places / thirds.add(1)).sum()


def mean_of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.mT, labels, reduction="none")
    return (
        each.masked_select(labels > 9).mean() + logits[labels > 9].square().sum() / 1000
    )


def of_zeros(logits: Tensor, labels: Tensor) -> Tensor:
    """Derivatives at rows that were not chosen are infinite, or no numbers."""
    mask = labels > 9
    x = (logits * mask[..., None])[mask]
    size = x.square().sum(-1)
    losses = size.sqrt(), size.rsqrt(), x.abs() ** 0.5, x.square().log() / size[:, None]
    return torch.stack([loss.mean() for loss in losses]).sum()


def of_gaps(logits: Tensor, labels: Tensor) -> Tensor:
    """What is wanted of rows that were not chosen is no number."""
    wanted = torch.where(labels > 9, labels.to(logits.dtype), torch.nan)
    mask = ~wanted.isnan()
    return (logits[mask].mean(-1) - wanted[mask]).square().mean()


def of_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels of tokens that were not chosen are no classes, and divide nothing."""
    labels = torch.where(labels > 9, labels, -100)
    mask = labels != -100
    own = F.one_hot(labels[mask], VOCAB) * logits[mask]
    return own.mean() + (own.sum(-1) * (100 // (labels + 100)[mask])).mean()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale)[x > 0].mean()


def case(loss: Callable[..., Tensor], *adds: Callable[..., Tensor]) -> Case:
    torch.manual_seed(0)
    model = randomize(Chosen(loss, *adds))
    return Case(model, token_batch(4, 8, ignored="none")).double()


ADDS = (in_place, one_hot, copies, of_samples, scattered, of_one_mask)

GUARDED = (if_any, else_nothing, by_masks, if_not_none, if_counted, if_in, if_in_counts)


def test_experts_in_all_words_are_proved() -> None:
    program = case(of_all, *ADDS).proved("dp=2,tp=2")
    assert "test_chosen_rows.py" in program.remarks[0]
    assert program.parameters["layers.0.experts.0.1.weight"].pattern == "ffn/tp embed"


def test_of_one_row_several_may_be_chosen() -> None:
    case(of_all, several).verify("dp=2", 1)


@pytest.mark.parametrize("loss", [of_zeros, of_gaps, of_numbers])
def test_rows_that_were_not_chosen_are_in_no_gradient(loss: Any) -> None:
    case(loss).verify("dp=2", 2)


def test_a_mean_in_half_precision_is_of_as_many_as_there_are() -> None:
    x = torch.rand(4, 20_000, dtype=torch.float16) + 0.5
    Case(Scaled(), {"x": x}).verify("dp=2", 2)


@pytest.mark.parametrize("loss", [of_chosen, mean_of_chosen, looked_up, in_losses])
def test_a_loss_over_chosen_tokens_is_that_of_all_microbatches(loss: Any) -> None:
    case(loss).verify("dp=2", 2)


def test_the_largest_number_and_the_norm_are_those_of_chosen_rows() -> None:
    case(of_all_rows).verify("tp=2", 1)


def test_a_row_beside_one_that_was_not_chosen_may_be_none() -> None:
    case(after_chosen).verify("dp=2", 1)


def test_whether_there_are_rows_may_be_asked() -> None:
    case(of_all, *GUARDED[:4]).verify("dp=2", 1)


def test_it_may_be_asked_in_all_words() -> None:
    case(of_all, in_words).verify("tp=1", 1)


@pytest.mark.parametrize("change", [more, others, summed])
def test_what_is_done_if_there_are_rows_is_to_them_alone(change: Any) -> None:
    one = case(of_all, guarded(themselves))
    trace(one.model, one.batch)
    one = case(of_all, guarded(change))
    with pytest.raises(CaptureError, match=r"by if, while or bool\(\)(?s:.*)\n  fix "):
        trace(one.model, one.batch)


@pytest.mark.parametrize("add", [if_first, if_positive])
def test_one_number_that_is_0_or_less_says_nothing_of_others(add: Any) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match=r"by if, while or bool\(\)(?s:.*)\n  fix "):
        trace(one.model, one.batch)


def test_counts_are_as_many_as_torch_gives() -> None:
    case(of_all, if_in_short_counts, never_chosen(EXPERTS)).verify("dp=2", 1)
    one = case(of_all, never_chosen(0))
    with pytest.raises(CaptureError, match=f"fix  .*minlength={EXPERTS}"):
        trace(one.model, one.batch)


@pytest.mark.parametrize(
    "add", [different, of_each, moved, split, weighed, of_two, of_length]
)
def test_what_else_depends_on_how_many_were_chosen_is_refused(add: Any) -> None:
    one = case(of_all, add)
    with pytest.raises(CaptureError, match=r"depends on the values|by \.item"):
        trace(one.model, one.batch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "add", (*ADDS[:-1], *GUARDED, in_words)
)  # torch cannot run the last
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "cp=2", "dp=2"])
def test_experts(add: Callable[..., Tensor], mesh: str) -> None:
    case(of_all, add, add).verify(mesh, 2)
