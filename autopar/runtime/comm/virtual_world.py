"""The shared state of a virtual mesh: calls that meet, messages, deadlocks."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from autopar.passes.graph_text import type_text
from autopar.passes.mesh import Mesh
from autopar.runtime.comm.comm import CommError
from autopar.runtime.comm.scheduler import CooperativeScheduler
from autopar.runtime.comm.work import Call, Work


class Deadlock(CommError):
    """All ranks wait. The text lists what each of them waits for."""


class Mismatch(CommError):
    """Ranks that meet do not make the same call. The text shows each rank's call."""


@dataclass
class Meeting:
    """A collective under way: the contributions of ranks that have come, by rank."""

    calls: dict[int, Call] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class Joined(Work):
    """One rank's part in a collective that may still wait for other ranks."""

    def __init__(
        self, world: World, rank: int, ranks: tuple[int, ...], key: Any, call: Call
    ) -> None:
        self.world, self.rank, self.ranks, self.key = world, rank, ranks, key
        self.call = call

    def wait(self) -> Any:
        return self.world.leave(self)

    def __str__(self) -> str:
        return str(self.call)


class Reducing(Work):
    """One rank's part in a reduction that overwrites its contribution."""

    def __init__(self, joined: Joined, x: Tensor) -> None:
        self.joined, self.x, self.version = joined, x, x._version

    def wait(self) -> Tensor:
        if self.x._version != self.version:
            world, rank = self.joined.world, self.joined.rank
            text = "a tensor was changed while it was being reduced"
            line = f"{world.name(rank)}  {self.joined}"
            world.scheduler.stop(Mismatch(_listed(text, [line])))
        return self.x.copy_(self.joined.wait())


class Message(Work):
    """One end of a message: what `rank` sends to `peer`, or receives from it."""

    def __init__(
        self, world: World, sends: bool, rank: int, peer: int, tag: int, x: Tensor
    ) -> None:
        self.world, self.sends, self.rank, self.peer = world, sends, rank, peer
        self.tag, self.x = tag, x
        self.version = x._version
        self.done = False

    def wait(self) -> Tensor:
        if not self.done:
            self.world.scheduler.wait(self.rank, self, lambda: f"waits in {self}")
        return self.x

    def carries(self) -> tuple[Any, ...]:
        """The fields that must be equal at both ends."""
        return self.tag, self.x.dtype, self.x.shape

    def __str__(self) -> str:
        call, way = ("send", "to") if self.sends else ("recv", "from")
        x = type_text(tuple(self.x.shape), self.x.dtype)
        return f"{call}({x}, {way} rank {self.peer}, tag={self.tag})"


class World:
    """The shared state of a virtual mesh's ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.scheduler = CooperativeScheduler(mesh.size, self._deadlock)
        self._meetings: defaultdict[Any, Meeting] = defaultdict(Meeting)
        # Parts in collectives that nobody has waited for yet.
        self._joined: dict[tuple[int, Any], Joined] = {}
        self._met: Counter[tuple[int, tuple[int, ...]]] = Counter()
        # By (sender, receiver): the ends whose other end is not there yet, all alike.
        self._unmatched: defaultdict[tuple[int, int], deque[Message]] = defaultdict(
            deque
        )

    def name(self, rank: int) -> str:
        """Names a rank by its coordinates, for messages."""
        coords = ", ".join(f"{k}={v}" for k, v in self.mesh.coords(rank).items())
        return f"rank {rank} ({coords})"

    def join(
        self,
        rank: int,
        ranks: tuple[int, ...],
        call: Call,
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Joined:
        """Bring a value to the next collective of these ranks; `leave` it for a result.

        compute: from the values to the results, both in rank order. It is called once,
        when the last rank is there: until it has left a rank must not change its value.
        """
        self.scheduler.check()
        key = (ranks, self._met[rank, ranks])
        self._met[rank, ranks] += 1
        meeting = self._meetings[key]
        meeting.calls[rank], meeting.values[rank] = call, value
        joined = Joined(self, rank, ranks, key, call)
        self._joined[rank, key] = joined
        if len(meeting.calls) == len(ranks):
            if any(other.common() != call.common() for other in meeting.calls.values()):
                text = "ranks meet, but do not make the same call"
                lines = (f"{self.name(r)}  {meeting.calls[r]}" for r in ranks)
                self.scheduler.stop(Mismatch(_listed(text, lines)))
            results = compute([meeting.values[r] for r in ranks])
            meeting.results.update(zip(ranks, results, strict=True))
            self.scheduler.wake(key)
        return joined

    def leave(self, joined: Joined) -> Any:
        """Waits until all have joined, and returns this rank's result."""
        rank, key, ranks = joined.rank, joined.key, joined.ranks
        meeting = self._meetings[key]
        if not meeting.results:
            self.scheduler.wait(rank, key, lambda: _absent(joined.call, ranks, meeting))
        del self._joined[rank, key]
        result = meeting.results.pop(rank)
        if not meeting.results:
            del self._meetings[key]
        return result

    def post(self, end: Message) -> None:
        """Deliver a message if its other end is there, else keep this end for it."""
        pair = (end.rank, end.peer) if end.sends else (end.peer, end.rank)
        ends = self._unmatched[pair]
        if not ends or ends[0].sends == end.sends:
            ends.append(end)
            return
        other = ends.popleft()
        sent, received = (end, other) if end.sends else (other, end)
        if sent.carries() != received.carries():
            self._stop("a send and the recv that it meets do not fit", sent, received)
        if sent.x._version != sent.version:
            self._stop("a tensor was changed while it was being sent", sent, received)
        received.x.copy_(sent.x)
        for message in (sent, received):
            message.done = True
            self.scheduler.wake(message)

    def _stop(self, text: str, *ends: Message) -> NoReturn:
        lines = (f"{self.name(end.rank)}  {end}" for end in ends)
        self.scheduler.stop(Mismatch(_listed(text, lines)))

    def check_messages(self) -> None:
        """Raise Mismatch if a send or a recv has not met its other end, or nobody has
        waited for a collective."""
        lines = [
            f"{self.name(end.rank)}  {end}"
            for ends in self._unmatched.values()
            for end in ends
        ]
        lines += [
            f"{self.name(j.rank)}  {j}"
            for _, j in sorted(self._joined.items(), key=lambda j: j[0][0])
        ]
        if lines:
            raise Mismatch(_listed("the ranks are done, but messages are left", lines))

    def _deadlock(self, waits: dict[int, str]) -> Deadlock:
        lines = [
            f"{self.name(rank)}  {waits.get(rank, 'is done')}"
            for rank in range(self.mesh.size)
        ]
        return Deadlock(_listed("no rank can go on", lines))


def _absent(call: Call, ranks: tuple[int, ...], meeting: Meeting) -> str:
    absent = [str(rank) for rank in ranks if rank not in meeting.calls]
    word = "rank" if len(absent) == 1 else "ranks"
    return f"waits in {call} for {word} {', '.join(absent)}"


def _listed(text: str, lines: Iterable[str]) -> str:
    return "\n  ".join([text, *lines])
