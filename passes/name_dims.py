"""name_dims: find out what each dim of each tensor is.

Every tensor dim is a product of named dims, outermost first. The rule of each op says
which dims are the same; unifying them over the graph, and splitting a dim when a view
splits it, names every dim of every tensor. GPT-2's fused projection comes out as
`(embed) (3 heads head_dim)`, a flattened batch as `(batch seq)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.atoms import Atoms
from passes.graph import Graph, Node, Value
from passes.notation import Equation, Role, extent_of
from passes.origins import Origin, find_origins
from passes.probe import probe_equation
from passes.rules import equation
from passes.trace import Traced


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dim. Two dims are the same if their `key` is; names may repeat."""

    key: int
    name: str
    size: int

    def __str__(self) -> str:
        return self.name


Dims = tuple[tuple[Dim, ...], ...]
# (operand or out, tensor dim, factor in that dim): where a named dim sits.
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Factor:
    """One named dim flowing through one op."""

    dim: Dim
    role: Role
    operands: tuple[Place, ...]
    outs: tuple[Place, ...]


@dataclass(frozen=True)
class Named:
    """A graph whose dims have names.

    dims: value name -> its dims. factors: for each node, the dims that flow through.
    unruled: for each node whose op has no rule, by the name of its first result: what
    trials found out about it (`probe`).
    """

    traced: Traced
    dims: Mapping[str, Dims]
    factors: tuple[tuple[Factor, ...], ...]
    origins: Mapping[str, Origin]
    unruled: Mapping[str, str]

    @property
    def graph(self) -> Graph:
        return self.traced.graph

    def pattern(self, value: Value | str) -> str:
        """einops-like: `(embed) (3 heads head_dim)` is `embed (3 heads head_dim)`."""
        name = value if isinstance(value, str) else value.name
        return pattern(self.dims[name])

    def verify(self) -> Named:
        for v in [
            *self.graph.sources,
            *(o for n in self.graph.nodes for o in n.results),
        ]:
            for extent, dims in zip(v.shape, self.dims[v.name], strict=True):
                size = 1
                for d in dims:
                    size *= d.size
                assert size == extent, f"%{v.name}: {self.pattern(v)} is not {v.shape}"
        return self

    def __str__(self) -> str:
        lines = [
            f"{v.type:20} %{v.name}  {self.pattern(v)}" for v in self.graph.sources
        ]
        for node in self.graph.nodes:
            dims = ", ".join(self.pattern(v) for v in node.results)
            lines.append(f"{dims:44} {node}")
        return "\n".join(lines)


def pattern(dims: Dims) -> str:
    parts = []
    for factors in dims:
        names = " ".join(d.name for d in factors)
        parts.append(names if len(factors) == 1 else f"({names})" if names else "1")
    return " ".join(parts)


def name_dims(traced: Traced) -> Named:
    """Name every dim of every tensor, and say which flow through each op."""
    graph = traced.graph
    atoms = Atoms()
    tensors: dict[str, list[list[int]]] = {
        v.name: [atoms.fresh(n) for n in v.shape] for v in graph.sources
    }
    bound: list[tuple[Equation, dict[str, list[int]]] | None] = []
    origins = find_origins(graph)
    probed = set()
    for node in graph.nodes:
        for v in node.results:
            tensors[v.name] = [atoms.fresh(n) for n in v.shape]
        if node.op == "aten.reshape.default":
            x, y = node.operands[0], node.out
            atoms.unify(_flat(tensors[x.name]), _flat(tensors[y.name]))
            bound.append(None)
            continue
        rule = equation(node)
        if rule is None and origins[node.results[0].name] is not Origin.CONSTANT:
            rule = probe_equation(node)
            probed.add(node.results[0].name)
        bound.append(
            None if rule is None else (rule, _bind(atoms, node, rule, tensors))
        )
    names = _Names(atoms, tensors, graph, origins).run()
    leaves = {
        name: tuple(tuple(names.dim(a) for a in atoms.leaves(d)) for d in dims)
        for name, dims in tensors.items()
    }
    factors, unruled = [], {}
    for node, match in zip(graph.nodes, bound, strict=True):
        if match is not None:
            letters = {
                k: [names.dim(a) for a in atoms.leaves(v)] for k, v in match[1].items()
            }
            factors.append(_equation_factors(node, match[0], letters, leaves))
        elif node.op == "aten.reshape.default":
            factors.append(_reshape_factors(node, leaves))
        else:
            factors.append(())
        if node.results[0].name in probed:
            unruled[node.results[0].name] = _verdict(node, factors[-1])
    return Named(traced, leaves, tuple(factors), origins, unruled).verify()


