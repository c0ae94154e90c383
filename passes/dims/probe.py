"""probe: run an op on shards, and see whether the parts recombine to the whole.

That is what a sharding rule claims, so it proves the table of rules (in the tests), and
finds out which dims of an op without a rule may be split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..graph import Node, Value, map_values, resolve
from ..ops.evaluate import Results, evaluate
from ..ops.notation import Equation, Role, extent_of
from ..ops.op import op_of

# On more elements than this an op is tried out with smaller extents.
LARGEST = 2**18
SMALL = 16  # extents up to this one stay as they are
TRIALS = 3
# What torch raises when an op cannot run on the sizes that it is given.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
# Arguments that torch takes as they are: LAPACK writes where numbers at random point.
TRUSTED = {"pivots", "LU_pivots"}

Letters = tuple[tuple[str, ...], ...]  # for each dim of a tensor
Part = tuple[int, int]  # start, length


def random_operands(node: Node, seed: int) -> list[Tensor]:
    """Data for a node: floats in double precision, integers that are valid indices.

    Seeds take turns between normal, positive and large numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    extents = [n for v in node.operands for n in v.shape if n > 1]
    rows = min(extents, default=2)
    made: dict[str, Tensor] = {}
    for v in node.operands:
        if v.name in made:
            continue
        if v.dtype == torch.bool:
            made[v.name] = torch.rand(v.shape, generator=generator) < 0.5
        elif not v.dtype.is_floating_point:
            data = torch.randint(rows, v.shape, generator=generator)
            made[v.name] = data.to(v.dtype)
        else:
            draw = torch.rand if seed % 3 == 1 else torch.randn
            data = draw(v.shape, generator=generator, dtype=torch.float64)
            made[v.name] = data * 30 if seed % 3 == 2 else data
    return [made[v.name] for v in node.operands]


# --- Shards of it ------------------------------------------------------------------


def holds(node: Node, rule: Equation, letter: str, role: Role, seed: int) -> bool:
    """Whether shards of a letter recombine to the whole result, as its role says.

    map, rows: each shard's result is the shard of the result. sum, lookup, max: the
    results of the shards add up, or their maximum is the result. Runs on random data.
    """
    operands = random_operands(node, seed)
    whole = evaluate(node, operands)
    extents = letter_extents(node, rule)
    partials = []
    for part in _two_parts(extents[letter], seed):
        start = part[0] if role in ("lookup", "rows") else None
        results = _on_shard(node, rule, operands, whole, {letter: part}, start)
        if results is None:
            return False
        got, wanted = results
        if role in ("map", "rows") and not all(map(_same, got, wanted)):
            return False
        partials.append(got)
    if role in ("map", "rows"):
        return True
    combine = torch.maximum if role == "max" else torch.add
    for first, second, wanted in zip(*partials, whole, strict=True):
        if wanted is None or first is None or second is None:
            continue
        if first.shape != second.shape or not _same(combine(first, second), wanted):
            return False
    return True


def letter_extents(node: Node, rule: Equation) -> dict[str, int]:
    """The global extent of each letter of a rule."""
    tensors = zip(
        (*node.operands, *node.outs), (*rule.operands, *rule.outs), strict=True
    )
    dims = [
        (extent, names)
        for v, letters in tensors
        if v is not None
        for extent, names in zip(v.shape, letters, strict=True)
        if extent != 1
    ]
    extents: dict[str, int] = {}
    # Single letters first, so that a product's last unknown extent can be divided out.
    for extent, names in sorted(dims, key=lambda d: len(d[1])):
        for name in names:
            stated = extent_of(name)
            if stated is not None:
                extents[name] = stated
        rest = extent // math.prod(extents.get(name, 1) for name in names)
        for name in names:
            if name not in extents:
                extents[name], rest = rest, 1
    return extents


def _two_parts(extent: int, seed: int) -> tuple[Part, Part]:
    """Two uneven parts; the cut moves with the seed."""
    cut = 1 + seed % (extent - 1)
    return (0, cut), (cut, extent - cut)


def _on_shard(
    node: Node,
    rule: Equation,
    operands: Sequence[Tensor],
    whole: Results,
    parts: Mapping[str, Part],
    start: int | None = None,
) -> tuple[Results, Results] | None:
    """The op's results on a shard, and that shard of the whole; None if it refuses."""
    extents = letter_extents(node, rule)
    wanted = tuple(
        None if x is None else take(x, letters, extents, parts)
        for x, letters in zip(whole, rule.outs, strict=True)
    )
    shards = [
        take(x, letters, extents, parts)
        for x, letters in zip(operands, rule.operands, strict=True)
    ]
    try:
        return evaluate(_localized(node, shards, wanted), shards, start), wanted
    except REFUSALS:
        return None


def _localized(node: Node, shards: Sequence[Tensor], outs: Results) -> Node:
    """The node of a shard, as a rank has it: with the sizes of its results."""

    def typed(x: Tensor, i: int) -> Value:
        return Value(str(i), tuple(x.shape), x.dtype)

    operands = map(typed, shards, itertools.count())
    made = tuple(None if x is None else typed(x, -1) for x in outs)
    local = replace(node.substitute(lambda _: next(operands)), outs=made)
    sizes = op_of(node).sizes
    return sizes(local) if sizes else local


