"""Rows that are sorted by their experts, split by how many each has, and joined again,
as people write it: of a layer m, its tokens x [rows, width], and for each the numbers
of some experts and their weights [rows, chosen]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models_of_rows import CHOSEN, EXPERTS, WIDTH
from torch import Tensor


def put_back(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS).tolist()
    pieces = torch.split(x[order // CHOSEN], counts, dim=0)
    y = torch.cat([m.experts[e](piece) for e, piece in enumerate(pieces)], dim=0)
    y = y[order.argsort()].view(*chosen.shape, -1)
    return (y * weight[..., None]).sum(1)


def added(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    _, order = chosen.flatten().sort(0)
    token = torch.arange(len(x)).repeat_interleave(CHOSEN).index_select(0, order)
    share = weight.flatten().index_select(0, order)
    counts = F.one_hot(chosen, EXPERTS).sum((0, 1)).tolist()
    rows = x.index_select(0, token).split(counts)
    y = torch.cat([expert(r) for expert, r in zip(m.experts, rows, strict=True)])
    return torch.zeros_like(x).index_add(0, token, y * share.unsqueeze(1))


def by_slots(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """All tokens' first choices come before all second ones."""
    flat = chosen.T.reshape(-1)
    order = flat.argsort(stable=True)
    pieces = x[order % len(x)].split(flat.bincount(minlength=EXPERTS).tolist())
    y = torch.cat([expert(p) for expert, p in zip(m.experts, pieces, strict=True)])
    y = y[order.argsort()].view(CHOSEN, len(x), WIDTH)
    return (y * weight.T[..., None]).sum(0)


