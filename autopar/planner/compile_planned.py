"""Compiles a plan of `autopar plan -o` where it lies, once for a run's ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autopar.compiler import compile_offline
from autopar.models.load import load_model
from autopar.passes.price.cluster import Cluster
from autopar.passes.program import Program
from autopar.planner.planned import batch_for, is_planned, read_decided
from autopar.plans.plan_record import read_record
from autopar.plans.store import StoredPlan, load_plan, save_plan
from autopar.progress import Progress

WAIT = timedelta(minutes=30)  # for rank 0 to compile
# Keys of a run's store.
READ, COMPILED, MADE = "autopar/read", "autopar/compiled", "autopar/made"


def compiled(directory: Path, prove: bool = True) -> StoredPlan:
    """Loads a compiled plan; one that is only planned is compiled, and proved,
    first."""
    if is_planned(directory):
        compile_there(directory, prove)
    return load_plan(directory)


def compiled_once(
    directory: Path, store: dist.Store, rank: int, world: int, prove: bool = True
) -> StoredPlan:
    """The same on ranks of one run, which share a disk: rank 0 compiles for all, when
    all have read what was planned.

    It tells by the store that it is done; if it fails, the run's watchdog ends the
    others.
    """
    if store.add(READ, 1) == world:
        store.set(f"{READ}/all", "")
    store.wait([f"{READ}/all"], WAIT)
    if rank == 0:
        stored = compiled(directory, prove)
        store.set(COMPILED, "")
        return stored
    store.wait([COMPILED], WAIT)
    return load_plan(directory)


def made_once(make: Callable[[], Path], store: dist.Store, rank: int) -> Path:
    """The directory of a plan that rank 0 makes, on a disk that ranks share."""
    if rank == 0:
        directory = make().absolute()
        store.set(MADE, str(directory))
        return directory
    store.wait([MADE], WAIT)
    return Path(store.get(MADE).decode())


def compile_there(
    directory: Path, prove: bool = True, cluster: Cluster | None = None
) -> Program:
    """Compiles a directory's plan. cluster: other devices, whose prices cut stages."""
    record = read_record(directory)
    decided = read_decided(directory)
    with Progress("compile"):
        loaded = load_model(record.model, seed=record.seed)
        batch = batch_for(loaded, record.global_batch, record.seq)
        program = compile_offline(
            loaded.model, batch, decided.plan, cluster=cluster, prove=prove
        )
    save_plan(program, directory, record.model, record.seed, decided.record, cluster)
    return program
