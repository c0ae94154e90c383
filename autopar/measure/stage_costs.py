"""stage_costs: seconds of each distinct op by itself, by which stages are cut.

An op, forward and both halves of its backward (the gradients of activations, and of
weights), is emitted and timed as a stage of its own, see `autopar.measure.ops`, on one
thread, as torchrun starts its ranks. Results are kept in this machine's profile. What
is too large to run here is estimated from the best of what was measured. Of devices
that are not here they are the planner's prices, see `cluster_costs`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator

import torch

from autopar.machine.profile_file import Profile, read_profile, save_profile
from autopar.measure.ops import make_job, run_job
from autopar.passes.cost import Costs, Seconds, flops, signature, traffic
from autopar.passes.dims.origins import find_differentiable
from autopar.passes.dims.probe import REFUSALS
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Node
from autopar.passes.ops.op import is_view
from autopar.passes.price.cluster import Cluster, Device
from autopar.passes.price.price import BACKWARD, FORWARD, WEIGHT, price
from autopar.passes.shard.insert_collectives import Lowered
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.localize import Localizer
from autopar.passes.stage.one_op import one_op
from autopar.progress import tell
from autopar.runtime.launch.join import default_device

# An op that touches more than this many bytes is not run, but estimated.
LARGEST = 1 << 28
REPEATS = 3

LOG = logging.getLogger(__name__)


def stage_costs(lowered: Lowered) -> Costs:
    """Costs of the graph's nodes, at the shapes of the first rank; if nothing is
    decided by them, by the rates of the largest ones."""
    flows = find_differentiable(lowered.graph, lowered.traced.trainable)
    nodes = {key: n for key, n in _distinct(lowered, flows).items() if _is_small(n)}
    held = read_profile().halves
    wanted = nodes if lowered.plan.needs_costs else _telling(nodes)
    unknown = {key: node for key, node in wanted.items() if key not in held}
    new = {}
    with _one_thread():
        for number, (key, node) in enumerate(unknown.items()):
            tell("timing ops", number, len(unknown))
            if (seconds := measure(node, flows)) is not None:
                new[key] = seconds
    if new:
        # A read-only home: measured again next time.
        with contextlib.suppress(OSError):
            save_profile(Profile(halves=new))
    both = {**held, **new}
    known = {key: both[key] for key in nodes if key in both}
    return Costs(known, *_rates(nodes, known))


def cluster_costs(cluster: Cluster) -> Callable[[Lowered], Costs]:
    """Costs as the planner prices them, for devices that need not be here."""

    def costs(lowered: Lowered) -> Costs:
        plan = lowered.plan
        device = cluster.device.running(plan.tf32, plan.backend)
        flows = find_differentiable(lowered.graph, lowered.traced.trainable)
        priced = {
            key: seconds
            for key, node in _distinct(lowered, flows).items()
            if (seconds := _priced(node, flows, device)) is not None
        }
        links = [level.bytes_per_second * level.efficiency for level in cluster.levels]
        return Costs(
            priced,
            device.peak("float32") * device.efficiency,
            device.bytes_per_second * device.bandwidth_efficiency,
            *links[:1],
        )

    return costs


def _priced(node: Node, flows: Collection[str], device: Device) -> Seconds | None:
    """By the account of a stage of its own; None for an op without a derivative."""
    try:
        account = price(differentiate(one_op(node, flows), {}, {}, halves=True), device)
    except (*REFUSALS, CaptureError) as error:
        LOG.debug("%s is not priced by itself: %s", node.op, error)
        return None
    return Seconds(*(account["seconds", part] for part in (FORWARD, BACKWARD, WEIGHT)))


def _distinct(lowered: Lowered, flows: Collection[str]) -> dict[str, Node]:
    """The graph's nodes that compute, as the first rank has them, by signature."""
    plan = lowered.plan
    sizes = {axis: plan.size(axis) for axis in plan.axes}
    local = Localizer(
        lowered.dims, lowered.shardings, sizes, dict.fromkeys(plan.axes, 0)
    )
    nodes: dict[str, Node] = {}
    for node in lowered.graph.nodes:
        mine = local.node(node)
        if is_view(mine) or not mine.results or not mine.operands:
            continue
        if mine.op.startswith("comm."):
            continue
        # Of those that are alike, one that has a backward.
        if any(v.name in flows for v in mine.results):
            nodes[signature(mine)] = mine
        nodes.setdefault(signature(mine), mine)
    return nodes


def _is_small(node: Node) -> bool:
    """Enough so to be measured."""
    return traffic(node) <= LARGEST


def _telling(nodes: dict[str, Node]) -> dict[str, Node]:
    """The one that computes most, and of those that only move data the largest."""
    if not nodes:
        return {}
    most = max(nodes, key=lambda key: flops(nodes[key]))
    moving = [key for key in nodes if key != most and not _is_bound_by_work(nodes[key])]
    telling = [most, *sorted(moving, key=lambda key: -traffic(nodes[key]))[:1]]
    return {key: nodes[key] for key in telling}


def _is_bound_by_work(node: Node) -> bool:
    return flops(node) > 8 * traffic(node)


def _rates(nodes: dict[str, Node], known: dict[str, Seconds]) -> tuple[float, float]:
    """FLOP/s and bytes/s of the best measured ops, for those that were not."""
    default = Costs()
    speeds, bandwidths = [default.flops_per_second], [default.bytes_per_second]
    for key, measured in known.items():
        node = nodes[key]
        work, seconds = flops(node), max(measured.total, 1e-9)
        if work > 1e7 and _is_bound_by_work(node):
            speeds.append(3 * work / seconds)
        elif traffic(node) > 1e6:
            bandwidths.append(3 * traffic(node) / seconds)
    return max(speeds), max(bandwidths)


def measure(node: Node, flows: Collection[str] | None = None) -> Seconds | None:
    """Seconds of each part of a node, emitted as a stage of its own.

    flows: see `one_op`. None for an op that does not run on weights and numbers drawn
    at random, or has no derivative of its own: whether a model needs one is found out
    when its stages are differentiated.
    """
    try:
        local = differentiate(one_op(node, flows), {}, {}, halves=True)
        parts = run_job(make_job(node.op, local), default_device(), REPEATS).parts
    except (*REFUSALS, CaptureError) as error:
        LOG.debug("%s is not measured: %s", node.op, error)
        return None
    return Seconds(parts["forward"], parts["backward_input"], parts["backward_weight"])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
