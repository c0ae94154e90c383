"""The mesh on its machine: nodes, and the links that ranks of each axis talk over."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program


def mesh_data(
    mesh: Mesh, cluster: Cluster, groups: Iterable[tuple[str, ...]]
) -> dict[str, Any]:
    """axes: outermost first. levels: of links, innermost first. links: of the ranks
    that talk along some axes. A rank's place follows from its number: see `Mesh`."""
    own = {axes for axes in groups if axes}
    own |= {(axis,) for axis, size in mesh.axes if size > 1}
    return {
        "axes": [list(axis) for axis in mesh.axes],
        "size": mesh.size,
        "cluster": str(cluster),
        "device": cluster.device.name,
        "levels": [
            [level.devices, level.bytes_per_second, level.latency]
            for level in cluster.levels
        ],
        "links": [_link(mesh, cluster, axes) for axes in sorted(own)],
    }


def _link(mesh: Mesh, cluster: Cluster, axes: tuple[str, ...]) -> dict[str, Any]:
    """ranks: that communicate. in_node: the fewest of them in one node; None: all.
    speed: bytes a second that each sends to the farthest."""
    link = cluster.link(mesh, axes)
    finite = math.isfinite(link.bytes_per_second)
    return {
        "axes": list(axes),
        "ranks": link.ranks,
        "in_node": link.near.ranks if link.near else None,
        "bytes_per_second": link.bytes_per_second if finite else None,
        "latency": link.latency,
    }


def coords_key(program: Program) -> list[dict[str, str]]:
    """{coordinates without pp, as text: key of the rank's module}, for each stage."""
    return [dict(stage.modules) for stage in program.stages]
