"""The plan is chosen where a step is compiled: for this machine, or a named one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.machine.measured_cluster import how_priced
from autopar.models.batches import samples_of, with_samples
from autopar.passes.plan import Plan
from autopar.passes.price.candidate import Candidate
from autopar.passes.search.candidates import ALIKE
from autopar.planner.planner import capture_short, find_plans, plan_of
from autopar.planner.request import PlanRequest
from autopar.planner.shard_ops_of_best import open_to_op_shardings, shard_ops_of_best

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
    of = capture_short(model, with_samples(batch, SAMPLES), loss_fn, **request.of_all)
    plans = find_plans(of, request.limited, samples_of(batch), **request.space)
    sharded: Mapping[Candidate, Plan] = {}
    if open_to_op_shardings(plans, ALIKE):
        whole = capture_short(model, batch, loss_fn, **request.of_all)
        plans, sharded = shard_ops_of_best(
            plans, whole, request.limited, ALIKE, request.fixes_attention
        )
    best = plans.best[0]
    LOG.info("%s: %s", best.candidate, how_priced(best, request.cluster))
    return sharded.get(best.candidate) or plan_of(best.candidate, of)
