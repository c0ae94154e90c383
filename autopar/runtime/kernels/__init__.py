"""Numeric kernels that emitted modules call: plain functions on tensors, no autograd.

Names that end in `_` accumulate into their first argument and return it. Everything
here runs on CPU; where CUDA has a better op, the choice follows the tensors' device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from autopar.passes.errors import IndexOutOfRange
from autopar.passes.ops.random import Kind
from autopar.passes.shard.layout import Pieces
from autopar.runtime.kernels.sdpa import attention, attention_backward

__all__ = [
    "add_",
    "add_each_",
    "affine",
    "attention",
    "attention_backward",
    "bias_grad_",
    "check_indices",
    "draw",
    "embedding_grad_",
    "kept",
    "linear_weight_grad_",
    "masked_scale",
    "matmul_weight_grad_",
    "sum_exp",
    "sum_exp_backward",
    "sum_exp_backward_",
]

Factor = tuple[int, Pieces]  # global extent, and what of it is here


def _block_elements(device: torch.device) -> int:
    """Elements to work on at once: those of a CPU core's cache, or that fill a GPU."""
    return 1 << 15 if device.type == "cpu" else 1 << 24


# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014, figure 17: the counter's step and the two multipliers of its mixer.
_STEP, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def dropout_mask(
    p: float,
    key: int,
    op: int,
    dims: Sequence[Sequence[Factor]],
    device: torch.device | str,
) -> Tensor:
    """Which elements of a rank's part of a tensor a dropout keeps: 1 with chance 1-p.

    Element i of the *global* tensor (its row-major index) is kept when SplitMix64's
    mixer sends seed + i * step to the lowest 1-p of all int64; (key, op) hash to seed.
    So the split cannot matter, and the chance is exact to the rounding of p (2^-53).
    key stands for the user's seed and the step, op for the dropout call in the model.
    dims holds, for each dim of the tensor, its factors, outermost first.
    Returns bool [local extent of each dim]; what is kept is not scaled.
    Raises: ValueError when p or a factor is out of range.

    Costs about 2 ns an element on an AVX-512 core, `bernoulli_` 4. (A 32-bit hash would
    cost 1, but repeats itself every 2^32 elements.)
    """
    return kept(*counters(key, op, dims, device), p)


def counters(
    key: int, op: int, dims: Sequence[Sequence[Factor]], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Two int64 tensors whose sum is, at each element of a rank's part of a tensor, the
    counter that its bits are mixed from: [all but the last extent, 1] and [last].

    key, op, dims: as of `dropout_mask`. Raises: ValueError for a factor out of range.
    """
    places = tuple(map(tuple, dims))
    rows, cols = _counters(places, torch.device(device))
    return rows + _signed(_mix(_mix(key) + op * _STEP)), cols


def kept(rows: Tensor | None, cols: Tensor | None, p: float) -> Tensor | None:
    """Whether a dropout of chance p keeps each of rows + cols, int64 as of `counters`:
    bool of their common shape. None of None: there is no dropout then."""
    if rows is None or cols is None:
        return None
    return _filled(
        lambda h, tile: torch.le(h, most(p), out=tile), rows, cols, torch.bool
    )


def most(p: float) -> int:
    """The largest int64 that dropout of chance p keeps. Raises: ValueError."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1]: got {p}")
    return max(round((1.0 - p) * 2.0**64) - 1, 0) - 2**63


_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # of a number, in base 2


