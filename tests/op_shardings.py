"""What tests of labels share: a labelling's price beside that of its program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch

from autopar.machine.hardware import cluster_of
from autopar.options import make_plan
from autopar.passes.plan import Plan
from autopar.passes.price.account import Account
from autopar.passes.price.cluster import Link
from autopar.passes.price.price import price
from autopar.passes.search.op_sharding_costs import OpShardingCosts
from autopar.passes.search.value_costs import COMMUNICATION, COMPUTE, Setting
from autopar.passes.shard.insert_collectives import insert_collectives
from autopar.passes.shard.propagate import Sharded, propagate
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.split_stages import split_stages
from autopar.planner.planner import ShortModel, capture_short
from examples.gpt import GPT, Config

CLUSTER = cluster_of("8xA100-80GB")


@cache
def large(layers: int = 24, samples: int = 8) -> ShortModel:
    """A GPT so large that computing takes most of the time."""
    with torch.device("meta"):
        model = GPT(Config(layers, width=2048, heads=16, context=1024, vocab=32000))
    ids = torch.zeros(samples, 1024, dtype=torch.int64)
    return capture_short(model, {"ids": ids, "labels": ids.clone()})


def setting_of(named, plan: Plan, axis: str = "tp") -> Setting:
    link = CLUSTER.link(plan.mesh, (axis,))
    return Setting(propagate(named, plan), axis, CLUSTER.device, link)


def choices_of(costs: OpShardingCosts, sharded: Sharded, axis: str) -> dict[int, int]:
    """The choices that a propagation stands for."""
    found = {}
    for i, node in enumerate(costs.nodes):
        label = sharded.op_shardings[i][axis]
        varies = axis in sharded.states[node.results[0].name].varying
        for spot, choice in enumerate(costs.choices[i]):
            if choice.op_sharding == label and choice.varying == (
                varies and label is None
            ):
                found[i] = spot
    return found


def communication_of(costs: OpShardingCosts, choices: Mapping[int, int]) -> float:
    """Seconds of collectives, as the tables have them."""
    total = 0.0
    for amounts in costs.tables:
        row = amounts.values[tuple(choices[i] for i in amounts.nodes)]
        assert float(row[COMPUTE]) < math.inf, "propagate has chosen what is forbidden"
        total += float(row[COMMUNICATION])
    return total


def compiled(named, plan: Plan) -> Account:
    """Prices the program of the whole graph as one stage."""
    staged = split_stages(insert_collectives(propagate(named, plan)))
    sizes = plan.sizes
    at_zero = dict.fromkeys(sizes, 0)
    return price(differentiate(staged.stages[0], sizes, at_zero), CLUSTER.device)


def seconds_of(account: Account, axis: str, link: Link, microbatches: int = 1) -> float:
    """Seconds of a program's collectives over an axis, and its gradients' reduction."""
    total = 0.0
    once = (*account.step.exchanges, *account.step.beside)
    assert all(axis not in e.axes for e in once)  # tokens are counted over dp
    for part in account.microbatch.values():
        for e in (*part.exchanges, *part.beside):
            if e.axes == (axis,):
                total += e.calls * link.seconds(e.kind, e.bytes / e.calls)
    pending = sum(e.bytes for e in account.pending if axis in e.axes)
    reduced = link.without_latency().seconds("all_reduce", pending)
    return total + reduced / microbatches


def tp(size: int, **options) -> Plan:
    return make_plan(f"tp={size}", **options)
