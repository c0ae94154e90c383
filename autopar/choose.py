"""The plan is chosen where a step is compiled: for this machine, or a named one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.batches import samples_of, with_samples
from autopar.measured_cluster import how_priced, measured_cluster, named_cluster
from autopar.planner import find_plans, plan_of, sketch
from passes.cluster import Cluster
from passes.mesh import MeshError
from passes.plan import Plan, PlanError

# Of the batch that a model is captured with, two for each rank of up to 8 with experts
# of their own; costs are linear in them.
SAMPLES = 16
LOG = logging.getLogger("autopar")


def wanted(mesh: Any, options: Mapping[str, Any]) -> Cluster | None:
    """What to choose a plan for: a number of devices of this machine, a `Cluster` or
    its text as `8xA100-80GB`. None for a mesh, which is decided already. This machine
    is as its profile has it, if there is one: see `autopar.profile`.

    Raises: MeshError, ClusterError; PlanError for options, which would be decisions.
    """
    if isinstance(mesh, Cluster):
        found = mesh
    elif isinstance(mesh, int):
        if isinstance(mesh, bool) or mesh < 1:
            raise MeshError(f"a mesh of {mesh} devices", fix="give at least 1")
        found = measured_cluster(mesh)
    elif isinstance(mesh, str) and re.match(r"\s*\d", mesh):
        found = named_cluster(mesh)
    else:
        return None
    if options:
        raise PlanError(
            f"the planner chooses for {found}, but {next(iter(options))}= is given",
            fix='leave it out, or decide on a mesh, as "pp=2,tp=2"',
        )
    return found


def choose_plan(
    model: nn.Module,
    cluster: Cluster,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Plan:
    """The best plan for steps on such batches. Raises: NoPlanFits, PlanError."""
    of = sketch(model, with_samples(batch, SAMPLES), loss_fn)
    found = find_plans(of, cluster, samples_of(batch))
    LOG.info("%s: %s", found.best[0].candidate, how_priced(found.best[0], cluster))
    return plan_of(found.best[0].candidate, of)
