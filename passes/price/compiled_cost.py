"""compiled_cost: the accounts of a compiled plan's stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..plan import Plan
from ..price.account import Account, Held, by_rank, rank_memory
from ..price.cluster import Cluster
from ..price.price import price
from ..schedule.fit_schedule import Limits
from ..stage.local_stage import LocalStage


def stage_accounts(
    locals_: Sequence[LocalStage], plan: Plan, cluster: Cluster
) -> list[Account]:
    """Counts each stage on its first rank."""
    device = cluster.device.running(plan.tf32, plan.backend)
    known: dict[int, Account] = {}  # stages of equal text have the same nodes
    for local in locals_:
        if id(local.forward) not in known:
            known[id(local.forward)] = price(local, device, offload=plan.offload)
    return [known[id(local.forward)] for local in locals_]


def count_once(
    accounts: Sequence[Account], locals_: Sequence[LocalStage], placement: Sequence[int]
) -> list[Account]:
    """The accounts, in which each rank counts once what several of its stages use, and
    exchanges gradients of weights that other ranks use."""
    held: dict[str, list[int]] = {}
    for i, local in enumerate(locals_):
        for v in (*local.params, *local.buffers):
            held.setdefault(local.stage.names[v.name], []).append(i)
    counted = list(accounts)
    for name, stages in held.items():
        seen: set[int] = set()
        apart = len({placement[i] for i in stages}) > 1
        for i in stages if len(stages) > 1 else ():
            local = locals_[i]
            both = (*local.params, *local.buffers)
            (v,) = (v for v in both if local.stage.names[v.name] == name)
            trained = v.bytes * (v.name in local.grads)
            more = Account(tied=Held(trained=trained * apart))
            if placement[i] in seen and v in local.buffers:
                more = Account(buffers=-v.bytes)
            elif placement[i] in seen:
                offloaded = trained if accounts[i].held.offloaded else 0
                more = Account(held=Held(-v.bytes, -trained, offloaded=-offloaded))
            seen.add(placement[i])
            counted[i] += more
    return counted


def activation_budget(
    accounts: Sequence[Account], locals_: Sequence[LocalStage], memory: float
) -> Limits:
    """The bytes left for activations on each rank of a device with `memory` bytes (0:
    no limit). accounts: of each stage, see `stage_accounts`."""

    def limits(placement: Sequence[int]) -> list[float]:
        ranks = by_rank(count_once(accounts, locals_, placement), placement)
        return [(memory or math.inf) - sum(rank_memory(a).values()) for a in ranks]

    return limits
