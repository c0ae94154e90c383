"""This machine as a cluster, with what its profile has of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.hardware import this_cluster
from autopar.machine import busy, machine_text
from autopar.profile_file import read_profile
from passes.cluster import Cluster
from passes.measured import Messages, Ops


def measured_cluster(devices: int, path: Path | None = None) -> Cluster:
    """So many devices of this machine, as they were measured.

    path: of a profile that must have something of this machine; None: the one in the
    cache, if it has. What was not measured is of the table of hardware;
    `Cluster.profile` is "" if nothing was.
    Raises: ProfileError, ClusterError.
    """
    found, cluster = read_profile(path), this_cluster(devices)
    ops = found.ops.get(busy(devices), Ops())
    messages = found.messages.get(devices, Messages())
    if not (ops.timed or ops.update or messages.points):
        return cluster
    device = replace(cluster.device, ops=ops)
    return replace(cluster, device=device, messages=messages, profile=machine_text())
