"""sort_rows: rows lie in the order of their experts for all that is done there.

A product of rows with the weights of the experts that they chose works on the rows of
one expert at a time, so these have to lie together. Each product could bring them
together and put its result back; here rows are permuted once, before the first product
of a mixture, and home again after what is done row by row, as Megatron-LM permutes
tokens (`megatron/core/transformer/moe/moe_utils.py`). Each rank does so with the rows
that it has. Rows of a single product are left to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

from ..builder import Builder, prune
from ..dims.origins import find_origins
from ..graph import Location, Node, Value
from ..ops.experts import EXPERT, GROUP, GROUPED, PERMUTE, PRODUCT, ROWS, UNPERMUTE
from ..ops.op import op_of
from ..ops.row_dims import along
from ..shard.insert_collectives import Lowered
from ..shard.sharding import Route, Sharding


class Order(NamedTuple):
    """How rows are sorted. expert: of each row, sorted. places: where each was. ends:
    where the rows of each expert end."""

    expert: Value
    places: Value
    ends: Value


def sort_rows(lowered: Lowered) -> Lowered:
    """The same with rows permuted around products with the weights of experts."""
    sorter = _Sorter(lowered)
    if not any(map(sorter.sums, lowered.graph.nodes)):
        return lowered
    for node in lowered.graph.nodes:
        sorter.add(node)
    outputs = tuple(map(sorter.home, lowered.graph.outputs))
    nodes = tuple(sorter.builder.nodes)
    graph = prune(replace(lowered.graph, nodes=nodes, outputs=outputs))
    return replace(
        lowered,
        graph=graph,
        dims=sorter.dims,
        shardings=sorter.shardings,
        origins=find_origins(graph),
    ).verify()


def _sums(node: Node) -> bool:
    """Whether a node multiplies rows of several numbers, so that order matters."""
    return node.name == PRODUCT and node.operands[ROWS].shape[-1] > 1


class _Sorter:
    """orders: by the value that names experts. sorted: values of the graph that are
    there with their rows sorted, and by which. away: those that are there only so, and
    where they were made."""

    def __init__(self, lowered: Lowered) -> None:
        graph = lowered.graph
        made = (v for node in graph.nodes for v in node.results)
        self.builder = Builder.beside((*graph.sources, *made))
        self.dims, self.shardings = {**lowered.dims}, {**lowered.shardings}
        # By the value that names the experts of rows.
        sums = filter(_sums, graph.nodes)
        self.products = Counter(node.operands[EXPERT].name for node in sums)
        self.orders: dict[str, Order] = {}
        self.sorted: dict[str, tuple[Value, Order]] = {}
        self.away: dict[str, Location] = {}

    def sums(self, node: Node) -> bool:
        """Whether a node is one of several products of rows with their experts."""
        return _sums(node) and self.products[node.operands[EXPERT].name] > 1

    def add(self, node: Node) -> None:
        """Append a node, with what it reads in the order in which it takes rows."""
        if self.sums(node) or (node.name == PRODUCT and self._is_ordered(node)):
            self._multiply(node)
        elif (order := self._order_kept(node)) is not None:
            self._append(node, order)
        else:
            self.builder.nodes.append(node.substitute(self.home))

    def home(self, v: Value) -> Value:
        """A value with each row where it was."""
        if (where := self.away.pop(v.name, None)) is not None:
            x, order = self.sorted[v.name]
            args = x, order.places
            self.builder.nodes.append(Node(UNPERMUTE, args, {}, (v,), where))
        return v

    def _is_ordered(self, node: Node) -> bool:
        """Whether its rows are sorted for other products: as of experts' biases."""
        return node.operands[EXPERT].name in self.orders

    def _multiply(self, node: Node) -> None:
        x, expert, weight = node.operands
        order = self._order(expert, weight, node.location)
        self._permute(x, order, node.location)
        if self.sums(node):
            node = replace(node, op=GROUPED, args=(x, weight, order.ends))
        self._append(node, order)

    def _order(self, expert: Value, weight: Value, where: Location) -> Order:
        if expert.name not in self.orders:
            ((axes,), *_) = self.shardings[weight.name].slots
            lies = self.shardings[expert.name]
            route = Route("", expert.name, weight.shape[0])
            order = Order(
                self._new("expert", expert, lies.with_route(route)),
                self._new("places", expert, lies),
                self.builder.value("ends", weight.shape[:1], torch.int32),
            )
            self.dims[order.ends.name] = self.dims[weight.name][:1]
            self.shardings[order.ends.name] = Sharding(((axes,),))
            args = self.home(expert), weight.shape[0], axes
            self.builder.nodes.append(Node(GROUP, args, {}, tuple(order), where))
            self.orders[expert.name] = order
            self.sorted[expert.name] = order.expert, order
        return self.orders[expert.name]

    def _permute(self, x: Value, order: Order, where: Location) -> None:
        """Has a value with its rows in this order."""
        if x.name in self.sorted and self.sorted[x.name][1] == order:
            return
        there = self._there(self.home(x), order, "permuted")
        args = x, order.places
        self.builder.nodes.append(Node(PERMUTE, args, {}, (there,), where))
        self.sorted[x.name] = there, order

    def _order_kept(self, node: Node) -> Order | None:
        """The order of the rows of a node that works on each by itself; None where
        some of its rows lie in no order, or in another."""
        if not op_of(node).row_by_row:
            return None
        away = [v.name for v in node.operands if v.name in self.away]
        orders = {self.sorted[name][1] for name in away}
        dim = along(node, lambda v: 0 if v.name in away else None) if away else None
        return orders.pop() if dim == 0 and len(orders) == 1 else None

    def _append(self, node: Node, order: Order) -> None:
        """Append a node all of whose rows are in this order."""

        def there(v: Value) -> Value:
            return self.sorted[v.name][0] if v.name in self.sorted else v

        outs = tuple([v and self._there(v, order, v.name) for v in node.outs])
        new = replace(node.substitute(there), outs=outs)
        self.builder.nodes.append(new)
        for v, out in zip(node.outs, outs, strict=True):
            if v is not None and out is not None:
                self.sorted[v.name] = out, order
                self.away[v.name] = node.location

    def _there(self, v: Value, order: Order, name: str) -> Value:
        """A new value: another one's rows in this order."""
        route = self.shardings[order.expert.name].route
        lies = self.shardings[v.name].with_route(route)
        return self._new(name, v, lies)

    def _new(self, name: str, like: Value, lies: Sharding) -> Value:
        v = self.builder.value(name, like.shape, like.dtype)
        self.dims[v.name], self.shardings[v.name] = self.dims[like.name], lies
        return v
