"""A mask that is too large to be made is told to be causal, or that of a sliding
window, by some of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpret import loss_of
from torch import Tensor, nn

from autopar.passes import rewrite
from autopar.passes.capture.normalize import causal_masks
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace

SEQ = 96
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as written": lambda r, c: c <= r,
    "turned round": lambda r, c: ~(c > r),
    "of differences": lambda r, c: r - c >= 0,
    "with what it has": lambda r, c: (c <= r) | (c < 1),
    "twice": lambda r, c: (c <= r) & (c < r + 1),
    "strict": lambda r, c: c < r,
    "one more": lambda r, c: c <= r + 1,
    "window": lambda r, c: (c <= r) & (c > r - 40),
    "window of distances": lambda r, c: (r - c >= 0) & (r - c <= 39),
    "window of one": lambda r, c: c == r,
    "window ahead": lambda r, c: (c >= r) & (c < r + 40),
    "window and first": lambda r, c: (c <= r) & ((c > r - 40) | (c < 2)),
    "prefix": lambda r, c: (c <= r) | (c < 50),
    "late rows see all": lambda r, c: (c <= r) | (r > 70),
    "one row sees all": lambda r, c: (c <= r) | ((r > 40) & (r < 42)),
    "a column is hidden": lambda r, c: (c <= r) & ((c < 30) | (c > 30)),
    "of rows that are the same": lambda r, c: (c <= r) & (r * 0 == c * 0),
    "of ids by chance": lambda r, c: (c <= r) & (c * c % 91 <= r * r % 91 + 60),
    "a piece by itself": lambda r, c: (c <= r) & ((r < 60) | (c > 20)),
}


class Masked(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.qkv = name, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        samples, seq, _ = x.shape
        qkv = self.qkv(x).view(samples, seq, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        positions = torch.arange(seq).expand(samples, 1, seq)
        mask = MASKS[self.name](positions[..., None], positions[:, :, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()


@pytest.mark.parametrize("name", MASKS)
def test_rows_tell_what_the_whole_mask_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = torch.arange(SEQ)
    mask = MASKS[name](positions[:, None], positions[None])
    causal = torch.equal(mask, torch.ones(SEQ, SEQ).tril().bool())
    monkeypatch.setattr(rewrite, "LARGEST_CONSTANT", SEQ * SEQ - 1)
    monkeypatch.setattr(causal_masks, "SMALL", 2 * SEQ)
    graph = normalize(trace(Masked(name), {"x": torch.randn(2, SEQ, 8)})).graph
    (attention,) = [n for n in graph.nodes if n.op == "autopar.attention"]
    window = {"window": 40, "window of distances": 40, "window of one": 1}.get(name)
    told = causal or window is not None
    assert (attention.args[3] is None) == attention.args[4] == told
    assert attention.kwargs == ({"window": window} if told and window else {})


def banded(hidden: float, width: int = SEQ) -> Tensor:
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    return torch.where((distance >= 0) & (distance < width), 0.0, hidden)


LEAST = torch.finfo(torch.float32).min
# What is added to scores -> what the attention has in place of it: None is the mask.
ADDED: dict[str, tuple[Callable[[], Tensor], dict[str, int] | None]] = {
    "minus infinity": (lambda: torch.full((SEQ, SEQ), -torch.inf).triu(1), {}),
    "the least number": (lambda: torch.full((SEQ, SEQ), LEAST).triu(1), {}),
    "a window": (lambda: banded(-torch.inf, 40), {"window": 40}),
    "not quite hidden": (lambda: banded(-1e4), None),
    "hidden and more": (lambda: banded(-torch.inf) + torch.eye(SEQ), None),
}


class Added(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unbind()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.make()).sum()


@pytest.mark.parametrize("name", ADDED)
def test_numbers_that_only_hide_are_a_mask(name: str) -> None:
    make, told = ADDED[name]
    model, x = Added(make), torch.randn(3, 2, 2, SEQ, 4)
    traced = normalize(trace(model, {"x": x}))
    (attention,) = [n for n in traced.graph.nodes if n.op == "autopar.attention"]
    assert (attention.args[3] is None) == attention.args[4] == (told is not None)
    assert attention.kwargs == (told or {})
    torch.testing.assert_close(loss_of(traced, model, {"x": x}), model(x))