def _verdict(node: Node, factors: tuple[Factor, ...]) -> str:
    free = ", ".join(f"'{f.dim}'" for f in factors if f.role == "map")
    found = f"found by trial that {free} may be split" if free else "kept whole"
    return f"{node.op.rpartition('.')[0]}: no rule; {found}"


def _flat(dims: list[list[int]]) -> list[int]:
    return [atom for dim in dims for atom in dim]


def _bind(
    atoms: Atoms, node: Node, rule: Equation, tensors: dict[str, list[list[int]]]
) -> dict[str, list[int]]:
    """Give each letter of a rule its dims, and unify them with the tensors' dims."""
    letters: dict[str, list[int]] = {}
    pending = []
    for value, dims in zip(
        (*node.operands, *node.outs), (*rule.operands, *rule.outs), strict=True
    ):
        if value is None:
            continue
        for extent, names, own in zip(
            value.shape, dims, tensors[value.name], strict=True
        ):
            if extent != 1 and names:
                pending.append((extent, names, own))
    # Single letters first, so that a product's last unknown extent can be divided out.
    for extent, names, own in sorted(pending, key=lambda p: len(p[1])):
        rest = extent
        unknown = []
        for name in names:
            if name not in letters and (stated := extent_of(name)) is not None:
                letters[name] = atoms.fresh(stated)
            if name in letters:
                for atom in letters[name]:
                    rest //= atoms.size[atom]
            else:
                unknown.append(name)
        for name in unknown:
            letters[name] = atoms.fresh(rest)
            rest = 1
        atoms.unify(own, [a for name in names for a in letters[name]])
    return letters


def _equation_factors(
    node: Node,
    rule: Equation,
    letters: dict[str, list[Dim]],
    leaves: Mapping[str, Dims],
) -> tuple[Factor, ...]:
    """The dims of each letter, with their places; whole where sizes did not match."""
    places: dict[tuple[str, int], tuple[list[Place], list[Place]]] = {}
    broken: set[str] = set()
    for side, values, equations in (
        (0, node.operands, rule.operands),
        (1, node.outs, rule.outs),
    ):
        for which, (value, dims) in enumerate(zip(values, equations, strict=True)):
            if value is None:
                continue
            for d, names in enumerate(dims):
                own = leaves[value.name][d]
                wanted = [x for name in names for x in letters.get(name, [])]
                if value.shape[d] == 1:
                    continue
                if list(own) != wanted:
                    broken.update(names)
                    continue
                spot = 0
                for name in names:
                    for i in range(len(letters[name])):
                        both = places.setdefault((name, i), ([], []))
                        both[side].append((which, d, spot))
                        spot += 1
    found = []
    for (name, i), (operands, outs) in places.items():
        role = "whole" if name in broken else rule.roles[name]
        found.append(Factor(letters[name][i], role, tuple(operands), tuple(outs)))
    return tuple(found)


def _reshape_factors(node: Node, leaves: Mapping[str, Dims]) -> tuple[Factor, ...]:
    """Dims that a reshape keeps, matched from the outermost inwards."""
    sides: list[list[tuple[Dim, Place]]] = []
    for value in (node.operands[0], node.out):
        dims = leaves[value.name]
        sides.append(
            [(x, (0, d, i)) for d, own in enumerate(dims) for i, x in enumerate(own)]
        )
    found, (left, right) = [], sides
    i = j = 0
    before_left = before_right = 1
    while i < len(left) and j < len(right):
        (x, here), (y, there) = left[i], right[j]
        if before_left == before_right and x == y:
            found.append(Factor(x, "map", (here,), (there,)))
        if before_left * x.size <= before_right * y.size:
            before_left, i = before_left * x.size, i + 1
            if before_left == before_right * y.size:
                before_right, j = before_right * y.size, j + 1
        else:
            before_right, j = before_right * y.size, j + 1
    return tuple(found)


def _dim_of(node: Node) -> int:
    """The dim that an unbind takes apart."""
    return int(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0))


