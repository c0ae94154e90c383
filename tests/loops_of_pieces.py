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


PIECES = put_back, added, weighed_first, scattered_sums, in_two_steps


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
