"""The place where a run's processes meet: a store of this start alone."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta

import torch.distributed as dist

from autopar.runtime.agreement.arrivals import FIX, await_all, await_keys
from autopar.runtime.agreement.roll_call import RanksDisagree
from autopar.runtime.launch.nodes import check_launch

HELLO, WELCOME = "autopar/hello", "autopar/welcome"


def open_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that torchrun says, this process's rank, and how many there are.

    Whoever is not there yet is not waited for.
    Raises: EnvironmentVariableError, RanksDisagree.
    """
    rank, world = check_launch()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=rank == 0 and not of_agent(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise RanksDisagree(
            f"rank {rank} finds nobody at {host}:{port}: {first_line(error)}",
            fix="start torchrun on all nodes, with one --rdzv-endpoint and --rdzv-id, "
            f"and let {host} be reached from them",
        ) from error
    return store, rank, world


def of_agent() -> bool:
    """Whether the store is of a torchrun, or else of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_line(error: BaseException) -> str:
    """`KeyError: 'x'`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def meet(
    store: dist.Store,
    rank: int,
    world: int,
    call: str,
    timeout: timedelta,
    fix: str = FIX,
) -> dist.Store:
    """Wait until all ranks come to a call; returns a store that has nothing yet.

    That of torchrun outlives the processes, which it may start again: with keys of
    before they would not wait for each other. So rank 0 names a part of it, and tells
    the name to those that ask with one that they have just made up.
    Raises: RanksDisagree, after the timeout.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"{HELLO}/{rank}", name)
        await_keys(store, {0: f"{WELCOME}/{name}"}, rank, call, timeout, fix)
        name = store.get(f"{WELCOME}/{name}").decode()
    greeted: dict[int, bytes] = {}

    def welcome() -> None:
        for other in range(1, world):
            if not store.check([f"{HELLO}/{other}"]):
                continue
            asked = store.get(f"{HELLO}/{other}")
            if greeted.get(other) != asked:
                store.set(f"{WELCOME}/{asked.decode()}", name)
                greeted[other] = asked

    own = dist.PrefixStore(f"autopar/{name}", store)
    greeting = welcome if rank == 0 else None
    await_all(own, rank, world, call, timeout, fix=fix, meanwhile=greeting)
    return own
