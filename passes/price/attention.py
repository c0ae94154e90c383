"""Attention's share of a device's peak: by head dim, causal or not, and length.

Of FlashAttention-2, the kernel that a GPU's ranks run (`autopar.runtime.kernels`).
Figures 5 and 6 of Shah 2024 (arXiv:2407.08608) say for an H100 what it does in a second
with 16,384 tokens in sequences of 512 to 16,384; a causal mask's is of the half that it
lets through. Backwards are without a mask there, and of 64 and 128: a causal one is
taken to lose as much as its forward does, one of 256 to be as one of 128.

On an A100 the best is 73 % of the peak forward and 63 % backward (Dao 2023,
arXiv:2307.08691, abstract and section 4.1); the rest is taken to be as on an H100.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from ..graph import Node
from ..ops.attention import ATTENTION, ATTENTION_BACKWARD

FORWARDS = ("autopar.attention", ATTENTION)
BACKWARDS = ("autopar.attention_backward", ATTENTION_BACKWARD)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOP/s: (head dim, causal) -> of each length.
FORWARD_TFLOPS: Mapping[tuple[int, bool], tuple[int, ...]] = {
    (64, False): (282, 306, 318, 321, 322, 324),
    (64, True): (180, 229, 262, 284, 295, 299),
    (128, False): (309, 350, 362, 368, 370, 370),
    (128, True): (191, 260, 298, 319, 333, 335),
    (256, False): (275, 313, 321, 323, 324, 326),
    (256, True): (208, 251, 278, 293, 297, 298),
}
BACKWARD_TFLOPS: Mapping[int, tuple[int, ...]] = {
    64: (198, 238, 264, 279, 287, 291),
    128: (214, 260, 291, 310, 318, 322),
    256: (214, 260, 291, 310, 318, 322),
}
BEST = max(map(max, FORWARD_TFLOPS.values())), max(map(max, BACKWARD_TFLOPS.values()))
# Generation of tensor cores -> the best share of the peak, forward and backward.
SHARES = {"hopper": (BEST[0] / 989.5, BEST[1] / 989.5), "ampere": (0.73, 0.63)}


def attention_share(node: Node, generation: str) -> float | None:
    """The multiply-adds that a device does of a node's, which counts all keys, over
    those that it could do at its peak; None: it is no attention in 16 bits."""
    forward = node.op in FORWARDS
    if generation not in SHARES or not (forward or node.op in BACKWARDS):
        return None
    q, k = node.named("q k")
    if q.dtype.itemsize != 2:
        return None
    keys = node.arg("keys")
    length = k.shape[-2] if keys is None else math.prod(n for n, _ in keys)
    width = min((w for w in BACKWARD_TFLOPS if w >= q.shape[-1]), default=256)
    causal = bool(node.arg("is_causal"))
    reached = _between(FORWARD_TFLOPS[width, causal], length)
    if not forward:
        masked = reached / _between(FORWARD_TFLOPS[width, False], length)
        reached = _between(BACKWARD_TFLOPS[width], length) * masked
    share = SHARES[generation][not forward] * reached / BEST[not forward]
    # Of a window each row sees all, of a causal mask half on average.
    half = causal and node.kwargs.get("window", length) >= length
    return share * 2 if half else share


def _between(row: tuple[int, ...], length: int) -> float:
    """Interpolates `row` at a length, linearly in the logarithm of lengths."""
    after = bisect_left(LENGTHS, length)
    if after in (0, len(LENGTHS)):
        return row[min(after, len(LENGTHS) - 1)]
    low, high = LENGTHS[after - 1], LENGTHS[after]
    part = math.log(length / low) / math.log(high / low)
    return row[after - 1] + (row[after] - row[after - 1]) * part
