"""Joins the processes of a step, and finds this one's rank and device."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.passes.mesh import MeshError
from autopar.passes.ranges import shown
from autopar.read_file import read_variable
from autopar.runtime.agreement.arrivals import await_all
from autopar.runtime.agreement.roll_call import ranks_text
from autopar.runtime.launch.meet import meet, open_store
from autopar.runtime.launch.nodes import RANK, this_node, torchrun_for
from autopar.runtime.launch.uncaught import leave, watch

COMPILE = "autopar.compile()"


def join(caller: str, size: int, timeout: timedelta) -> None:
    """Joins `size` processes, those of torch.distributed or of torchrun.

    caller: has as many ranks. The process leaves its groups when it ends. Raises:
    MeshError if so many do not run, RanksDisagree if not all of them join.
    """
    if not dist.is_initialized() and size > 1 and "RANK" in os.environ:
        store, rank, world = open_store(timeout)
        dist.init_process_group(
            choose_backend(),
            store=meet(store, rank, world, COMPILE, timeout),
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
    else:
        await_here(COMPILE, timeout)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        watch()
        atexit.unregister(_leave)  # of an earlier step
        atexit.register(_leave)
    if world != size:
        raise MeshError(
            f"{caller} has {size} ranks, but {world} processes run",
            fix=f"start it by {torchrun_for(size)}",
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
    leave()
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
    """A device of this process; `meta`, which has no data, is always one.

    Raises: MeshError, which lists the devices.
    """
    there = ["cpu"]
    if (kind := torch.accelerator.current_accelerator()) is not None:
        numbers = range(torch.accelerator.device_count())
        there += [kind.type, *(f"{kind.type}:{i}" for i in numbers)] if numbers else []
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, AssertionError):
        chosen = None
    if chosen is None or (chosen.type != "meta" and str(chosen) not in there):
        raise MeshError(
            f"device={shown(device)}, but this process has {', '.join(there)}",
            fix="give one of these, or none: then it is this process's GPU, if there "
            "is one",
        )
    return chosen


def default_device() -> torch.device:
    """This process's device: its GPU, unless processes talk by gloo."""
    if torch.cuda.is_available() and (not dist.is_initialized() or by_nccl()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def by_nccl() -> bool:
    """Whether NCCL carries tensors on GPUs."""
    return "cuda:nccl" in dist.get_backend_config()


def check_own_gpu(device: torch.device, timeout: timedelta) -> None:
    """Compares this process's GPU with the others', where NCCL carries tensors: two on
    one GPU would wait for ever. Raises MeshError on all of them."""
    if device.type != "cuda" or not dist.is_initialized() or not by_nccl():
        return
    assert dist.group.WORLD is not None
    store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
    gpu = torch.cuda.get_device_properties(device).uuid
    node = this_node()
    compare_gpus(
        store, rank, dist.get_world_size(), f"{device}{node.on} {gpu}", timeout
    )


def compare_gpus(
    store: dist.Store, rank: int, world: int, own: str, timeout: timedelta
) -> None:
    """Tell the others the GPU of this rank. Raises: MeshError if two have the same."""
    keys = [f"autopar/gpu/{r}" for r in range(world)]
    store.set(keys[rank], own)
    store.wait(keys, timeout)
    holders: dict[bytes, list[int]] = {}
    for other, gpu in enumerate(store.multi_get(keys)):
        holders.setdefault(gpu, []).append(other)
    for gpu, ranks in holders.items():
        if len(ranks) > 1:
            name = gpu.decode().rpartition(" ")[0]
            raise MeshError(
                f"{ranks_text(ranks)} all compute on {name}, but NCCL needs a GPU for "
                "each",
                fix="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
                "init_process_group, or leave that to autopar.compile",
            )
