"""Prices a search's result again; and as formulas in the model's named dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import measured_cluster
from autopar.models.load import load_model
from autopar.passes.errors import LossNotSeparable
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster, ClusterError
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.symbolic import activation_bytes, parameters, step_flops
from autopar.passes.search.recompute_whole import with_whole_layers
from autopar.passes.search.search import run_on_paper
from autopar.planner.choose import SAMPLES
from autopar.planner.planned import batch_for
from autopar.planner.planner import ShortModel, capture_short, make_prices
from autopar.plans.plan_record import EstimateError, PlanRecord
from autopar.terminal import command


def formulas(record: PlanRecord) -> dict[str, str]:
    """Parameters, operations and saved bytes of the model, in its named dims."""
    of = _short_model(record)
    return {
        "parameters": str(parameters(of)),
        "FLOPs of a step": str(step_flops(of)),
        "bytes that a layer saves": str(activation_bytes(of)),
    }


def _short_model(record: PlanRecord) -> ShortModel:
    loaded = load_model(record.model, seed=record.seed, device="meta")
    batch = batch_for(loaded, SAMPLES, record.seq)
    return capture_short(loaded.model, batch, **record.options)


def as_priced(cluster: Cluster, profile: Path | None) -> Cluster:
    """The cluster of a record, with measurements again, which records do not keep.

    Raises: ClusterError, if they are not in this machine's profile.
    """
    if not cluster.profile:
        return cluster
    measured = measured_cluster(cluster.devices, profile)
    if measured.profile != cluster.profile:
        raise ClusterError(
            f"the plan was priced by a profile of {cluster.profile}, which is not here",
            fix=f"measure again, or give --devices {cluster}",
        )
    return with_memory(measured, cluster.device.memory)


def reprice(record: PlanRecord, cluster: Cluster) -> PlanRecord:
    """The same plans on other devices, or by another version's prices.

    The one that was chosen stays first; those with op shardings are left out.
    Raises: ClusterError; EstimateError, if the chosen one has them.
    """
    model = command(record.model)
    if cluster.devices != record.cluster.devices:
        raise ClusterError(
            f"the plans are for {record.cluster.devices} devices, not "
            f"{cluster.devices}",
            fix=f"plan anew: autopar plan {model} --devices ...",
        )
    if record.best[0].candidate.has_op_shardings:
        raise EstimateError(
            f"the plan's op shardings were decided for {record.cluster}",
            fix=f"plan anew: autopar plan {model} --devices ...; with "
            "--no-op-shardings, a plan can be priced again",
        )
    plain = [e.candidate for e in record.best if not e.candidate.has_op_shardings]
    best = price(plain, _short_model(record), cluster)
    return replace(record, cluster=cluster, best=best, priced=())


def price(
    candidates: Sequence[Candidate], of: ShortModel, cluster: Cluster
) -> tuple[Estimate, ...]:
    """Estimates of plans without op shardings; of the first also with whole layers
    recomputed."""

    def priced(at_once: bool) -> tuple[Estimate, ...]:
        prices = make_prices(of, cluster, at_once)
        first, *others = (run_on_paper(c, prices, cluster) for c in candidates)
        return with_whole_layers(first, prices, cluster), *others

    try:
        return priced(at_once=False)
    except LossNotSeparable:
        return priced(at_once=True)
