"""Requests to a planner: devices, and the decisions that are made already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autopar.machine.hardware import with_memory
from autopar.machine.measured_cluster import measured_cluster, named_cluster
from autopar.options import (
    OF_ALL,
    UNPRICED,
    make_plan,
    options_of,
    read_bytes,
    read_mesh,
)
from autopar.passes.mesh import AXES, QUERY_GROUP, Mesh, MeshError
from autopar.passes.plan import AUTO, PlanError
from autopar.passes.price.cluster import Cluster
from autopar.passes.ranges import RANKS, shown

# What a search chooses among: the fields of `passes.search.candidates.Space` that list.
ONE_OF = ("schedule", "stages_per_rank", "recompute", "zero", "context_parallel")


@dataclass(frozen=True)
class PlanRequest:
    """Devices to plan for. mesh: axes whose sizes are decided. shape: sizes of axes in
    order, whose meaning is not. options: each fixes a decision; see
    `autopar.options.Options`, "auto" leaves it open.

    Raises: PlanError for options that are wrong, or that the planner cannot price.
    """

    cluster: Cluster
    mesh: Mesh | None = None
    shape: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in options_of(UNPRICED):
            if self.options.get(name):
                raise PlanError(
                    f"the planner chooses for {self.cluster}, but has no prices for "
                    f"{name}=",
                    fix='leave it out, or decide on a whole mesh, as "pp=2,tp=2"',
                )
        is_part = self.mesh and self.mesh.size < self.cluster.devices
        if self.mesh and is_part and self.mesh.axis_size(QUERY_GROUP) > 1:
            raise PlanError(
                f"the planner decides which ranks of '{self.mesh}' share heads of keys",
                fix="write tp with the product of its size and that of qp",
            )
        shares = self.mesh is not None and self.mesh.needs_zero
        usual = {"zero": 1} if shares else {}
        # It raises for wrong values.
        mesh = "fsdp=2" if shares else "dp=2"
        make_plan(mesh, **{**usual, **self.decided, **self.of_all})

    @property
    def of_all(self) -> dict[str, Any]:
        """The options that hold for all plans, as `capture_short` takes them."""
        return {k: v for k, v in self.options.items() if k in options_of(OF_ALL)}

    @property
    def decided(self) -> dict[str, Any]:
        """The options that are decisions of a search, and made already."""
        other = (*options_of(OF_ALL), *options_of(UNPRICED))
        priced = {k: v for k, v in self.options.items() if k not in other}
        return {k: v for k, v in priced.items() if v != AUTO}

    @property
    def fixes_attention(self) -> bool:
        """Whether how attention works on cp is decided."""
        return "context_parallel" in self.decided

    @property
    def limited(self) -> Cluster:
        """The cluster, with as much memory as plans may use."""
        memory = read_bytes(self.options.get("memory", 0))
        return with_memory(self.cluster, memory) if memory else self.cluster

    @property
    def space(self) -> dict[str, Any]:
        """Fields of a `Space` that are decided."""
        decided = {k: (v,) if k in ONE_OF else v for k, v in self.decided.items()}
        return {"mesh": self.mesh, "shape": self.shape, **decided}


def plan_request(
    mesh: Any,
    options: Mapping[str, Any],
    auto: bool = False,
    devices: Cluster | str | int | None = None,
) -> PlanRequest | None:
    """What to choose a plan for; None for a mesh with which all is decided.

    mesh: axes of which all or some are decided, or their sizes alone, as (4, 2) or
    "4,2"; or devices, if it is what they may be. auto: also for a whole mesh, what it
    leaves open. devices: a number of them on this machine, as it was measured if it was
    (see `autopar.planner.profile`), a `Cluster`, or its text as `8xA100-80GB`.
    Raises: MeshError, ClusterError, PlanError.
    """
    if devices is None and _is_devices(mesh):
        mesh, devices = None, mesh
    shape = _shape(mesh, auto or devices is not None)
    known = None if shape or mesh is None else mesh
    if devices is not None:
        whole = None if known is None else read_mesh(known)
        return PlanRequest(_cluster(devices), whole, shape, options)
    if shape:
        return PlanRequest(measured_cluster(prod(shape)), shape=shape, options=options)
    if not auto:
        return None
    whole = read_mesh(mesh)
    return PlanRequest(measured_cluster(whole.size), whole, options=options)


def _is_devices(mesh: Any) -> bool:
    """Whether the text or value for a mesh names devices, not axes."""
    written = isinstance(mesh, str) and re.match(r"\s*\d+\s*([a-zA-Z*]|$)", mesh)
    return isinstance(mesh, Cluster | int) or bool(written)


def _cluster(devices: Cluster | str | int) -> Cluster:
    if isinstance(devices, Cluster):
        return devices
    if isinstance(devices, str):
        return named_cluster(devices)
    if devices not in RANKS:
        raise MeshError(f"a mesh of {shown(devices)} devices", fix=f"give {RANKS}")
    return measured_cluster(devices)


def _shape(mesh: Any, open: bool) -> tuple[int, ...]:
    """Sizes of axes that have no meaning yet. open: whether their names, if they have
    any, may be a user's own."""
    if isinstance(mesh, tuple | list):
        mesh = ",".join(map(str, mesh))
    if isinstance(mesh, str) and (open or re.match(r"\s*\d", mesh)):
        return read_shape(mesh)
    return ()


def read_shape(text: str) -> tuple[int, ...]:
    """Sizes of axes that have no meaning yet: `4,2`, or with names of one's own, as
    `x=4,y=2`. Empty for a mesh of axes that are known. Raises: MeshError."""
    pieces = [piece.partition("=") for piece in text.split(",")]
    names = [name.strip() for name, equals, _ in pieces if equals]
    if not text.strip() or any(name in AXES for name in names):
        return ()
    sizes = [(size if equals else name).strip() for name, equals, size in pieces]
    if len(set(names)) < len(names) or len(names) not in (0, len(pieces)):
        raise MeshError(
            f"mesh {shown(text)} has axes without names, or two of one name",
            fix="write all of their sizes alone, as 4,2, or as x=4,y=2",
        )
    for size in sizes:
        if RANKS.parse(size) is None:
            raise MeshError(
                f"size {shown(size)} in mesh {shown(text)} is not a whole number above "
                f"0 and up to {RANKS.most}",
                fix="write for instance 4,2",
            )
    shape = tuple(map(int, sizes))
    if prod(shape) not in RANKS:
        raise MeshError(
            f"mesh {shown(text)} has {prod(shape)} ranks",
            fix=f"a mesh has at most {RANKS.most}",
        )
    return shape
