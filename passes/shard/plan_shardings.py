"""Op shardings in a plan: for single ops, the dim that an axis splits.

    "op_shardings": {"tp": {"blocks.*.mlp.up:linear": "ffn", "blocks.0:add.1": null,
                            "blocks.*.norm1:layer_norm": "seq"}}

An op goes by its module path and its name, and a number if it is not the first of that
name in its module. `*` stands for the number of any layer; an op's own name counts
more. null is whole. A dim without a name of its own is `#2`, the op's third.
`ring:seq` is an alternative that the op has: keys and values are passed round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..dims.name_dims import UNNAMED, Factor, Named
from ..dims.origins import Origin
from ..graph import LAYER, Graph, short
from ..plan import Plan, PlanError, Preference
from ..shard.alternatives import alternative_factors
from ..shard.op_sharding import Allowed, OpSharding


class OpName(NamedTuple):
    """`blocks.3.mlp:add.1`: the second add of a module."""

    module: str
    op: str

    @classmethod
    def parse(cls, text: str) -> OpName:
        module, _, op = text.rpartition(":")  # a module may be `experts[0:8]`
        return cls(module, op)

    def __str__(self) -> str:
        return f"{self.module}:{self.op}"

    def in_layer(self, layer: int | str) -> OpName:
        """The op's name in another layer, or in any: `*`."""
        return OpName(_in_layer(self.module, str(layer)), self.op)


@cache
def _in_layer(module: str, layer: str) -> str:
    return LAYER.sub(layer, module, count=1)


def name_ops(graph: Graph) -> tuple[OpName, ...]:
    """A name for each node, which does not depend on how deep the model is."""
    count: Counter[OpName] = Counter()
    names = []
    for node in graph.nodes:
        name = OpName(node.location.module, short(node.op))
        number = count[name]
        names.append(name._replace(op=f"{name.op}.{number}") if number else name)
        count[name] += 1
    return tuple(names)


def sharding_text(factors: tuple[Factor, ...], sharding: OpSharding) -> str | None:
    """How a plan writes it: `seq`, or as an alternative of the op: `ring:seq`."""
    if not isinstance(sharding, Factor):
        return None
    only = "" if sharding in factors else sharding.role
    name = sharding.dim.name
    if UNNAMED.fullmatch(name):
        same = [f == sharding or bool(only and f.dim == sharding.dim) for f in factors]
        name = f"#{same.index(True)}"
    return str(Preference(name, only))


def splittable(
    named: Named, allowed: Allowed, axis: str, i: int, others: Mapping[str, OpSharding]
) -> list[Factor]:
    """What the axis may split of node i, by its rule or by an alternative to it, one
    for each text. others: of other axes."""
    node, factors = named.graph.nodes[i], named.factors[i]
    by_text: dict[str | None, Factor] = {}
    for f in (*factors, *alternative_factors(node, factors, allowed, others)):
        if allowed.may_split(f, node) and allowed.divides(axis, f.dim, others):
            by_text.setdefault(sharding_text(factors, f), f)
    return list(by_text.values())


@dataclass(frozen=True)
class PlanSharding:
    """An op sharding that the plan gives: its text, and the plan's name for the op."""

    op: str
    text: str | None


def read_plan_shardings(
    named: Named, plan: Plan
) -> dict[tuple[str, str], PlanSharding]:
    """(an op's first result, axis) -> what the plan says about it.

    Raises: PlanError for a name that no op has.
    """
    read: dict[tuple[str, str], PlanSharding] = {}
    names = name_ops(named.graph) if plan.op_shardings else ()
    for axis, wanted in plan.op_shardings.items():
        texts = {OpName.parse(text): text for text in wanted}
        used = set()
        for name, node in zip(names, named.graph.nodes, strict=True):
            first = node.results[0].name
            if not named.origins[first] & Origin.PARAM:
                continue
            own = texts.get(name) or texts.get(name.in_layer("*"))
            if own is not None:
                used.add(own)
                read[first, axis] = PlanSharding(own, wanted[own])
        if unused := sorted(set(wanted) - used):
            like = names[-1].in_layer("*")
            raise PlanError(
                f"op_shardings of '{axis}' name {unused[0]!r}, but no op that reads "
                "parameters or what is made of them has this name",
                fix=f"names look like '{like}'; leave this op out",
            )
    return read


def planned_factor(
    named: Named,
    allowed: Allowed,
    axis: str,
    i: int,
    others: Mapping[str, OpSharding],
    planned: PlanSharding,
) -> Factor | None:
    """The dim that an op sharding names. Raises: PlanError if it cannot be split."""
    if planned.text is None:
        return None
    node, options = named.graph.nodes[i], splittable(named, allowed, axis, i, others)
    texts = [sharding_text(named.factors[i], f) for f in options]
    if planned.text not in texts:
        shown = ", ".join(str(t) for t in texts) or "null alone"
        raise PlanError(
            f"the op sharding {planned.op!r}: {planned.text!r} of '{axis}' asks for a "
            f"dim that {node} cannot be split along",
            source=str(node.location),
            fix=f"it may be {shown}, or null",
        )
    return options[texts.index(planned.text)]


def fold(shardings: Mapping[OpName, str | None]) -> dict[str, str | None]:
    """The same with `*` for what most layers do, and the others by their names."""
    rows: dict[OpName, list[OpName]] = {}
    for name in shardings:
        rows.setdefault(name.in_layer("*"), []).append(name)
    folded: dict[str, str | None] = {}
    for star, names in rows.items():
        most, _ = Counter(shardings[name] for name in names).most_common(1)[0]
        folded[str(star)] = most
        folded.update((str(n), shardings[n]) for n in names if shardings[n] != most)
    return folded
