"""Rows that lie where their experts do: an axis splits tokens and experts alike.

Where tokens meet the weights of the experts that they chose (`autopar.expert_linear`),
an axis ep splits the tokens by sample and the weights by expert. Each rank sends every
row to the rank that has its expert, once, and gets it back when all is done with it
(Lepikhin 2020, section 3.2): two all-to-alls, whose counts depend on the data, so no
row is dropped and none is padded. Against gathering the rows of all n ranks for each
product, as the op sharding `expert_linear:experts` does, it moves 1/n of the rows.

To the compiler such rows are split along the batch as ever, only in another order and
number: a state of its own of a `Sharding`. What computes row by row passes it on; any
other reader has the rows sent home before. Shapes on paper are those of tokens that
choose experts evenly.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..builder import Builder
from ..dims.name_dims import Dim, Dims, Factor
from ..graph import Location, Node, Value
from ..ops.experts import EXPERT, ROUTE, WEIGHT
from ..ops.op import op_of
from ..shard.op_sharding import OpSharding
from ..shard.sharding import Route, Sharding, Slots


def route_of(
    node: Node, op_shardings: Mapping[str, OpSharding], states: Mapping[str, Sharding]
) -> Route | None:
    """How the rows of a node lie: by its own experts, or as all of its operands do that
    have rows. None: each where its sample is."""
    for axis, op_sharding in op_shardings.items():
        if isinstance(op_sharding, Factor) and op_sharding.role == "routed":
            expert, weight = node.operands[EXPERT], node.operands[WEIGHT]
            return Route(axis, expert.name, weight.shape[0])
    if not op_of(node).row_by_row:
        return None
    routes = {states[v.name].route for v in node.operands} - {None}
    if len(routes) != 1:
        return None
    (route,) = routes
    assert route is not None, "there is one"
    op_sharding = op_shardings[route.axis]
    if not isinstance(op_sharding, Factor) or op_sharding.role != "map":
        return None
    split = {which for which, _, _ in op_sharding.operands}
    alike = all(states[node.operands[i].name].route == route for i in split)
    return route if alike else None


Way = tuple[Value, Value, Value]


class Ways:
    """How rows get to their experts, once for all that go there."""

    def __init__(
        self, builder: Builder, dims: dict[str, Dims], shardings: dict[str, Sharding]
    ) -> None:
        self.builder, self.dims, self.shardings = builder, dims, shardings
        self._ways: dict[tuple[Route, Slots], Way] = {}

    def known(self, route: Route, rows: Slots) -> Way | None:
        """rows: how axes split them, at home. See `make`."""
        return self._ways.get((route, rows))

    def make(self, route: Route, home: Value, ranks: int, where: Location) -> Way:
        """home: the experts of rows, where the samples are -> the same at the experts;
        the order in which rows leave; how many go to each of the ranks, and come."""
        lies = self.shardings[home.name]
        number = Dim(-1 - len(self._ways), "ranks", 2 * ranks)
        there = self.builder.value("routed", home.shape, home.dtype)
        order = self.builder.value("order", home.shape, home.dtype)
        counts = self.builder.value("counts", (number.size,), home.dtype)
        for v, state in ((there, lies.with_route(route)), (order, lies)):
            self.dims[v.name], self.shardings[v.name] = self.dims[home.name], state
        self.dims[counts.name] = ((number,),)
        self.shardings[counts.name] = Sharding.whole(self.dims[counts.name])
        args = (home, route.axis, route.experts)
        way = there, order, counts
        self.builder.nodes.append(Node(ROUTE, args, {}, way, where))
        self._ways[route, lies.slots] = way
        return way
