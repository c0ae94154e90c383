"""The mesh: named axes of ranks, and the arithmetic of splitting a dim over them.

Ranks are laid out row-major in the order in which the axes were written: the last axis
is the fastest, as in torch's DeviceMesh. In `pp=2,tp=3` rank 4 is `pp=1, tp=1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from .errors import AutoparError
from .ranges import RANKS, shown

PIPELINE, DATA, CONTEXT, EXPERT, TENSOR = "pp", "dp", "cp", "ep", "tp"
SHARDED_DATA, QUERY_GROUP = "fsdp", "qp"
TIME = "time"
"""The axis of microbatches: it splits dims like any other, but no rank lies on it."""


@dataclass(frozen=True)
class Axis:
    """All that there is to say of a mesh axis.

    splits: the dims that it splits, in order of preference: an op is split along the
    first of these that flows through it. `op:dim` is a preference of one op alone,
    `weights:dim` of ops that read weights along it, and of what follows from them;
    `routed:dim`: samples go to the ranks that have their part of it, see
    `passes.shard.routed`.
    shares_parameters: whether its ranks hold the same parameters though they split no
    samples, and ZeRO may share these out. replicated_beside: the axis whose ranks alone
    share out, where a mesh has that too. needs_zero: whether it is there to share out.
    holds_experts: whether experts lie on it. searched: whether a search chooses its
    size.
    """

    splits: tuple[str, ...] = ()
    shares_parameters: bool = False
    replicated_beside: str = ""
    needs_zero: bool = False
    holds_experts: bool = False
    searched: bool = False

    @property
    def splits_samples(self) -> bool:
        """Whether each rank of the axis has samples of its own."""
        return "batch" in self.splits

    @property
    def splits_heads(self) -> bool:
        """Whether its ranks share the work on each token."""
        return "heads" in self.splits

    @property
    def splits_only_samples(self) -> bool:
        """Whether its ranks compute the same, each of its own samples."""
        return self.splits == ("batch",)

    @property
    def splits_only_seq(self) -> bool:
        """Whether each rank of the axis has some rows of all samples."""
        return self.splits == ("seq",)


# The axes that a mesh may have, outermost first, as a search lays them out (the last
# has the fastest links): pipeline, data, sharing data (see
# `passes.shard.parameter_sharding`), context, expert and tensor parallel, and what
# shares keys of it (see `passes.shard.query_groups`). ep splits samples as dp does, but
# experts where they work (Lepikhin 2020). For tp this is Megatron's choice (Shoeybi
# 2019); `seq` at the end is its sequence parallelism (Korthikanti 2022): what has no
# heads, ffn or vocab is split along the sequence. qp does the same where queries share
# keys.
AXES: dict[str, Axis] = {
    PIPELINE: Axis(searched=True),
    DATA: Axis(("batch",), replicated_beside=SHARDED_DATA, searched=True),
    SHARDED_DATA: Axis(("batch",), needs_zero=True),
    CONTEXT: Axis(("seq",), shares_parameters=True, searched=True),
    EXPERT: Axis(
        ("weights:experts", "routed:experts", "expert_linear:experts", "batch"),
        holds_experts=True,
        searched=True,
    ),
    TENSOR: Axis(
        ("heads", "kv_heads", "q_per_kv", "ffn", "vocab", "seq"), searched=True
    ),
    QUERY_GROUP: Axis(("heads", "q_per_kv", "ffn", "vocab", "seq")),
}
SIZED_AXES = tuple(
    name
    for name, axis in reversed(AXES.items())
    if axis.searched and axis.splits and not axis.splits_only_samples
)
"""Those of which a search tries the sizes that a model allows, innermost first; what is
left of the devices is data and pipeline parallel."""
TENSOR_AXES = tuple(name for name, axis in AXES.items() if axis.splits_heads)
"""Tensor parallel as one axis or two, see `passes.shard.query_groups`."""
CONTEXT_AXES = tuple(name for name, axis in AXES.items() if axis.splits_only_seq)


def usual_split() -> dict[str, tuple[str, ...]]:
    """The dims that each axis, and time, splits where a plan decides nothing else."""
    splits = {name: axis.splits for name, axis in AXES.items() if axis.splits}
    return {**splits, TIME: ("batch",)}


Axes = str | tuple[str, ...]
"""One axis, or several that ranks meet on at once, outermost first."""

Split = tuple[int, tuple[str, ...]]
"""The extent of a named dim, whole, and the axes that split it, outermost first."""


class MeshError(AutoparError):
    """A mesh that cannot be, or a question about an axis or rank that it lacks."""


@dataclass(frozen=True)
class Mesh:
    """Axes and their sizes, outermost (slowest) first; no axes is a single rank."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, size in self.axes:
            _known(name)
            if name in seen:
                raise MeshError(
                    f"axis {name!r} is there twice in mesh '{self}'",
                    fix="write it once, with the product of its sizes",
                )
            if size not in RANKS:
                raise MeshError(
                    f"axis {name!r} has size {shown(size)}",
                    fix=f"sizes are at least 1 and at most {RANKS.most}; leave out an "
                    "axis that is not wanted",
                )
            seen.add(name)
        if self.size > RANKS.most:
            raise MeshError(
                f"mesh '{self}' has {self.size} ranks",
                fix=f"a mesh has at most {RANKS.most}",
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a search asks for it some 100,000 times
        return hash(self.axes)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `"pp=2,tp=2"`, or with spaces in place of commas; the empty text is the
        mesh of one rank.

        Raises: MeshError, naming the piece that is wrong.
        """
        tight = re.sub(r"\s*=\s*", "=", text)
        between = tight.split(",") if text.strip() else []
        pieces = (piece for several in between for piece in several.split() or [""])
        return cls(tuple(_parse_axis(piece, text) for piece in pieces))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.axes)

    def axis_size(self, name: str) -> int:
        """The number of ranks along an axis: 1 where this mesh does not have it."""
        if name not in self._sizes:
            _known(name)
        return self._sizes.get(name, 1)

    def span(
        self, extent: int, axes: Sequence[str], coords: Mapping[str, int]
    ) -> tuple[int, int]:
        """The part (begin, length) of a dim of `extent` that the rank at `coords` has,
        if `axes` split it."""
        begin = 0
        for axis in axes:
            parts, here = self.axis_size(axis), coords[axis]
            begin += start(extent, parts, here)
            extent = balanced(extent, parts)[here]
        return begin, extent

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def pipeline_ranks(self) -> int:
        """The number of ranks along the pipeline."""
        return self.axis_size(PIPELINE)

    def pipeline_rank(self, rank: int) -> int:
        """The position of a rank along the pipeline."""
        self._check(rank)
        size, stride = self._pipeline
        return rank // stride % size

    @cached_property
    def _pipeline(self) -> tuple[int, int]:
        """The number of ranks along the pipeline, and how far apart two of them are."""
        on, _ = self._split((PIPELINE,))
        return next(((size, stride) for _, size, stride in on), (1, 1))

    @property
    def stage_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes that ranks of one pipeline rank lie on, and their sizes."""
        return tuple((name, n) for name, n in self.axes if name != PIPELINE)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """The axes of several ranks that split samples and nothing else."""
        return tuple(a for a, n in self.axes if n > 1 and AXES[a].splits_only_samples)

    @property
    def sample_ranks(self) -> int:
        """The number of parts that a batch is split into."""
        return prod(n for name, n in self.axes if AXES[name].splits_samples)

    @property
    def context_ranks(self) -> int:
        """The number of parts that each sample is split into."""
        return prod(n for name, n in self.axes if name in CONTEXT_AXES)

    @cached_property
    def needs_zero(self) -> bool:
        """Whether ranks lie on an axis that is there for ZeRO alone."""
        return any(AXES[name].needs_zero for name, n in self.axes if n > 1)

    @cached_property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axes of several ranks that would hold the same parameters, which ZeRO
        shares out; but those that replicate shares, see `Axis.replicated_beside`."""
        several = {name: AXES[name] for name, n in self.axes if n > 1}
        return tuple(
            name
            for name, axis in several.items()
            if axis.shares_parameters or axis.splits_samples
            if axis.replicated_beside not in several
        )

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis, in mesh order."""
        self._check(rank)
        coords = {}
        for name, size in reversed(self.axes):
            rank, coords[name] = divmod(rank, size)
        return dict(reversed(coords.items()))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise MeshError(
                f"mesh '{self}' has no rank {rank}",
                fix=f"its ranks are 0 to {self.size - 1}",
            )

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank that lies at these coordinates, one for each axis."""
        if set(coords) != {name for name, _ in self.axes}:
            raise MeshError(
                f"coordinates {dict(coords)} do not fit mesh '{self}'",
                fix="give one number for each of its axes",
            )
        rank = 0
        for name, size in self.axes:
            if not 0 <= coords[name] < size:
                raise MeshError(
                    f"{name}={coords[name]} is outside of mesh '{self}'",
                    fix=f"{name} goes from 0 to {size - 1}",
                )
            rank = rank * size + coords[name]
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes only, in ascending order.

        Ascending is row-major over the axes in mesh order, whatever the order of
        `axes`. Axes that this mesh lacks have size 1 and change nothing.
        """
        free, fixed = self._split(axes)
        coords = self.coords(rank)
        here = sum(coords[name] * stride for name, _, stride in fixed)
        return tuple(here + at for at in _places(free))

    def groups(self, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """The group of every rank, each once, by its first rank."""
        free, fixed = self._split(axes)
        within = _places(free)
        for here in _places(fixed):
            yield tuple(here + at for at in within)

    def _split(self, axes: tuple[str, ...]) -> tuple[list[_Extent], list[_Extent]]:
        """Name, size and stride of the axes that are named, and of the others."""
        for name in axes:
            _known(name)
        free: list[_Extent] = []
        fixed: list[_Extent] = []
        stride = self.size
        for name, size in self.axes:
            stride //= size
            (free if name in axes else fixed).append((name, size, stride))
        return free, fixed


_Extent = tuple[str, int, int]


def _places(extents: Iterable[_Extent]) -> list[int]:
    """The ranks that are 0 on all axes but these, in ascending order."""
    places = [0]
    for _, size, stride in extents:
        places = [at + i * stride for at in places for i in range(size)]
    return places


def balanced(n: int, parts: int) -> tuple[int, ...]:
    """The sizes of n things in as even parts as can be, as numpy.array_split has them:
    the first n % parts get one more."""
    least, more = divmod(n, parts)
    return (least + 1,) * more + (least,) * (parts - more)


@lru_cache(maxsize=4096)
def nested(n: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of n things in parts of parts, outermost first, each `balanced`."""
    sizes: tuple[int, ...] = (n,)
    for count in parts:
        sizes = tuple(part for size in sizes for part in balanced(size, count))
    return sizes


def as_axes(axes: Axes) -> tuple[str, ...]:
    """One axis or several, as several."""
    return (axes,) if isinstance(axes, str) else axes


def start(n: int, parts: int, i: int) -> int:
    """The begin of part i of `balanced(n, parts)`."""
    least, more = divmod(n, parts)
    return i * least + min(i, more)


def _known(name: str) -> str:
    if name in tuple(AXES):  # what is no text has no hash
        return name
    if name == TIME:
        raise MeshError(
            f"{TIME!r} is the axis of microbatches and no axis of the mesh",
            fix="set the number of microbatches instead",
        )
    raise MeshError(
        f"unknown axis {shown(name)}", fix=f"the axes are {', '.join(AXES)}"
    )


def _parse_axis(piece: str, text: str) -> tuple[str, int]:
    name, equals, size = (part.strip() for part in piece.partition("="))
    if not (name and equals):
        raise MeshError(
            f"{shown(piece)} in mesh {shown(text)} is not an axis",
            fix="write name=size, with commas between, as in 'pp=2,tp=2'",
        )
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", size):
        raise MeshError(
            f"size {shown(size)} of axis {shown(name)} in mesh {shown(text)} is not a "
            f"whole number up to {RANKS.most}",
            fix="write for instance 'tp=2'",
        )
    return name, int(size)
