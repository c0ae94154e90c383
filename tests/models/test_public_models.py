"""What public GPT code does: each was once refused, or did not run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize
from torch import Tensor, nn

from autopar.passes.proof_record import SMALL
from autopar.proof import prove_program
from autopar.verify import verify

SAMPLES, SEQ = 4, 18


class Decayed(nn.Module):
    """Layers as lists of their parts, without a module of their own; scores that decay
    by numbers of positions, as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
            for _ in range(2)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, place = self.tokens(ids), torch.arange(ids.shape[1])
        decay = (0.9 ** (place[:, None] - place)).tril() / (place / 7 + 1)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + decay @ mixer(x)
            x = x + mlp(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Grouped(nn.Module):
    """Rows go to their experts in order, by one product in bfloat16; it insists on the
    dtypes of its router."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.zeros(4, 48, WIDTH))
        self.down = nn.Parameter(torch.zeros(4, WIDTH, 48))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        assert scores.dtype == torch.float32, "routers are of float32"
        weights, chosen = scores.topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros_like(scores).scatter(-1, chosen, 1.0).sum(0)
        ends = counts.cumsum(0).int()
        rows = x[order // 2].bfloat16()
        h = F.silu(torch._grouped_mm(rows, self.up.bfloat16().mT, offs=ends))
        y = torch._grouped_mm(h, self.down.bfloat16().mT, offs=ends).type_as(x)
        y = y * weights.flatten()[order][:, None]
        x = x.index_add(0, order // 2, y)
        return F.cross_entropy(self.head(x), labels.flatten())


class WithGaps(nn.Module):
    """Layers as lists in which there is None for what a layer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleList(  # the norm before, the layer, the norm behind
                [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), None]
            )
            for _ in range(4)
        )
        self.bridges = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) if i % 2 else None for i in range(4)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for (before, layer, behind), bridge in zip(
            self.layers, self.bridges, strict=True
        ):
            y = layer(before(x))
            x = x + (y if behind is None else behind(y))
            x = x if bridge is None else bridge(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ByNumber(nn.Module):
    """Parts of a layer are in lists of their own, the norms two for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(16))
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for i, mixer in enumerate(self.mixers):
            x = x + self.norms[2 * i + 1](mixer(self.norms[2 * i](x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Convolved(nn.Module):
    """Long convolutions by Fourier transforms of twice the sequence; groups of rows are
    normalised with a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.kernels = nn.ParameterList(torch.zeros(WIDTH, SEQ) for _ in range(4))
        self.scales = nn.ParameterList(torch.zeros(WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, (batch, seq) = self.tokens(ids), ids.shape
        for kernel, scale in zip(self.kernels, self.scales, strict=True):
            made = torch.fft.rfft(kernel, n=2 * seq) * torch.fft.rfft(x.mT, n=2 * seq)
            y = torch.fft.irfft(made, n=2 * seq)[..., :-seq].mT
            y = F.group_norm(y.reshape(batch * seq, WIDTH), 8, 1 + scale)
            x = x + y.view(batch, seq, WIDTH)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Packed(nn.Module):
    """Documents begin where positions are 0. Where those begin that there are not, the
    sequence's length is written."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, seq = self.tokens(ids), ids.shape[1]
        first, place = ids[0] % 3 == 0, torch.arange(seq)
        number = first.cumsum(0) - 1
        starts = torch.full((seq + 1,), seq).scatter_(
            0,
            torch.where(first, number, torch.full_like(number, seq)),
            torch.where(first, place, seq),
        )
        near = (place >= starts[number][:, None]) & (place <= place[:, None])
        share = near / near.sum(-1, keepdim=True).clamp(min=1)
        for mixer in self.mixers:
            x = x + share @ mixer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class FromOthers(nn.Module):
    """Each layer adds what the first reads, by a number of its own; the last leaves out
    what a certain one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.shares, self.middle = nn.Parameter(torch.zeros(12)), 3

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = first = self.tokens(ids)
        given = []
        for i, layer in enumerate(self.layers):
            x = x + self.shares[i] * first
            x = x + layer(x)
            given.append(x)
        logits = self.head(x - 0.2 * given[self.middle])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rotated(nn.Module):
    """Of each row the last part is rotated, as complex numbers of where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 30 + 16), nn.Linear(30 + 16, WIDTH)])
            for _ in range(4)
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, seq = self.tokens(ids), ids.shape[1]
        angles = torch.outer(torch.arange(seq) / 9, torch.arange(1, 9) / 8)
        turns = torch.polar(torch.ones_like(angles), angles)
        for mixer, back in self.layers:
            kept, rest = mixer(x).split([30, 16], -1)
            pairs = torch.view_as_complex(rest.unflatten(-1, (-1, 2)))
            rest = torch.view_as_real(pairs * turns).flatten(-2)
            x = x + back(torch.cat([kept, rest], -1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case(model: nn.Module) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (SAMPLES, SEQ))
    return Case(randomize(model), {"ids": ids, "labels": ids.roll(-1, 1)})


def test_layers_of_listed_parts_and_numbers_of_positions_are_proved() -> None:
    case(Decayed()).proved("pp=2,tp=2", 2)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    "made", [WithGaps, ByNumber, Convolved, Packed, FromOthers, Rotated]
)
def test_what_is_large_is_proved_small(
    made: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_program, "LITTLE", 0)
    monkeypatch.setattr(prove_program, "MUCH", 0)
    proof = case(made()).proved("pp=2,tp=2", 2).proof
    assert proof is not None and proof.size == SMALL


@pytest.mark.slow
def test_rows_in_the_order_of_their_experts_are_split_by_them() -> None:
    one = case(Grouped())
    program = one.proved("ep=2,tp=2")
    assert program.parameters["up"].pattern == "experts/ep ffn/tp embed"
    proof = verify(program, one.model, one.batch, tolerance=1e-6).check()
    assert proof.in_double is not None and proof.in_double.passed
