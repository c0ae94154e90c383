"""Op shardings for the best plans that a search found: where they gain, it has them.

A search prices an axis as its template splits (Megatron's, for tp). For the best plans
the shardings of all ops are then decided exactly, by
`passes.search.choose_op_shardings`, priced by the graph that they make, and kept if the
step is faster on paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.errors import LossNotSeparable
from autopar.passes.mesh import AXES
from autopar.passes.plan import Plan, PlanError
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate, estimate
from autopar.passes.price.price_layers import price_layers
from autopar.passes.search.by_formula import layer_mesh
from autopar.passes.search.choose_op_shardings import ChosenShardings, ShardingsDoNotFit
from autopar.passes.search.search import Ranking, simplest_first
from autopar.planner.planner import ShortModel, open_ops, plan_of
from autopar.progress import tell

MOST = 2  # of the best plans have ops sharded, that differ by more than ZeRO
TRIES = 2  # to leave room for what op shardings do not count
GAIN = 1e-3  # of a step: what a plan must gain to have them


def open_to_op_shardings(plans: Ranking, reach: float = math.inf) -> list[Estimate]:
    """The best of the plans whose axes leave something to decide.

    reach: share of the fastest plan's seconds by which these may be slower.
    """
    open_to: dict[Candidate, Estimate] = {}
    limit = (1 + reach) * min(e.seconds for e in plans.best)
    for e in plans.best:
        if _inner(e.candidate) and e.seconds <= limit:
            open_to.setdefault(replace(e.candidate, zero=0), e)
    return list(open_to.values())[:MOST]


def shard_ops_of_best(
    searched: Ranking,
    whole: ShortModel,
    cluster: Cluster,
    reach: float = math.inf,
    decided: bool = False,
) -> tuple[Ranking, Mapping[Candidate, Plan]]:
    """Returns the ranking with plans that have op shardings among the best; and these.

    whole: the model captured with all samples of a step. reach: see
    `open_to_op_shardings`. decided: see `autopar.planner.planner.open_ops`.
    """
    plans: dict[Candidate, Plan] = {}
    better: list[Estimate] = []
    open_to = open_to_op_shardings(searched, reach)
    for number, e in enumerate(open_to):
        tell(f"choosing op shardings of {e.candidate}", number, len(open_to))
        try:
            tried = _with_op_shardings(e, whole, cluster, decided)
        except PlanError:  # layers that cannot be decided one by one
            if math.isinf(reach):
                raise
            continue
        if tried and tried[0].seconds < e.seconds * (1 - GAIN):
            better.append(tried[0])
            plans[tried[0].candidate] = tried[1]
    best = simplest_first([*searched.best, *better])
    return replace(searched, best=tuple(best)), plans


def _inner(candidate: Candidate) -> bool:
    """Whether a candidate has an axis on which op shardings are to be chosen."""
    return any(
        n > 1 and not AXES[a].splits_samples for a, n in candidate.mesh.stage_axes
    )


def _with_op_shardings(
    e: Estimate, whole: ShortModel, cluster: Cluster, decided: bool
) -> tuple[Estimate, Plan] | None:
    """The estimate and plan with them; None: none of them fit, or samples are taken
    together, so that what one costs cannot be told."""
    limit = memory = cluster.device.memory
    try:
        ops = open_ops(whole, plan_of(e.candidate, whole), cluster, decided)
        for _ in range(TRIES):
            chosen = ops.choose(memory)
            sharded = _priced(e.candidate, chosen, whole, cluster)
            if sharded.peak <= limit:
                return sharded, chosen.plan
            memory -= sharded.peak - limit
            if memory <= 0:
                break
    except (ShardingsDoNotFit, LossNotSeparable):
        pass
    return None


def _priced(
    candidate: Candidate, chosen: ChosenShardings, whole: ShortModel, cluster: Cluster
) -> Estimate:
    """Prices a candidate by the graph that its op shardings make, as
    `autopar.planner.planner.make_prices` does."""
    candidate = replace(candidate, has_op_shardings=True)
    plan = replace(
        chosen.of_graph,
        mesh=layer_mesh(candidate.mesh),
        microbatches=whole.batch // candidate.samples,
        zero=0,
        recompute=candidate.recompute,
    )
    named = whole.shared if candidate.zero else whole.named
    device, halves = cluster.device, candidate.halves
    prices = price_layers(named, plan, whole.starts, device, halves)
    return estimate(prices.stages(candidate.layers), candidate, cluster)
