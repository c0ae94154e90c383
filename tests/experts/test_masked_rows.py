"""Rows of scores that are all masked: their logarithm of a sum is -inf, as torch's."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from autopar.runtime.kernels import sum_exp, sum_exp_backward


class Sinks(nn.Module):
    """Attention with a sink beside the keys, which takes all where no key is seen."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.qkv, self.sinks = nn.Linear(16, 48), nn.Parameter(torch.zeros(2))

    def forward(self, ids, labels):
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        unseen = torch.ones_like(ids, dtype=torch.bool)[0].diag().logical_not().triu()
        unseen = unseen | (ids == 0)[:, None, :, None]  # padding sees nothing
        scores = (q @ k.mT).masked_fill(unseen, -torch.inf)
        largest = scores.amax(-1, keepdim=True).detach().clamp(min=-1e4)
        weights = (scores - largest).exp()
        y = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        y = y * (scores.logsumexp(-1) - self.sinks[:, None]).sigmoid()[..., None]
        x = x + y.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_attention_with_sinks_of_padding(mesh):
    torch.manual_seed(0)
    ids, labels = torch.randint(1, 32, (2, 4, 8))
    ids[:, 6:] = 0
    Case(Sinks(), {"ids": ids, "labels": labels}).verify(mesh)


def test_sum_exp_of_a_row_that_is_all_masked():
    x = torch.randn(4, 9).index_fill_(0, torch.tensor([1, 3]), -torch.inf)
    x[2, :5] = -torch.inf
    m, dy = x.amax(-1), torch.randn(4)
    total = sum_exp(x, m)
    assert_close(total.log() + m, x.logsumexp(-1))
    x.requires_grad_()
    x.logsumexp(-1).backward(dy)
    wanted = x.grad.nan_to_num(0)  # torch's of such a row is no number
    assert_close(sum_exp_backward(x.detach(), dy / total, m), wanted)
