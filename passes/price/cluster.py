"""The machine that a plan is for: devices of one kind, and the links between them.

Links form levels, innermost first: the devices of a node, then the nodes. A mesh axis
lies on the innermost level that holds all of its ranks; an axis that spans several
nodes moves its bytes through each node's share of the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from ..errors import AutoparError
from ..mesh import Mesh
from ..price.attention import SHARES
from ..price.measured import TABLE, Messages, Ops, without_products
from ..ranges import RANKS, shown
from ..schedule.core_contention import ALONE, CoreContention


class ClusterError(AutoparError):
    """The description of a machine is wrong or incomplete."""


TF32 = "tf32"  # float32 as tensor cores multiply it, where that is asked for


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process of a CPU.

    memory: bytes that a rank may use. bytes_per_second: of its own memory. flops: dtype
    (as torch names it, or `TF32`) -> peak floating point operations a second; a dtype
    that is not there runs as float32. efficiency: the share of the peak that a large
    product reaches, and bandwidth_efficiency that a large copy reaches; launch: seconds
    that an op takes at least. fused: whether elementwise ops in a row run as one, by
    the backend that is taken there if none is named.
    dispatch: seconds of the host for each op; where ops take less, the device waits.
    attention: whose tensor cores its attention is known of, see
    `passes.price.attention.SHARES`; "": it is as fast as any product.
    ops: what ops were measured to take; the rest is for those that were not.
    """

    name: str
    memory: float
    bytes_per_second: float
    flops: Mapping[str, float]
    efficiency: float = 0.75
    bandwidth_efficiency: float = 0.8
    launch: float = 4e-6
    fused: bool = False
    dispatch: float = 0.0
    attention: str = ""
    ops: Ops = field(default_factory=Ops)

    def __post_init__(self) -> None:
        for name in ("memory", "bytes_per_second", "efficiency"):
            _positive(f"{name} of device {self.name}", getattr(self, name))
        _positive(f"bandwidth_efficiency of {self.name}", self.bandwidth_efficiency)
        if not (math.isfinite(self.dispatch) and self.dispatch >= 0):
            raise ClusterError(
                f"dispatch of {self.name} is {self.dispatch}", fix="give seconds, or 0"
            )
        if self.attention and self.attention not in SHARES:
            raise ClusterError(
                f"attention of {self.name} is {shown(self.attention)}",
                fix=f"use one of {', '.join(SHARES)}, or leave it out",
            )
        if "float32" not in self.flops:
            raise ClusterError(
                f"device {self.name} has no peak for float32",
                fix="give flops a value for float32, and one for each other dtype",
            )
        for dtype, peak in self.flops.items():
            _positive(f"flops of {dtype} of device {self.name}", peak)

    def running(self, tf32: bool, backend: str) -> Device:
        """The device as a plan uses it: with float32 products in TF32, or as they are;
        with compiled functions, or not.

        What was measured of these products was so without TF32. Of backend "auto" it is
        what was measured to be faster, see `autopar.machine.backend`.
        """
        gain = self.ops.compiled
        faster = self.fused if gain == 1 else gain < 1
        fused = {"eager": False, "inductor": True}.get(backend, faster)
        device = self if fused == self.fused else replace(self, fused=fused)
        if fused and gain != 1:
            device = replace(device, ops=self.ops.by_inductor)
        if not tf32 or TF32 not in self.flops:
            return device
        ops = replace(device.ops, timed=without_products(device.ops.timed, "f32"))
        flops = {**self.flops, "float32": self.flops[TF32]}
        return replace(device, flops=flops, ops=ops)

    def seconds(
        self, launches: float = 0.0, moved: float = 0.0, work: float = 0.0
    ) -> float:
        """Seconds of kernels: of their launches, of bytes that they move, and of work,
        seconds of products at the peak. The three add up, so products that are small
        or thin are slow, as they are."""
        speed = self.bytes_per_second * self.bandwidth_efficiency
        return self.launch * launches + moved / speed + work / self.efficiency

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in a dtype, float32's if unknown."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True)
class Level:
    """Links that join `devices` devices, counted from the innermost level.

    bytes_per_second: that each device sends while it receives as many. latency: seconds
    until the first byte arrives. efficiency: the share of the bandwidth that a large
    collective reaches. step: seconds that a message of a collective keeps a link busy,
    however small it is (the gap of Culler 1993, LogP); 0 where latency is all.
    """

    devices: int
    bytes_per_second: float
    latency: float
    efficiency: float = 0.8
    step: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step) and self.step >= 0):
            raise ClusterError(
                f"step of a level of links is {self.step}",
                fix="give seconds, or 0 where a message's latency is all",
            )
        for name in ("devices", "bytes_per_second", "latency", "efficiency"):
            _positive(f"{name} of a level of links", getattr(self, name))


