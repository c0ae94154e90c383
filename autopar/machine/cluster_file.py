"""Clusters from files: TOML or JSON.

devices = 16
cores = 0                      # that processes of all devices share; 0: their own

[device]
name = "A100-80GB"             # of the table; what follows overrules it
memory = "72GB"                # what a rank may use
bytes_per_second = "2TB"       # of its own memory
flops = { bfloat16 = "312T", float32 = "19.5T", tf32 = "156T" }
fused = false                  # elementwise ops in a row run as one kernel
dispatch = 0                   # seconds of the host for each op
attention = "ampere"           # or "hopper": whose tensor cores attention is known of

[[links]]                      # innermost first; the last joins all devices
devices = 8
bytes_per_second = "300GB"     # that each device sends
latency = 5e-6                 # seconds

[[links]]
devices = 16
fabric = "InfiniBand HDR"      # of the table; bytes_per_second, latency, step overrule
nics = 4                       # that a node has of it; without, one for each device
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autopar.machine.fabrics import FABRICS, Fabric
from autopar.machine.hardware import DEVICES, make_cluster
from autopar.passes.decode import decode, decode_fields, parse_json
from autopar.passes.price.cluster import Cluster, ClusterError, Device, Level
from autopar.passes.ranges import RANKS, shown
from autopar.read_file import parse_toml, read_text

UNITS = {
    **{"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
WRITE = "give a cluster file: TOML or JSON with devices, device and links"
LINKS = "write [[links]] for each level"
NUMBER = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"\s*([KMGTPk]i?)?(?:B|FLOP)?(?:/s)?"
)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ClusterError that names the key at fault."""
    path = Path(path)
    return cluster_from(_parse(path, read_text(path, ClusterError, WRITE)))


@dataclass(frozen=True)
class _File:
    devices: Any
    device: Any
    links: Any = None
    cores: Any = 0


@dataclass(frozen=True)
class _Links(Level):
    """Links as a file has them. nics: of a node, None for one of each device."""

    fabric: str = ""
    nics: int | None = None


def cluster_from(data: Any) -> Cluster:
    """The cluster that the keys of a cluster file stand for. Raises ClusterError."""
    file: _File = decode(_File, data, "the cluster", ClusterError, "")
    device = _device(file.device)
    devices = _whole("devices", file.devices)
    if file.links is not None:
        levels: tuple[Level, ...] = ()
        kind = list[dict[str, Any]]
        for links in decode(kind, file.links, "'links'", ClusterError, LINKS):
            levels += (_level(links, levels[-1].devices if levels else 1),)
    elif device.name in DEVICES:
        levels = make_cluster(DEVICES[device.name], devices).levels
    else:
        raise ClusterError(
            f"'links' of {device.name} are missing",
            fix="add a [[links]] table for each level, innermost first",
        )
    return Cluster(device, devices, levels, cores=number("cores", file.cores))


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the keys of a cluster file, which stand for the same; without what
    was measured, which is in a profile."""
    return {
        "devices": cluster.devices,
        "device": _without_ops(cluster.device),
        "links": [asdict(level) for level in cluster.levels],
        "cores": cluster.cores,
    }


def _parse(path: Path, text: str) -> dict[str, Any]:
    parse = parse_json if path.suffix == ".json" else parse_toml
    data = parse(text, f"'{path}'", ClusterError, WRITE)
    if not isinstance(data, dict):
        raise ClusterError(f"'{path}' holds no table of keys")
    return data


def _device(data: Any) -> Device:
    data = {"name": data} if isinstance(data, str) else data
    if isinstance(data, dict):
        known = DEVICES.get(str(data.get("name")))
        own = _without_ops(known) if known else {}
        data = {**own, **_numbers("device", Device, data)}
    read = decode_fields(
        Device, data, "device", ClusterError, "", without=frozenset({"ops"})
    )
    return Device(**read)


def _without_ops(device: Device) -> dict[str, Any]:
    return {f.name: getattr(device, f.name) for f in fields(Device) if f.name != "ops"}


def _level(data: dict[str, Any], node: int) -> Level:
    """node: devices that share the NICs of a level."""
    data = _numbers("links", Level, data)
    devices = _whole("links.devices", data.get("devices"))
    if "fabric" in data:
        nics = _whole("links.nics", data.get("nics", node))
        level = _fabric(data["fabric"]).level(devices, nics / node)
        data = {**asdict(level), **data}
    elif "nics" in data:
        raise ClusterError(
            "'links.nics' says how many, but not of what",
            fix='name the fabric, as fabric = "InfiniBand NDR"',
        )
    links: _Links = decode(_Links, data, "links", ClusterError, "")
    return Level(**{f.name: getattr(links, f.name) for f in fields(Level)})


def _fabric(name: Any) -> Fabric:
    if not isinstance(name, str) or name not in FABRICS:
        raise ClusterError(
            f"no fabric is known as {shown(name)}",
            fix=f"use one of {', '.join(FABRICS)}; or give bytes_per_second and "
            "latency",
        )
    return FABRICS[name]


def _numbers(table: str, kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a table, with numbers for what the fields of a kind have as numbers,
    and for each of several."""
    amounts = {f.name for f in fields(kind) if f.type == "float"}
    rows = {f.name for f in fields(kind) if f.type == "Mapping[str, float]"}

    def read(key: str, value: Any) -> Any:
        if key in rows and isinstance(value, Mapping):
            return {k: number(f"{table}.{key}.{k}", x) for k, x in value.items()}
        return number(f"{table}.{key}", value) if key in amounts else value

    return {key: read(key, value) for key, value in data.items()}


def number(key: str, value: Any) -> float:
    """`"80GB"` -> 8e10; B and /s may follow the unit. Raises ClusterError."""
    parsed = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        parsed = float(value) if abs(value) < math.inf else math.nan
    elif isinstance(value, str) and (match := NUMBER.fullmatch(value.strip())):
        parsed = float(match[1]) * UNITS.get(match[2] or "", 1.0)
    if not math.isfinite(parsed):
        raise ClusterError(
            f"'{key}' is {shown(value)}", fix='write a number, or one as "80GB"'
        )
    return parsed


def _whole(key: str, value: Any) -> int:
    if value not in RANKS:
        raise ClusterError(f"'{key}' is {shown(value)}", fix=f"write {RANKS}")
    return value
