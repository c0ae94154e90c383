"""Sliding windows: a number of attention, not a mask of all rows and columns."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.cost import flops
from autopar.passes.graph import Node, Value
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.shard import layout
from autopar.passes.shard.layout import Pieces, window_tiles
from autopar.proof import prove_program
from autopar.runtime.comm import ring_attention
from autopar.runtime.comm.virtual import run_virtual
from autopar.verify import verify
from examples.benchmarks.live_bytes import LiveBytes

WINDOW, SEQ = 7, 24


def positions(pieces: Pieces) -> Tensor:
    return torch.cat([torch.arange(a, a + n) for a, n in pieces])


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 11, 40])
def test_tiles_show_each_key_once(
    window: int, parts: int, zigzag: bool, small_tiles: None
) -> None:
    """And no tile has many keys in vain."""
    for rows, keys in product(layout.layout(29, parts, zigzag), repeat=2):
        r, c = positions(rows), positions(keys)
        seen = torch.zeros(len(r), len(c), dtype=torch.int64)
        for tile in window_tiles(rows, keys, window):
            block = seen[tile.row :, tile.key :][: tile.rows, : tile.keys]
            assert block.shape == (tile.rows, tile.keys) and tile.keys < window + 10
            apart = torch.arange(tile.rows)[:, None] - torch.arange(tile.keys)
            apart += tile.ahead or 0
            inside = (apart >= 0) & (apart < window)
            block += 1 if tile.ahead is None else inside
        apart = r[:, None] - c
        assert torch.equal(seen == 1, (apart >= 0) & (apart < window))


class Attends(nn.Module):
    """2 heads of keys for 4 of queries; a kind of it says what rows see."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(16, n) for n in (16, 16, 16))

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        samples, seq, width = x.shape
        q = self.q(x).view(samples, seq, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(samples, seq, 2, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(samples, seq, width))


class Windowed(Attends):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        mask = at[None] <= at[:, None]
        if self.window is not None:
            mask = mask & (at[None] > at[:, None] - self.window)
        return self.attend(x, mask)


class InTurn(nn.Module):
    """Every other layer sees a window, as in Gemma (arXiv 2408.00118)."""

    def __init__(self, window: int = WINDOW, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        windows = [window if i % 2 else None for i in range(count)]
        self.layers = nn.ModuleList(map(Windowed, windows))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(32, (4, SEQ))
    return Case(InTurn().double(), {"ids": ids, "labels": ids.roll(-1, 1)})


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=1", {}),
        ("tp=2", {"recompute": "full"}),
        ("cp=3", {"context_parallel": "ring"}),
        ("cp=2", {"context_parallel": "ring", "cp_layout": "zigzag"}),
        ("cp=2", {"context_parallel": "gather"}),
        ("cp=2", {"context_parallel": "ulysses"}),
        ("pp=2", {"schedule": "zb-h1", "microbatches": 2}),
    ],
)
def test_a_window_is_a_number_of_attention(
    mesh: str, options: dict[str, object], small_tiles: None
) -> None:
    one = case()
    program = compile_program(one.trace(), make_plan(mesh, **options), PLAIN)
    text = next(iter(program.modules.values()))
    assert f"window={WINDOW}" in text and "aten.gt" not in text
    verify(program, *one).check()


@pytest.mark.slow
def test_the_default_proof_keeps_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small where all is; another number in a text is no size."""
    monkeypatch.setattr(prove_program, "LITTLE", 0)
    monkeypatch.setattr(prove_program, "MUCH", 0)
    found = []
    differs = prove_program.differs

    def changed(large: str, small: str, *others: object) -> object:
        found.append(differs(large.replace("window=300", "window=301"), small, *others))
        return differs(large, small, *others)

    monkeypatch.setattr(prove_program, "differs", changed)
    batch = {name: torch.zeros(4, 2048, dtype=torch.int64) for name in case().batch}
    with torch.device("meta"):
        model = InTurn(window=300, count=6)
    compiled = compile_offline(
        model, batch, make_plan("cp=2"), cluster=PLAIN, prove=True
    )
    assert compiled.proof is not None and compiled.proof.size == "small"
    assert found and all(f is not None for f in found)


@pytest.mark.slow
def test_memory_is_linear_in_the_sequence() -> None:
    """16,384 rows, where a mask of them would have 2^28 elements."""
    seq, window = 2**14, 512
    q, k, v, dy = torch.randn(4, 1, 1, seq, 8)
    split = ((seq, ()),)
    scoring = ring_attention.Scoring(None, True, None, window)

    def attend(comm: object) -> int:
        with LiveBytes() as live:
            before = live.now
            out, lse = ring_attention.forward(
                comm, (q, k, v), scoring, split, split, None
            )
            ring_attention.backward(
                comm, dy, (q, k, v), (out, lse), scoring, split, split, None
            )
            return live.peak - before

    (most,) = run_virtual(Mesh.parse("dp=1"), 1, attend)
    assert most < 10 * q.nbytes + 8 * window**2


def test_work_is_of_the_window() -> None:
    q = Value("q", (1, 2, 64, 4), torch.float32)
    out = (Value("y", q.shape, q.dtype),)
    whole, some = (
        flops(Node("autopar.attention", (q, q, q, None, True, 1.0), given, out))
        for given in ({}, {"window": 16})
    )
    assert whole == 4 * some


class ShortConvolution(nn.Module):
    """Each token adds up the last few ones, as windows of a padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weight = nn.Embedding(48, 24), nn.Parameter(torch.rand(4))
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        windows = F.pad(x.transpose(1, 2), (3, 0)).unfold(-1, 4, 1).flip(-1)
        x = x + (windows * self.weight).sum(-1).transpose(1, 2)
        return (x + self.down(self.up(x).tanh())).square().mean()


@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "dp=2,tp=2", "cp=2"])
def test_microbatches_have_windows_of_their_own_samples(mesh: str) -> None:
    torch.manual_seed(0)
    case = Case(ShortConvolution(), {"ids": torch.randint(48, (8, 12))})
    case.verify(mesh, 2)
