"""Rows that go to the ranks of their experts, and home again.

How many go where depends on the data, so ranks tell each other first. Rows of one rank
arrive together, in the order of their experts.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from autopar.passes.shard.layout import extent
from autopar.runtime import kernels
from autopar.runtime.comm.collectives import Collectives


class Routing(Collectives):
    """The calls of emitted code that route rows, beside those that all ranks make."""

    def route(
        self, expert: Tensor, axis: str, experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """expert int64 [rows], of all ranks' `experts` -> the experts of the rows that
        come to me; the order in which mine leave [rows]; and on the CPU how many go to
        each rank, and how many come from it [2 n]. Waits for the device once."""
        kernels.check_indices(expert, experts)
        ranks = self._enter("all_to_all", (axis,), expert, 0, experts=experts)
        leaving, order = expert.sort(stable=True)
        last = accumulate(extent(pieces) for pieces in self.layout(experts, axis))
        ends = torch.tensor(list(last), device=expert.device)
        sent = torch.searchsorted(leaving, ends).diff(prepend=ends.new_zeros(1))
        ones = [1] * len(ranks)
        received = self._trade(sent, ones, ones, ranks)
        counts = torch.cat([sent, received]).cpu()
        to_me = self._trade(leaving, *_halves(counts), ranks)
        return to_me, order, counts

    def dispatch(self, x: Tensor, axis: str, order: Tensor, counts: Tensor) -> Tensor:
        """x [rows, ...] -> [rows that come to me, ...], by `route`."""
        ranks = self._enter("all_to_all", (axis,), x, 0)
        sent, received = _halves(counts)
        return self._trade(x.index_select(0, order), sent, received, ranks)

    def combine(self, x: Tensor, axis: str, order: Tensor, counts: Tensor) -> Tensor:
        """The inverse of `dispatch`, and its transpose."""
        ranks = self._enter("all_to_all", (axis,), x, 0)
        sent, received = _halves(counts)
        rows = self._trade(x.contiguous(), received, sent, ranks)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    def _trade(
        self, x: Tensor, sent: list[int], received: list[int], ranks: tuple[int, ...]
    ) -> Tensor:
        """x [sum(sent), ...], rows for each rank -> [sum(received), ...] from each."""
        if len(ranks) == 1:
            return x
        row = prod(x.shape[1:])
        leave, come = ([row * n for n in counts] for counts in (sent, received))
        flat = self._start_exchange(x.view(-1), leave, come, ranks).wait()
        return flat.view(sum(received), *x.shape[1:])


def _halves(counts: Tensor) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from it."""
    sent, received = counts.view(2, -1).tolist()
    return sent, received
