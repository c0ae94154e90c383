"""Which process and device this is, of those that a step runs on."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from passes.cluster import Cluster
from passes.mesh import MeshError
from passes.plan import Plan


def join(decided: Plan | Cluster, timeout: timedelta) -> None:
    """Be one of the mesh's processes: those of torch.distributed, or of torchrun.

    Raises: MeshError if so many do not run.
    """
    if isinstance(decided, Plan):
        what, size = f"mesh '{decided.mesh}'", decided.mesh.size
    else:
        what, size = f"cluster '{decided}'", decided.devices
    if not dist.is_initialized() and size > 1 and "RANK" in os.environ:
        if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != size:
        raise MeshError(
            f"{what} has {size} ranks, but {world} processes run",
            fix=f"start it by torchrun --nproc-per-node {size}",
        )


def default_device() -> torch.device:
    """Where this process computes."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
