"""Which process and device this is, of those that a step runs on."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.passes.mesh import MeshError
from autopar.passes.ranges import RANKS, Range, shown
from autopar.read_file import EnvironmentVariableError, read_variable
from autopar.runtime.agreement.arrivals import await_all

COMPILE = "autopar.compile()"
RANK, PORT = Range(0, RANKS.most - 1), Range(0, (1 << 16) - 1)


def check_launch() -> tuple[int, int]:
    """This process's rank, and how many there are, as torchrun says: (0, 1) without it.

    Raises: EnvironmentVariableError for variables that processes cannot meet by.
    """
    world = read_variable("WORLD_SIZE", 1)
    rank = read_variable("RANK", 0, Range(0, world - 1))
    if world > 1 or "RANK" in os.environ:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise EnvironmentVariableError(
                    f"the environment has no {name}, which processes meet by",
                    fix=f"start by torchrun --nproc-per-node {world}, which sets it",
                )
        read_variable("MASTER_PORT", 0, PORT)
    return rank, world


def join(what: str, size: int, timeout: timedelta) -> None:
    """Be one of so many processes: those of torch.distributed, or of torchrun.

    what: has as many ranks. The process leaves its groups when it ends.
    Raises: MeshError if so many do not run, RanksDisagree if not all of them join.
    """
    if not dist.is_initialized() and size > 1 and "RANK" in os.environ:
        check_launch()
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
        await_all(store, rank, world, COMPILE, timeout)
        dist.init_process_group(
            choose_backend(),
            store=dist.PrefixStore("autopar", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
    else:
        await_here(COMPILE, timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        atexit.unregister(_leave)  # of an earlier step
        atexit.register(_leave)
    if world != size:
        raise MeshError(
            f"{what} has {size} ranks, but {world} processes run",
            fix=f"start it by torchrun --nproc-per-node {size}",
        )


def await_here(call: str, timeout: timedelta) -> None:
    """Wait until all of this run's processes, if there are others, come to a call.

    Raises: RanksDisagree.
    """
    if dist.is_initialized() and (world := dist.get_world_size()) > 1:
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        await_all(store, dist.get_rank(), world, call, timeout)


def _leave() -> None:
    """End the process groups while Python still runs, if the script did not.

    A thread of gloo's may hold the tensors of the last message. Where it lets go of
    them after the interpreter is gone, the process aborts. After an error of the
    user's, peers may never answer, and the end must not wait for them.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def choose_backend() -> str:
    """NCCL, with a GPU of its own for each process of this machine; gloo without GPUs.

    Makes the process's GPU, as torchrun numbers them, the current one.
    Raises: MeshError, on all processes of a machine that has too few.
    """
    if not torch.cuda.is_available():
        return "gloo"
    if "LOCAL_RANK" in os.environ:
        rank, gpus = read_variable("LOCAL_RANK", 0, RANK), torch.cuda.device_count()
        here = read_variable("LOCAL_WORLD_SIZE", rank + 1)
        if here > gpus:
            raise MeshError(
                f"{here} processes run on this machine, which has {gpus} GPUs",
                fix=f"start {gpus} on each machine, or set CUDA_VISIBLE_DEVICES= "
                "to compute on the CPU",
            )
        torch.cuda.set_device(rank)
    return "nccl"


def read_device(device: Any) -> torch.device:
    """A device that this process has. Raises: MeshError, which says which there are.

    One without data, `meta`, is always there.
    """
    there = ["cpu"]
    if (kind := torch.accelerator.current_accelerator()) is not None:
        numbers = range(torch.accelerator.device_count())
        there += [kind.type, *(f"{kind.type}:{i}" for i in numbers)] if numbers else []
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, AssertionError):
        found = None
    if found is None or (found.type != "meta" and str(found) not in there):
        raise MeshError(
            f"device={shown(device)}, but this process has {', '.join(there)}",
            fix="give one of these, or none: then it is this process's GPU, if there "
            "is one",
        )
    return found


def default_device() -> torch.device:
    """Where this process computes: on its GPU, but where processes talk by gloo."""
    by_nccl = not dist.is_initialized() or "cuda:nccl" in dist.get_backend_config()
    if torch.cuda.is_available() and by_nccl:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