def take(
    x: Tensor, letters: Letters, extents: Mapping[str, int], parts: Mapping[str, Part]
) -> Tensor:
    """The part of a tensor on a rank that holds the given parts of some letters."""
    for d, names in enumerate(letters):
        if x.shape[d] == 1 or not parts.keys() & set(names):
            continue
        x = x.unflatten(d, [extents[name] for name in names])
        for i, name in enumerate(names):
            if name in parts:
                x = x.narrow(d + i, *parts[name])
        x = x.flatten(d, d + len(names) - 1)
    return x.contiguous()


def _same(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Equal up to the rounding of another order of summation."""
    if got is None or wanted is None:
        return got is wanted
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, wanted)
    slack = torch.finfo(got.dtype).eps ** 0.75
    return torch.allclose(got, wanted, rtol=slack, atol=slack, equal_nan=True)


# --- An op without a rule ----------------------------------------------------------


def probe_equation(node: Node) -> Equation | None:
    """The dims that may be split, as far as trials show; None if there are none.

    A dim counts when it has the same extent in the results and in some operands,
    aligned from the right or from the left, and two uneven shards of it give the two
    shards of the result, on random data. Large extents are tried as smaller ones, which
    the op refuses when its arguments speak of sizes. Ops that are random, write in
    place or do not run on random data stay whole.
    """
    if not node.operands or node.op.startswith("autopar."):
        return None
    tensors = (*node.operands, *node.results)
    smaller: dict[int, int] = {}
    if max(v.numel for v in tensors) > LARGEST:
        large = sorted({n for v in tensors for n in v.shape if n > SMALL})
        smaller = dict(zip(large, itertools.count(SMALL + 1)))
    # Only types matter for a trial: equal ops of all layers are tried out once.
    names: dict[str, str] = {}

    def anonymous(v: Value) -> Value:
        shape = tuple(smaller.get(n, n) for n in v.shape)
        return replace(v, name=names.setdefault(v.name, str(len(names))), shape=shape)

    call = map_values(anonymous, (node.args, tuple(node.kwargs.items()), node.outs))
    return _probe(node.op, *call)


@cache
def _probe(
    op: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    outs: tuple[Value | None, ...],
) -> Equation | None:
    node = Node(op, args, dict(kwargs), outs)
    operator: Any = resolve(op)
    names = {argument.name for argument in operator._schema.arguments}
    if operator._schema.is_mutable or names & TRUSTED or not _is_function(node):
        return None
    rule = Equation(
        tuple(((),) * len(v.shape) for v in node.operands),
        tuple(((),) * (len(v.shape) if v is not None else 0) for v in outs),
        {},
    )
    for candidate in _candidates(node):
        wider = _with_letter(rule, candidate)
        try:
            if wider is not None and _all_map(node, wider):
                rule = wider
        except REFUSALS:  # it runs on some random data, and not on other
            continue
    return rule if rule.roles else None


def _is_function(node: Node) -> bool:
    """Whether the op runs on random data, and gives the same result twice."""
    with torch.random.fork_rng(devices=()):
        try:
            operands = random_operands(node, 0)
            first, second = (evaluate(node, operands) for _ in range(2))
            typed = zip(first, node.outs, strict=True)
            shaped = all(x is None or v is None or x.shape == v.shape for x, v in typed)
            return shaped and all(map(_same, first, second))
        except REFUSALS:
            return False


def _candidates(node: Node) -> Iterator[tuple[int | None, ...]]:
    """The dims of each tensor that a letter may be: for each dim of the result, the
    choices that cover most tensors first. None: the tensor does not have the letter."""
    tensors = [*node.operands, *node.outs]
    result = node.results[0]
    rank = len(result.shape)
    for d, extent in enumerate(result.shape):
        if extent < 2:
            continue
        choices: list[list[int | None]] = []
        for i, v in enumerate(tensors):
            aligned = [] if v is None else [len(v.shape) - rank + d, d]
            fits: list[int | None] = [
                at
                for at in dict.fromkeys(aligned)
                if v is not None and 0 <= at < len(v.shape) and v.shape[at] == extent
            ]
            is_operand = i < len(node.operands)
            choices.append([*fits, None] if is_operand or v is None else fits)
        mappings = itertools.product(*choices)
        yield from sorted(mappings, key=lambda places: places.count(None))


def _with_letter(rule: Equation, places: tuple[int | None, ...]) -> Equation | None:
    """The rule with one more letter; None if one of its dims has a letter already."""
    letter = chr(ord("a") + len(rule.roles))
    tensors = []
    for dims, at in zip((*rule.operands, *rule.outs), places, strict=True):
        if at is not None and dims[at]:
            return None
        tensors.append(
            tuple((letter,) if d == at else old for d, old in enumerate(dims))
        )
    count = len(rule.operands)
    roles: dict[str, Role] = {**rule.roles, letter: "map"}
    return Equation(tuple(tensors[:count]), tuple(tensors[count:]), roles)


def _all_map(node: Node, rule: Equation) -> bool:
    """Whether the newest letter may be split, alone and with all others."""
    newest = list(rule.roles)[-1]
    if not any((newest,) in dims for dims in rule.operands):
        return False
    extents = letter_extents(node, rule)
    with torch.random.fork_rng(devices=()):
        for seed in range(TRIALS):
            if not holds(node, rule, newest, "map", seed):
                return False
            operands = random_operands(node, seed)
            parts = {a: _two_parts(extents[a], seed)[1] for a in rule.roles}
            results = _on_shard(node, rule, operands, evaluate(node, operands), parts)
            if results is None or not all(map(_same, *results)):
                return False
    return True
