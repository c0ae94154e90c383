"""Measurements of a machine: seconds of ops and of messages.

Both are points. What was not measured itself is read off between them: of an op by
its bytes and operations, of a message by its bytes; and how it was found is told along.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from ..cost import flops, signature, traffic
from ..graph import Node

# How seconds were found: measured; between or beyond points of the same kind; or not
# at all, so that a table of hardware has to say.
MEASURED, BETWEEN, BEYOND, TABLE = "measured", "between", "beyond", "table"
SOURCES = (MEASURED, BETWEEN, BEYOND, TABLE)

FLOATS = re.compile(r"\b(b?f\d+)\[")

Point = tuple[float, float]  # bytes, seconds
Place = tuple[str, int, int]  # collective, ranks of a group, how far apart they are


@dataclass(frozen=True)
class Timed:
    """One op at one size. seconds: of one run; bytes: read and written; flops: done.
    compiled: seconds that the ops of its model take beside products, as Inductor
    compiles them, over those of Python; 0: not known."""

    seconds: float
    bytes: float
    flops: float
    compiled: float = 0.0

    @property
    def is_product(self) -> bool:
        """Whether it does more operations than it moves bytes."""
        return self.flops > self.bytes


@dataclass(frozen=True)
class Line:
    """seconds = start + bytes * per_byte + flops * per_flop; no term is negative."""

    start: float
    per_byte: float
    per_flop: float

    def __call__(self, bytes: float, flops: float) -> float:
        return self.start + bytes * self.per_byte + flops * self.per_flop


@dataclass(frozen=True)
class Ops:
    """Ops of emitted code, forward and backward, as they ran on one rank's device.

    timed: `passes.cost.signature` -> what it took, with what starting it took. update:
    what the optimizer takes for a parameter: (its bytes, seconds), by ascending bytes.
    compiled: as of `Timed`, of the layers that were compiled last.
    """

    timed: Mapping[str, Timed] = field(default_factory=dict)
    update: tuple[Point, ...] = ()
    compiled: float = 1.0

    def seconds(self, node: Node) -> tuple[float, str]:
        """Returns a node's seconds, and their source: 0 and `TABLE` if no such op
        was measured, with floats of its type.

        Between sizes: the point nearest to it, times what a line through all points of
        the op says is the ratio of the two.
        """
        if not self.timed:
            return 0.0, TABLE
        key = signature(node)
        if known := self.timed.get(key):
            return known.seconds, MEASURED
        kind = kind_of(key)
        points = self._points.get(kind)
        if points is None:
            return 0.0, TABLE
        moved, work = traffic(node), flops(node)
        nearest = min(points, key=lambda p: _distance(p, moved, work))
        line = self._lines[kind]
        there = line(nearest.bytes, nearest.flops)
        ratio = line(moved, work) / there if there > 0 else 1.0
        inside = _within(moved, [p.bytes for p in points])
        inside = inside and _within(work, [p.flops for p in points])
        return nearest.seconds * ratio, BETWEEN if inside else BEYOND

    @cached_property
    def by_inductor(self) -> Ops:
        """The same in compiled functions: products as they are, whose kernels are the
        same, and the rest by as much faster as that of its model was."""
        gains = {k: t.compiled or self.compiled for k, t in self.timed.items()}
        timed = {
            key: t if t.is_product else replace(t, seconds=t.seconds * gains[key])
            for key, t in self.timed.items()
        }
        return replace(self, timed=timed, compiled=1.0)

    @cached_property
    def _points(self) -> dict[str, list[Timed]]:
        points: dict[str, list[Timed]] = {}
        for key, timed in self.timed.items():
            points.setdefault(kind_of(key), []).append(timed)
        return points

    @cached_property
    def _lines(self) -> dict[str, Line]:
        return {kind: fit_line(points) for kind, points in self._points.items()}


def kind_of(signature: str) -> str:
    """`aten.add.Tensor f32`: the op, and its first floating type if it has one."""
    dtype = FLOATS.search(signature)
    return f"{signature.partition('(')[0]} {dtype[1] if dtype else ''}".rstrip()


def without_products(timed: Mapping[str, Timed], floats: str) -> dict[str, Timed]:
    """The measurements but for products of floats of a type, as `f32`."""
    return {
        key: timed_op
        for key, timed_op in timed.items()
        if not (timed_op.is_product and kind_of(key).endswith(f" {floats}"))
    }


def fit_line(points: Sequence[Timed]) -> Line:
    """The line of least squared relative error without a negative term.

    With three terms the best line is that of the best choice of terms for which plain
    least squares gives no negative one (Lawson and Hanson 1974, chapter 23).
    """
    seconds = np.array([max(p.seconds, 1e-9) for p in points])
    terms = np.array([[1.0, p.bytes, p.flops] for p in points]) / seconds[:, None]
    best, least = np.array([np.median(seconds), 0.0, 0.0]), math.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            columns = terms[:, chosen]
            scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
            line, *_ = np.linalg.lstsq(columns / scale, np.ones(len(points)))
            line = line / scale
            error = float(((columns @ line - 1) ** 2).sum())
            if (line >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(3), error
                best[list(chosen)] = line
    return Line(*map(float, best))


def _distance(point: Timed, bytes: float, flops: float) -> float:
    """The sum of the absolute log ratios of bytes and of FLOPs."""
    return abs(math.log((point.bytes + 1) / (bytes + 1))) + abs(
        math.log((point.flops + 1) / (flops + 1))
    )


def _within(amount: float, others: Sequence[float]) -> bool:
    return min(others) <= amount <= max(others)


@dataclass(frozen=True)
class Messages:
    """Collectives and messages between processes, all groups of ranks at once.

    points: for a collective, the number of a group's ranks, and how far apart they are:
    (bytes, seconds), by ascending bytes, see `passes.price.cluster.Link` for which
    bytes. skew: for the number of a group's ranks, and how far apart they are: what
    they wait for the last of them where they meet, after a second of computing, see
    `passes.price.cluster.Link.skew`. wakeup: seconds from when a message is sent until
    who waits for it goes on, while all others compute.
    """

    points: Mapping[Place, tuple[Point, ...]] = field(default_factory=dict)
    skew: Mapping[tuple[int, int], float] = field(default_factory=dict)
    wakeup: float = 0.0

    def seconds(
        self, kind: str, ranks: int, stride: int, bytes: float
    ) -> tuple[float, str]:
        """Returns a message's seconds and their source: 0 and `TABLE`, if no such group
        was measured. Messages of a pipeline are of pairs, whatever its length."""
        size = 2 if kind == "send" else ranks
        points = self.points.get((kind, size, stride))
        return between(points, bytes) if points else (0.0, TABLE)


def between(points: Sequence[Point], bytes: float) -> tuple[float, str]:
    """Seconds at some bytes: straight between the points, on logarithmic scales.

    Above the last one by the slope before it, at most linear; below the first one
    what that takes, since a message has a least time.
    """
    if bytes <= points[0][0]:
        exact = bytes == points[0][0]
        return points[0][1], MEASURED if exact else BEYOND
    for (x0, y0), (x1, y1) in pairwise(points):
        if bytes <= x1:
            share = math.log(bytes / x0) / math.log(x1 / x0)
            how = MEASURED if bytes == x1 else BETWEEN
            return y0 * (y1 / y0) ** share, how
    (x1, y1), slope = points[-1], 1.0
    if len(points) > 1:
        x0, y0 = points[-2]
        slope = min(1.0, max(0.0, math.log(y1 / y0) / math.log(x1 / x0)))
    return y1 * (bytes / x1) ** slope, BEYOND
