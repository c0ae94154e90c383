"""Seconds of this machine's ops, by which stages are cut and scheduled.

Ops of the emitted code are measured: each op of the model by itself, with both halves
of its backward (the gradients of activations, and of weights), as a stage of its own,
see `autopar.measure.ops`, on one thread, as torchrun starts its ranks. Results are kept
in this machine's profile. What is too large to run here, or comes when the seconds for
it are spent, is read off from what ran.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from autopar.machine.measured_cluster import known_cluster
from autopar.machine.profile_file import Profile, read_profile, save_profile
from autopar.measure.ops import make_job, run_job
from autopar.passes.cost import flops, signature, traffic
from autopar.passes.dims.origins import find_differentiable
from autopar.passes.dims.probe import REFUSALS
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Node
from autopar.passes.ops.op import is_view
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.measured import Timed
from autopar.passes.shard.insert_collectives import Lowered
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.local_stage import LocalStage
from autopar.passes.stage.localize import Localizer
from autopar.passes.stage.one_op import one_op
from autopar.progress import tell
from autopar.runtime.launch.join import default_device

# An op that touches more than this many bytes is not run, but estimated.
LARGEST = 1 << 28
REPEATS = 3
# Seconds: of one op's runs, and of all of them, the smallest op first.
OF_ONE, OF_ALL = 0.5, 10.0

LOG = logging.getLogger(__name__)


def this_machine(lowered: Lowered) -> Cluster:
    """This machine's devices, one for each rank of the plan. Where anything is decided
    by seconds, ops that are in no profile are measured first."""
    plan, cluster = lowered.plan, known_cluster(lowered.plan.mesh.size)
    if not plan.needs_costs:
        return cluster
    flows = find_differentiable(lowered.graph, lowered.traced.trainable)
    ops, alone = cluster.device.ops, dict(read_profile().alone)
    new: dict[str, Timed] = {}
    nodes = _distinct(lowered, flows)
    with _one_thread():
        start = time.monotonic()
        for number, node in enumerate(sorted(nodes.values(), key=flops)):
            if time.monotonic() - start > OF_ALL:
                break
            tell("timing ops", number, len(nodes))
            local = alone_stage(node, flows)
            if local is None or {*ops.timed, *alone} >= _signatures(local):
                continue
            new |= measure(node.op, local)
            alone |= new
    if new:
        # A read-only home: measured again next time.
        with contextlib.suppress(OSError):
            save_profile(Profile(alone=new))
    known = replace(ops, timed={**alone, **ops.timed})
    return replace(cluster, device=replace(cluster.device, ops=known))


def alone_stage(node: Node, flows: Collection[str] | None = None) -> LocalStage | None:
    """A node as a stage of its own, its backward in halves. flows: see `one_op`.

    None for one without a derivative of its own: whether a model needs one is found out
    when its stages are differentiated.
    """
    try:
        return differentiate(one_op(node, flows), {}, {}, halves=True)
    except (*REFUSALS, CaptureError) as error:
        LOG.debug("%s is not measured: %s", node.op, error)
        return None


def measure(name: str, local: LocalStage) -> Mapping[str, Timed]:
    """Measures a stage's ops; {} if it does not run on drawn weights and numbers."""
    try:
        return run_job(make_job(name, local), default_device(), REPEATS, OF_ONE).timed
    except (*REFUSALS, CaptureError) as error:
        LOG.debug("%s is not measured: %s", name, error)
        return {}


def _signatures(local: LocalStage) -> set[str]:
    """The signatures of a stage's nodes that take time."""
    return {signature(node) for node in local.nodes if traffic(node)}


def _distinct(lowered: Lowered, flows: Collection[str]) -> dict[str, Node]:
    """The graph's nodes that compute and are not too large, as the first rank has them,
    by signature."""
    plan = lowered.plan
    at_zero = dict.fromkeys(plan.axes, 0)
    local = Localizer(lowered.dims, lowered.shardings, plan.sizes, at_zero)
    nodes: dict[str, Node] = {}
    for node in lowered.graph.nodes:
        mine = local.node(node)
        if is_view(mine) or not mine.results or not mine.operands:
            continue
        if mine.is_comm or traffic(mine) > LARGEST:
            continue
        # Of those that are alike, one that has a backward.
        if any(v.name in flows for v in mine.results):
            nodes[signature(mine)] = mine
        nodes.setdefault(signature(mine), mine)
    return nodes


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
