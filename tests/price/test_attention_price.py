"""Seconds of attention, by what is published of the kernel that ranks run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.machine.cluster_file import cluster_from
from autopar.machine.hardware import DEVICES
from autopar.passes.cost import flops
from autopar.passes.graph import Location, Node, Value
from autopar.passes.price.attention import FORWARD_TFLOPS, LENGTHS, attention_share
from autopar.passes.price.cluster import ClusterError
from autopar.passes.price.price import compute_part

HEADS, TOKENS = 16, 16384  # of the published figures


def attention(
    length: int, width: int = 128, causal: bool = False, dtype=torch.bfloat16
) -> Node:
    shape = (TOKENS // length, HEADS, length, width)
    q, k, v, out = (Value(name, shape, dtype) for name in ("q", "k", "v", "out"))
    args = (q, k, v, None, causal, width**-0.5)
    return Node("autopar.attention", args, {}, (out,), Location())


@pytest.mark.parametrize(("width", "causal"), FORWARD_TFLOPS)
def test_an_h100_takes_what_is_published(width: int, causal: bool) -> None:
    for length, speed in zip(LENGTHS, FORWARD_TFLOPS[width, causal], strict=True):
        node = attention(length, width, causal)
        device = replace(DEVICES["H100"], launch=0.0, bytes_per_second=1e18)
        work = flops(node) / (2 if causal else 1)
        assert compute_part([node], device).seconds == pytest.approx(
            work / speed / 1e12, rel=1e-3
        )


def test_an_a100_reaches_its_own_share_of_the_peak() -> None:
    share = attention_share(attention(16384), "ampere")
    assert share == pytest.approx(0.73)
    between = attention(3000)
    assert (
        attention_share(attention(2048), "ampere")
        < attention_share(between, "ampere")
        < attention_share(attention(4096), "ampere")
    )


def test_of_a_window_each_row_sees_all() -> None:
    causal = attention(4096, causal=True)
    window = replace(causal, kwargs={"window": 1024})
    whole, part = (attention_share(n, "hopper") for n in (causal, window))
    assert whole == 2 * part


def test_what_is_not_published_is_as_fast_as_any_product() -> None:
    assert attention_share(attention(512, dtype=torch.float32), "hopper") is None
    assert attention_share(attention(512), DEVICES["V100"].attention) is None
    with pytest.raises(ClusterError, match="attention of H100 is 'volta'"):
        cluster_from({"devices": 8, "device": {"name": "H100", "attention": "volta"}})
