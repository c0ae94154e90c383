"""name_dims: find out what each dim of each tensor is.

Every tensor dim is a product of named dims, outermost first. The rule of each op says
which dims are the same; unifying them over the graph, and splitting a dim when a view
splits it, names every dim of every tensor. GPT-2's fused projection comes out as
`(embed) (3 heads head_dim)`, a flattened batch as `(batch seq)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from ..atoms import Atoms
from ..dims.choose_names import choose_names
from ..dims.origins import Origin, find_origins
from ..dims.probe import probe_equation
from ..graph import Graph, Node, Value
from ..ops.notation import Equation, Role, extent_of
from ..ops.rules import equation
from ..traced import Traced


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dim. Two dims are the same if their `key` is; names may repeat."""

    key: int
    name: str
    size: int

    def __str__(self) -> str:
        return self.name


Dims = tuple[tuple[Dim, ...], ...]
UNNAMED = re.compile(r"d\d+")  # a dim that no use gives a name
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
        """Checks that each extent is the product of its dims' sizes."""
        self.graph.verify()
        for v in [
            *self.graph.sources,
            *(o for n in self.graph.nodes for o in n.results),
        ]:
            for extent, dims in zip(v.shape, self.dims[v.name], strict=True):
                size = prod(d.size for d in dims)
                assert size == extent, f"%{v.name}: {self.pattern(v)} is not {v.shape}"
        return self

    def __str__(self) -> str:
        return self.graph.text(self.pattern)


def pattern(dims: Dims) -> str:
    """Writes dims as in rules: `batch seq (heads head_dim)`."""
    return " ".join(dim_text([d.name for d in own], [()] * len(own)) for own in dims)


def dim_text(names: Sequence[str], slots: Sequence[Sequence[str]]) -> str:
    """`(3 heads/tp head_dim)`: a dim by its factors' names, each with the axes that
    split it."""
    texts = ["/".join((name, *axes)) for name, axes in zip(names, slots, strict=True)]
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})" if texts else "1"


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
        bound.append(None if rule is None else (rule, bind(atoms, node, rule, tensors)))
    names = choose_names(atoms, tensors, graph, origins)

    @cache
    def dim_of(atom: int) -> Dim:
        return Dim(atom, names.get(atom, f"d{atom}"), atoms.size[atom])

    def dims_of(own: list[int]) -> tuple[Dim, ...]:
        return tuple(map(dim_of, atoms.leaves(own)))

    leaves = {name: tuple(map(dims_of, dims)) for name, dims in tensors.items()}
    factors, unruled = [], {}
    for node, match in zip(graph.nodes, bound, strict=True):
        if match is not None:
            letters = {k: dims_of(own) for k, own in match[1].items()}
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
    verdict = f"found by trial that {free} may be split" if free else "kept whole"
    return f"{node.name}: no rule; {verdict}"


def _flat(dims: list[list[int]]) -> list[int]:
    return [atom for dim in dims for atom in dim]


def bind(
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
                    rest //= max(1, atoms.size[atom])
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
    letters: Mapping[str, Sequence[Dim]],
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
    factors = []
    for (name, i), (operands, outs) in places.items():
        role = "whole" if name in broken else rule.roles[name]
        if role == "lookup" and len(letters[name]) > 1:
            role = "whole"  # a global index tells where a share of one dim begins
        factors.append(Factor(letters[name][i], role, tuple(operands), tuple(outs)))
    return tuple(factors)


def _reshape_factors(node: Node, leaves: Mapping[str, Dims]) -> tuple[Factor, ...]:
    """Dims that a reshape keeps, matched from the outermost inwards."""
    sides: list[list[tuple[Dim, Place]]] = []
    for value in (node.operands[0], node.out):
        dims = leaves[value.name]
        sides.append(
            [(x, (0, d, i)) for d, own in enumerate(dims) for i, x in enumerate(own)]
        )
    factors, (left, right) = [], sides
    i = j = 0
    before_left = before_right = 1
    while i < len(left) and j < len(right):
        (x, here), (y, there) = left[i], right[j]
        if before_left == before_right and x == y:
            factors.append(Factor(x, "map", (here,), (there,)))
        if before_left * x.size <= before_right * y.size:
            before_left, i = before_left * x.size, i + 1
            if before_left == before_right * y.size:
                before_right, j = before_right * y.size, j + 1
        else:
            before_right, j = before_right * y.size, j + 1
    return tuple(factors)
