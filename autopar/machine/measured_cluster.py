"""This machine as a cluster, with what its profile has of it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autopar.machine.hardware import cluster_of, read_devices, this_cluster
from autopar.machine.machine import busy, machine_text
from autopar.machine.profile_file import (
    BackendTimes,
    ProfileError,
    measured_machines,
    read_profile,
)
from autopar.passes.price.cluster import Cluster, Device
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.measured import (
    BETWEEN,
    BEYOND,
    MEASURED,
    TABLE,
    Messages,
    Ops,
)
from autopar.passes.price.sources import COMPUTE, MESSAGES

LOG = logging.getLogger("autopar")
FEW = 0.5  # of the seconds of computing: a model whose own ops were not measured
HOW = {
    MEASURED: "measured",
    BETWEEN: "read off between measured sizes",
    BEYOND: "beyond them",
    TABLE: "of the table of hardware",
}


def named_cluster(text: str, profile: Path | None = None) -> Cluster:
    """`4`: of this machine, see `measured_cluster`. `8xA100-80GB`: of the table.

    Raises: ProfileError, ClusterError.
    """
    if re.fullmatch(r"[0-9]+", text.strip()):
        return measured_cluster(read_devices(text.strip()), profile)
    if profile is not None:
        raise ProfileError(
            f"'{profile}' is of this machine, but the devices are {text}",
            fix="give their number alone, as --devices 4, or no profile",
        )
    return cluster_of(text)


def measured_cluster(devices: int, path: Path | None = None) -> Cluster:
    """A cluster of so many devices of this machine, as they were measured.

    path: of a profile that must have something of this machine; None: the one in the
    cache, if it has. What was not measured is from the table of hardware; if nothing
    was, `Cluster.profile` is "", and a warning says so. Raises: ProfileError,
    ClusterError.
    """
    cluster = known_cluster(devices, path)
    if not cluster.profile and os.environ.get("RANK", "0") == "0":
        LOG.warning(_not_measured(devices))
    return cluster


def known_cluster(devices: int, path: Path | None = None) -> Cluster:
    """The same without a warning."""
    profile, cluster = read_profile(path), this_cluster(devices)
    ops = profile.ops.get(busy(devices), Ops())
    messages = profile.messages.get(devices, Messages())
    if not (ops.timed or ops.update or messages.points):
        return cluster
    kind = "cpu" if cluster.device.name == "CPU" else "cuda"
    layers = profile.backends.get(kind, BackendTimes(1.0, 1.0))
    ops = replace(ops, compiled=layers.beside_products)
    device = replace(cluster.device, ops=ops, flops=_peaks(cluster.device, ops))
    return replace(cluster, device=device, messages=messages, profile=machine_text())


def _peaks(device: Device, ops: Ops) -> Mapping[str, float]:
    """Returns a GPU's peaks as its maker has them, a CPU's by its fastest op, others in
    proportion."""
    if device.name != "CPU":
        return device.flops
    best = max(
        (t.flops / t.seconds for t in ops.timed.values() if t.seconds), default=0
    )
    faster = max(1.0, best / max(device.flops.values()))
    return {dtype: faster * peak for dtype, peak in device.flops.items()}


def _not_measured(devices: int) -> str:
    others = [m for m in measured_machines() if m != machine_text()]
    text = f"{devices} devices of this machine, {machine_text()}, were not measured"
    text += f" (but these were: {'; '.join(others)})" if others else ""
    return (
        f"{text}: a table of hardware prices plans"
        f"\n  fix  autopar profile MODEL --ranks {devices}"
    )


def how_priced(e: Estimate, cluster: Cluster) -> str:
    """A line on the sources of an estimate."""
    if not cluster.profile:
        return f"priced by the table of hardware, for {cluster.device.name}"
    parts = [f"priced by the profile of {cluster.profile}"]
    for kind, name in ((COMPUTE, "computing"), (MESSAGES, "messages")):
        shares = e.sources.get(kind, {})
        told = [f"{shares[how]:.0%} {HOW[how]}" for how in HOW if how in shares]
        if told:
            parts.append(f"{name}: {', '.join(told)}")
    if e.sources.get(COMPUTE, {}).get(MEASURED, 0.0) < FEW:
        ranks = cluster.devices
        parts.append(f"autopar profile MODEL --ranks {ranks} measures the model's own")
    return "; ".join(parts)
