"""`autopar run MODEL`: the plan is found, proved and compiled first, into a folder from
which the same command starts again."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from autopar.commands.arguments import SEQ, add_batch_sizes, path
from autopar.commands.devices import add_devices, read_devices
from autopar.commands.plan import (
    DECISIONS,
    add_decisions,
    read_global_batch,
    read_request,
)
from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import named_cluster
from autopar.models.load import LoadedModel, ModelError, load_model
from autopar.passes.mesh import Mesh
from autopar.passes.plan import PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.search.candidates import ALIKE
from autopar.planner.best_plan import best_plan, capture_few_layers
from autopar.planner.compile_planned import compiled
from autopar.planner.infeasible import NothingToChoose
from autopar.planner.plan_folder import plan_folder
from autopar.planner.planned import save_record
from autopar.planner.request import read_shape
from autopar.plans.plan_record import ESTIMATE, read_record
from autopar.progress import Progress
from autopar.runtime.launch.nodes import check_launch, starts_again
from autopar.units import size

PLANS = Path("plans")
SAMPLES = 8  # of a step at least, and two for each device, where nobody says how many
# A plan may be run by another backend than it was made for.
DECIDED = tuple(name for name in DECISIONS if name != "backend")
# Flags that decide on a plan; a plan that is there has decided.
DECIDING = (
    *("devices", "cluster", "memory", "profile", "global_batch", "seq", "mesh"),
    *(*DECIDED, "plans"),
)


def add_planning(add: argparse.ArgumentParser) -> None:
    """Adds the flags that decide on the plan of a MODEL."""
    group = add.add_argument_group("for a MODEL, which is planned first")
    add_devices(group, required=False)
    usual = f"those of the model's own batch, else two a device, at least {SAMPLES}"
    add_batch_sizes(group, usual)
    add_decisions(group, DECIDED)
    group.add_argument(
        "--plans",
        type=path,
        metavar="DIR",
        help=f"folder in which each plan gets its own (default: {PLANS})",
    )


def is_model(target: str) -> bool:
    """Whether it names a model, and not the directory of a plan."""
    return ":" in target and not Path(target).exists()


def check_decided(arguments: argparse.Namespace) -> None:
    """Raises PlanError for a flag that would decide what a plan has decided."""
    for name in DECIDING:
        if getattr(arguments, name) is not None:
            raise PlanError(
                f"--{name.replace('_', '-')} decides on a plan, but "
                f"'{arguments.plan}' is one",
                fix="leave it out; or give a MODEL, as file.py:factory or hf:gpt2, "
                "which is planned first",
            )


@dataclass(frozen=True)
class ModelToRun:
    """A model, and what its plan is to follow from. prove: before anything runs."""

    arguments: argparse.Namespace
    seed: int
    prove: bool

    def prepare(self) -> Path:
        """Returns the folder of the compiled plan, which is made unless it is there.

        Where ranks come and go, and so many cannot share the work, it is for fewer.
        Prints two lines on it to stderr. Raises: AutoparError.
        """
        arguments = self.arguments
        cluster = most = _devices(arguments)
        why: NothingToChoose | None = None
        loaded = load_model(arguments.plan, seed=self.seed, device="meta")
        decided = arguments.devices or arguments.cluster or arguments.mesh
        least = 1 if starts_again() and not decided else most.devices
        for devices in range(most.devices, least - 1, -1):
            if devices < most.devices:
                cluster = _devices(arguments, devices)
            try:
                with Progress("plan"):
                    folder = self._prepare(loaded, cluster)
            except NothingToChoose as error:
                why = why or error
                continue
            if why:
                spare = most.devices - devices
                print(f"spare   {spare} ranks wait: {why.message}", file=sys.stderr)
            return folder
        assert why is not None, "some number of devices was tried"
        raise why

    def _prepare(self, loaded: LoadedModel, cluster: Cluster) -> Path:
        began, arguments = time.perf_counter(), self.arguments
        request = read_request(arguments, cluster)
        global_batch = _global_batch(loaded, arguments, request.cluster)
        seq = arguments.seq or SEQ
        of = capture_few_layers(loaded, request, global_batch, seq)
        plans = arguments.plans or PLANS
        folder = plan_folder(plans, of, loaded, request, global_batch, self.seed)
        known = (folder / ESTIMATE).is_file()
        if not known:
            best = best_plan(of, loaded, request, global_batch, seq, self.seed, ALIKE)
            save_record(best.record, best.plan, folder)
        compiled(folder, self.prove)
        how = "found again" if known else "planned, proved and compiled"
        if not (known or self.prove):
            how = "planned and compiled"
        chosen = read_record(folder).best[0]
        print(
            f"plan    {chosen.candidate}: {chosen.seconds:.3g} s a step, "
            f"{size(chosen.peak)} of a device\n"
            f"folder  {folder} ({how} in {time.perf_counter() - began:.0f} s)",
            file=sys.stderr,
        )
        return folder


def _devices(arguments: argparse.Namespace, devices: int | None = None) -> Cluster:
    """The cluster that flags name, else `devices` of this machine, else those of
    `_cluster`; with the memory of --memory."""
    if arguments.devices or arguments.cluster or arguments.profile:
        named = read_devices(arguments)
        assert named is not None, "without devices a profile is refused"
        return named
    cluster = _cluster(arguments) if devices is None else named_cluster(str(devices))
    return with_memory(cluster, arguments.memory) if arguments.memory else cluster


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """This machine's devices: as many as the mesh has ranks, or torchrun has processes;
    else all GPUs, or one device."""
    mesh = arguments.mesh or ""
    shape = () if "=" in mesh else read_shape(mesh)
    devices = torch.cuda.device_count() or 1
    if shape:
        devices = prod(shape)
    elif mesh:
        devices = Mesh.parse(mesh).size
    elif "RANK" in os.environ:
        devices = check_launch()[1]
    return named_cluster(str(devices))


def _global_batch(loaded: LoadedModel, arguments: Any, cluster: Cluster) -> int:
    """Returns those of a step, as asked for or else as many as suit the devices."""
    if (asked := read_global_batch(loaded, arguments)) is not None:
        return asked
    if starts_again():
        raise ModelError(
            "no --global-batch is given, and the number of devices may change",
            fix=f"add --global-batch {max(SAMPLES, 2 * cluster.devices)}, which stays",
        )
    return max(SAMPLES, 2 * cluster.devices)
