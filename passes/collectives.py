"""Which nodes communicate over mesh axes, and what they move."""

from __future__ import annotations

from passes.graph import Node

# Those that are waited for later count where they start.
KINDS = {
    "comm.all_reduce": "all_reduce",
    "comm.all_gather": "all_gather",
    "comm.start_gather": "all_gather",
    "comm.reduce_scatter": "reduce_scatter",
    "comm.start_scatter": "reduce_scatter",
    "comm.all_to_all": "all_to_all",
}


def collective(node: Node) -> tuple[str, tuple[str, ...]] | None:
    """("all_gather", its axes); None for what sends nothing."""
    kind = KINDS.get(node.op)
    if kind is None:
        return None
    axes = node.args[1]
    return kind, (axes,) if isinstance(axes, str) else tuple(axes)
