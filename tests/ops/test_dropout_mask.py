"""Dropout masks against their definition, and as random bits."""

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from autopar.runtime.kernels import Factor, dropout_mask


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


STEP = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """SplitMix64's mixer on Python integers."""
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def whole(*extents: int) -> list[list[Factor]]:
    return [[(extent, ((0, extent),))] for extent in extents]


def keep_mask(*extents: int, p: float = 0.1, key: int = 1, op: int = 0) -> Tensor:
    return dropout_mask(p, key, op, whole(*extents), "cpu")


def test_mask_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(1234567 + i * STEP) for i in (1, 2, 3)] == published
    seed = mix(mix(-41) + 7 * STEP)
    drawn = [mix(seed + i * STEP) for i in range(3000)]
    expected = [(z + 2**63) % 2**64 < 0.7 * 2**64 for z in drawn]  # order of int64
    mask = keep_mask(3, 1000, p=0.3, key=-41, op=7)
    assert torch.equal(mask, torch.tensor(expected).view(3, 1000))


def part(extent: int, start: int, local: int) -> Factor:
    return extent, ((start, local),)


def cuts(extent: int, parts: int) -> list[Factor]:
    """An extent cut into parts; the first ones are larger where it does not divide."""
    bounds = [math.ceil(i * extent / parts) for i in range(parts + 1)]
    return [part(extent, a, b - a) for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    "parts", [(1, 1, 1, 1), (2, 1, 3, 1), (1, 4, 2, 3), (5, 1, 1, 7)]
)
def test_a_shard_has_its_slice_of_the_mask(parts):
    batch, seq, heads, width = 5, 12, 6, 33
    full = keep_mask(batch, seq, heads * width).view(batch, seq, heads, width)
    extents = (batch, seq, heads, width)
    for b, s, h, w in product(*map(cuts, extents, parts)):
        shard = dropout_mask(0.1, 1, 0, [[b], [s], [h, w]], "cpu")
        index = tuple(
            slice(start, start + local) for _, ((start, local),) in (b, s, h, w)
        )
        assert torch.equal(shard, full[index].flatten(2))


def test_a_mask_depends_on_the_row_major_position_alone():
    full = keep_mask(6, 7, 8)
    assert torch.equal(keep_mask(42, 8).view(6, 7, 8), full)
    assert torch.equal(keep_mask(6 * 7 * 8).view(6, 7, 8), full)
    fused = dropout_mask(
        0.1, 1, 0, [[part(6, 0, 6), part(7, 2, 3)], [part(8, 0, 8)]], "cpu"
    )
    assert torch.equal(fused, full[:, 2:5].flatten(0, 1))
    assert dropout_mask(0.5, 1, 0, [], "cpu").shape == ()
    assert dropout_mask(0.5, 1, 0, [[part(4, 2, 0)], [part(3, 0, 3)]], "cpu").shape == (
        0,
        3,
    )


def test_positions_beyond_32_bits_differ():
    def row(index: int) -> Tensor:
        dims = [[part(2**40, index, 1)], [part(1 << 16, 0, 1 << 16)]]
        return dropout_mask(0.5, 1, 0, dims, "cpu")

    assert not torch.equal(row(0), row(2**16))
    assert not torch.equal(row(0), row(2**32))


def test_certain_masks():
    assert keep_mask(300, 300, p=0.0).all()
    assert not keep_mask(300, 300, p=1.0).any()
    assert keep_mask(300, 300, p=1e-18).all()


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_a_chance_out_of_range_is_an_error(bad):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        keep_mask(2, p=bad)


def test_a_shard_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="no slice 3:5 in extent 4"):
        dropout_mask(0.1, 1, 0, [[part(4, 3, 2)]], "cpu")


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, 2**63])
def test_the_keep_rate(p, key):
    mask = keep_mask(1000, 1000, p=p, key=key)
    sigma = math.sqrt(p * (1 - p) * mask.numel())
    assert abs(mask.sum().item() - (1 - p) * mask.numel()) < 5 * sigma


def agreement(a: Tensor, b: Tensor) -> float:
    """Correlation of two fair masks, in standard deviations from none."""
    signs = (a == b).double() * 2 - 1
    return abs(signs.sum().item()) / math.sqrt(signs.numel())


def test_masks_of_other_keys_ops_and_positions_are_uncorrelated():
    mask = keep_mask(512, 1024, p=0.5)
    others = [keep_mask(512, 1024, p=0.5, key=key) for key in (0, 2, 3, 1 << 40)]
    others += [keep_mask(512, 1024, p=0.5, op=op) for op in (1, 2, 100)]
    others += [mask.roll(shift, dim) for shift in (1, 2, 8, 16) for dim in (0, 1)]
    assert max(agreement(mask, other) for other in others) < 5
    assert agreement(mask, mask) > 5


def test_masks_have_no_rows_columns_or_tiles():
    """Chi-square of counts along rows, along columns, and of 2x2 patterns."""
    mask = keep_mask(1024, 1024, p=0.5)
    for counts in (mask.sum(0), mask.sum(1)):
        chi2 = ((counts - 512.0) ** 2 / 256.0).sum().item()
        assert abs(chi2 - 1024) < 5 * math.sqrt(2 * 1024)
    tiles = mask.view(512, 2, 512, 2).transpose(1, 2).flatten(2)
    patterns = (tiles * torch.tensor([1, 2, 4, 8])).sum(-1).flatten().bincount()
    share = 512 * 512 / 16
    assert len(patterns) == 16
    assert ((patterns - share) ** 2 / share).sum().item() < 15 + 5 * math.sqrt(2 * 15)
