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
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from autopar.machine.fabrics import FABRICS, Fabric
from autopar.machine.hardware import DEVICES, make_cluster
from autopar.passes.decode import parse_json
from autopar.passes.price.cluster import Cluster, ClusterError, Device, Level
from autopar.passes.ranges import RANKS, shown
from autopar.read_file import parse_toml, read_text

UNITS = {
    **{"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
WRITE = "give a cluster file: TOML or JSON with devices, device and links"
NUMBER = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"\s*([KMGTPk]i?)?(?:B|FLOP)?(?:/s)?"
)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ClusterError that names the key at fault."""
    path = Path(path)
    return cluster_from(_parse(path, read_text(path, ClusterError, WRITE)))


def cluster_from(data: Any) -> Cluster:
    """The cluster that the keys of a cluster file stand for. Raises ClusterError."""
    allowed = {"devices", "device", "links", "cores"}
    _known("the cluster", data, allowed, {"devices", "device"})
    device = _device(data["device"])
    devices = _whole("devices", data["devices"])
    if "links" not in data:
        if device.name not in DEVICES:
            raise ClusterError(
                f"'links' of {device.name} are missing",
                fix="add a [[links]] table for each level, innermost first",
            )
        made = make_cluster(DEVICES[device.name], devices)
        levels = made.levels
    else:
        levels = _levels(_tables(data["links"]))
    cores = number("cores", data.get("cores", 0))
    return Cluster(device, devices, levels, cores=cores)


def cluster_data(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the keys of a cluster file, which stand for the same; without what
    was measured, which is in a profile."""
    own = (f.name for f in fields(Device) if f.name != "ops")
    device = {name: getattr(cluster.device, name) for name in own}
    links = [asdict(level) for level in cluster.levels]
    return {
        "devices": cluster.devices,
        "device": device,
        "links": links,
        "cores": cluster.cores,
    }


def _parse(path: Path, text: str) -> dict[str, Any]:
    parse = parse_json if path.suffix == ".json" else parse_toml
    data = parse(text, f"'{path}'", ClusterError, WRITE)
    if not isinstance(data, dict):
        raise ClusterError(f"'{path}' holds no table of keys")
    return data


def _device(data: Any) -> Device:
    if isinstance(data, str):
        data = {"name": data}
    allowed = {f.name for f in fields(Device)} - {"ops"}
    _known("device", data, allowed, {"name"})
    name = _read("device.name", data["name"])
    base: dict[str, Any] = {}
    if name in DEVICES:
        base = {f: getattr(DEVICES[name], f) for f in allowed}
    values = {key: _read(f"device.{key}", value) for key, value in data.items()}
    whole = {**base, **values}
    needed = {"memory", "bytes_per_second", "flops"}
    _known("device", whole, allowed, needed)
    return Device(**whole)


def _levels(tables: list[Any]) -> tuple[Level, ...]:
    levels: list[Level] = []
    for data in tables:
        levels.append(_level(data, levels[-1].devices if levels else 1))
    return tuple(levels)


def _level(data: Any, node: int) -> Level:
    """node: devices that share the NICs of a level."""
    own = {f.name for f in fields(Level)}
    _known("links", data, own | {"fabric", "nics"}, {"devices"})
    values = {k: _read(f"links.{k}", v) for k, v in data.items() if k in own}
    values["devices"] = _whole("links.devices", data["devices"])
    if "fabric" in data:
        nics = _whole("links.nics", data.get("nics", node))
        level = _fabric(data["fabric"]).level(values["devices"], nics / node)
        return replace(level, **values)
    if "nics" in data:
        raise ClusterError(
            "'links.nics' says how many, but not of what",
            fix='name the fabric, as fabric = "InfiniBand NDR"',
        )
    _known("links", values, own, {"devices", "bytes_per_second", "latency"})
    return Level(**values)


def _fabric(name: Any) -> Fabric:
    if not isinstance(name, str) or name not in FABRICS:
        raise ClusterError(
            f"no fabric is known as {shown(name)}",
            fix=f"use one of {', '.join(FABRICS)}; or give bytes_per_second and "
            "latency",
        )
    return FABRICS[name]


def _tables(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ClusterError("'links' is no list", fix="write [[links]] for each level")
    return data


def _read(key: str, value: Any) -> Any:
    if key in ("device.name", "device.attention"):
        if not isinstance(value, str):
            raise ClusterError(f"'{key}' is {shown(value)}", fix="write its name")
        return value
    if key == "device.fused":
        if not isinstance(value, bool):
            raise ClusterError(f"'{key}' is {value!r}", fix="write true or false")
        return value
    if key == "device.flops":
        if not isinstance(value, Mapping):
            raise ClusterError(
                f"'{key}' is {value!r}", fix='write { float32 = "19.5T" }'
            )
        return {dtype: number(f"{key}.{dtype}", peak) for dtype, peak in value.items()}
    return number(key, value)


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


def _known(table: str, data: Any, allowed: set[str], needed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ClusterError(f"{table} is {data!r}", fix="write a table of keys")
    if unknown := sorted(set(data) - allowed):
        raise ClusterError(
            f"unknown key '{unknown[0]}' in {table}",
            fix=f"the keys are {', '.join(sorted(allowed))}",
        )
    if missing := sorted(needed - set(data)):
        raise ClusterError(
            f"{table} has no '{missing[0]}'", fix=f"add {missing[0]} = ..."
        )
