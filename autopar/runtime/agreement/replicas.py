"""Whether ranks that hold the same part of a parameter still have the same values.

They began alike, and an update is alike where gradients and options are. What differs
by rank after that, as noise of its own or an edit, would train a model that no rank
has; so in a few steps ranks tell sketches of what they hold in common.

A sketch of x [n] is x @ signs [n, WAYS], with signs that look random and are the same
on all ranks (Alon, Matias and Szegedy 1996). It is linear, so the difference of two is
that of what they are of, and ||a - b||^2 is the mean square of the difference, give or
take a third: from a few numbers, ranks know how far apart they are, and how far an
update went.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.passes.digest import digest
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.agreement.roll_call import ranks_text
from autopar.runtime.agreement.validate import ModelMismatch

LOG = logging.getLogger("autopar")
WAYS = 8
# Elements that have signs of their own; and such rows that are summed in one go: so
# many as stay in the cache of a core, and as keep a GPU busy.
ROW, SLAB, SLAB_OF_GPU = 1 << 12, 1 << 4, 1 << 10
# Compared in the first step, the 2nd, 3rd, 5th, 9th ..., and after each so many.
EVERY = 256


@dataclass(frozen=True)
class Tolerance:
    """How far replicas may be apart, as a multiple of what updates moved them.

    many: more than a quarter of the parameters that two ranks have in common, each.
    one: any. ends: whether training ends where they are farther, or ranks are warned.
    """

    many: float
    one: float
    ends: bool


# On CPUs, replicas are alike to the bit: kernels add in a fixed order. On CPUs of two
# kinds float32 is rounded otherwise, by less than a thousandth of an update.
ON_CPU = Tolerance(many=1e-3, one=1e-3, ends=True)
# On GPUs they differ honestly: kernels that add in no fixed order, or that were tuned
# on each rank by itself, round otherwise, and nothing brings the norms together that
# each rank of tp has. Of gradients in bfloat16 it may be a hundredth, and a tenth of
# the first update of Adam, which takes of small ones the sign alone. Noise, another
# rate or other gradients are as much as an update. In a few parameters rounding is too:
# where a gradient is zero but for it, as of a bias of keys, Adam walks at random as far
# as elsewhere, and two such walks end sqrt(2) times as far apart as each went; sketches
# of 8 numbers tell that but roughly. Most edits are farther. No run on GPUs has shown
# yet that honest ones stay within: so it is told, and training goes on.
ON_GPU = Tolerance(many=0.25, one=8.0, ends=False)
# A rounding more of every element, of weights that are updated in their own dtype.
ROUNDINGS = 4

FEW = "one rank alone changed weights, or each in its own way"
MANY = (
    "each rank changed gradients in its own way, as by noise drawn from a seed with "
    "the rank in it, or updated with options of its own"
)
FIX = (
    "change weights and gradients alike on all ranks, and draw noise for the same "
    "parameter from the same seed, without the rank in it. Go on from a checkpoint: "
    "step.load(folder, optimizer); or call "
    "step.load_state_dict(step.state_dict()) and make the optimizer anew"
)


class Replicas:
    """The parts of parameters that one rank holds and other ranks hold too."""

    def __init__(self, program: Program, rank: int, tolerance: Tolerance) -> None:
        self._program, self._rank, self._tolerance = program, rank, tolerance
        self._several = {n for n in program.parameters if copies(program, n) > 1}
        # Steps that were done before the first one here, and before the last time.
        self._begin: int | None = None
        self._last = 0
        self._before: Tensor | None = None

    def due(self, steps: int) -> bool:
        """Whether they are compared in a step. steps: that were done before, alike on
        all ranks, also where one of them had failed."""
        if self._begin is None:
            self._begin = steps
        count = abs(steps - self._begin)
        rare = count & (count - 1) and count % EVERY
        return bool(self._several) and not rare

    def facts(
        self, steps: int, parameters: Mapping[str, Tensor], *, first: bool
    ) -> Mapping[tuple[str, str], Any]:
        """What a rank tells, see `judge_first` and `judge`; it differs where ranks hold
        other parts. steps: that were done before."""
        held = [parameters[name] for name, *_ in self._shared(self._rank)]
        none = torch.empty(0, WAYS, dtype=torch.float64)
        sketches = torch.stack([sketch(p) for p in held]).cpu() if held else none
        last, self._last = self._last, steps
        before, self._before = self._before, sketches
        if first:
            return {("weights", ""): [digest(p) for p in parameters.values()]}
        moved = sketches if before is None else sketches - before
        told = torch.stack([sketches, moved], 1)
        return {("replicas", f"{last + 1} and {steps + 1}"): pack(told)}

    def judge_first(self, _: str, values: Mapping[int, Any]) -> AutoparError | None:
        """Whether ranks have the same values of what they have the same part of."""
        seen = dict[Place, tuple[int, int]]()
        told = {rank: one for rank, one in values.items() if one is not None}
        for rank, digests in told.items():
            for place, value in zip(held_by(self._program, rank), digests, strict=True):
                first, expected = seen.setdefault(place, (rank, value))
                if value != expected:
                    return ModelMismatch(
                        f"'{place[0]}' has other values on rank {rank} than on rank "
                        f"{first}, which hold the same part of it",
                        fix="change weights before compile, on all ranks alike, or by "
                        "step.load_state_dict(state)",
                    )
        return None

    def judge(self, steps: str, values: Mapping[int, Any]) -> AutoparError | None:
        """Whether they still have, but for rounding. steps: between which."""
        if None in values.values():  # one failed before, and did not tell
            return None
        told = {
            rank: dict(zip(self._shared(rank), parts(packed), strict=True))
            for rank, packed in values.items()
        }
        apart: dict[str, tuple[float, int, int]] = {}  # how far, the ranks; by name
        pairs: dict[tuple[int, int], list[tuple[str, Apart]]] = {}
        firsts: dict[Place, tuple[int, bytes]] = {}
        known: dict[tuple[Place, bytes], Apart] = {}  # of many ranks, some are alike
        common = Counter[tuple[int, int]]()
        for rank, places in told.items():
            for place, one in places.items():
                first, other = firsts.setdefault(place, (rank, one))
                common[first, rank] += 1
                if other == one:
                    continue
                if (place, one) not in known:
                    eps = self._eps(place[0])
                    known[place, one] = Apart.between(unpack(other), unpack(one), eps)
                pairs.setdefault((first, rank), []).append(
                    (place[0], known[place, one])
                )
        most = self._tolerance
        for (first, rank), ways in pairs.items():
            wide = sum(way.exceeds(most.many) for _, way in ways)
            unlike = wide > common[first, rank] // 4
            for name, way in ways:
                if way.exceeds(most.many if unlike else most.one):
                    worse = way.ratio, first, rank
                    apart[name] = max(apart.get(name, worse), worse)
        if not apart:
            return None
        error = self._error(steps, apart)
        if most.ends:
            return error
        if self._rank == 0:
            LOG.warning(str(error))
        return None

    def _error(
        self, steps: str, apart: Mapping[str, tuple[float, int, int]]
    ) -> ModelMismatch:
        worst = max(apart, key=lambda name: apart[name])
        ratio, first, rank = apart[worst]
        unlike = sorted({r for _, f, r in apart.values() if f == first})
        common = {*self._shared(first)} & {*self._shared(rank)}
        far = f"by {ratio:.2g} times what updates changed in it"
        if ratio == inf:
            far = "which one of them did not change, or not to finite numbers"
        return ModelMismatch(
            f"{ranks_text(unlike)} drifted apart from {ranks_text([first])} between "
            f"steps {steps}, in {len(apart)} of {len(common)} parameters that they "
            f"hold alike: {'most ' if len(apart) > 1 else ''}in '{worst}', {far}; "
            + (FEW if 2 * len(apart) <= len(common) else MANY),
            fix=FIX,
        )

    def _shared(self, rank: int) -> list[Place]:
        """The places of a rank that other ranks share."""
        held = held_by(self._program, rank)
        return [place for place in held if place[0] in self._several]

    def _eps(self, name: str) -> float:
        dtype: torch.dtype = getattr(torch, self._program.parameters[name].dtype)
        rounds = dtype.is_floating_point or dtype.is_complex
        return torch.finfo(dtype).eps if rounds else 0.0


Place = tuple[Any, ...]
"""A name, and the coordinates of the axes that split the parameter."""


def held_by(program: Program, rank: int) -> list[Place]:
    """The part that a rank has of each parameter, in their order."""
    coords = program.mesh.coords(rank)
    return [
        (name, *(coords[axis] for axis in spec.split_axes))
        for name, spec in program.parameters.items()
        if program.holds(name, rank)
    ]


def copies(program: Program, name: str) -> int:
    """How many ranks hold each part of a parameter."""
    spec, mesh = program.parameters[name], program.mesh
    whole = prod(mesh.axis_size(axis) for axis in spec.split_axes)
    places = {program.schedule.stage_to_rank[stage] for stage in spec.stages}
    return mesh.size // mesh.pipeline_ranks // whole * len(places)


@dataclass(frozen=True)
class Apart:
    """Squares of how far two replicas are from each other, how far updates moved the
    one that they moved less, and what may be rounding."""

    far: float
    moved: float
    rounding: float

    @classmethod
    def between(cls, a: Sketches, b: Sketches, eps: float) -> Apart:
        """Returns the present difference, or its growth since the last time, if that is
        less: weights that were loaded are alike again, and the rounding that was left
        then does not count again."""
        now, came = (
            square(map(float.__sub__, x, y)) for x, y in zip(a, b, strict=True)
        )
        far = 0.0  # what is not finite on both, the loss tells
        if isfinite(now) and isfinite(came):
            far = min(now, came)
        elif isfinite(square(a[0])) != isfinite(square(b[0])):
            far = inf
        moved, rounding = min(square(a[1]), square(b[1])), square(a[0])
        if not isfinite(moved + rounding):
            moved = rounding = 0.0
        return cls(far, moved, (ROUNDINGS * eps) ** 2 * rounding)

    def exceeds(self, factor: float) -> bool:
        """Whether replicas differ by more than `factor` of how far they moved, and
        rounding."""
        return sqrt(self.far) > factor * sqrt(self.moved) + sqrt(self.rounding)

    @property
    def ratio(self) -> float:
        """The difference relative to how far the replicas moved."""
        return sqrt(self.far / self.moved) if self.moved else inf


Sketches = tuple[Sequence[float], Sequence[float]]
"""Of values [WAYS], and of how far they moved since the last time."""


@torch.no_grad()
def sketch(x: Tensor) -> Tensor:
    """Returns float64 [WAYS] on the device of x [...], see above."""
    raw = torch.view_as_real(x) if x.is_complex() else x
    columns, rows, slabs = _signs(x.device)
    total = torch.zeros(WAYS, dtype=torch.float64, device=x.device)
    for i, slab in enumerate(raw.detach().reshape(-1).split(ROW * len(rows))):
        whole = F.pad(slab.double(), (0, -slab.numel() % ROW)).view(-1, ROW)
        by_row = (whole @ columns) * rows[: whole.shape[0]]
        total += by_row.sum(0) * slabs[i % ROW]
    return total


@cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Signs of the elements of a row, of rows and of slabs; an element's is the product
    of its three. On all ranks the same."""
    drawn = torch.Generator().manual_seed(0)
    sizes = (ROW, SLAB if device.type == "cpu" else SLAB_OF_GPU, ROW)
    tables = [torch.randint(2, (n, WAYS), generator=drawn) * 2.0 - 1 for n in sizes]
    columns, rows, slabs = (table.to(device, torch.float64) for table in tables)
    return columns, rows, slabs


def square(numbers: Iterable[float]) -> float:
    """The square of a norm, from a sketch."""
    return sum(x * x for x in numbers) / WAYS


def pack(sketches: Tensor) -> bytes:
    """Sketches in 4 bytes a number: there may be many ranks to tell them to."""
    return array("f", sketches.flatten().tolist()).tobytes()


def parts(packed: bytes) -> list[bytes]:
    """The packed bytes of each parameter."""
    size = 2 * WAYS * 4
    return [packed[i : i + size] for i in range(0, len(packed), size)]


def unpack(part: bytes) -> Sketches:
    """Reads back the sketches of one parameter."""
    numbers = array("f", part).tolist()
    return numbers[:WAYS], numbers[WAYS:]
