"""The nodes that ranks are on, as torchrun tells each of them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from autopar.passes.mesh import TENSOR_AXES, Mesh
from autopar.passes.price.cluster import nodes
from autopar.passes.ranges import RANKS, Range
from autopar.read_file import EnvironmentVariableError, read_variable

RANK, PORT = Range(0, RANKS.most - 1), Range(0, (1 << 16) - 1)


def check_launch() -> tuple[int, int]:
    """Returns (rank, number of ranks) as torchrun says: (0, 1) without it.

    Raises: EnvironmentVariableError for variables by which processes cannot meet.
    """
    world = read_variable("WORLD_SIZE", 1)
    rank = read_variable("RANK", 0, Range(0, world - 1))
    if world > 1 or "RANK" in os.environ:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise EnvironmentVariableError(
                    f"the environment has no {name}, which processes meet by",
                    fix=f"start by {torchrun_for(world)}, which sets it",
                )
        read_variable("MASTER_PORT", 0, PORT)
    return rank, world


@dataclass(frozen=True)
class Node:
    """number: of this node, among `nodes`. ranks: that it runs. host: its name."""

    number: int = 0
    nodes: int = 1
    ranks: int = 1
    host: str = ""

    @property
    def on(self) -> str:
        """` on node 1 (host b)`; nothing where there is one node."""
        return f" on node {self.number} (host {self.host})" if self.nodes > 1 else ""


def this_node() -> Node:
    """The node of this process; of those that no launcher started, all are on one.
    Raises: EnvironmentVariableError."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    count = read_variable("GROUP_WORLD_SIZE", 1)
    return Node(
        read_variable("GROUP_RANK", 0, Range(0, count - 1)),
        count,
        read_variable("LOCAL_WORLD_SIZE", read_variable("WORLD_SIZE", world)),
        socket.gethostname(),
    )


def starts_again() -> bool:
    """Whether torchrun starts ranks again that fail, or when nodes come and go."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def torchrun_for(ranks: int, most: int | None = None) -> str:
    """The command that starts so many ranks, on nodes that run `most` each: if it is
    not given, as many as this one where there are several, else all of them."""
    here = this_node()
    most = most or (here.ranks if here.nodes > 1 else ranks)
    each = max(n for n in range(1, min(most, ranks) + 1) if ranks % n == 0)
    if each == ranks:
        return f"torchrun --nproc-per-node {ranks}"
    return (
        f"torchrun --nnodes {ranks // each} --nproc-per-node {each} "
        "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    )


def straddling(mesh: Mesh, node: int) -> str | None:
    """A warning about tensor parallel groups that leave a node of `node` ranks; None if
    they stay inside."""
    axes = tuple(axis for axis in TENSOR_AXES if mesh.axis_size(axis) > 1)
    over = nodes(mesh, axes, node) if axes and node < mesh.size else None
    if over is None:
        return None
    inner = [(n, size) for n, size in mesh.axes if n in axes]
    better = Mesh((*((n, s) for n, s in mesh.axes if n not in axes), *inner))
    problem = (
        f"{' and '.join(axes)} of mesh '{mesh}' talk over {over[0]} nodes of {node} "
        "ranks each, in every layer"
    )
    if nodes(better, axes, node) is None:
        return f"{problem}\n  fix  write '{better}', where neighbours are in one node"
    return f"{problem}\n  fix  give {' and '.join(axes)} a size that divides {node}"
