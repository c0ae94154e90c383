"""Pipeline schedules as data: which rank runs which stage on which microbatch, when.

A schedule is one list of actions per rank of the pipeline. Executor, checker, simulator
and printer all read that list; only `passes.schedule.make_schedule` knows what 1F1B
means. Named schedules hold compute actions only, and `add_communication` lowers them to
lists with messages.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..errors import AutoparError


class ScheduleError(AutoparError):
    """A schedule that does not exist, cannot be read, or cannot run."""


class Kind(str, Enum):
    """The kind of an action. A full backward, B, does the work of both I and W."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # noqa: E741  input-gradient half of the backward
    W = "W"  # weight-gradient half of the backward
    SEND_F = "SEND_F"  # send the stage's output to the next stage
    RECV_F = "RECV_F"  # receive the stage's input from the stage before
    SEND_B = "SEND_B"  # send the gradient of the stage's input to the stage before
    RECV_B = "RECV_B"  # receive the gradient of the stage's output from the next stage

    is_send: bool
    is_recv: bool
    is_compute: bool

    def __init__(self, value: str) -> None:
        self.is_send = value.startswith("SEND")
        self.is_recv = value.startswith("RECV")
        self.is_compute = not (self.is_send or self.is_recv)

    __hash__ = str.__hash__  # an Enum's own is written in Python


# The other end of a message: its kind, and how many stages away it is.
_PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
# The message that a compute action may have to wait for, and the one it may cause.
_RECEIVES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
_SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
KINDS = {kind: number for number, kind in enumerate(Kind)}
_KIND_OF = {kind.value: kind for kind in Kind}  # Kind(text) takes ten times as long

_NUMBER = r"\d{1,9}"
_ACTION = re.compile(
    rf"({_NUMBER})({'|'.join(kind.value for kind in Kind)})({_NUMBER})"
)
_HEADER = re.compile(
    rf"schedule (\S+): ({_NUMBER}) microbatches, stages on ranks ((?:{_NUMBER} ?)+)"
)


