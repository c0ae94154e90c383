"""The best plan of a model for a cluster, with the record of how it was found."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.models.load import TOKENS, LoadedModel
from autopar.passes.plan import Plan
from autopar.passes.price.estimate import Estimate
from autopar.passes.search.search import Ranking
from autopar.planner.choose import SAMPLES, search_plans
from autopar.planner.planned import batch_for
from autopar.planner.planner import ShortModel, capture_short
from autopar.planner.reprice import price
from autopar.planner.request import PlanRequest
from autopar.plans.plan_record import PlanRecord, priced_near
from autopar.plans.store import checksum


@dataclass(frozen=True)
class BestPlan:
    """of: the model as it was captured. plans: the best plans, the chosen one first.
    narrow: what that one takes with "bf16-stream", where layers add to float32."""

    of: ShortModel
    plans: Ranking
    plan: Plan
    record: PlanRecord
    narrow: Estimate | None = None


def capture_few_layers(
    loaded: LoadedModel, request: PlanRequest, global_batch: int, seq: int | None
) -> ShortModel:
    """Returns the model as it is captured for planning, with all samples of a step
    where they can be made up: op shardings are chosen for so many. seq: tokens of a
    sample, for a model that brings no batch."""
    made_up = loaded.batch is None and global_batch * (seq or 1) in TOKENS
    samples = SAMPLES if global_batch % SAMPLES or not made_up else global_batch
    batch = batch_for(loaded, samples, seq, device="meta")
    return capture_short(loaded.model, batch, **request.of_all)


def best_plan(
    of: ShortModel,
    loaded: LoadedModel,
    request: PlanRequest,
    global_batch: int,
    seq: int | None,
    seed: int,
    reach: float,
) -> BestPlan:
    """Search for the best plan of steps of a global batch.

    of: see `capture_few_layers`. seed: of weights. reach: of op shardings, see
    `open_to_op_shardings`.
    Raises: Infeasible, PlanError.
    """

    def whole(of: ShortModel, few: bool) -> ShortModel:
        if of.batch == global_batch:
            return of
        batch = batch_for(loaded, global_batch, seq)
        return capture_short(loaded.model, batch, few=few, **request.of_all)

    of, plans, plan = search_plans(of, request, global_batch, whole, reach)
    record = PlanRecord(
        plan=checksum(plan.to_json()),
        model=loaded.spec,
        seed=seed,
        seq=seq if loaded.batch is None else None,
        global_batch=global_batch,
        runs=of.runs,
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        cluster=request.cluster,
        best=plans.best,
        tried=plans.tried,
        options=request.of_all,
        priced=priced_near(plans),
    )
    best, narrow = plans.best[0].candidate, None
    if not best.has_op_shardings and (other := of.narrow) is not None:
        (narrow,) = price([best], other, request.limited)
    return BestPlan(of, plans, plan, record, narrow)