class _Names:
    """Names dims after how they are used."""

    def __init__(
        self,
        atoms: Atoms,
        tensors: dict[str, list[list[int]]],
        graph: Graph,
        origins: Mapping[str, Origin],
    ) -> None:
        self.atoms, self.tensors = atoms, tensors
        self.graph, self.origins = graph, origins
        self.names: dict[int, str] = {}
        self.dims: dict[int, Dim] = {}

    def dim(self, atom: int) -> Dim:
        if atom not in self.dims:
            name = self.names.get(atom, f"d{atom}")
            self.dims[atom] = Dim(atom, name, self.atoms.size[atom])
        return self.dims[atom]

    def give(self, value: Value, dim: int, *names: str) -> None:
        """Name the factors of a tensor dim; the first name that a factor gets stays."""
        if not -len(value.shape) <= dim < len(value.shape):
            return
        own = self.atoms.leaves(self.tensors[value.name][dim])
        if len(names) == 1 and len(own) > 1:
            names = tuple(f"{names[0]}{i}" for i in range(len(own)))
        for atom, name in zip(own, names, strict=False):
            self.names.setdefault(atom, name)

    def run(self) -> _Names:
        self.inputs()
        by_op: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            by_op.setdefault(node.op.rpartition(".")[0], []).append(node)
            if node.op.startswith("autopar."):
                by_op.setdefault(node.op, []).append(node)
        for node in by_op.get("autopar.attention", []):
            self.attention(node)
        for node in by_op.get("aten.softmax", []):
            self.spelled_out_attention(node)
        for node in by_op.get("aten.embedding", []):
            table, ids = node.operands
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
        for node in products:
            if all(len(v.shape) == 4 for v in node.operands):
                self.give(node.operands[0], -1, "head_dim")
                self.give(node.operands[1], -1, "head_dim")
        self.hidden(products)
        for node in by_op.get("aten.split", []) + by_op.get("aten.chunk", []):
            self.pieces(node)
        for node in by_op.get("aten.unbind", []):
            count = len(node.outs)
            self.give(node.operands[0], _dim_of(node), str(count))
        return self

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
            self.give(v, 0, "batch")
        for v in self.graph.inputs:
            if not v.dtype.is_floating_point:
                self.give(v, 1, "seq")

    def attention(self, node: Node) -> None:
        q, k, v = node.operands[:3]
        heads = self.atoms.leaves(self.tensors[q.name][1])
        grouped = len(heads) == 2 or q.shape[1] != k.shape[1]
        self.give(q, 1, *(("kv_heads", "q_per_kv") if grouped else ("heads",)))
        self.give(k, 1, "kv_heads" if grouped else "heads")
        self.give(q, 2, "seq")
        self.give(k, 2, "seq")
        self.give(q, 3, "head_dim")
        self.give(v, 3, "head_dim")

    def spelled_out_attention(self, node: Node) -> None:
        scores = node.out
        if len(scores.shape) == 4:
            many = len(self.atoms.leaves(self.tensors[scores.name][1])) == 2
            self.give(scores, 1, *(("kv_heads", "q_per_kv") if many else ("heads",)))
            self.give(scores, 2, "seq")
            self.give(scores, 3, "seq")

    def hidden(self, products: list[Node]) -> None:
        """What one weight makes and another sums away: the width inside of an MLP."""
        made: set[int] = set()
        used: set[int] = set()
        for node in products:
            rule = equation(node)
            if rule is None:
                continue
            for v, dims in zip(node.operands, rule.operands, strict=True):
                if self.origins[v.name] is not Origin.PARAM or len(dims) != 2:
                    continue
                for own, names in zip(self.tensors[v.name], dims, strict=True):
                    summed = any(rule.roles[name] == "sum" for name in names)
                    (used if summed else made).update(self.atoms.leaves(own))
        for atom in made & used:
            self.names.setdefault(atom, "ffn")

    def pieces(self, node: Node) -> None:
        """The number of equal pieces prints as itself: `(3 heads head_dim)`."""
        x, piece = node.operands[0], node.results[0]
        for dim, (whole, part) in enumerate(zip(x.shape, piece.shape, strict=True)):
            if whole != part and whole % part == 0:
                count = self.atoms.leaves(self.tensors[x.name][dim])[0]
                self.names.setdefault(count, str(whole // part))
