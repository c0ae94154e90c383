"""Devices and clusters by name, as their makers give them, and from files.

Peaks are of dense products without sparsity, from the makers' data sheets; efficiencies
are what large products, copies and collectives reach of them.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from autopar.machine.machine import cores as usable_cores
from autopar.machine.machine import host_memory
from autopar.passes.price.cluster import TF32, Cluster, ClusterError, Device, Level
from autopar.passes.ranges import RANKS, shown
from autopar.read_file import read_variable
from autopar.runtime.launch.launch import rank_threads

GB, TERA = 1e9, 1e12


def _gpu(
    name: str,
    gigabytes: float,
    terabytes_per_second: float,
    half: float,
    tf32: float | None,
    float32: float,
    float64: float,
) -> Device:
    """half: TFLOP/s in 16 bits. tf32: None before Ampere, which has no bfloat16
    either."""
    peaks = {"float32": float32, "float16": half, "float64": float64}
    if tf32 is not None:
        peaks |= {"bfloat16": half, TF32: tf32}
    flops = {dtype: peak * TERA for dtype, peak in peaks.items()}
    return Device(name, gigabytes * GB, terabytes_per_second * 1e12, flops)


# NVIDIA data sheets: V100 (2020), A100 (2021), H100 (2023), H200 (2024), L4 (2023).
DEVICES = {
    "V100": _gpu("V100", 32, 0.9, 125, None, 15.7, 7.8),
    "A100-40GB": _gpu("A100-40GB", 40, 1.555, 312, 156, 19.5, 19.5),
    "A100-80GB": _gpu("A100-80GB", 80, 2.039, 312, 156, 19.5, 19.5),
    "H100": _gpu("H100", 80, 3.35, 989.5, 494.7, 67, 67),
    "H200": _gpu("H200", 141, 4.8, 989.5, 494.7, 67, 67),
    "L4": _gpu("L4", 24, 0.3, 121, 60, 30.3, 0.49),
    "CPU": Device(
        "CPU", 8 * GB, 10 * GB, {"float32": 5e10, "float64": 2.5e10}, launch=5e-6
    ),
}
# Devices in a node; bytes a second that each sends to the others in it, and out of it.
NODES = {
    "V100": (8, 150 * GB, 12.5 * GB),
    "A100-40GB": (8, 300 * GB, 25 * GB),
    "A100-80GB": (8, 300 * GB, 25 * GB),
    "H100": (8, 450 * GB, 50 * GB),
    "H200": (8, 450 * GB, 50 * GB),
    "L4": (8, 32 * GB, 12.5 * GB),
    "CPU": (64, 2 * GB, 1 * GB),
}
LATENCY = {"node": 5e-6, "network": 1.5e-5}  # seconds of a message
# Seconds that a message of a collective keeps a link between nodes busy. Fitted to
# gathers and scatters of 256 MiB over 2 to 64 nodes (`published.py --sweep` of
# `examples/benchmarks`). What is published of training agrees, by eight ranks of a node
# (`published_zero.py` there) and by one (`published_others.py`).
RING_STEP = 3.8e-5


def cluster_of(text: str) -> Cluster:
    """`8xA100-80GB`: so many devices, in nodes as they are usually built.

    Raises: ClusterError.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*[xX*]\s*(\S+)\s*", text)
    if match is None:
        raise ClusterError(
            f"{shown(text)} is not a number of devices and their name",
            fix="write for instance 8xA100-80GB",
        )
    return make_cluster(device_of(match[2]), read_devices(match[1]))


def read_devices(text: str) -> int:
    """A number of devices. Raises: ClusterError."""
    devices = RANKS.parse(text)
    if devices is None:
        raise ClusterError(f"{shown(text)} devices", fix=f"give {RANKS}")
    return int(devices)


def device_of(name: str) -> Device:
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ClusterError(
        f"no device is known as {shown(name)}",
        fix=f"use one of {', '.join(DEVICES)}, or a cluster file",
    )


def this_cluster(devices: int) -> Cluster:
    """So many devices as this process has one of, in nodes as torchrun says.

    Raises: ClusterError for a GPU that is not of the table.
    """
    cores = 0.0
    if devices not in RANKS:
        raise ClusterError(f"{shown(devices)} devices", fix=f"give {RANKS}")
    on_node = min(devices, read_variable("LOCAL_WORLD_SIZE", devices))
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties().total_memory
        device = named_by_torch(name, memory)
        memory = min(memory, device.memory)
    else:
        device = DEVICES["CPU"]
        memory = host_memory() / on_node
        cores = usable_cores() / rank_threads() * devices / on_node
    cluster = with_memory(make_cluster(device, devices, on_node), memory)
    return replace(cluster, cores=cores)


def named_by_torch(name: str, memory: float) -> Device:
    """`NVIDIA A100-SXM4-80GB` is A100-80GB. memory: bytes, where names do not tell."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    alike = [d for key, d in DEVICES.items() if key.partition("-")[0] in words]
    if not alike:
        raise ClusterError(
            f"the planner does not know the speed of a {name!r}",
            fix="describe it: autopar.compile(model, Cluster(Device(...), ...)), or "
            'decide on a mesh, as "pp=2,tp=2"',
        )
    return min(alike, key=lambda device: abs(device.memory - memory))


def make_cluster(device: Device, devices: int, node: int | None = None) -> Cluster:
    """Devices of the table, in nodes (of so many devices) joined by a network."""
    usual, inside, outside = NODES[device.name]
    node = node or usual
    latency = (5e-5, 1e-4) if device.name == "CPU" else tuple(LATENCY.values())
    levels = [Level(min(node, max(devices, 1)), inside, latency[0])]
    if devices > node:
        step = 0.0 if device.name == "CPU" else RING_STEP
        levels.append(Level(devices, outside, latency[1], step=step))
    return Cluster(device, devices, tuple(levels))


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory=memory))