class Action(NamedTuple):
    """One thing that a rank does: `2F0` is the forward of stage 2 on microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read `2F0` or `2SEND_F0`. Raises ScheduleError."""
        match = _ACTION.fullmatch(text)
        if match is None:
            kinds = " ".join(kind.value for kind in Kind)
            raise ScheduleError(
                f"{text!r} is not an action",
                fix=f"write stage, kind and microbatch, as 2F0; kinds are {kinds}",
            )
        return Action(int(match[1]), _KIND_OF[match[2]], int(match[3]))

    @property
    def partner(self) -> Action:
        """The other end of a message: 2SEND_F0 and 3RECV_F0, 2SEND_B0 and 1RECV_B0."""
        kind, step = _PARTNER[self.kind]
        return Action(self.stage + step, kind, self.microbatch)

    @property
    def other_stage(self) -> int:
        """The stage at the other end of a message."""
        return self.stage + _PARTNER[self.kind][1]

    @property
    def recv(self) -> Action | None:
        """The message that brings the operand of this compute action, if ranks differ.

        None for W, which works on what its own stage has kept.
        """
        kind = _RECEIVES.get(self.kind)
        return None if kind is None else Action(self.stage, kind, self.microbatch)

    @property
    def send(self) -> Action | None:
        """The message that takes away this compute action's result, if ranks differ."""
        kind = _SENDS.get(self.kind)
        return None if kind is None else Action(self.stage, kind, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of each pipeline rank.

    stage_to_rank[i] is the rank that runs stage i; ranks[r] are the actions of rank r.
    """

    name: str
    microbatches: int
    stage_to_rank: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\s:]+", self.name):
            raise ScheduleError(
                f"schedule name {self.name!r} is not one word without ':'"
            )
        at_least_one("microbatches", self.microbatches)
        at_least_one("stages", self.stages)
        strays = [r for r in self.stage_to_rank if not 0 <= r < len(self.ranks)]
        if strays:
            raise ScheduleError(
                f"stages {self.stage_to_rank} are placed on rank {strays[0]}, "
                f"but the schedule has actions for {len(self.ranks)} ranks"
            )

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.stage_to_rank)

    @property
    def has_communication(self) -> bool:
        return any(not a.kind.is_compute for actions in self.ranks for a in actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward runs in halves, I and W."""
        halves = (Kind.I, Kind.W)
        return any(a.kind in halves for actions in self.ranks for a in actions)

    @cached_property
    def numbers(self) -> tuple[np.ndarray, ...]:
        """Numbers for each rank its actions' kinds and stages: [2, actions]."""
        return tuple(
            np.array(
                [[KINDS[a.kind] for a in actions], [a.stage for a in actions]],
                dtype=np.int64,
            )
            for actions in self.ranks
        )

    @cached_property
    def peers(self) -> Mapping[tuple[Kind, int], int]:
        """The rank at the other end of each stage's messages, of those that cross."""
        placed = self.stage_to_rank
        return {
            (kind, stage): placed[stage + step]
            for kind, (_, step) in _PARTNER.items()
            for stage in range(len(placed))
            if 0 <= stage + step < len(placed) and placed[stage + step] != placed[stage]
        }

    @cached_property
    def messages(self) -> tuple[list[tuple[int, int, bool]], ...]:
        """(index in the list, rank at the other end, whether it sends), by rank."""
        return tuple(
            [
                (index, peer, kind.is_send)
                for index, (stage, kind, _) in enumerate(actions)
                if (peer := self.peers.get((kind, stage))) is not None
            ]
            for actions in self.ranks
        )

    @cached_property
    def completed(self) -> tuple[list[tuple[int, int]], ...]:
        """What `passes.schedule.messages.send_completions` says, by places in each
        rank's list: (SEND, RECV), in the order of the RECV."""
        return tuple(map(self._completed, range(len(self.ranks))))

    def _completed(self, rank: int) -> list[tuple[int, int]]:
        sends: dict[int, list[int]] = defaultdict(list)
        receives: dict[int, list[int]] = defaultdict(list)
        for index, peer, is_send in self.messages[rank]:
            (sends if is_send else receives)[peer].append(index)
        pairs = []
        for peer, own in sends.items():
            # Messages of a pair arrive in order: what the peer has by its next answer.
            got = known = answers = 0
            for _, back, is_send in self.messages[peer]:
                if back != rank:
                    continue
                if is_send:
                    recv = receives[peer][answers]
                    pairs += [(send, recv) for send in own[known:got]]
                    known, answers = got, answers + 1
                else:
                    got += 1
        return sorted(pairs, key=itemgetter(1, 0))

    def crosses(self, message: Action) -> bool:
        """Whether a message's other end exists and lives on another rank."""
        other, placed = message.other_stage, self.stage_to_rank
        return 0 <= other < len(placed) and placed[other] != placed[message.stage]

    def peer(self, message: Action) -> int:
        """The rank at the other end of a message that crosses ranks."""
        return self.stage_to_rank[message.other_stage]

    def label(self, action: Action) -> str:
        """The short name of a compute action: `F0`, or `2F0` if ranks hold several."""
        text = f"{action.kind.value}{action.microbatch}"
        return text if self._one_each else f"{action.stage}{text}"

    @cached_property
    def _one_each(self) -> bool:
        """Whether no rank holds several stages."""
        return len(set(self.stage_to_rank)) == self.stages

    def __str__(self) -> str:
        placement = " ".join(map(str, self.stage_to_rank))
        lines = [
            f"schedule {self.name}: {self.microbatches} microbatches, "
            f"stages on ranks {placement}"
        ]
        for rank, actions in enumerate(self.ranks):
            lines.append(" ".join([f"rank {rank} |", *map(str, actions)]))
        return "\n".join(lines)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Read what `str` wrote. Raises ScheduleError, which names the bad text."""
        header, *lines = text.strip().split("\n")
        match = _HEADER.fullmatch(header.strip())
        if match is None:
            raise ScheduleError(
                f"{header!r} does not read as "
                "'schedule NAME: M microbatches, stages on ranks 0 1 ...'"
            )
        ranks = []
        for rank, line in enumerate(lines):
            prefix, bar, actions = line.partition("|")
            if prefix.split() != ["rank", str(rank)] or not bar:
                raise ScheduleError(f"{line!r} does not begin with 'rank {rank} |'")
            ranks.append(tuple(map(Action.parse, actions.split())))
        placement = tuple(map(int, match[3].split()))
        return Schedule(match[1], int(match[2]), placement, tuple(ranks))


def add_communication(schedule: Schedule) -> Schedule:
    """Lower a schedule to one with messages between the stages of different ranks.

    A SEND follows its producer and must not block; a RECV precedes its consumer. For
    each pair of ranks, messages are received in the order in which they are sent, which
    channels without tags (NCCL) need: where a consumer wants a later message first, the
    earlier ones are received ahead of it, and that costs no waiting.

    Messages already in the schedule are made anew, so lowering twice changes nothing.
    A schedule that is wrong stays wrong: `check` tells what is missing.
    """
    compute = [[a for a in actions if a.kind.is_compute] for actions in schedule.ranks]
    peers = schedule.peers
    # (sender, receiver) -> what the receiver gets, in the order sent
    inbox: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, actions in enumerate(compute):
        for stage, kind, microbatch in actions:
            send = _SENDS.get(kind)
            if send and (peer := peers.get((send, stage))) is not None:
                recv, step = _PARTNER[send]
                inbox[rank, peer].append(Action(stage + step, recv, microbatch))
    ranks = []
    for rank, actions in enumerate(compute):
        lowered: list[Action] = []
        received: set[Action] = set()
        for action in actions:
            stage, kind, microbatch = action
            need, send = _RECEIVES.get(kind), _SENDS.get(kind)
            if need and (peer := peers.get((need, stage))) is not None:
                queue, wanted = inbox[peer, rank], (stage, need, microbatch)
                while wanted not in received:
                    # One that nobody sends is still waited for: `check` reports it.
                    lowered.append(queue.popleft() if queue else Action(*wanted))
                    received.add(lowered[-1])
            lowered.append(action)
            if send and (send, stage) in peers:
                lowered.append(Action(stage, send, microbatch))
        ranks.append(tuple(lowered))
    return replace(schedule, ranks=tuple(ranks))


def at_least_one(quantity: str, count: int) -> None:
    """Raises ScheduleError for a size that no schedule can have."""
    if count < 1:
        raise ScheduleError(f"a schedule needs {quantity} >= 1, got {count}")
