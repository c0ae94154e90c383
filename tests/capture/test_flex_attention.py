"""flex_attention is captured as the attention that it is, and compared on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from autopar.passes.capture.forward.flex_attention import flex_as_attention
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError

HEADS, SEQ, SAMPLES = 4, 12, 4
compiled = torch.compile(flex_attention, backend="eager")
make_mask = torch.compile(create_block_mask, backend="eager")

Kind = Callable[[Tensor, Tensor], dict[str, Any]]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def sliding(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < 5)

    return {"block_mask": make_mask(near, 1, 1, SEQ, SEQ, device="cpu")}


def packed(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
    documents = (ids == 3).cumsum(1)

    def same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return {"block_mask": make_mask(same, SAMPLES, None, SEQ, SEQ, device="cpu")}


def plain(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
    return {"block_mask": create_block_mask(causal, None, None, SEQ, SEQ, "cpu")}


def slanted(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
    def lower(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return 9 * torch.tanh(score / 9) - (q - kv) * slopes[h]

    return {**plain(ids, slopes), "score_mod": lower}


class Flexible(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.name, self.kind = kind.__name__, kind  # tests tell models apart by names
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.ones(HEADS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = compiled(*qkv.unbind(), scale=0.3, **self.kind(ids, self.slopes))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case(kind: Kind) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (SAMPLES, SEQ))
    batch = {"ids": ids % 7, "labels": ids}
    return Case(randomize(Flexible(kind)), batch)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("kind", [plain, sliding, packed])
def test_masks_are_told_as_those_of_any_attention(kind: Kind) -> None:
    one = case(kind)
    graph = normalize(trace(one.model, one.batch)).graph
    (attention,) = [n for n in graph.nodes if n.op == "autopar.attention"]
    assert attention.args[3] is None and attention.args[4]
    told = {plain: [], sliding: ["window"], packed: ["documents"]}[kind]
    assert list(attention.kwargs) == told


@pytest.mark.parametrize("kind", [packed, slanted])
def test_a_model_with_it_is_split_and_compared_with_itself(kind: Kind) -> None:
    one = case(kind)
    program = one.compile("dp=2,tp=2")
    assert "tp" in program.parameters["qkv.weight"].split_axes
    assert program.remarks == ()
    one.verify("dp=2,tp=2", 2)


@pytest.mark.slow
def test_scores_masks_and_sums_are_torchs() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, SEQ, 8) for heads in (HEADS, 2, 2))
    odd = torch.rand(SEQ) > 0.3

    def some(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q != 2) & odd[kv] & (h != 1)

    def run() -> tuple[Tensor, Any]:
        mask = create_block_mask(some, None, HEADS, SEQ, SEQ, device="cpu")
        given = {**slanted(q, q[0, :, 0, 0]), "block_mask": mask, "enable_gqa": True}
        return flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **given)

    slow = pytest.warns(UserWarning, match="without torch.compile")
    with torch.no_grad():
        with slow:
            theirs, aside = run()
        with flex_as_attention(), flex_as_attention():
            ours, beside = run()
    torch.testing.assert_close(ours, theirs)
    assert not ours[:, :, 2].any() and not ours[:, 1].any()
    torch.testing.assert_close(beside.lse[:, 0, 3:], aside.lse[:, 0, 3:])


def by_hand(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
    counts, blocks = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 1)
    mask = BlockMask.from_kv_blocks(counts.int(), blocks.int(), mask_mod=causal)
    return {"block_mask": mask}


OUTSIDE = create_block_mask(causal, None, None, SEQ, SEQ, device="cpu")


@pytest.mark.parametrize("kind", [by_hand, lambda *_: {"block_mask": OUTSIDE}])
def test_a_mask_that_forward_does_not_make_is_refused(kind: Kind) -> None:
    with pytest.raises(CaptureError, match="made outside of forward"):
        trace(*case(kind)[:2])


def test_a_mask_of_other_lengths_is_refused() -> None:
    def longer(ids: Tensor, slopes: Tensor) -> dict[str, Any]:
        return {"block_mask": create_block_mask(causal, None, None, 16, SEQ, "cpu")}

    with pytest.raises(CaptureError, match=r"12 rows and 12 columns.* of 16 and 12"):
        trace(*case(longer)[:2])
