"""Names for the dims that `name_dims` found, after how they are used.

An embedding's rows are `vocab`, attention's operands have `heads`, `seq`, `head_dim`;
what one weight makes and the next sums away is `ffn`, what pairs weights with tokens is
`experts`. What no use gives away gets no name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..atoms import Atoms
from ..dims.origins import Origin
from ..graph import Graph, Node, Value
from ..ops.op import is_view
from ..ops.rules import equation


def choose_names(
    atoms: Atoms,
    tensors: dict[str, list[list[int]]],
    graph: Graph,
    origins: Mapping[str, Origin],
) -> dict[int, str]:
    """Atom -> name. tensors: value name -> the atoms of each of its dims."""
    return _Names(atoms, tensors, graph, origins).run().names


def _sums_last(node: Node) -> bool:
    """Whether a product sums over one letter, the last of its first operand."""
    rule = equation(node)
    if rule is None:
        return False
    summed = [letter for letter, role in rule.roles.items() if role == "sum"]
    return list(rule.operands[0][-1]) == summed


@dataclass
class _Names:
    """Atom -> name; see `choose_names`."""

    atoms: Atoms
    tensors: dict[str, list[list[int]]]
    graph: Graph
    origins: Mapping[str, Origin]
    names: dict[int, str] = field(default_factory=dict)

    @cached_property
    def made(self) -> Mapping[str, Node]:
        return self.graph.producers()

    def give(self, value: Value, dim: int, *names: str) -> None:
        """Name the factors of a tensor dim; the first name that a factor gets stays."""
        if not -len(value.shape) <= dim < len(value.shape):
            return
        own = self.atoms.leaves(self.tensors[value.name][dim])
        if len(names) == 1 and len(own) > 1:
            names = tuple(f"{names[0]}{i}" for i in range(len(own)))
        for atom, name in zip(own, names, strict=False):
            self.names.setdefault(atom, name)

    def outermost(self, value: Value, dim: int, name: str) -> None:
        """Name the factors of a tensor dim that a model takes apart, as samples into
        pairs and positions into chunks: what can be shared out is the outermost one, of
        whole pairs or chunks, and has the name of the dim."""
        if dim < len(value.shape):
            count = len(self.atoms.leaves(self.tensors[value.name][dim]))
            self.give(value, dim, name, *(f"{name}{i}" for i in range(1, count)))

    def run(self) -> _Names:
        self.inputs()
        by_op: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            by_op.setdefault(node.name, []).append(node)
        for node in by_op.get("autopar.attention", []):
            self.attention(node)
        for node in by_op.get("aten.softmax", []):
            self.decomposed_attention(node)
        for node in by_op.get("aten.embedding", []):
            table, ids = node.operands
            if self.is_chosen(ids):  # as a vector of each expert
                continue
            from_data = self.origins[ids.name] is not Origin.CONSTANT
            self.give(table, 0, "vocab" if from_data else "positions")
            self.give(table, 1, "embed")
        for node in by_op.get("autopar.pick", []):
            self.give(node.operands[0], -1, "vocab")
        products = [
            node
            for op in ("linear", "matmul", "einsum")
            for node in by_op.get(f"aten.{op}", [])
        ]
        products += by_op.get("aten.bmm", []) + by_op.get("autopar.expert_linear", [])
        self.experts(products)
        for node in products:
            if all(len(v.shape) == 4 for v in node.operands) and _sums_last(node):
                self.give(node.operands[0], -1, "head_dim")
                self.give(node.operands[1], -1, "head_dim")
        self.hidden(products)
        for node in by_op.get("aten.split", []) + by_op.get("aten.chunk", []):
            self.pieces(node)
        for node in by_op.get("aten.unbind", []):
            count = len(node.outs)
            self.give(node.operands[0], node.arg("dim"), str(count))
        return self

    def is_chosen(self, ids: Value) -> bool:
        """Whether integers are found among real numbers, as experts by their scores."""
        node = self.made.get(ids.name)
        while node is not None and is_view(node):
            node = self.made.get(node.operands[0].name)
        return node is not None and any(
            v.dtype.is_floating_point for v in node.operands
        )

    def inputs(self) -> None:
        """The batch is the first dim of most fields; positions [seq] or a mask
        [seq, seq], which all samples share, have none."""
        firsts: dict[tuple[int, ...], list[Value]] = {}
        for v in self.graph.inputs:
            if v.shape:
                own = tuple(self.atoms.leaves(self.tensors[v.name][0]))
                firsts.setdefault(own, []).append(v)

        def likely(values: list[Value]) -> tuple[bool, int, int]:
            ranks = [len(v.shape) for v in values if not v.dtype.is_floating_point]
            return values[0].shape[0] > 1, len(values), max(ranks, default=0)

        for v in max(firsts.values(), key=likely, default=[]):
            self.outermost(v, 0, "batch")
        for v in self.graph.inputs:
            if not v.dtype.is_floating_point:
                self.outermost(v, 1, "seq")

    def attention(self, node: Node) -> None:
        q, k, v = node.operands[:3]
        heads = self.atoms.leaves(self.tensors[q.name][1])
        grouped = len(heads) == 2 or 1 < k.shape[1] != q.shape[1]
        self.give(q, 1, *(("kv_heads", "q_per_kv") if grouped else ("heads",)))
        self.give(k, 1, "kv_heads" if grouped else "heads")
        self.give(q, 2, "seq")
        self.give(k, 2, "seq")
        self.give(q, 3, "head_dim")
        self.give(v, 3, "head_dim")

    def decomposed_attention(self, node: Node) -> None:
        scores = node.out
        if len(scores.shape) == 4:
            heads, rows = (2, 1) if self.is_named(scores, 1, "seq") else (1, 2)
            many = len(self.atoms.leaves(self.tensors[scores.name][heads])) == 2
            names = ("kv_heads", "q_per_kv") if many else ("heads",)
            self.give(scores, heads, *names)
            self.give(scores, rows, "seq")
            self.give(scores, 3, "seq")

    def is_named(self, value: Value, dim: int, name: str) -> bool:
        own = self.atoms.leaves(self.tensors[value.name][dim])
        return [self.names.get(atom) for atom in own] == [name]

    def experts(self, products: list[Node]) -> None:
        """Products of many pairs of matrices, one of each pair being a weight."""
        for node in products:
            rule = equation(node)
            if node.op == "autopar.expert_linear":
                self.give(node.operands[2], 0, "experts")
            if rule is None or len(node.operands) != 2:
                continue
            for v, dims in zip(node.operands, rule.operands, strict=True):
                if self.origins[v.name] is Origin.PARAM and len(dims) == 3:
                    shared = set(rule.operands[0]) & set(rule.operands[1])
                    for d, names in enumerate(dims):
                        if names in shared and {rule.roles[n] for n in names} == {
                            "map"
                        }:
                            self.give(v, d, "experts")

    def hidden(self, products: list[Node]) -> None:
        """What one weight makes and another sums away: the width inside of an MLP. What
        a weight both sums and makes, as it mixes the streams of a residual, is none
        where there is anything else to split."""
        made: set[int] = set()
        used: set[int] = set()
        mixed: set[int] = set()
        for node in products:
            rule = equation(node)
            if rule is None:
                continue
            for v, dims in zip(node.operands, rule.operands, strict=True):
                if self.origins[v.name] is not Origin.PARAM or len(dims) > 3:
                    continue
                sums: set[int] = set()
                makes: set[int] = set()
                for own, names in zip(self.tensors[v.name], dims, strict=True):
                    summed = any(rule.roles[name] == "sum" for name in names)
                    (sums if summed else makes).update(self.atoms.leaves(own))
                used |= sums
                made |= makes
                mixed |= sums & makes
        inside = (made & used) - mixed
        is_split = inside or {"heads", "kv_heads"} & {*self.names.values()}
        for atom in inside if is_split else made & used:
            self.names.setdefault(atom, "ffn")

    def pieces(self, node: Node) -> None:
        """The number of equal pieces prints as itself: `(3 heads head_dim)`."""
        x, piece = node.operands[0], node.results[0]
        for dim, (whole, part) in enumerate(zip(x.shape, piece.shape, strict=True)):
            if whole != part and whole % part == 0:
                count = self.atoms.leaves(self.tensors[x.name][dim])[0]
                self.names.setdefault(count, str(whole // part))