def weighed_first(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each piece is weighed where it was computed."""
    order = torch.argsort(chosen.view(-1), stable=True)
    counts = torch.zeros(len(x), EXPERTS).scatter(1, chosen, 1).long().sum(0).tolist()
    rows = x[order // CHOSEN].split(counts)
    shares = weight.view(-1)[order].split(counts)
    parts = []
    for e in range(EXPERTS):
        parts.append(m.experts[e](rows[e]) * shares[e][:, None])
    y = torch.empty(len(order), WIDTH, dtype=x.dtype)
    y[order] = torch.concat(parts)
    return y.view(-1, CHOSEN, WIDTH).sum(1)


def scattered_sums(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts = torch.histc(chosen.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    order = torch.argsort(chosen.view(-1), stable=True)
    token = order // CHOSEN
    pieces = torch.split(x[token], counts.long().tolist(), dim=0)
    y = torch.cat([m.experts[e](piece) for e, piece in enumerate(pieces)], dim=0)
    y = y * weight.view(-1)[order].reshape(-1, 1)
    return x.scatter_add(0, token.reshape(-1, 1).expand(-1, WIDTH), y)


def in_two_steps(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Pieces are joined, and split once more."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()

    def each(x: Tensor, part: int) -> Tensor:
        pieces = x.split(counts)
        return torch.cat([m.experts[e][part](p) for e, p in enumerate(pieces)])

    y = each(F.silu(each(x[order // CHOSEN], 1)), 3)
    y = y[order.argsort()].view(*chosen.shape, -1)
    return (y * weight[..., None]).sum(1)


def without_empty(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Only experts that have rows are called."""
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    pieces = x[order // CHOSEN].split(counts)
    y = torch.cat([m.experts[e](p) for e, p in enumerate(pieces) if p.shape[0] > 0])
    y = y[order.argsort()].view(*chosen.shape, -1)
    return (y * weight[..., None]).sum(1)


def by_running_sums(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    rows, start, parts = x[order // CHOSEN], 0, []
    for e, count in enumerate(counts):
        if count == 0:
            continue
        parts.append(m.experts[e](rows[start : start + count]))
        start += count
    y = torch.empty_like(rows)
    y[order] = torch.cat(parts)
    return (y.view(*chosen.shape, -1) * weight[..., None]).sum(1)


def unless_none(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0).tolist()
    parts = []
    for expert, rows in zip(m.experts, x[order // CHOSEN].split(counts), strict=True):
        if len(rows):
            parts.append(expert(rows))
    y = torch.cat(parts)[order.argsort()].view(*chosen.shape, -1)
    return (y * weight[..., None]).sum(1)


PIECES = (
    put_back, added, by_slots, weighed_first, scattered_sums, in_two_steps,
    without_empty, by_running_sums, unless_none,
)  # fmt: skip


# --- what another number of pieces would change ---------------------------------------


def parts_of(x: Tensor, chosen: Tensor) -> tuple[list[int], tuple[Tensor, ...], Tensor]:
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    return counts, x[order // CHOSEN].split(counts), order


def back(parts: list[Tensor], weight: Tensor, order: Tensor) -> Tensor:
    y = torch.cat(parts)[order.argsort()].view(*weight.shape, -1)
    return (y * weight[..., None]).sum(1)


def the_next_expert(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Experts are counted among those that have rows."""
    _, pieces, order = parts_of(x, chosen)
    there = [p for p in pieces if p.shape[0] > 0]
    return back([m.experts[e](p) for e, p in enumerate(there)], weight, order)


def how_many(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    _, pieces, order = parts_of(x, chosen)
    there = [m.experts[e](p) for e, p in enumerate(pieces) if len(p) > 0]
    return back(there, weight, order) / len(there)


def up_to_the_first_without(
    m: Any, x: Tensor, weight: Tensor, chosen: Tensor
) -> Tensor:
    counts, pieces, order = parts_of(x, chosen)
    there = []
    for e, count in enumerate(counts):
        if count == 0:
            break
        there.append(m.experts[e](pieces[e]))
    return back(there, weight, order)


def marked_empty(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts, pieces, order = parts_of(x, chosen)
    there, scale = [], 1.0
    for e, count in enumerate(counts):
        if count > 0:
            there.append(m.experts[e](pieces[e]))
        else:
            scale *= 2
    return back(there, weight, order) * scale


def few_left_out(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts, pieces, order = parts_of(x, chosen)
    there = [m.experts[e](p) for e, p in enumerate(pieces) if counts[e] > 1]
    return back(there, weight, order)


def two_after_one(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """What comes before a piece is not all that does."""
    counts, _, order = parts_of(x, chosen)
    rows, start, parts = x[order // CHOSEN], 0, []
    for e, count in enumerate(counts):
        parts.append(m.experts[e](rows[start : start + count]))
        start += count if e != 1 else 0
    return back(parts, weight, order)


def of_some(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows that are more than were counted."""
    counts = torch.bincount(chosen[:, 0], minlength=EXPERTS).tolist()
    x, start, parts = torch.cat([x, x]), 0, []
    for e, count in enumerate(counts):
        parts.append(m.experts[e](x[start : start + count]))
        start = start + count
    return torch.cat(parts)


def counts_written(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Counts are written to after they were listed."""
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    sizes, order = counts.tolist(), chosen.flatten().argsort(stable=True)
    counts.copy_(counts.flip(0))
    pieces = x[order // CHOSEN].split(sizes)
    return back([m.experts[e](p) for e, p in enumerate(pieces)], weight, order)


def list_written(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    counts, _, order = parts_of(x, chosen)
    counts.reverse()
    pieces = x[order // CHOSEN].split(counts)
    return back([m.experts[e](p) for e, p in enumerate(pieces)], weight, order)


OTHERWISE = (
    counts_written, list_written,
    the_next_expert, how_many, up_to_the_first_without, marked_empty, few_left_out,
    two_after_one, of_some,
)  # fmt: skip


def of_a_table(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """By a table of gates, of which those that are not 0 are listed column by
    column."""
    gates = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weight)
    _, order = torch.nonzero(gates).sort(0)
    token = torch.nonzero(gates)[order[:, 1], 0]
    counts = (gates > 0).sum(0).tolist()
    pieces = torch.split(x[token], counts, dim=0)
    y = torch.cat([m.experts[e](p) for e, p in enumerate(pieces)], 0)
    e = torch.nonzero(gates).sort(0)[0][:, 1:]
    y = y * gates[token].gather(1, e)
    return torch.zeros_like(x).index_add(0, token, y)
