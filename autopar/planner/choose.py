"""The plan is chosen where a step is compiled: for this machine, or a named one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from autopar.machine.measured_cluster import how_priced
from autopar.models.batches import samples_of, with_samples
from autopar.passes.errors import StageError
from autopar.passes.plan import Plan
from autopar.passes.price.candidate import Candidate
from autopar.passes.search.candidates import ALIKE
from autopar.passes.search.search import Ranking
from autopar.planner.planner import ShortModel, capture_short, find_plans, plan_of
from autopar.planner.request import PlanRequest
from autopar.planner.shard_ops_of_best import open_to_op_shardings, shard_ops_of_best
from autopar.progress import tell

# Of the batch that a model is captured with, two for each rank of ep; costs are linear
# in them.
SAMPLES = 16
LOG = logging.getLogger("autopar")


def choose_plan(
    model: nn.Module,
    request: PlanRequest,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Plan:
    """The best plan for steps on such batches. Raises: Infeasible, PlanError."""

    def capture(batch: Mapping[str, Any], few: bool = True) -> ShortModel:
        return capture_short(model, batch, loss_fn, few, **request.of_all)

    def whole(_: ShortModel, few: bool) -> ShortModel:
        return capture(batch, few)

    short = capture(with_samples(batch, SAMPLES))
    _, plans, plan = search_plans(short, request, samples_of(batch), whole)
    best = plans.best[0]
    LOG.info("%s: %s", best.candidate, how_priced(best, request.cluster))
    return plan


def search_plans(
    of: ShortModel,
    request: PlanRequest,
    global_batch: int,
    whole: Callable[[ShortModel, bool], ShortModel],
    reach: float = ALIKE,
) -> tuple[ShortModel, Ranking, Plan]:
    """The model that plans were priced by, the best plans, and the first one whole.

    Where a mesh cuts what one layer hands on to the next, the model is captured as it
    is, and without pipelines. whole: captures the model with all samples of a step, and
    with few layers or not. reach: of op shardings, see `open_to_op_shardings`. Raises:
    Infeasible, PlanError.
    """

    def searched(of: ShortModel, few: bool) -> tuple[ShortModel, Ranking, Plan]:
        every = partial(whole, of, few)
        return of, *_search(of, request, global_batch, every, reach)

    try:
        return searched(of, True)
    except StageError:
        if of.layers is None or of.again is None:
            raise
        return searched(of.again(few=False), False)


def _search(
    of: ShortModel,
    request: PlanRequest,
    global_batch: int,
    whole: Callable[[], ShortModel],
    reach: float,
) -> tuple[Ranking, Plan]:
    cluster, watch = request.limited, partial(tell, "pricing candidates")
    plans = find_plans(of, cluster, global_batch, watch=watch, **request.space)
    sharded: Mapping[Candidate, Plan] = {}
    if open_to_op_shardings(plans, reach):
        plans, sharded = shard_ops_of_best(
            plans, whole(), cluster, reach, request.fixes_attention
        )
    best = plans.best[0].candidate
    return plans, sharded.get(best) or plan_of(best, of)
