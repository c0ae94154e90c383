"""The roll call: before each operation ranks tell which one it is, and what of it must
be the same on all of them.

A rank that evaluates while another steps would wait in a collective that never comes,
or meet one that is not its own. So every operation begins with a message of four
numbers, in a process group of its own: what the rank is about to do, whether it can,
and digests of what it does it with. Only where these differ ranks send more, to say
what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar

from autopar.passes.digest import digest_of_text
from autopar.passes.errors import AutoparError
from autopar.runtime.comm.comm import Comm, CommError
from autopar.runtime.comm.work import Meeting

# What ranks do together, and how an error says it of one rank and of several.
ANOTHER_SHAPE = "another shape"
NO_MORE = "no more batches"
OPERATIONS = {
    "step": ("steps", "step"),
    "evaluate": ("evaluates", "evaluate"),
    "clip_grad_norm_": ("clips gradients", "clip gradients"),
    "gradient_norms": ("takes norms of gradients", "take norms of gradients"),
    "state_dict": ("takes a state dict", "take a state dict"),
    "load_state_dict": ("loads a state dict", "load a state dict"),
    "save": ("saves", "save"),
    "load": ("loads", "load"),
    "load_pretrained": ("loads weights", "load weights"),
    "save_pretrained": ("saves weights", "save weights"),
    "gather_for": ("prepares an optimizer", "prepare an optimizer"),
    "start_ema": ("starts an average of weights", "start an average of weights"),
    "build": ("compiles", "compile"),
    "batches": ("begins with a loader's batches", "begin with a loader's batches"),
    NO_MORE: ("has no more batches", "have no more batches"),
    ANOTHER_SHAPE: (
        "has a batch of another shape or another local=",
        "have batches of another shape or another local=",
    ),
}

# Kinds of facts that differ because others do, which are told then instead.
EFFECTS = {"replicas"}

# So many differences that were right are not sent again; sketches of weights, which
# are never the same again, are among them.
REMEMBERED = 64

Facts = Mapping[tuple[str, str], Any]
"""(kind, name) -> a plain value, such as a digest: all ranks must have the same."""
NOTHING: Facts = MappingProxyType({})

Judge = Callable[[str, Mapping[int, Any]], AutoparError | None]
"""From a fact's name and its values by rank (None: it has none) to an error, if the
difference is one."""


class RanksDisagree(AutoparError):
    """Ranks are not in the same operation."""


class State(IntEnum):
    """How a rank is in an operation."""

    HERE = 0  # it waits for the others before it begins
    FAILED = 1  # it cannot begin
    AHEAD = 2  # it has begun, and looks afterwards whether the others had


class RollCall:
    """One rank's part in the roll calls of a step.

    comm: of all ranks. judges: by kind of fact, what is said where ranks differ.
    under_way: another object for each operation of this process that waits for others.
    """

    under_way: ClassVar[object | None] = None

    def __init__(self, comm: Comm, judges: Mapping[str, Judge]) -> None:
        self.comm, self.judges = comm, judges
        # The ranks of each coordinate of the pipeline.
        by_stage: dict[int, list[int]] = {}
        for rank in range(comm.mesh.size):
            place = comm.mesh.pipeline_rank(rank)
            by_stage.setdefault(place, []).append(rank)
        self.stages = list(by_stage.values())
        # What ranks told that was not the same, and yet right.
        self.right: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(
        self, operation: str, facts: Facts = NOTHING, of_stage: Facts = NOTHING
    ) -> None:
        """Begin an operation; on all ranks, or on none.

        facts: the same on all ranks. of_stage: the same on those of the same stages.
        Raises, on all ranks: RanksDisagree, or what a judge says of the first fact that
        is not the same on all of them.
        """
        if self.comm.mesh.size > 1:
            with self._waiting():
                self._start(operation, State.HERE, facts, of_stage).finish()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The context of an operation that ends only when all ranks have begun it."""
        RollCall.under_way = object()
        try:
            yield
        finally:
            RollCall.under_way = None

    @contextmanager
    def ahead(
        self, operation: str, facts: Facts = NOTHING, of_stage: Facts = NOTHING
    ) -> Iterator[None]:
        """The same for an operation that runs at once, in this context: what is wrong
        is raised at its end, or where it fails because others are not in it."""
        if self.comm.mesh.size == 1:
            yield
            return
        with self._waiting():
            call = self._start(operation, State.AHEAD, facts, of_stage)
            try:
                yield
            except RuntimeError:
                try:
                    call.explain()
                except RanksDisagree as why:
                    raise why from None  # gloo's own words only hide it
                raise
            call.finish()

    def refuse(self, operation: str, error: AutoparError) -> None:
        """Begin an operation that this rank cannot take part in: the others raise too,
        and say why. The caller raises the error."""
        if self.comm.mesh.size > 1:
            with suppress(CommError):  # its own error says more
                self._start(operation, State.FAILED, NOTHING, NOTHING, error).finish()

    def _start(
        self,
        operation: str,
        state: State,
        facts: Facts,
        of_stage: Facts,
        error: AutoparError | None = None,
    ) -> _Call:
        number = list(OPERATIONS).index(operation)
        digests = [digest_of_text(repr(dict(own))) for own in (facts, of_stage)]
        meeting = self.comm.start_meet([number, state, *digests], operation)
        told = (operation, dict(facts), dict(of_stage), error)
        return _Call(self, meeting, state, told)


