"""The flags that say which devices a command plans or prices for."""

from __future__ import annotations

import argparse
from typing import Any

from autopar.commands.arguments import path, size, text
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
        help="as 8xA100-80GB; 4: of this machine",
    )
    where.add_argument(
        "--cluster", type=path, metavar="FILE", help="devices and links, TOML or JSON"
    )
    add.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="of a device to use, as 70GB (default: all)",
    )
    add.add_argument(
        "--profile",
        type=path,
        metavar="FILE",
        help="what was measured of this machine (default: in the cache)",
    )


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
