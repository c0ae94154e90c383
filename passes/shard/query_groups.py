"""query_groups: tensor parallel ranks that are more than a model's heads of keys.

With grouped queries (Ainslie 2023, arXiv 2305.13245) there are few heads of keys, and
several heads of queries to each. Where tp has more ranks than there are heads of keys,
some ranks must share one. So the axis is seen as two: `tp` splits heads of keys, `qp`
the queries of each of them. All else that tp splits both do, one inside of the other.
"""

from __future__ import annotations

from dataclasses import replace

from passes.dims.name_dims import Named
from passes.mesh import Mesh
from passes.plan import Plan

KEYS, QUERIES = "kv_heads", "q_per_kv"
PAIR = ("tp", "qp")


def split_groups(named: Named, plan: Plan) -> Plan:
    """The plan with tp=n as tp=a,qp=n/a, where n is more than the heads of keys.

    a: the most ranks that divide n and these heads, which leaves each rank some of the
    queries. A plan that has an axis qp, or labels for tp, stays as it is; so does one
    for which there is no such number.
    """
    ranks = plan.mesh.axis_size("tp")
    decided = plan.mesh.axis_size("qp") > 1 or plan.labels.get("tp")
    if decided or "qp" not in plan.split or KEYS not in plan.split.get("tp", ()):
        return plan
    groups = find_groups(named)
    if all(ranks <= keys for keys, _ in groups):
        return plan
    fits = (
        a
        for a in range(ranks - 1, 0, -1)
        if ranks % a == 0
        and all(keys % a == 0 and ranks // a <= shared for keys, shared in groups)
    )
    if (inner := next(fits, None)) is None:
        return plan
    return replace(plan, mesh=with_groups(plan.mesh, inner))


def find_groups(named: Named) -> frozenset[tuple[int, int]]:
    """(heads of keys, heads of queries for each) of the attentions of a model."""
    found = set()
    for factors in named.factors:
        sizes = {f.dim.name: f.dim.size for f in factors}
        if KEYS in sizes and QUERIES in sizes:
            found.add((sizes[KEYS], sizes[QUERIES]))
    return frozenset(found)


def with_groups(mesh: Mesh, keys: int) -> Mesh:
    """The mesh with so many ranks of tp, and the others on an axis qp inside of it."""
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        pair = [("tp", keys), ("qp", size // keys)]
        axes += pair if name == "tp" else [(name, size)]
    return Mesh(tuple((name, n) for name, n in axes if n > 1 or name not in PAIR))


def group_note(named: Named, before: Plan, after: Plan) -> tuple[str, ...]:
    """What `split_groups` has done, if anything."""
    if before.mesh == after.mesh:
        return ()
    heads = " and ".join(f"{k} {KEYS} x {q} {QUERIES}" for k, q in find_groups(named))
    pair = ",".join(f"{a}={n}" for a, n in after.mesh.axes if a in PAIR)
    return (
        f"tp={before.mesh.axis_size('tp')} is {pair}, as there are {heads}: tp splits "
        "heads of keys, qp the queries of each",
    )
