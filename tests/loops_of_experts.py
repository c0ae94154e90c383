"""Loops over experts, as people write them: of a layer m, its tokens x [rows, width],
and for each the numbers of some experts and their weights [rows, chosen]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def by_column(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (chosen == e).nonzero()
        row, place = rows[:, 0], rows[:, 1]
        y[row] += expert(x[row]) * weight[row, place].unsqueeze(-1)
    return y


def of_scores(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """With the scores of all experts, of which that of its number is picked."""
    y, scores = torch.zeros_like(x), m.router(x).softmax(-1)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += expert(x[mask]) * scores[mask, e].unsqueeze(1)
    return y


def of_one(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each token has one expert."""
    share, route = m.router(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        y[route == e] = expert(x[route == e])
    return y * share[:, None]


def of_samples_and_places(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    x, weight, chosen = (t.unflatten(0, (4, -1)) for t in (x, weight, chosen))
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        sample, token, place = torch.where(chosen == e)
        mine = expert(x[sample, token]) * weight[sample, token, place, None]
        y.index_put_((sample, token), mine, accumulate=True)
    return y.flatten(0, 1)


def of_products(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Weights that are turned, in products with a bias."""
    y = torch.zeros_like(x)
    for e, (_, up, _, down) in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        h = F.gelu(x[row] @ up.weight.t() + up.bias)
        mine = torch.addmm(down.bias, h, down.weight.t())
        y.index_add_(0, row, mine * weight[row, place, None])
    return y


def backwards(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """From the last expert on, onto what was there."""
    y = x.clone()
    for e in reversed(range(len(m.experts))):
        row, place = torch.where(chosen == e)
        y[row] += m.experts[e](x[row]) * weight[row, place, None]
    return y


def with_dropout(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        mine = F.dropout(expert(x[row]), 0.3)
        y[row] += mine * weight[row, place, None]
    return y


def of_halves(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """With gates, halves of one product."""
    y, hot = torch.zeros_like(x), F.one_hot(chosen, len(m.experts))
    for e, (_, up, _, down) in enumerate(m.experts):
        mask = hot[..., e] == 1
        share = torch.where(mask, weight, 0.0).sum(-1)
        row = mask.any(-1)
        gate, h = up(x[row]).chunk(2, -1)
        h = F.pad(F.silu(gate) * h, (0, 24))
        y[row] += down(h) * share[row][:, None]
    return y


def of_new(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """What each expert makes is added as a whole."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        new = torch.zeros_like(x)
        new[row] = expert(x[row]) * weight[row, place, None]
        y = y + new
    return y


def of_new_sums(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = x * 2
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        mine = expert(x[row]) * weight[row, place, None]
        y = torch.zeros_like(x).index_add(0, row, mine) + y
    return y


def by_slots(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Which of a token's choices it is is looked up, as in LLMs-from-scratch."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = chosen == e
        row = mask.any(-1).nonzero().squeeze(-1)
        slot = mask[row].int().argmax(-1, keepdim=True)
        share = torch.gather(weight.index_select(0, row), -1, slot).squeeze(-1)
        y.index_add_(0, row, expert(x.index_select(0, row)) * share.unsqueeze(-1))
    return y


def by_numbers(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """With the places of rows as numbers."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        share = weight[row].gather(1, place[:, None]) / (1 + row[:, None] % 3)
        y[row] += expert(x[row]) * share
    return y


def by_name(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Experts of a ModuleDict."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts.values()):
        row, place = torch.where(chosen == e)
        y[row] += expert(x[row]) * weight[row, place, None]
    return y


BATCHED = (
    by_column, of_scores, of_one, of_samples_and_places, of_products, backwards,
    by_slots, by_numbers, of_new, of_new_sums, of_halves,
)  # fmt: skip


# --- whose turns differ ----------------------------------------------------------


def other_work(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        mine = expert(x[row]) * weight[row, place, None]
        y[row] += mine.tanh() if e == 1 else mine.sin()
    return y


def other_numbers(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        y[row] += expert(x[row]) * weight[row, place, None] * (e + 1)
    return y


def without_a_bias(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The last expert has none."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        bias = None if e == len(m.experts) - 1 else expert[3].bias
        h = expert[:3](x[row])
        y[row] += F.linear(h, expert[3].weight, bias) * weight[row, place, None]
    return y


def not_all(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts[:-1]):
        row, place = torch.where(chosen == e)
        y[row] += expert(x[row]) * weight[row, place, None]
    return y


def the_next_expert(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Which scores a turn reads are not those of its number."""
    y, scores = torch.zeros_like(x), m.router(x).softmax(-1)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(-1)
        y[mask] += expert(x[mask]) * scores[mask, (e + 1) % 3].unsqueeze(1)
    return y


def onto_before(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each expert reads what those before it have made."""
    y = x.clone()
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        y[row] += expert(y[row]) * weight[row, place, None]
    return y


def the_last_counts(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Of two experts of a token, what the later one makes stays."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        y[row] = expert(x[row]) * weight[row, place, None]
    return y


def shown_between(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    y, total = torch.zeros_like(x), 0
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        y[row] += expert(x[row]) * weight[row, place, None]
        total = total + y.sum()
    return y * total.sigmoid()


def in_another_order(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Weights of rows in the order of tokens meet rows in that of choices."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        _, row = torch.where((chosen == e).t())
        y.index_add_(0, row, expert(x[row]) * weight[chosen == e][:, None])
    return y


def onto_few_places(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Of the rows of a turn that go to one place, one counts."""
    y = x[:2].clone()
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        y[place] += expert(x[row])
    return x + y.sum(0)


def one_beside_the_last(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Two parameters of a step are one in the last turn."""
    y, gains = torch.zeros_like(x), [expert[0].weight for expert in m.experts]
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        own = expert(x[row]) * weight[row, place, None]
        y[row] += torch.where(own > 0, gains[e], gains[-1])
    return y


def one_weight(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The first product of one expert serves another one too."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        h = F.silu(m.experts[max(e, 1)][1](x[row]))
        y[row] += expert[3](h) * weight[row, place, None]
    return y


def of_columns(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Places as columns [rows, 1] choose rows [rows, 1, width]."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, place = torch.where(chosen == e)
        own = expert(x[row[:, None]]).sum(1)
        y[row] += own * weight[row, place, None]
    return y


def by_token(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Samples write to the same tokens, of which the last one stays."""
    samples, chosen, weight = (t.unflatten(0, (4, -1)) for t in (x, chosen, weight))
    y = torch.zeros_like(samples[0])
    for e, expert in enumerate(m.experts):
        b, t, place = torch.where(chosen == e)
        new = torch.zeros_like(y)
        new[t] = expert(samples[b, t]) * weight[b, t, place, None]
        y = y + new
    return x + y.repeat(4, 1)


DIFFERING = (
    other_work, other_numbers, not_all, the_next_expert, onto_before, the_last_counts,
    shown_between, one_beside_the_last, without_a_bias,
)  # fmt: skip

REFUSED = (in_another_order, onto_few_places, by_token, of_columns)
