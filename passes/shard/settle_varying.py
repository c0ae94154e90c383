"""settle_varying: which whole values are used alike by all ranks, and which are not."""

from __future__ import annotations

from collections.abc import Sequence

from ..builder import find_reached
from ..dims.name_dims import Named
from ..dims.origins import Origin
from ..graph import Value
from ..plan import Plan
from ..shard.parameter_sharding import varying_axes
from ..shard.sharding import Sharding


def settle_varying(
    named: Named,
    plan: Plan,
    states: dict[str, Sharding],
    needs: Sequence[tuple[Sharding, ...]],
) -> list[tuple[Sharding, ...]]:
    """Settle R or V, from the loss backwards.

    A value of parameters alone is V on an axis if each of its uses there is V or split:
    its gradient then stays a pending sum, down to the parameter, and is reduced once a
    step. So is any other value on the axes that split the batch, if it has no samples:
    positions that come with the batch. A use through which no gradient of the loss
    comes back counts for nothing. What one op makes is V all together, or none of
    it: of what it is made of, the gradient has one state. States are updated in place;
    the nodes' needs are returned anew.
    """
    uses: dict[str, list[Sharding]] = {}
    all_needs = list(needs)

    def varying(v: Value) -> frozenset[str]:
        alone = named.origins[v.name] is Origin.PARAM
        axes = plan.axes if alone else plan.data_axes
        return varying_axes(states[v.name], uses.get(v.name, ()), axes)

    nodes, reached = named.graph.nodes, find_reached(named.graph)
    for i in range(len(nodes) - 1, -1, -1):
        node, own = nodes[i], all_needs[i]
        if named.origins[node.results[0].name] & Origin.PARAM:
            # What nothing reads sends no gradient back that could have a state.
            read = [v for v in node.results if v.name in uses] or node.results
            common = frozenset.intersection(*(varying(v) for v in read))
            for v in node.results:
                states[v.name] = states[v.name].with_varying(common)
            own = tuple(n.with_varying(n.varying | common) for n in own)
            all_needs[i] = own
        if not any(v.name in reached for v in node.results):
            continue
        for v, need in zip(node.operands, own, strict=True):
            if named.origins[v.name] & Origin.PARAM:
                uses.setdefault(v.name, []).append(need)
    for v in named.graph.params:
        states[v.name] = states[v.name].with_varying(varying(v))
    return all_needs
