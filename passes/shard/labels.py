"""Labels in a plan: for single ops, the dim that an axis splits.

    "labels": {"tp": {"blocks.*.mlp.up:linear": "ffn", "blocks.*.norm1:layer_norm":
                      "seq", "blocks.0:add.1": null}}

An op goes by its module path and its name, and a number if it is not the first of that
name in its module. `*` stands for the number of any layer; an op's own name counts
more. null is whole. A dim without a name of its own is `#2`, the op's third.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from passes.dims.name_dims import Factor, Named
from passes.dims.origins import Origin
from passes.graph import LAYER, Graph, short
from passes.plan import Plan, PlanError
from passes.shard.allowed import Allowed, Label

UNNAMED = re.compile(r"d\d+")


def name_ops(graph: Graph) -> tuple[str, ...]:
    """A name for each node, which does not depend on how deep the model is."""
    count: Counter[str] = Counter()
    names = []
    for node in graph.nodes:
        name = f"{node.where.module}:{short(node.op)}"
        names.append(f"{name}.{count[name]}" if count[name] else name)
        count[name] += 1
    return tuple(names)


def starred(name: str) -> str:
    """`blocks.*.mlp.up:linear` of `blocks.3.mlp.up:linear`."""
    module, colon, op = name.partition(":")
    return LAYER.sub("*", module, count=1) + colon + op


def at_layer(name: str, layer: int) -> str:
    """The op's name in another layer."""
    module, colon, op = name.partition(":")
    return LAYER.sub(str(layer), module, count=1) + colon + op


def label_text(factors: tuple[Factor, ...], label: Label) -> str | None:
    """How a plan writes a label."""
    if not isinstance(label, Factor):
        return None
    if UNNAMED.fullmatch(label.dim.name):
        return f"#{factors.index(label)}"
    return label.dim.name


def splittable(
    named: Named, allowed: Allowed, axis: str, i: int, labels: Mapping[str, Label]
) -> list[Factor]:
    """What the axis may split of node i, one for each text. labels: of other axes."""
    node, factors = named.graph.nodes[i], named.factors[i]
    found: dict[str | None, Factor] = {}
    for f in factors:
        if allowed.may_split(f, node) and allowed.divides(axis, f.dim, labels):
            found.setdefault(label_text(factors, f), f)
    return list(found.values())


@dataclass(frozen=True)
class Given:
    """A label that the plan gives: its text, and the plan's name for the op."""

    op: str
    text: str | None


def read_labels(named: Named, plan: Plan) -> dict[tuple[str, str], Given]:
    """(an op's first result, axis) -> what the plan says about it.

    Raises: PlanError for a name that no op has.
    """
    found: dict[tuple[str, str], Given] = {}
    names = name_ops(named.graph) if plan.labels else ()
    for axis, wanted in plan.labels.items():
        used = set()
        for name, node in zip(names, named.graph.nodes, strict=True):
            first = node.results[0].name
            if not named.origins[first] & Origin.PARAM:
                continue
            own = name if name in wanted else starred(name)
            if own in wanted:
                used.add(own)
                found[first, axis] = Given(own, wanted[own])
        if unused := sorted(set(wanted) - used):
            raise PlanError(
                f"labels of '{axis}' name {unused[0]!r}, but no op that reads "
                "parameters or what is made of them has this name",
                fix=f"names look like {starred(names[-1])!r}; drop this label",
            )
    return found


def given_factor(
    named: Named,
    allowed: Allowed,
    axis: str,
    i: int,
    labels: Mapping[str, Label],
    given: Given,
) -> Factor | None:
    """The dim that a plan's label names. Raises: PlanError if it cannot be split."""
    if given.text is None:
        return None
    node, options = named.graph.nodes[i], splittable(named, allowed, axis, i, labels)
    texts = [label_text(named.factors[i], f) for f in options]
    if given.text not in texts:
        shown = ", ".join(str(t) for t in texts) or "null alone"
        raise PlanError(
            f"the label {given.op!r}: {given.text!r} of '{axis}' asks for a dim that "
            f"{node} cannot be split along",
            source=str(node.where),
            fix=f"it may be {shown}, or null",
        )
    return options[texts.index(given.text)]


def fold(labels: Mapping[str, str | None]) -> dict[str, str | None]:
    """The same with `*` for what most layers do, and the others by their names."""
    rows: dict[str, list[str]] = {}
    for name in labels:
        rows.setdefault(starred(name), []).append(name)
    found: dict[str, str | None] = {}
    for star, names in rows.items():
        most, _ = Counter(labels[name] for name in names).most_common(1)[0]
        found[star] = most
        found.update((n, labels[n]) for n in names if labels[n] != most)
    return found
