"""query_groups: tensor parallel ranks that are more than a model's heads of keys.

With grouped queries (Ainslie 2023, arXiv 2305.13245) there are few heads of keys, and
several heads of queries to each. Where tp has more ranks than there are heads of keys,
some ranks must share one. So the axis is seen as two: `tp` splits heads of keys, `qp`
the queries of each of them. All else that tp splits both do, one inside of the other.
"""

from __future__ import annotations

from dataclasses import replace

from ..dims.name_dims import Named
from ..mesh import QUERY_GROUP, TENSOR, TENSOR_AXES, Mesh
from ..plan import Plan

KEYS, QUERIES = "kv_heads", "q_per_kv"
Groups = frozenset[tuple[int, int]]
"""(heads of keys, heads of queries for each) of the attentions of a model."""


def split_groups(named: Named, plan: Plan) -> Plan:
    """The plan with tp as two axes, where that is right for the model.

    A plan with op shardings for tp stays as it is; so does one whose tp splits no heads
    of keys.
    """
    splits = KEYS in plan.split.get(TENSOR, ()) and QUERY_GROUP in plan.split
    if plan.op_shardings.get(TENSOR) or not splits:
        return plan
    return replace(plan, mesh=with_groups(plan.mesh, find_groups(named)))


def find_groups(named: Named) -> Groups:
    """Returns (key heads, queries a key head) of each grouped-query attention."""
    groups = set()
    for factors in named.factors:
        sizes = {f.dim.name: f.dim.size for f in factors}
        if KEYS in sizes and QUERIES in sizes:
            groups.add((sizes[KEYS], sizes[QUERIES]))
    return frozenset(groups)


def with_groups(mesh: Mesh, groups: Groups) -> Mesh:
    """The mesh with tp=n as tp=a and, inside of it, qp=n/a, if n exceeds the heads of
    keys. A mesh that has an axis qp stays as it is."""
    ranks = mesh.axis_size(TENSOR)
    keys = ranks_of_keys(groups, ranks)
    if keys == ranks or mesh.axis_size(QUERY_GROUP) > 1:
        return mesh
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        pair = [(TENSOR, keys), (QUERY_GROUP, ranks // keys)]
        axes += pair if name == TENSOR else [(name, size)]
    return Mesh(tuple((a, n) for a, n in axes if n > 1 or a not in TENSOR_AXES))


def ranks_of_keys(groups: Groups, ranks: int) -> int:
    """The number of tp's ranks over which heads of keys are split: all, where these are
    enough; else the largest that divides both and leaves each rank some of the queries;
    all, if none does."""
    if all(ranks <= keys for keys, _ in groups):
        return ranks
    fits = (
        a
        for a in range(ranks, 0, -1)
        if ranks % a == 0
        and all(keys % a == 0 and ranks // a <= shared for keys, shared in groups)
    )
    return next(fits, ranks)


def divides_groups(groups: Groups, ranks: int) -> bool:
    """Whether `ranks` ranks of tp get equally many heads."""
    keys = ranks_of_keys(groups, ranks)
    return all(k % keys == 0 and q % (ranks // keys) == 0 for k, q in groups)


def group_remark(named: Named, before: Plan, after: Plan) -> tuple[str, ...]:
    """What `split_groups` has done, if anything."""
    if before.mesh == after.mesh:
        return ()
    groups = sorted(find_groups(named))
    heads = " and ".join(f"{k} {KEYS} x {q} {QUERIES}" for k, q in groups)
    pair = ",".join(f"{a}={n}" for a, n in after.mesh.axes if a in TENSOR_AXES)
    return (
        f"tp={before.mesh.axis_size(TENSOR)} is {pair}, as there are {heads}: tp "
        "splits heads of keys, qp the queries of each",
    )
