"""The planner: what a model's layers cost, and the best plan for a cluster.

The model is captured with three of its layers only (`autopar.shorten`), so that time
and memory do not grow with its depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

from torch import nn

from autopar.options import make_plan
from autopar.shorten import Layers, shortened
from autopar.uncollected import uncollected
from passes.cluster import Cluster
from passes.estimate import Candidate
from passes.label_axes import Labelled, Runs, label_axes
from passes.mesh import Mesh
from passes.name_dims import Named, name_dims
from passes.normalize import normalize
from passes.plan import Plan, PlanError
from passes.price_layers import Cut, LayerPrices, cut_layers, price_cut
from passes.recompute import squares
from passes.search import RECOMPUTE, Found, Prices, Space, Watch, search
from passes.trace import trace


@dataclass(frozen=True)
class Sketch:
    """A model with few of its layers, its dims named. batch: samples it was traced
    with. starts: where each run of its layers begins."""

    named: Named
    layers: Layers | None
    batch: int

    @property
    def runs(self) -> int:
        return self.layers.repeats if self.layers else 1

    @property
    def starts(self) -> tuple[str, ...]:
        if self.layers is None:
            return ("",)
        step = self.layers.period
        return tuple(
            f"{self.layers.path}.{i}" for i in range(0, self.layers.kept, step)
        )

    @property
    def spells_attention(self) -> bool:
        """Whether there is anything that selective recomputation leaves out."""
        return bool(squares(self.named.graph.nodes, self.named.dims))

    def extents(self, *names: str) -> tuple[int, ...]:
        """Sizes of the dims of these names."""
        found = {
            dim.size
            for dims in self.named.dims.values()
            for factors in dims
            for dim in factors
            if dim.name in names
        }
        return tuple(sorted(found))


@uncollected()
def sketch(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Sketch:
    """Capture a model for planning. batch: at least two samples, as an example."""
    with shortened(model) as layers:
        named = name_dims(normalize(trace(model, batch, loss_fn)))
    samples = max(v.shape[0] for v in named.graph.inputs if v.shape)
    return Sketch(named, layers, samples)


def make_prices(of: Sketch, cluster: Cluster, **options: Any) -> Prices:
    """Prices of layers on a cluster's devices, each way of splitting them once.

    options: more of `autopar.options.Options`, for all plans.
    """

    @cache
    def cut(mesh: Mesh, microbatches: int) -> Cut:
        plan = make_plan(mesh, **options, microbatches=microbatches)
        return cut_layers(of.named, plan, of.starts)

    @cache
    def at(mesh: Mesh, recompute: str, halves: bool, microbatches: int) -> LayerPrices:
        of_mesh = cut(mesh, microbatches)
        return price_cut(of_mesh, recompute, cluster.device, halves)

    @cache
    def prices(mesh: Mesh, recompute: str, halves: bool, samples: int) -> LayerPrices:
        # By a table costs are linear in the samples: two microbatch sizes say it all.
        # What is measured depends on caches: on the line between the sizes next to it.
        most = of.batch // mesh.axis_size("ep")
        low = 1
        while cluster.device.ops.timed and 2 * low <= samples and not most % (4 * low):
            low *= 2
        one = at(mesh, recompute, halves, most // low)
        if samples == low:
            return one
        two = at(mesh, recompute, halves, most // low // 2)
        return one.scaled(two, samples / low - 1)

    return prices


@uncollected()
def find_plans(
    of: Sketch,
    cluster: Cluster,
    batch: int,
    mesh: Mesh | None = None,
    watch: Watch = lambda done, total: None,
    **space: Any,
) -> Found:
    """The best plans for a global batch of so many samples.

    mesh: axes whose sizes are given. watch: see `passes.search.search`. space: more of
    `passes.search.Space`.
    Raises: NoPlanFits, PlanError.
    """
    if batch < 1:
        raise PlanError(f"a global batch of {batch}", fix="give at least 1 sample")
    every = make_space(of, cluster, batch, mesh, **space)
    prices = make_prices(of, cluster)
    found = search(every, prices, watch)
    if not found.tried:
        raise PlanError(
            f"no mesh of {cluster.devices} devices divides a batch of {batch} samples"
            + (f" with {mesh}" if mesh else ""),
            fix="choose a batch that has more divisors, or other axes",
        )
    if not found.best:
        raise does_not_fit(found, cluster)
    return found


def make_space(
    of: Sketch, cluster: Cluster, batch: int, mesh: Mesh | None = None, **space: Any
) -> Space:
    """What the search for a model chooses from: axes as they divide its dims."""
    heads = of.extents("heads", "kv_heads")
    node = cluster.levels[0].devices if cluster.levels else 1
    tp = [t for t in range(1, node + 1) if all(h % t == 0 for h in heads)]
    experts = of.extents("experts")
    # A layer is priced with one sample of a rank and with two.
    ep = [e for e in range(1, max(experts, default=1) + 1) if of.batch % (2 * e) == 0]
    given: dict[str, Any] = {
        "tp": tuple(t for t in tp if cluster.devices % t == 0),
        "ep": (1, *(e for e in ep if e > 1 and all(n % e == 0 for n in experts))),
        "mesh": mesh,
        "recompute": RECOMPUTE if of.spells_attention else ("none", "full"),
    }
    return Space(cluster, batch, of.runs, **{**given, **space})


class NoPlanFits(PlanError):
    """No plan needs as little memory as a device has."""


def does_not_fit(found: Found, cluster: Cluster) -> NoPlanFits:
    """By how much the most frugal plan is too large, what binds, and a way out."""
    nearest = found.nearest
    assert nearest is not None, "candidates were tried"
    terms = max(nearest.memory, key=lambda terms: sum(terms.values()))
    term = max(terms, key=lambda name: terms[name])
    peak, limit = nearest.peak, cluster.device.memory
    rests = ("parameters", "gradients", "optimizer")
    state = sum(terms[name] for name in rests)
    needed = math.ceil(cluster.devices * state / max(1.0, limit - (peak - state)))
    if peak - state < limit and needed > cluster.devices:
        fix = f"about {needed} devices would do, or devices of {gigabytes(peak)}"
    else:
        fix = f"use shorter sequences, or devices of {gigabytes(peak)}"
    shown = ", ".join(f"{gigabytes(v)} {k}" for k, v in terms.items() if v)
    return NoPlanFits(
        f"no plan fits into {cluster}: the most frugal of {found.tried}, "
        f"{nearest.candidate}, needs {gigabytes(peak - limit)} more than the "
        f"{gigabytes(limit)} of a device\n  {shown}; most are {term}",
        fix=fix,
    )


def gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.3g} GB"


def plan_of(candidate: Candidate, of: Sketch) -> Plan:
    """The plan that a candidate stands for; cuts go by the layers that begin there."""
    plan = make_plan(
        candidate.mesh,
        microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        stages_per_rank=candidate.stages_per_rank,
        recompute=candidate.recompute,
        zero=candidate.zero,
    )
    starts = of.layers.starts if of.layers else ()
    ends = accumulate(candidate.layers[:-1])
    return replace(plan, cuts=tuple(starts[end] for end in ends))


def label_plan(
    of: Sketch, plan: Plan, cluster: Cluster, memory: float | None = None
) -> Labelled:
    """Decide for each op what the axes of a plan split of it.

    of: captured with the whole batch of a step. memory: bytes that a rank may use for
    parameters and what is kept for the backward; None: the plan's, else a device's.
    Raises: LabelsDoNotFit, PlanError.
    """
    found = of.layers
    runs = Runs(found.path, found.period, found.repeats) if found else None
    return label_axes(of.named, plan, cluster, runs, memory)