@dataclass(frozen=True)
class _Call:
    """A roll call under way. told: what this rank tells, if it must."""

    roll: RollCall
    meeting: Meeting
    state: State
    told: tuple[str, Facts, Facts, AutoparError | None]

    def finish(self) -> None:
        """Raises what is wrong, but for a rank that could not begin and knows why."""
        rows = self.meeting.rows()
        key = tuple(map(tuple, rows))
        if self._alike(rows) or key in self.roll.right:
            return
        failed = self.state is State.FAILED
        states = {row[1] for row in rows}
        if State.AHEAD in states and len(states) > 1:
            # Some are in the midst of it: they cannot tell more.
            apart = State.FAILED in states or len({row[0] for row in rows}) > 1
            if apart and self.state is not State.AHEAD:
                self.roll.comm.abandon()
            if apart and not failed:
                judge_rows(rows)
            return
        told = self.roll.comm.gather_object(self.told)
        if not failed:
            self._judge(told)
            if len(self.roll.right) == REMEMBERED:  # on all ranks at once
                self.roll.right.clear()
            self.roll.right.add(key)

    def explain(self) -> None:
        """Raises RanksDisagree after an error of communication, if that is why."""
        if (rows := self.meeting.rows_soon()) is not None:
            judge_rows(rows)

    def _alike(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether all ranks are in one operation, with the same facts."""
        if any(row[:3] != rows[0][:3] for row in rows) or rows[0][1] == State.FAILED:
            return False
        return all(
            rows[rank][3] == rows[ranks[0]][3]
            for ranks in self.roll.stages
            for rank in ranks
        )

    def _judge(self, told: Sequence[tuple[str, Facts, Facts, Any]]) -> None:
        for rank, (operation, *_, error) in enumerate(told):
            if error is not None:
                raise RanksDisagree(
                    f"rank {rank} cannot {operation}: {error.message}", fix=error.fix
                )
        check_operations([operation for operation, *_ in told])
        facts_of = {rank: facts for rank, (_, facts, *_) in enumerate(told)}
        self._compare(facts_of)
        for ranks in self.roll.stages:
            self._compare({rank: told[rank][2] for rank in ranks})
        self._compare(facts_of, effects=True)

    def _compare(self, by_rank: Mapping[int, Facts], effects: bool = False) -> None:
        names = dict.fromkeys(key for facts in by_rank.values() for key in facts)
        for kind, name in names:
            if (kind in EFFECTS) != effects:
                continue
            values = {r: facts.get((kind, name)) for r, facts in by_rank.items()}
            if others(values) and (error := self.roll.judges[kind](name, values)):
                raise error


def judge_rows(rows: Sequence[Sequence[int]]) -> None:
    """Raises RanksDisagree if ranks are in other operations, or one cannot begin."""
    operations = [list(OPERATIONS)[row[0]] for row in rows]
    check_operations(operations)
    for rank, row in enumerate(rows):
        if row[1] == State.FAILED:
            raise RanksDisagree(
                f"rank {rank} cannot {operations[rank]}", fix="see what it said"
            )


def check_operations(by_rank: Sequence[str]) -> None:
    """Raises RanksDisagree unless all ranks are in the same operation."""
    if len(set(by_rank)) == 1:
        return
    parts = []
    for operation in dict.fromkeys(by_rank):
        ranks = [r for r, other in enumerate(by_rank) if other == operation]
        words = OPERATIONS[operation][len(ranks) > 1]
        parts.append(f"{ranks_text(ranks)} {words}")
    if ANOTHER_SHAPE in by_rank:
        raise RanksDisagree(
            ", but ".join(parts),
            fix="pass batches of the same shapes, and local= alike, on all ranks; each "
            "loads as many samples with step.sampler(dataset)",
        )
    if NO_MORE in by_rank:
        raise RanksDisagree(
            ", but ".join(parts),
            fix="give each rank's loader as many batches: step.sampler(dataset) does, "
            "and drop_last=True or a length (__len__) of an iterable dataset",
        )
    called = " and ".join(f"step.{o}()" for o in dict.fromkeys(by_rank) if o != "step")
    raise RanksDisagree(
        ", but ".join(parts),
        fix=f"call {called} on all ranks, at the same place, and not within "
        "`if rank == 0`; on one rank only print, or write files of your own",
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, `ranks 1 to 7`, `ranks 1, 3 and 5`; ascending."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def others(values: Mapping[int, Any]) -> list[int]:
    """The ranks whose value is not that of the first."""
    first = next(iter(values.values()))
    return [rank for rank, value in values.items() if value != first]