def draw(
    kind: Kind,
    key: int,
    op: int,
    dims: Sequence[Sequence[Factor]],
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    """Random numbers of a kind (see `passes.ops.random`), of a rank's part of a tensor.

    key, op, dims: as of `dropout_mask`, and the bits of a number are made in the same
    way. Real numbers have 24 of them, of dtypes with fewer digits as many as these.
    Returns [local extent of each dim] of dtype.
    """

    def write(h: Tensor, tile: Tensor) -> None:
        h = h ^ _shifted(h, 31)
        if kind == "bits":
            tile.copy_(_shifted(h, 1))
            return
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if kind == "uniform":
            digits = _DIGITS.get(dtype, 24)
            tile.copy_(_shifted(h, 64 - digits).to(wide) * 2.0**-digits)
            return
        u = (_shifted(h, 64 - 23).to(wide) + 0.5) * 2.0**-23  # neither 0 nor 1
        # By the inverse of the distribution (Devroye 1986, section II.2).
        tile.copy_(u.log().neg_() if kind == "exponential" else torch.special.ndtri(u))

    return _filled(write, *counters(key, op, dims, device), dtype)


def _filled(
    write: Callable[[Tensor, Tensor], object],
    rows: Tensor,
    cols: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Fills a tensor by `write`, from the bits of `mixed`, a tile at a time."""
    shape = torch.broadcast_shapes(rows.shape, cols.shape)
    filled = torch.empty(shape, dtype=dtype, device=rows.device)
    block = _block_elements(filled.device)
    height = max(1, block // max(1, cols.numel()))
    bands = filled.view(-1, cols.numel()).split(height)
    for row, band in zip(rows.view(-1, 1).split(height), bands, strict=True):
        for col, tile in zip(
            cols.view(-1).split(block), band.split(block, 1), strict=True
        ):
            write(mixed(row + col), tile)
    return filled


def mixed(counter: Tensor) -> Tensor:
    """Random bits of each counter, int64, which is written over; but for the mixer's
    last step, h ^ h >> 31, which only stirs the low ones."""
    h = counter
    h.bitwise_xor_(_shifted(h, 30)).mul_(_signed(_MUL1))
    return h.bitwise_xor_(_shifted(h, 27)).mul_(_signed(_MUL2))


def _shifted(h: Tensor, bits: int) -> Tensor:
    """Logical right shift; `>>` of a signed integer brings in copies of the sign."""
    return (h >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@lru_cache(maxsize=16)  # of a microbatch, all layers' are alike
def _counters(
    dims: tuple[tuple[Factor, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """`counters` of seed 0: (global index) * _STEP, by rows and columns."""
    unit, each = _STEP, []
    for factors in reversed(dims):
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        for extent, pieces in reversed(factors):
            for start, local in pieces:
                if not 0 <= start <= start + local <= extent:
                    raise ValueError(
                        f"no slice {start}:{start + local} in extent {extent}"
                    )
            index = positions(pieces, device)
            counter = _outer_sum(index.mul_(_signed(unit)), counter)
            unit = unit * extent
        each.append(counter)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    cols, *leading = each or [one[0]]
    shape = [counter.numel() for counter in reversed(leading)]
    rows = reduce(_outer_sum, reversed(leading), one)
    return rows.view(*shape, 1) if each else rows[0], cols


def positions(pieces: Pieces, device: torch.device) -> Tensor:
    """The positions in a dim that a share holds, int64 [rows of the share]."""
    parts = [torch.arange(a, a + n, device=device) for a, n in pieces]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *parts])


def _outer_sum(rows: Tensor, cols: Tensor) -> Tensor:
    return (rows[:, None] + cols).flatten()


def _mix(z: int) -> int:
    z %= 2**64
    z = (z ^ z >> 30) * _MUL1 % 2**64
    z = (z ^ z >> 27) * _MUL2 % 2**64
    return z ^ z >> 31


def _signed(z: int) -> int:
    """The int64 that has the low 64 bits of z: torch multiplies no uint64."""
    return (z + 2**63) % 2**64 - 2**63


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """Sum over the last dim of exp(x - m): x [..., V], m [...] -> [...]; of exp(x),
    where the largest m is infinite, as of scores that are all masked.

    Works on a few rows at a time, so no second [..., V] tensor exists. Computes and
    returns in the wider of the two dtypes.
    """
    total = m.new_empty(m.shape, dtype=torch.promote_types(x.dtype, m.dtype))
    shifts = finite_or_zero(m)[..., None]
    for row, shift, out in _row_blocks(x, shifts, total[..., None]):
        torch.sum((row - shift).exp_(), -1, keepdim=True, out=out)
    return total


def sum_exp_backward(x: Tensor, dy: Tensor, m: Tensor) -> Tensor:
    """Gradient of `sum_exp` for x: exp(x - m) * dy, [..., V], in one new buffer; 0 of
    what is all masked, whose sum, 0, others divide by."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _sum_exp_backward(x, dy, m, dx)


def sum_exp_backward_(x: Tensor, dy: Tensor, m: Tensor) -> Tensor:
    """The same, written over x."""
    if x.is_contiguous():
        return _sum_exp_backward(x, dy, m, x)
    return x.copy_(sum_exp_backward(x, dy, m))


def _sum_exp_backward(x: Tensor, dy: Tensor, m: Tensor, dx: Tensor) -> Tensor:
    shifts = finite_or_zero(m)[..., None]
    factors = dy.masked_fill(m == -torch.inf, 0)[..., None]
    for row, shift, factor, out in _row_blocks(x, shifts, factors, dx):
        torch.mul((row - shift).exp_(), factor, out=out)
    return dx


def finite_or_zero(m: Tensor) -> Tensor:
    """The finite elements unchanged, and 0 for infinite ones."""
    return m.masked_fill(m.isinf(), 0)


def _row_blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """x and others, leading dims flattened, a block of rows at a time."""
    height = max(1, _block_elements(x.device) // max(1, x.shape[-1]))
    return zip(*(_rows(t).split(height) for t in (x, *others)), strict=True)


def linear_weight_grad_(grad: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """grad += dy^T x, for y = x W^T: grad [N,K], dy [...,N], x [...,K].

    grad may be wider than the operands: float32 sums of bfloat16 products.
    """
    if grad.dtype == dy.dtype:
        return grad.addmm_(_rows(dy).mT, _rows(x))
    return grad.add_(_rows(dy).mT @ _rows(x))


def matmul_weight_grad_(grad: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    """grad += x^T dy, for y = x W (Conv1D): grad [K,N], x [...,K], dy [...,N]."""
    return linear_weight_grad_(grad, x, dy)


def bias_grad_(grad: Tensor, dy: Tensor) -> Tensor:
    """grad += dy summed over its leading dims: grad [N], dy [...,N]."""
    rows = _rows(dy)
    if rows.is_cpu and rows.dtype == grad.dtype and rows.element_size() >= 4:
        # On CPU a product with ones is 2 to 3 times as fast as a sum over rows.
        return grad.addmv_(rows.mT, rows.new_ones(len(rows)))
    return grad.add_(rows.sum(0, dtype=grad.dtype))


def embedding_grad_(
    grad: Tensor, dy: Tensor, ids: Tensor, padding_idx: int | None = None
) -> Tensor:
    """grad[ids] += dy, repeated ids added up: grad [rows,D], dy [...,D], ids [...].

    Row padding_idx of the table, where given, gets nothing.
    """
    rows, ids = _rows(dy).to(grad.dtype), ids.reshape(-1)
    if padding_idx is not None:
        # Not rows[...]: how many there are is known on the host only after a wait.
        rows = rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
    if grad.is_cuda:  # sorts: reproducible, where index_add_ adds in any order
        return grad.index_put_((ids,), rows, accumulate=True)
    # In place: no dense gradient of the table, which takes 4 to 50 times as long.
    return grad.index_add_(0, ids, rows)


def check_indices(index: Tensor, n: int, ignored: int | None = None) -> None:
    """Every index [...] must lie in 0 .. n-1, or be `ignored`.

    A shard takes no notice of indices that are not its own, so nothing else would show
    that one is nobody's. Raises: IndexOutOfRange. On a GPU nobody waits for it: the
    device fails there, as it does in torch's own lookups.
    """
    outside = (index < 0) | (index >= n)
    if ignored is not None:
        outside &= index != ignored
    if index.is_cpu:
        if outside.any():
            worst = int(index[outside][0])
            but = "" if ignored is None else f" (or {ignored}, which is ignored)"
            raise IndexOutOfRange(
                f"the index {worst} is out of range: there are 0 to {n - 1}{but}",
                fix="give the model ids that its table has rows for, and labels that "
                "its logits have classes for",
            )
    elif not index.is_meta:
        torch._assert_async(~outside.any(), f"an index is not in 0 to {n - 1}")


def _rows(x: Tensor) -> Tensor:
    """x with its leading dims flattened."""
    return x.reshape(-1, x.shape[-1])


def permute_rows(x: Tensor, places: Tensor) -> Tensor:
    """x [rows, ...] -> the rows that were at these places, in their order."""
    return x.index_select(0, places)


def unpermute_rows(x: Tensor, places: Tensor) -> Tensor:
    """The inverse of `permute_rows`, and its transpose."""
    return torch.empty_like(x).index_copy_(0, places, x)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., K], weight [K, N], bias [N] -> x @ weight + bias [..., N]."""
    y = torch.addmm(bias, _rows(x), weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def masked_scale(x: Tensor, keep: Tensor | None, scale: float) -> Tensor:
    """x [...] where kept (bool [...]), else zero, times scale; no mask keeps x."""
    if keep is None:
        return x.clone()
    return torch.mul(x, keep).mul_(scale)


def add_(x: Tensor, y: Tensor) -> Tensor:
    """x += y."""
    return x.add_(y)


def add_each_(sums: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """x += y for each pair, of any shapes, by a few kernels in all on a GPU."""
    torch._foreach_add_(sums, terms)