@dataclass(frozen=True)
class Cluster:
    """devices: their number. levels: of links, innermost first; the last joins all.
    messages: measurements by number of ranks; levels stand for the others. profile: the
    name of the measured machine, "" if none. cores: that the processes of all devices
    share, one thread each; 0: each has its own."""

    device: Device
    devices: int
    levels: tuple[Level, ...] = field(default_factory=tuple)
    messages: Messages = field(default_factory=Messages)
    profile: str = ""
    cores: float = 0.0

    def __post_init__(self) -> None:
        _positive("the number of devices", self.devices)
        if self.devices not in RANKS:
            raise ClusterError(
                f"a cluster of {shown(self.devices)} devices", fix=f"give {RANKS}"
            )
        sizes = [level.devices for level in self.levels]
        if self.devices > 1 and (not sizes or sizes[-1] < self.devices):
            raise ClusterError(
                f"the links join {sizes[-1] if sizes else 1} of {self.devices} devices",
                fix="add a level of links that joins all devices",
            )
        if sizes != sorted(set(sizes)):
            raise ClusterError(
                f"levels of {sizes} devices", fix="order them from small to large"
            )
        if not (math.isfinite(self.cores) and self.cores >= 0):
            raise ClusterError(
                f"the cores of the cluster are {self.cores}",
                fix="give how many its processes share, or 0",
            )

    def __str__(self) -> str:
        return f"{self.devices}x{self.device.name}"

    @property
    def cores_each(self) -> float:
        """Returns the cores that each device's process has while all are busy."""
        return self.cores / self.devices if self.cores else math.inf

    def check_holds(self, mesh: Mesh) -> None:
        """Raises ClusterError where the mesh has more ranks than there are devices."""
        if self.devices < mesh.size:
            raise ClusterError(
                f"the plan is for {mesh.size} devices, but {self} has fewer",
                fix=f"give --devices {mesh.size}x{self.device.name}",
            )

    def contention(self, mesh: Mesh) -> CoreContention:
        """The contention for cores among the ranks of a mesh."""
        if not self.cores:
            return ALONE
        return CoreContention(self.cores, mesh.size // mesh.pipeline_ranks)

    @cached_property
    def link(self) -> Callable[[Mesh, tuple[str, ...]], Link]:
        """The link that a group of ranks along some axes of a mesh has."""
        return cache(self._between)

    def _between(self, mesh: Mesh, axes: tuple[str, ...]) -> Link:
        size = math.prod(mesh.axis_size(a) for a in axes)
        # Neighbours of the group are as far apart as the axes inside of the innermost.
        stride = 1
        for name, extent in reversed(mesh.axes):
            if name in axes:
                break
            stride *= extent
        crossed = [i for i, x in enumerate(self.levels) if nodes(mesh, axes, x.devices)]
        here = crossed[-1] + 1 if crossed else 0
        if here == len(self.levels):
            return Link(size, math.inf, 0.0, None, stride, self.messages)
        level = self.levels[here]
        speed = level.bytes_per_second * level.efficiency
        if here == 0:
            return Link(size, speed, level.latency, None, stride, self.messages)
        # Ranks of the group in one node share what that node's devices can send.
        inner = self.levels[here - 1]
        many = nodes(mesh, axes, inner.devices)
        assert many is not None, "the group crosses this level"
        near = Near(
            many[1], inner.bytes_per_second * inner.efficiency, inner.latency, many[0]
        )
        return Link(size, speed, level.latency, near, stride, self.messages, level.step)


def nodes(mesh: Mesh, axes: tuple[str, ...], devices: int) -> tuple[int, int] | None:
    """(nodes that a group of ranks along `axes` spans, its ranks on each), with so many
    devices a node; None if no group leaves its node.

    Ranks are on devices in order. Where groups lie unevenly, as those of six ranks on
    nodes of eight, it is the worst case: the most nodes, the fewest ranks.
    """
    own: list[tuple[int, int]] = []  # stride and extent of each axis
    others: list[tuple[int, int]] = []
    inside = 1
    for name, extent in reversed(mesh.axes):
        (own if name in axes else others).append((inside, extent))
        inside *= extent
    size = math.prod(extent for _, extent in own)
    if all(s % devices == 0 or devices % s == 0 for s, _ in (*own, *others)):
        # Groups lie alike: of each axis, what fits into a node is in one.
        each = math.prod(min(n, max(1, devices // s)) for s, n in own)
        even = all(n % min(n, max(1, devices // s)) == 0 for s, n in own)
        if even:
            return (size // each, each) if each < size else None
    places = [0]
    for stride, extent in own:
        places = [at + stride * i for i in range(extent) for at in places]
    starts = {0}
    for stride, extent in others:
        starts = {(at + stride * i) % devices for i in range(extent) for at in starts}
    many, fewest = 1, size
    for start in starts:
        ranks = Counter((start + at) // devices for at in places)
        many, fewest = max(many, len(ranks)), min(fewest, *ranks.values())
    return (many, fewest) if many > 1 else None


@dataclass(frozen=True)
class Near:
    """How many ranks of a group that spans nodes are in one of them, at least, and what
    these talk over, see `Link`. nodes: how many these are, 0 if they are full."""

    ranks: int
    bytes_per_second: float
    latency: float
    nodes: int = 0


@dataclass(frozen=True)
class Link:
    """ranks that talk to each other; bytes a second that the device of each sends as
    far as the group reaches; seconds of a message. near: of those in one node, where
    the group spans several. messages: what was measured between ranks that are `stride`
    apart. step: of each message that leaves a node, see `Level`."""

    ranks: int
    bytes_per_second: float
    latency: float
    near: Near | None = None
    stride: int = 1
    messages: Messages = field(default_factory=Messages)
    step: float = 0.0

    def seconds(self, kind: str, whole: float) -> float:
        """Returns the seconds that one collective takes.

        whole: bytes of the tensor that is reduced or gathered; for `all_to_all` and
        `send`, of what each rank gives.
        """
        return self.find(kind, whole)[0]

    def find(self, kind: str, whole: float) -> tuple[float, str]:
        """The same, and how it was found, see `passes.price.measured`."""
        if self.ranks < 2:
            return 0.0, TABLE
        took, how = self.messages.seconds(kind, self.ranks, self.stride, whole)
        if how != TABLE:
            return took, how
        return self._from_table(kind, whole), TABLE

    def _from_table(self, kind: str, whole: float) -> float:
        """Seconds by rings (Thakur, Rabenseifner, Gropp 2005, section 4), or by two
        trees for a small all-reduce (Sanders, Speck, Traff 2009), as NCCL chooses."""
        n = self.ranks
        near = self.near or Near(n, self.bytes_per_second, self.latency)
        nodes = near.nodes or math.ceil(n / near.ranks)
        moved = whole * (n - 1) / n
        # A ring enters each node once; what crosses is shared by all devices in it. All
        # ranks' pieces go over each link, one after another: n - 1 messages.
        hops = (n - nodes) * near.latency + (nodes - 1) * self.latency
        ring = max(hops, (n - 1) * self.step) if nodes > 1 else hops
        shared = self.bytes_per_second
        if self.near:
            shared = min(shared * near.ranks, near.bytes_per_second)
        if kind in ("all_gather", "reduce_scatter"):
            return ring + moved / shared
        if kind == "all_reduce":
            # Trees join the nodes; in one, ranks are a chain. Each has its own piece,
            # and at each level all of a node's pass, one after another.
            level = max(self.latency, near.ranks * self.step)
            tree = (near.ranks - 1) * near.latency + math.log2(nodes) * level
            return 2 * min(ring + moved / shared, tree + whole / shared)
        if kind == "all_to_all":
            # To each by itself; to other nodes by the device's own link.
            far, close = n - near.ranks, near.ranks - 1
            slowest = max(far / self.bytes_per_second, close / near.bytes_per_second)
            return far * self.latency + close * near.latency + whole / n * slowest
        assert kind == "send", f"a link prices no {kind}"
        # By the device's own link: the ranks beside it send to others in the node.
        return self.latency + whole / self.bytes_per_second

    def skew(self, computing: float, meetings: float = 1.0) -> float:
        """Returns the seconds that ranks wait for the last of them where they meet, so
        many times in so many seconds of computing; 0 where it was not measured.

        That they come apart is in Faraj, Patarasuk, Yuan 2008, "A study of process
        arrival patterns for MPI collective operations". What holds them up comes by
        chance, so that they are apart by the root of what they computed since they met.
        """
        one = self.messages.skew.get((self.ranks, self.stride), 0.0)
        return one * math.sqrt(computing * meetings)

    def without_latency(self) -> Link:
        """The link with bandwidth alone."""
        near = replace(self.near, latency=0.0) if self.near else None
        return replace(self, latency=0.0, near=near, step=0.0)


def _positive(quantity: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{quantity} is {value}", fix="give a number above zero")


# As many plain processes as there may be, where nothing is known of a machine.
PLAIN = Cluster(
    Device("process", 2.0**50, 1e10, {"float32": 5e10}, 1.0, 1.0, launch=0.0),
    int(RANKS.most),
    (Level(int(RANKS.most), 1e9, 1e-9, 1.0),),
)
