"""The error for no plan: how much too large it is, what binds, and a way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.machine.hardware import DEVICES, make_cluster
from autopar.passes.mesh import Mesh
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.price_layers import Prices
from autopar.passes.schedule.make_schedule import USUAL_SCHEDULE
from autopar.passes.search.by_formula import rough
from autopar.passes.search.candidates import Space, candidates, meshes
from autopar.passes.search.search import Ranking, run_on_paper

NO_LAYERS = (
    "the model has no list of layers whose pattern repeats, or does not run with few"
)
TIMES = (2, 4, 8, 16, 32, 64)  # as many devices are tried
TRIED = 3  # of the most frugal candidates


class Infeasible(PlanError):
    """No plan needs as little memory as a device has."""


class NothingToChoose(PlanError):
    """The devices cannot share such a model, or such a batch."""


def infeasible(
    plans: Ranking,
    prices: Prices,
    lighter: Callable[[], Mapping[str, Prices]],
    space: Space,
    wishes: Mapping[str, object],
    space_of: Callable[[Cluster, Mapping[str, object]], Space],
) -> Infeasible:
    """How much too large the most frugal plan is, what binds, and a way out.

    lighter: returns prices with options of which activations may take less memory, by
    how these are written. wishes: fields of the space that were decided. space_of:
    makes a space of a cluster and wishes.
    """
    nearest, cluster = plans.nearest, space.cluster
    assert nearest is not None, "candidates were tried"
    terms = max(nearest.memory, key=lambda terms: sum(terms.values()))
    term = max(terms, key=lambda name: terms[name])
    peak, limit = nearest.peak, cluster.device.memory
    others = lighter() if terms["activations"] > peak - limit else {}
    fits = {option: frugal(space, those) for option, those in others.items()}
    ways = [f"use {option}: {_told(e)}" for option, e in fits.items() if e]
    ways.append(_way_out(peak, cluster, prices, wishes, space_of))
    shown = ", ".join(f"{gigabytes(v)} {k}" for k, v in terms.items() if v)
    return Infeasible(
        f"no plan fits into {cluster}: the most frugal of {plans.tried}, "
        f"{nearest.candidate}, needs {gigabytes(peak - limit)} more than the "
        f"{gigabytes(limit)} of a device\n  {shown}; most are {term}",
        fix="; or ".join(ways),
    )


def _way_out(
    peak: float,
    cluster: Cluster,
    prices: Prices,
    wishes: Mapping[str, object],
    space_of: Callable[[Cluster, Mapping[str, object]], Space],
) -> str:
    """The smallest change with which a plan fits: a wish less, else more devices."""
    larger = f"or use devices of {gigabytes(peak, up=True)}"
    for name in wishes:
        others = {k: v for k, v in wishes.items() if k != name}
        if fitting := frugal(space_of(cluster, others), prices):
            option = "the mesh" if name in ("shape", "mesh") else name
            return f"leave {option} to the planner: {_told(fitting)}; {larger}"
    for times in TIMES:
        more = with_devices(cluster, times * cluster.devices)
        if fitting := frugal(space_of(more, wishes), prices):
            return f"use {more.devices} devices: {_told(fitting)}; {larger}"
    return f"use shorter sequences, {larger}"


def _told(e: Estimate) -> str:
    return f"{e.candidate} needs {gigabytes(e.peak, up=True)}"


def frugal(space: Space, prices: Prices) -> Estimate | None:
    """A plan that fits, of those that need the least memory; None: there is none.

    Unless a schedule is decided it is 1F1B, which keeps the least.
    """
    if len(space.schedule) > 1:
        space = replace(space, schedule=(USUAL_SCHEDULE,))
    limit = space.cluster.device.memory
    ranked = [r for c in candidates(space) if (r := rough(c, space, prices))]
    for _, _, candidate in sorted(ranked, key=lambda r: r[1])[:TRIED]:
        estimate = run_on_paper(candidate, prices, space.cluster)
        if estimate.peak <= limit:
            return estimate
    return None


def with_devices(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of more devices of the same kind: more nodes, of as many each."""
    *inner, last = cluster.levels or make_cluster(cluster.device, devices).levels
    if not inner and cluster.device.name in DEVICES:
        return make_cluster(cluster.device, devices)
    return replace(
        cluster,
        devices=devices,
        levels=(*inner, *([] if inner else [last]), replace(last, devices=devices)),
    )


def gigabytes(amount: float, up: bool = False) -> str:
    """Formats an amount with three digits, rounded; `up` rounds up, to be enough."""
    amount /= 1e9
    if up and amount > 0:
        digit = 10.0 ** (math.floor(math.log10(amount)) - 2)
        amount = math.ceil(amount / digit) * digit
    return f"{amount:.3g} GB"


def nothing_to_choose(space: Space) -> NothingToChoose:
    """Say which wish leaves no candidate."""
    wished = f" with {space.mesh}" if space.mesh else ""
    if space.shape:
        wished = f" with axes of {', '.join(map(str, space.shape))}"
    devices, batch = space.cluster.devices, space.global_batch
    possible = list(meshes(space))
    if space.runs == 1 and (space.mesh or Mesh(())).pipeline_ranks > 1:
        return NothingToChoose(
            f"no pipeline can be planned: {NO_LAYERS}",
            fix=f"compile it as it is: autopar compile ... --mesh {space.mesh}",
        )
    if not possible:
        return NothingToChoose(
            f"no mesh of {devices} devices{wished} has a meaning for this model",
            fix="let the sizes of axes divide the devices, and be no more than layers",
        )
    if all(batch % m.sample_ranks for m in possible):
        return NothingToChoose(
            f"no mesh of {devices} devices divides a batch of {batch} samples{wished}",
            fix="choose a batch that has more divisors, or other axes",
        )
    return NothingToChoose(
        f"no plan for {devices} devices{wished} and {batch} samples is as the options "
        "decide",
        fix="leave out some of microbatches, schedule, stages_per_rank and zero",
    )
