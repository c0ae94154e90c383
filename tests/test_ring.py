"""Ring attention: keys and values are passed round, and no rank ever holds them all."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from torch import Tensor

from autopar.comm import Comm
from autopar.kernels import positions
from autopar.process_groups import ProcessComm
from autopar.virtual import run_virtual
from examples.benchmarks.live_bytes import LiveBytes
from passes.mesh import Mesh, balanced
from passes.plan import CONTEXT_PARALLEL, SPLIT
from passes.shares import causal_tiles, extent, shares, within

RING = {"split": {**SPLIT, "cp": CONTEXT_PARALLEL["ring"]}, "zigzag": ("cp",)}


def rows_of(pieces) -> list[int]:
    return [row for begin, length in pieces for row in range(begin, begin + length)]


# --- who holds which rows ----------------------------------------------------------


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_shares_hold_each_row_once(parts, zigzag) -> None:
    for n in range(1, 24):
        found = shares(n, parts, zigzag)
        assert sorted(row for share in found for row in rows_of(share)) == [*range(n)]
        assert tuple(map(extent, found)) == balanced(n, parts)


def test_zigzag_is_a_piece_and_its_mirror_image() -> None:
    assert shares(16, 4, zigzag=True) == (
        ((0, 2), (14, 2)),
        ((2, 2), (12, 2)),
        ((4, 2), (10, 2)),
        ((6, 4),),
    )


@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_are_the_causal_mask(zigzag) -> None:
    """Each entry of it once, for all shares of rows, split further or not."""
    for n, parts, inner in itertools.product((5, 12, 17), (1, 2, 3), (1, 2)):
        held = shares(n, parts, zigzag)
        for share, keys in itertools.product(held, [*held, ((0, n),)]):
            for part in shares(extent(share), inner):
                rows = within(share, part)
                mask = torch.zeros(extent(rows), extent(keys), dtype=torch.int64)
                for tile in causal_tiles(rows, keys):
                    ones = torch.ones(tile.rows, tile.keys, dtype=torch.int64)
                    block = mask.narrow(0, tile.row, tile.rows)
                    block = block.narrow(1, tile.key, tile.keys)
                    block += ones.tril() if tile.causal else ones
                seen = torch.tensor(rows_of(rows))[:, None] >= torch.tensor(
                    rows_of(keys)
                )
                assert torch.equal(mask, seen.long())


def test_zigzag_gives_all_ranks_the_same_work() -> None:
    def work(zigzag: bool) -> list[float]:
        held = shares(1024, 4, zigzag)
        return [
            sum(
                tile.rows * tile.keys * (0.5 if tile.causal else 1.0)
                for keys in held
                for tile in causal_tiles(rows, keys)
            )
            for rows in held
        ]

    assert max(work(zigzag=True)) == min(work(zigzag=True))
    assert max(work(zigzag=False)) == 7 * min(work(zigzag=False))


# --- the attention of one call -----------------------------------------------------


def operands(seq: int, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dy of 4 heads; v has another width than k."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, seq, 8), (2, groups, seq, 8), (2, groups, seq, width)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (*shapes, (2, 4, seq, width))
    ]


def masks(kind: str, seq: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A mask and whether it is causal. Under "padded" some rows attend to nothing;
    "added" is to be added to the scores, as ALiBi's is."""
    if kind == "causal":
        return None, True
    if kind == "full":
        return None, False
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    if kind == "padded":
        return causal & (torch.arange(seq) >= torch.tensor([[[[5]]], [[[0]]]])), False
    distance = torch.arange(seq) - torch.arange(seq)[:, None]
    return (distance * 0.1).to(dtype).masked_fill_(~causal, -1e4), False


@pytest.mark.parametrize("axis", ["cp", None], ids=["ring", "all keys"])
@pytest.mark.parametrize("kind", ["causal", "full", "padded", "added"])
@pytest.mark.parametrize(
    ("seq", "groups", "width", "dtype"),
    [
        (16, 4, 8, torch.float64),
        (17, 2, 8, torch.float32),
        (13, 1, 6, torch.float64),
        (16, 4, 8, torch.bfloat16),
    ],
    ids=str,
)
def test_shares_of_attention_are_those_of_the_whole(
    seq, groups, width, dtype, kind, axis
) -> None:
    q, k, v, dy = operands(seq, groups, width, dtype)
    mask, causal = masks(kind, seq, dtype)
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    added = mask.double() if mask is not None and mask.is_floating_point() else mask
    out = F.scaled_dot_product_attention(
        *wide, attn_mask=added, is_causal=causal, scale=0.4, enable_gqa=True
    )
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]

    def body(comm: Comm) -> None:
        comm.zigzag = frozenset({"cp"})
        rows = ((seq, ("cp",)),)
        keys = rows if axis else ((seq, ()),)
        mine = positions(comm.pieces(*rows[0]), comm.device)
        held = positions(comm.pieces(*keys[0]), comm.device)
        own = (q[:, :, mine], k[:, :, held], v[:, :, held])
        seen = None if mask is None else mask[..., mine, :]
        scoring = (seen, causal, 0.4, rows, keys, axis)
        got, lse = comm.attention(*own, *scoring)
        grads = comm.attention_backward(dy[:, :, mine], *own, got, lse, *scoring)
        if axis is None:
            grads = (grads[0], *(comm.all_reduce(x, ("cp",)) for x in grads[1:]))
        for found, whole, at in zip(
            (got, *grads), want, (mine, mine, held, held), strict=True
        ):
            assert found.dtype == dtype
            close(found, whole[:, :, at], tolerance)

    run_virtual(Mesh.parse("cp=3"), 1, body)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def hold_few_keys() -> tuple[float, float]:
    """The most bytes at once of a call forward and backward, beside its operands and
    results, in shares of keys and values."""
    comm = ProcessComm(Mesh.parse("cp=4"), groups=[("cp",)])
    q, dy = torch.randn(2, 1, 2, 1, 64)
    k, v = torch.randn(2, 1, 2, 1024, 64)
    split = (((4, ("cp",)),), ((4096, ("cp",)),), "cp")

    def peak(run):
        with LiveBytes() as live:
            before = live.now
            results = run()
            return results, (live.peak - before) / ((k.numel() + v.numel()) * 4)

    (out, lse), forward = peak(
        lambda: comm.attention(q, k, v, None, False, None, *split)
    )
    _, backward = peak(
        lambda: comm.attention_backward(
            dy, q, k, v, out, lse, None, False, None, *split
        )
    )
    return forward, backward


def test_a_ring_holds_the_keys_of_few_ranks() -> None:
    """Forward: those at work and those under way. Backward: their gradients too, which
    are also added up and passed on; and what the kernel finds."""
    for forward, backward in run_ranks(hold_few_keys, 4):
        assert 1.9 < forward < 2.1
        assert 4.9 < backward < 6.1
