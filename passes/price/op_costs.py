"""op_costs: seconds of an op with its derivative, each by itself.

By these a graph is cut into stages, before there are any. What a stage takes is counted
on all of its nodes, once they are known: see `passes.price.stage_seconds`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..cost import BACKWARD_WORK, Seconds, signature, weights_of
from ..dims.origins import find_differentiable
from ..dims.probe import REFUSALS
from ..errors import CaptureError
from ..graph import Node
from ..ops.op import is_view
from ..price.account import Account, PartCost
from ..price.cluster import Cluster, Device
from ..price.price import compute, compute_part
from ..price.stage_seconds import neighbour, part_seconds
from ..shard.collectives import axes_of
from ..shard.insert_collectives import Lowered
from ..stage.differentiate import differentiate
from ..stage.one_op import one_op


def op_parts(
    node: Node,
    flows: Collection[str],
    device: Device,
    trained: bool,
    sizes: Mapping[str, int],
) -> Mapping[str, PartCost]:
    """What an op and its derivative take, each by itself, by the part of a microbatch.

    node: in the shapes of a rank. flows: names of values that a gradient flows through;
    trained: whether one flows through the op. sizes: of the mesh's axes.
    """
    if is_view(node):
        return Account().microbatch
    first = dict.fromkeys(sizes, 0)
    try:
        local = differentiate(one_op(node, flows), sizes, first, halves=True)
    except (*REFUSALS, CaptureError):  # it has no derivative by itself
        once = compute_part([node], device)
        backward = once * (BACKWARD_WORK * trained)
        late = backward * (0.5 * bool(weights_of(node)))
        return Account(once, backward - late, late).microbatch
    return compute(local, device).microbatch


@dataclass(frozen=True)
class OpCosts:
    """See `passes.cost.NodeCosts`. Nodes of one signature take as long."""

    lowered: Lowered
    cluster: Cluster
    _known: dict[tuple[str, bool], Seconds] = field(default_factory=dict)

    @cached_property
    def device(self) -> Device:
        plan = self.lowered.plan
        return self.cluster.device.running(plan.tf32, plan.backend)

    @cached_property
    def flows(self) -> frozenset[str]:
        """Names of values that a gradient flows through."""
        return find_differentiable(self.lowered.graph, self.lowered.traced.trainable)

    def seconds(self, node: Node) -> Seconds:
        """Seconds of an op and of its halves of backward, cached by signature."""
        trained = any(v.name in self.flows for v in node.results)
        key = signature(node), trained
        if key not in self._known:
            self._known[key] = self._seconds(node, trained)
        return self._known[key]

    def _seconds(self, node: Node, trained: bool) -> Seconds:
        plan = self.lowered.plan
        parts = op_parts(node, self.flows, self.device, trained, plan.sizes)
        took = (
            part_seconds(part, name, plan.mesh, self.cluster)[0]
            for name, part in parts.items()
        )
        return Seconds(*took)

    def gather(self, node: Node) -> Seconds:
        """Seconds to gather a parameter's shards and to reduce its gradient."""
        plan, size = self.lowered.plan, sum(v.bytes for v in node.results)
        link = self.cluster.link(plan.mesh, axes_of(node))
        gathered = link.seconds("all_gather", size) if plan.zero == 3 else 0.0
        scattered = link.seconds("reduce_scatter", size) if plan.zero > 1 else 0.0
        return Seconds(gathered, gathered + scattered, 0.0)

    def send(self, size: int) -> float:
        """Seconds to send so many bytes to the next stage."""
        return neighbour(self.cluster, self.lowered.plan.mesh).seconds("send", size)
