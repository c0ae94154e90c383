"""The flags that say which devices a command plans or prices for."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.commands.arguments import add_options, add_switch, path, text
from autopar.machine.cluster_file import read_cluster
from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import named_cluster
from autopar.machine.profile_file import ProfileError
from autopar.passes.price.cluster import Cluster, ClusterError


def add_devices(add: Any, required: bool) -> None:
    """Adds flags for the devices of a plan; required: one of --devices and
    --cluster."""
    where = add.add_mutually_exclusive_group(required=required)
    where.add_argument(
        "--devices",
        type=text,
        metavar="NxNAME|N",
        help="number and kind, as 8xA100-80GB, or nodes too, as 2x8xA100-80GB; a "
        "number alone: of this machine",
    )
    where.add_argument(
        "--cluster", type=path, metavar="FILE", help="TOML or JSON of devices and links"
    )
    add_options(add, ["memory"], {"memory": "all"})
    add.add_argument(
        "--profile",
        type=path,
        metavar="FILE",
        help="measurements of this machine (default: those in the cache)",
    )


def add_compiled(add: Any) -> None:
    """Adds --compiled, which prefers a program's seconds to an estimate's."""
    told = "use what compiling measured, even if there is an estimate"
    add_switch(add, "--compiled", told)


def read_devices(arguments: argparse.Namespace) -> Cluster | None:
    """The cluster that the flags name, if they name one."""
    if arguments.cluster:
        if arguments.profile:
            raise ProfileError(
                f"'{arguments.profile}' is of this machine, not of a cluster file's",
                fix="give --devices N with it",
            )
        cluster = read_cluster(arguments.cluster)
    elif arguments.devices:
        cluster = named_cluster(arguments.devices, arguments.profile)
    else:
        _check_alone(arguments)
        return None
    if arguments.memory is not None:
        if not arguments.memory:
            raise ClusterError("--memory 0", fix="give bytes above 0, as 70GB")
        cluster = with_memory(cluster, arguments.memory)
    return cluster


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raises an error for flags about devices, where none are named."""
    if arguments.memory is not None:
        raise ClusterError(
            "--memory is of no devices", fix="add --devices or --cluster"
        )
    if arguments.profile and not getattr(arguments, "reprice", False):
        raise ProfileError("--profile is of no devices", fix="add --devices N")
