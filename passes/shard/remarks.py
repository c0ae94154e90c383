"""Remarks on a plan for the user: work that an axis does not split, and ops that have
no rule.

A program that keeps too much whole is right, only slow: nothing but these notes tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from ..dims.name_dims import Factor
from ..dims.origins import Origin
from ..graph import Node, Value
from ..graph_text import DTYPES
from ..mesh import AXES, TIME
from ..ops.op import op_of
from ..shard.parameter_sharding import find_casts
from ..shard.propagate import Sharded
from ..shard.separable import first_whole, samples_of

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, in `h.3.attn`
PIECE = re.compile(r"\[\d+:\d+\]")  # of a weight that is cut, in `qkv[32:40].weight`
TOKENS = ("batch", "seq")  # dims of the data, which no weight has
SHOWN = 3  # places that a note names


def find_remarks(sharded: Sharded) -> tuple[str, ...]:
    """Lines for the user, those about the whole model first."""
    plan = sharded.plan
    axes = [a for a in plan.axes if a not in (TIME, *plan.data_axes)]
    remarks = [
        note
        for axis in axes
        for note in (*_unsplit(sharded, axis), *_held_whole(sharded, axis))
    ]
    return (
        *remarks,
        *_without_samples(sharded),
        *_without_experts(sharded),
        *_unruled(sharded),
        *_precision(sharded),
    )


def _without_experts(sharded: Sharded) -> list[str]:
    remarks = []
    for axis in (a for a in sharded.plan.axes if a != TIME and AXES[a].holds_experts):
        on_axis = (own.get(axis) for own in sharded.op_shardings)
        dims = {own.dim.name for own in on_axis if isinstance(own, Factor)}
        if "experts" not in dims:
            remarks.append(f"{axis} splits no experts: only samples, as dp does")
    return remarks


def _without_samples(sharded: Sharded) -> list[str]:
    """Remarks on axes whose ranks have no samples of their own, as with a batch of one
    row in which documents are packed, or one that forward takes apart."""
    plan, named, op_shardings = sharded.plan, sharded.named, sharded.op_shardings
    products = [
        own
        for node, own in zip(sharded.graph.nodes, op_shardings, strict=True)
        if op_of(node).is_product
    ]
    remarks = []
    for axis in (a for a in plan.data_axes if a != TIME and plan.size(a) > 1):
        if not products or any(own.get(axis) is not None for own in products):
            continue
        node = first_whole(named, op_shardings, axis)
        why = "of which the batch has too few"
        if node is not None and max(samples_of(named).values()) >= plan.size(axis):
            why = f"which forward needs all at once at {node.location}"
        remarks.append(
            f"{axis} splits no samples, {why}: its ranks all compute the same; an axis "
            "cp splits positions"
        )
    return remarks


def _unsplit(sharded: Sharded, axis: str) -> list[str]:
    """Remarks on an axis that splits no matrix product, or only the samples or
    positions of one: each of its ranks then holds all of the weights."""
    wanted = sharded.plan.preferences(axis)
    splits_weights = not all(p.only or p.dim in TOKENS for p in wanted)
    whole: list[Node] = []
    by_token: dict[str, list[Node]] = {}
    count = 0
    for node, op_shardings in zip(
        sharded.graph.nodes, sharded.op_shardings, strict=True
    ):
        if not op_of(node).is_product:
            continue
        if sharded.named.origins[node.results[0].name] is not Origin.BOTH:
            continue
        count += 1
        op_sharding = op_shardings[axis]
        if op_sharding is None:
            whole.append(node)
        elif (
            splits_weights
            and isinstance(op_sharding, Factor)
            and _reads_whole_weight(sharded, node, op_sharding)
        ):
            by_token.setdefault(op_sharding.dim.name, []).append(node)
    if count == len(whole):
        why, fix = _too_small(sharded, axis, whole)
        return [
            f"{axis} splits no matrix product{why}: its ranks all compute the same{fix}"
        ]
    remarks = []
    if whole:
        places = _places(whole)
        why, fix = _too_small(sharded, axis, whole)
        remarks.append(
            f"{axis} does not split {places}{why}: its ranks all compute the same{fix}"
        )
    for dim, nodes in by_token.items():
        places, (why, fix) = _places(nodes), _too_small(sharded, axis, nodes)
        remarks.append(
            f"{axis} splits {places}{why} along '{dim}' only: its ranks all hold the "
            f"weights{fix}"
        )
    return remarks


def _held_whole(sharded: Sharded, axis: str) -> list[str]:
    """Weights that are cut unevenly, where the axis splits the products of the pieces:
    no rank could hold a part of each piece in one even share."""
    graph = sharded.graph
    casts = find_casts(graph.nodes, graph.params)
    cut_from: dict[str, Value] = {}
    names_of: dict[str, None] = {}
    for node, op_shardings in zip(graph.nodes, sharded.op_shardings, strict=True):
        if node.op == "aten.split_with_sizes.default":
            whole = node.operands[0]
            whole = cut_from.get(whole.name, whole)
            held = sharded.states[whole.name].place(axis) is None
            if held and sharded.named.origins[whole.name] is Origin.PARAM:
                cut_from |= {v.name: whole for v in node.results}
        op_sharding = op_shardings[axis]
        if not isinstance(op_sharding, Factor):
            continue
        for which in {which for which, _, _ in op_sharding.operands}:
            weight = cut_from.get(node.operands[which].name)
            if weight is not None and len(weight.shape) > 1:
                names_of[NUMBER.sub("*", casts.get(weight.name, weight.name))] = None
    if not names_of:
        return []
    names = ", ".join(list(names_of)[:SHOWN])
    more = f" and {len(names_of) - SHOWN} more" if len(names_of) > SHOWN else ""
    return [
        f"{axis} splits the work of {names}{more}, but its ranks all hold the weights, "
        "which the model cuts unevenly: a weight for each piece would save memory"
    ]


def _too_small(sharded: Sharded, axis: str, nodes: list[Node]) -> tuple[str, str]:
    """`, with 4 heads on 8 ranks`: the dims that would be split if they were larger;
    and `; tp=4 would split them`."""
    wanted, ranks = sharded.plan.split.get(axis, ()), sharded.plan.size(axis)
    chosen = {id(node) for node in nodes}
    small = {
        f.dim.name: f.dim.size
        for node, factors in zip(
            sharded.graph.nodes, sharded.named.factors, strict=True
        )
        for f in factors
        if id(node) in chosen and f.dim.name in wanted and f.dim.size < ranks
    }
    dims = " and ".join(f"{size} {name}" for name, size in small.items())
    if not dims:
        return "", ""
    most = max(small.values())
    return f", with {dims} on {ranks} ranks", f"; {axis}={most} would split them"


def _reads_whole_weight(sharded: Sharded, node: Node, op_sharding: Factor) -> bool:
    split = {which for which, _, _ in op_sharding.operands}
    return any(
        sharded.named.origins[v.name] is Origin.PARAM
        for which, v in enumerate(node.operands)
        if which not in split
    )


def _places(nodes: Iterable[Node]) -> str:
    """`h.*.attn (gpt.py:35)`: the modules, or the pieces of one that are cut from its
    weight, equal layers as one, and the first line."""
    places: dict[str, str] = {}
    for node in nodes:
        module = NUMBER.sub("*", node.location.module) or "products of the model itself"
        cuts = (PIECE.search(v.name) for v in node.operands)
        module += next((cut.group() for cut in cuts if cut), "")
        places.setdefault(module, node.location.source)
    texts = [f"{m} ({source})" if source else m for m, source in places.items()]
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _unruled(sharded: Sharded) -> list[str]:
    """One line for each op without a rule and what trials found out about it."""
    unruled: dict[str, str] = {}
    for node in sharded.graph.nodes:
        verdict = sharded.named.unruled.get(node.results[0].name)
        if verdict is not None:
            unruled.setdefault(verdict, node.location.source)
    return [f"{v} ({source})" if source else v for v, source in unruled.items()]


def _precision(sharded: Sharded) -> list[str]:
    """Remarks on parameters in 16 bits, and on those in 64 beside a precision."""
    dtypes = {v.dtype for v in sharded.graph.params}
    remarks = []
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in dtypes:
            remarks.append(
                f"parameters are {DTYPES[dtype]}, without a copy in float32: updates "
                "too small for them get lost; a float32 model with precision= keeps "
                "its parameters in float32"
            )
    if sharded.plan.dtype and torch.float64 in dtypes:
        remarks.append(
            f"parameters are f64: precision {sharded.plan.precision!r} leaves them and "
            "what is computed with them as they are, as autocast does"
        )
    return remarks
