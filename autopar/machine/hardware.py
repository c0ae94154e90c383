"""Devices and clusters by name, as their makers give them, and from files.

Peaks are of dense products without sparsity, from the makers' data sheets; efficiencies
are what large products, copies and collectives reach of them.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch

from autopar.machine.fabrics import FABRICS
from autopar.machine.machine import cores as usable_cores
from autopar.machine.machine import host_memory
from autopar.machine.measured_device import measure_device
from autopar.passes.price.cluster import TF32, Cluster, ClusterError, Device, Level
from autopar.passes.ranges import RANKS, shown
from autopar.read_file import read_variable
from autopar.runtime.launch.launch import rank_threads

LOG = logging.getLogger("autopar")
GB, TERA = 1e9, 1e12


# Seconds of a host that starts an op on a GPU: a rank's own code, which autograd does
# not watch, takes some 5 us an op, and a launch as much again. Not measured on a GPU.
DISPATCH = 1e-5


def _gpu(
    name: str,
    gigabytes: float,
    terabytes_per_second: float,
    half: float,
    tf32: float | None,
    float32: float,
    float64: float,
    attention: str = "",
    efficiency: float = 0.75,
) -> Device:
    """half: TFLOP/s in 16 bits. tf32: None before Ampere, which has no bfloat16
    either. efficiency: see `Device`."""
    peaks = {"float32": float32, "float16": half, "float64": float64}
    if tf32 is not None:
        peaks |= {"bfloat16": half, TF32: tf32}
    flops = {dtype: peak * TERA for dtype, peak in peaks.items()}
    bandwidth = terabytes_per_second * 1e12
    memory = gigabytes * GB
    # Functions are compiled there, see `autopar.machine.backend`.
    return Device(
        name,
        memory,
        bandwidth,
        flops,
        efficiency,
        fused=True,
        dispatch=DISPATCH,
        attention=attention,
    )


# The makers' data sheets: NVIDIA T4 (2019), V100 (2020), A10, A10G, A30, A40, RTX A6000
# and RTX 3090 (2021), A100 (2021), A800 (2022), RTX 4090 and L40 (2022), H100 of all
# three forms, L4, L40S, GH200, H800 and H20 (2023), H200 and its NVL (2024), HGX B200
# and GB200 NVL72 (2024), RTX 5090 and HGX B300 (2025), AMD MI300X (2023) and MI325X
# (2024). float64 is of tensor cores, where there are any.
# A name's words are those by which torch names the device. What attention reaches of
# the peak is measured on an A100 and an H100; an Ada's tensor cores are programmed as
# an Ampere's, and those of an H20 have so small a peak that they are no less busy.
# Products reach 0.75 of the peak, as published runs on A100s and H100s have it, where
# the best that a search over shapes in bfloat16 came upon reaches 0.87 and 0.80 (Bekman
# 2026, github.com/stas00/ml-engineering, compute/accelerator, "Maximum Achievable
# Matmul FLOPS"). Where it reaches less, so do they, in the proportion of the H100: on a
# B200 (0.776), a GB200 (0.729) and an MI300X (0.514). A B300's and an MI325X's are as
# many as a B200's and an MI300X's, and taken to be as good.
# Words that drivers and shops add: makers, series, and forms that are not named in a
# row of their own.
UNSAID = re.compile("|NVIDIA|TESLA|GEFORCE|AMD|INSTINCT|SXM[0-9]?|OAM|HBM[0-9]?E?")
DEVICES = {
    device.name: device
    for device in (
        _gpu("T4", 16, 0.32, 65, None, 8.1, 0.25),
        _gpu("V100", 32, 0.9, 125, None, 15.7, 7.8),
        _gpu("A10", 24, 0.6, 125, 62.5, 31.2, 0.49, "ampere"),
        _gpu("A10G", 24, 0.6, 70, 35, 35, 0.55, "ampere"),
        _gpu("A30", 24, 0.933, 165, 82, 10.3, 10.3, "ampere"),
        _gpu("A40", 48, 0.696, 149.7, 74.8, 37.4, 0.58, "ampere"),
        _gpu("A100-40GB", 40, 1.555, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A100-80GB", 80, 2.039, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A100-PCIe-40GB", 40, 1.555, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A100-PCIe-80GB", 80, 1.935, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A800-80GB", 80, 2.039, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A800-PCIe-40GB", 40, 1.555, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("A800-PCIe-80GB", 80, 1.935, 312, 156, 19.5, 19.5, "ampere"),
        _gpu("RTX-A6000", 48, 0.768, 154.8, 77.4, 38.7, 0.6, "ampere"),
        _gpu("RTX-3090", 24, 0.936, 71, 35.6, 35.6, 0.56, "ampere"),
        _gpu("RTX-4090", 24, 1.008, 165.2, 82.6, 82.6, 1.29, "ampere"),
        _gpu("RTX-5090", 32, 1.792, 209.5, 104.8, 104.8, 1.64),
        _gpu("L4", 24, 0.3, 121, 60, 30.3, 0.49, "ampere"),
        _gpu("L40", 48, 0.864, 181, 90.5, 90.5, 1.41, "ampere"),
        _gpu("L40S", 48, 0.864, 362, 183, 91.6, 1.43, "ampere"),
        _gpu("H100", 80, 3.35, 989.5, 494.7, 67, 67, "hopper"),
        _gpu("H100-PCIe", 80, 2.0, 756, 378, 51, 51, "hopper"),
        _gpu("H100-NVL", 94, 3.9, 835, 417.5, 60, 60, "hopper"),
        _gpu("H200", 141, 4.8, 989.5, 494.7, 67, 67, "hopper"),
        _gpu("H200-NVL", 141, 4.8, 835.5, 417.5, 60, 60, "hopper"),
        _gpu("H800", 80, 3.35, 989.5, 494.7, 67, 1, "hopper"),
        _gpu("H800-PCIe", 80, 2.0, 756, 378, 51, 0.8, "hopper"),
        _gpu("H20", 96, 4.0, 148, 74, 44, 1, "ampere"),
        _gpu("GH200", 96, 4.0, 989.5, 494.7, 67, 67, "hopper"),
        _gpu("B200", 180, 7.7, 2250, 1100, 75, 37, efficiency=0.72),
        _gpu("B300", 288, 8.0, 2250, 1125, 75, 1.25, efficiency=0.72),
        _gpu("GB200", 186, 8.0, 2500, 1250, 80, 40, efficiency=0.68),
        _gpu("MI300X", 192, 5.3, 1307.4, 653.7, 163.4, 163.4, efficiency=0.48),
        _gpu("MI325X", 256, 6.0, 1307.4, 653.7, 163.4, 163.4, efficiency=0.48),
        Device(
            "CPU", 8 * GB, 10 * GB, {"float32": 5e10, "float64": 2.5e10}, launch=5e-6
        ),
    )
}
# Devices in a node, what joins them there, what leaves the node (see
# `autopar.machine.fabrics`), and how many NICs each device has for that.
NODES: Mapping[str, tuple[int, str, str, float]] = {
    "T4": (4, "PCIe 3", "Ethernet 100G", 1 / 2),
    "V100": (8, "NVLink 2", "InfiniBand EDR", 1),
    "A10": (4, "PCIe 4", "Ethernet 100G", 1),
    "A10G": (8, "PCIe 4", "EFA 100G", 1 / 8),
    "A30": (4, "PCIe 4", "Ethernet 100G", 1),
    "A40": (8, "PCIe 4", "InfiniBand EDR", 1),
    "A100-40GB": (8, "NVLink 3", "InfiniBand HDR", 1),
    "A100-80GB": (8, "NVLink 3", "InfiniBand HDR", 1),
    "A100-PCIe-40GB": (8, "PCIe 4", "InfiniBand EDR", 1),
    "A100-PCIe-80GB": (8, "PCIe 4", "InfiniBand EDR", 1),
    "A800-80GB": (8, "NVLink 3, 8 links", "InfiniBand HDR", 1),
    "A800-PCIe-40GB": (8, "PCIe 4", "InfiniBand EDR", 1),
    "A800-PCIe-80GB": (8, "PCIe 4", "InfiniBand EDR", 1),
    "RTX-A6000": (8, "PCIe 4", "Ethernet 100G", 1),
    "RTX-3090": (4, "PCIe 4", "Ethernet 10G", 1),
    "RTX-4090": (8, "PCIe 4", "Ethernet 10G", 1),
    "RTX-5090": (8, "PCIe 5", "Ethernet 10G", 1),
    "L4": (8, "PCIe 4", "Ethernet 100G", 1),
    "L40": (8, "PCIe 4", "RoCE 200G", 1),
    "L40S": (8, "PCIe 4", "RoCE 200G", 1),
    "H100": (8, "NVLink 4", "InfiniBand NDR", 1),
    "H100-PCIe": (8, "PCIe 5", "InfiniBand HDR", 1),
    "H100-NVL": (8, "PCIe 5", "InfiniBand HDR", 1),
    "H200": (8, "NVLink 4", "InfiniBand NDR", 1),
    "H200-NVL": (8, "PCIe 5", "InfiniBand NDR", 1),
    "H800": (8, "NVLink 4, 8 links", "InfiniBand NDR", 1),
    "H800-PCIe": (8, "PCIe 5", "InfiniBand HDR", 1),
    "H20": (8, "NVLink 4", "InfiniBand NDR", 1),
    "GH200": (1, "NVLink 4", "InfiniBand NDR", 1),
    "B200": (8, "NVLink 5", "InfiniBand NDR", 1),
    "B300": (8, "NVLink 5", "InfiniBand XDR", 1),
    "GB200": (72, "NVLink 5", "InfiniBand NDR", 1),
    "MI300X": (8, "Infinity Fabric 3", "RoCE 400G", 1),
    "MI325X": (8, "Infinity Fabric 3", "RoCE 400G", 1),
}
OTHERS = (8, "PCIe 4", "Ethernet 100G", 1.0)  # of devices that nobody knows
# Processes of a CPU, whose links nobody measured.
CPU_NODE = 64
CPU_LEVELS = (Level(CPU_NODE, 2 * GB, 5e-5), Level(CPU_NODE, 1 * GB, 1e-4))


def cluster_of(text: str) -> Cluster:
    """The cluster that `8xA100-80GB` names, in nodes as they are usually built; or
    `2x8xA100-80GB`, two nodes of eight.

    Raises: ClusterError.
    """
    times = r"\s*[xX*]\s*"
    match = re.fullmatch(rf"\s*([0-9]+)({times}[0-9]+)?{times}(\S.*?)\s*", text)
    if match is None:
        turned = re.fullmatch(rf"\s*(\S.*?){times}([0-9]+)\s*", text)
        meant = f"{turned[2]}x{turned[1]}" if turned else "for instance 8xA100-80GB"
        raise ClusterError(
            f"{shown(text)} is not a number of devices and their name",
            fix=f"write {meant}",
        )
    count, node, name = match.groups()
    device = device_of(name)
    devices = read_devices(count)
    if node is None:
        return make_cluster(device, devices)
    own = read_devices(node.strip(" xX*"))
    return make_cluster(device, read_devices(str(devices * own)), own)


def read_devices(text: str) -> int:
    """A number of devices. Raises: ClusterError."""
    devices = RANKS.parse(text)
    if devices is None:
        raise ClusterError(f"{shown(text)} devices", fix=f"give {RANKS}")
    return int(devices)


def device_of(name: str) -> Device:
    """Returns the device of that name: as a driver says it, `NVIDIA A100-SXM4-80GB`, or
    as people do, `RTX4090`. Raises ClusterError for an unknown one."""
    spelled = _spellings(name)
    for known, device in DEVICES.items():
        memory = f" {device.memory / GB:.0f}GB"
        if spelled & (_spellings(known) | _spellings(known + memory)):
            return device
    names = {known.lower(): known for known in DEVICES}
    model = re.split(r"[-_ ]", name.lower())[0]  # whatever form it has
    close = [known for known in names if known.split("-")[0] == model]
    close = close or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.7)
    meant = f"did you mean {' or '.join(names[n] for n in close)}? else " * bool(close)
    raise ClusterError(
        f"no device is known as {shown(name)}",
        fix=f"{meant}use one of {', '.join(DEVICES)}, or a cluster file",
    )


def _spellings(name: str) -> set[object]:
    """A name in one piece, and as words in any order, without those of `UNSAID`."""
    every = re.split(r"[^A-Z0-9]+", name.upper())
    words = [word for word in every if not UNSAID.fullmatch(word)]
    return {"".join(words), frozenset(words)}


def this_cluster(devices: int) -> Cluster:
    """A cluster of devices like this process's, in nodes as torchrun says.

    A GPU that is not in the table is measured, in seconds. Raises: ClusterError.
    """
    cores = 0.0
    if devices not in RANKS:
        raise ClusterError(f"{shown(devices)} devices", fix=f"give {RANKS}")
    on_node = min(devices, read_variable("LOCAL_WORLD_SIZE", devices))
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties().total_memory
        device = _known(name, memory) or _measured(name, memory)
        memory = min(memory, device.memory)
    else:
        device = DEVICES["CPU"]
        memory = host_memory() / on_node
        cores = usable_cores() / rank_threads() * devices / on_node
    cluster = with_memory(make_cluster(device, devices, on_node), memory)
    return replace(cluster, cores=cores)


def named_by_torch(name: str, memory: float) -> Device:
    """`NVIDIA A100-SXM4-80GB` is A100-80GB: of the rows whose words the name has all,
    those of most words, and of these the one of that memory.

    memory: bytes, where names do not tell. Raises: ClusterError.
    """
    device = _known(name, memory)
    if device is None:
        raise ClusterError(
            f"the planner does not know the speed of a {name!r}",
            fix="describe it: autopar.compile(model, Cluster(Device(...), ...)), or "
            'decide on a mesh, as "pp=2,tp=2"',
        )
    return device


def _known(name: str, memory: float) -> Device | None:
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    told = {key: _words(key) for key in DEVICES}
    alike = [key for key in DEVICES if told[key] <= words]
    most = max((len(told[key]) for key in alike), default=0)
    closest = [DEVICES[key] for key in alike if len(told[key]) == most]
    return min(closest, key=lambda device: abs(device.memory - memory), default=None)


@cache
def _measured(name: str, memory: float) -> Device:
    """Measures this process's GPU, which is not in the table."""
    LOG.warning(
        f"no table has a {name}: its products and copies are measured now, its links "
        "are taken for PCIe of generation 4\n  fix  a cluster file describes another"
    )
    here = torch.device("cuda", torch.cuda.current_device())
    return measure_device(name, memory, here, dispatch=DISPATCH)


def _words(name: str) -> set[str]:
    """`A100-PCIe-80GB` -> A100, PCIE: two of other memory differ by that alone."""
    return {w for w in name.upper().split("-") if not re.fullmatch(r"[0-9]+GB", w)}


def node_size(device: Device) -> int:
    """Devices in a node, as they are usually built."""
    return CPU_NODE if device.name == "CPU" else NODES.get(device.name, OTHERS)[0]


def make_cluster(device: Device, devices: int, node: int | None = None) -> Cluster:
    """A cluster of devices of the table, in nodes of `node`, joined by a network."""
    node = node or node_size(device)
    _, inside, outside, nics = NODES.get(device.name, OTHERS)
    near, far = FABRICS[inside].level(node), FABRICS[outside].level(node, nics)
    if device.name == "CPU":
        near, far = CPU_LEVELS
    levels = [replace(near, devices=min(node, max(devices, 1)))]
    if devices > node:
        levels.append(replace(far, devices=devices))
    return Cluster(device, devices, tuple(levels))


def with_memory(cluster: Cluster, memory: float) -> Cluster:
    """Returns the cluster with `memory` bytes a device."""
    return replace(cluster, device=replace(cluster.device, memory=memory))
