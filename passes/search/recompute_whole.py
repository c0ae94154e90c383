"""recompute_whole: what a step takes where full recomputation runs whole layers again.

So do the checkpoints of Megatron-LM, and torch's reentrant ones. Of ours the backward
runs again what it uses, as torch's others do: not the last product, which only makes
what the layer gives on (see `passes.recompute`).
"""

from __future__ import annotations

from dataclasses import replace

from ..price.account import Account, Alive
from ..price.cluster import Cluster
from ..price.estimate import Estimate, estimate
from ..price.price_layers import LayerPrices, Prices
from ..search.by_formula import prices_of


def layer_again(prices: LayerPrices) -> Account:
    """What running the forward of a whole layer again adds to its backward. prices:
    with nothing computed again, of a model of two layers at least."""
    assert prices.more is not None
    forward = replace(prices.more.forward, beside=(), alive=Alive(), alone=Alive())
    return Account(backward=forward)


def with_whole_layers(e: Estimate, prices: Prices, cluster: Cluster) -> Estimate:
    """The estimate with `whole_layers`, if it is of full recomputation and of a model
    of several layers."""
    candidate = e.candidate
    of = prices_of(replace(candidate, recompute="none"), prices)
    if candidate.recompute != "full" or of.more is None:
        return e
    again, stages = layer_again(of), of.stages(candidate.layers)
    accounts = [
        account + again * runs
        for account, runs in zip(stages, candidate.layers, strict=True)
    ]
    whole = estimate(accounts, candidate, cluster)
    return replace(e, whole_layers=whole.seconds)
