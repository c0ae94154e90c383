"""The virtual mesh: all ranks in one process, one at a time, in an order that repeats.

Each rank is a thread that runs until it has to wait for another one. A collective
happens when the last of its ranks arrives, and only if all make the same call; when no
rank can go on, that is a deadlock, found at once. Values are computed as on process
groups, with sums in rank order.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from autopar.runtime.comm.comm import Comm, CommError
from autopar.runtime.comm.scheduler import CooperativeScheduler, Stopped
from autopar.runtime.comm.work import Arrived, Work, sum_in_order
from passes.graph_text import DTYPES
from passes.mesh import Mesh

T = TypeVar("T")


class Deadlock(CommError):
    """No rank can go on. The text lists what each of them waits for."""


class Mismatch(CommError):
    """Ranks that meet do not make the same call. The text shows each rank's call."""


class RankError(CommError):
    """A rank raised an exception: it is this one's `__cause__`."""


def run_virtual(
    mesh: Mesh,
    microbatches: int,
    body: Callable[[Comm], T],
    device: torch.device | None = None,
) -> list[T]:
    """Run body(comm) once for each rank of the mesh; give what they return, by rank.

    Grad mode is that of the caller, and kernels use one CPU thread.
    Raises: RankError, Deadlock, Mismatch; no rank is left running.
    """
    world = _World(mesh)
    comms = [
        VirtualComm(world, rank, microbatches, device or torch.device("cpu"))
        for rank in range(mesh.size)
    ]
    results: dict[int, T] = {}
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()

    def run_rank(rank: int) -> None:
        torch.set_num_threads(1)  # a setting of the thread, as grad mode is
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = body(comms[rank])
        except Stopped:
            raise
        except BaseException as cause:
            what = f"{world.name(rank)}: {type(cause).__name__}: {cause}"
            error = RankError(what)
            error.__cause__ = cause
            world.scheduler.stop(error)

    try:
        world.scheduler.run(run_rank)
    finally:
        torch.set_num_threads(threads)
    world.check_messages()
    return [results[rank] for rank in range(mesh.size)]


class VirtualComm(Comm):
    """One rank's end of a virtual mesh; `run_virtual` makes them."""

    def __init__(
        self, world: _World, rank: int, microbatches: int, device: torch.device
    ) -> None:
        super().__init__(world.mesh, rank, microbatches, device)
        self._world = world
        self._everyone = tuple(range(world.mesh.size))
        self._call = _Call("")
        self._sends: list[_Message] = []

    def flush(self) -> None:
        for message in self._sends:
            message.wait()
        self._sends.clear()

    def gather_object(self, value: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._gather_pickled(value)]

    def gather_to_first(self, value: Any) -> list[Any]:
        pickled = self._gather_pickled(value)
        return [pickle.loads(one) for one in pickled] if self.rank == 0 else []

    def _gather_pickled(self, value: Any) -> list[bytes]:
        """As between processes, so that ranks do not share what is mutable."""
        self._call = _Call("gather_object")
        return self._meet(
            self._everyone, pickle.dumps(value), lambda values: [values] * len(values)
        )

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        self._call = _Call("broadcast_object", detail={"source": source})
        pickled = self._meet(
            self._everyone,
            pickle.dumps(value) if self.rank == source else None,
            lambda values: [values[source]] * len(values),
        )
        return pickle.loads(pickled)

    def _start_reduce_(self, x: Tensor, ranks: tuple[int, ...], op: str) -> Work:
        def reduce(rows: list[Tensor]) -> list[Tensor]:
            summed = op == "sum"
            total = sum_in_order(rows) if summed else torch.stack(rows).amax(0)
            return [total] * len(rows)  # to be read only

        return _Reducing(self._join(ranks, x, reduce), x)

    def _gather(self, x: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return self._meet(ranks, x, _stacked)

    def _exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Tensor:
        return self._meet(ranks, x.split(sent), _exchanged)

    def _start_gather(self, rows: Tensor, ranks: tuple[int, ...]) -> Work:
        return self._join(ranks, rows[ranks.index(self.rank)], _stacked)

    def _start_exchange(
        self, x: Tensor, sent: list[int], counts: list[int], ranks: tuple[int, ...]
    ) -> Work:
        return self._join(ranks, x.split(sent), _exchanged)

    def _shift(self, x: Tensor, ranks: tuple[int, ...], numel: int) -> Work:
        def shift(rows: list[Tensor]) -> list[Tensor]:
            return [row.clone() for row in (rows[-1], *rows[:-1])]

        found = self._meet(ranks, x, shift)
        if found.numel() != numel:
            raise CommError(f"a shift brings {found.numel()} elements, not {numel}")
        return Arrived(found)

    def _send(self, x: Tensor, to_rank: int, tag: int) -> Work:
        self._sends = [sent for sent in self._sends if not sent.done]
        message = _Message(self._world, True, self.rank, to_rank, tag, x)
        self._sends.append(message)
        self._world.post(message)
        return message

    def _recv(self, x: Tensor, from_rank: int, tag: int) -> Work:
        message = _Message(self._world, False, self.rank, from_rank, tag, x)
        self._world.post(message)
        return message

    def _enter(
        self,
        kind: str,
        axes: tuple[str, ...],
        x: Tensor,
        open_dim: int | None = None,
        **detail: Any,
    ) -> tuple[int, ...]:
        self._call = _Call(kind, axes, x.dtype, tuple(x.shape), open_dim, detail)
        return super()._enter(kind, axes, x, open_dim, **detail)

    def _meet(
        self,
        ranks: tuple[int, ...],
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Any:
        return self._join(ranks, value, compute).wait()

    def _join(
        self,
        ranks: tuple[int, ...],
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> _Joined:
        return self._world.join(self.rank, ranks, self._call, value, compute)


def _stacked(shards: list[Tensor]) -> list[Tensor]:
    """What each rank gets of a gather."""
    return [torch.stack(shards) for _ in shards]


def _exchanged(rows: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What each rank gets, where each brings parts for all."""
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


@dataclass(frozen=True)
class _Call:
    """A collective as one rank calls it."""

    kind: str
    axes: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    open_dim: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def common(self) -> tuple[Any, ...]:
        """What must be the same on all ranks that meet."""
        shape: list[int | None] = list(self.shape)
        if self.open_dim is not None:
            shape[self.open_dim] = None
        detail = [tuple(v) if isinstance(v, list) else v for v in self.detail.values()]
        return self.kind, self.dtype, shape, detail

    def __str__(self) -> str:
        words = [] if self.dtype is None else [_typed(self.dtype, self.shape)]
        words += ["+".join(self.axes)] if self.axes else []
        words += [f"{k}={v}" for k, v in self.detail.items() if v is not None]
        return f"{self.kind}({', '.join(words)})"


@dataclass
class _Meeting:
    """A collective under way: what the ranks that are there bring, by rank."""

    calls: dict[int, _Call] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)


class _Joined(Work):
    """One rank's part in a collective that may still wait for other ranks."""

    def __init__(
        self, world: _World, rank: int, ranks: tuple[int, ...], key: Any, call: _Call
    ) -> None:
        self.world, self.rank, self.ranks, self.key = world, rank, ranks, key
        self.call = call

    def wait(self) -> Any:
        return self.world.leave(self)

    def __str__(self) -> str:
        return str(self.call)


class _Reducing(Work):
    """One rank's part in a reduction that is written over what it brought."""

    def __init__(self, joined: _Joined, x: Tensor) -> None:
        self.joined, self.x, self.version = joined, x, x._version

    def wait(self) -> Tensor:
        if self.x._version != self.version:
            world, rank = self.joined.world, self.joined.rank
            text = "a tensor was changed while it was being reduced"
            line = f"{world.name(rank)}  {self.joined}"
            world.scheduler.stop(Mismatch(_listed(text, [line])))
        return self.x.copy_(self.joined.wait())


class _Message(Work):
    """One end of a message: what `rank` sends to `peer`, or receives from it."""

    def __init__(
        self, world: _World, sends: bool, rank: int, peer: int, tag: int, x: Tensor
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
        """What must be the same at both ends."""
        return self.tag, self.x.dtype, self.x.shape

    def __str__(self) -> str:
        call, way = ("send", "to") if self.sends else ("recv", "from")
        x = _typed(self.x.dtype, tuple(self.x.shape))
        return f"{call}({x}, {way} rank {self.peer}, tag={self.tag})"


class _World:
    """What the ranks of a virtual mesh share."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.scheduler = CooperativeScheduler(mesh.size, self._deadlock)
        self._meetings: defaultdict[Any, _Meeting] = defaultdict(_Meeting)
        # Parts in collectives that nobody has waited for yet.
        self._joined: dict[tuple[int, Any], _Joined] = {}
        self._met: Counter[tuple[int, tuple[int, ...]]] = Counter()
        # By (sender, receiver): the ends whose other end is not there yet, all alike.
        self._posted: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)

    def name(self, rank: int) -> str:
        coords = ", ".join(f"{k}={v}" for k, v in self.mesh.coords(rank).items())
        return f"rank {rank} ({coords})"

    def join(
        self,
        rank: int,
        ranks: tuple[int, ...],
        call: _Call,
        value: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> _Joined:
        """Bring a value to the next collective of these ranks; `leave` it for a result.

        compute: from the values to the results, both in rank order. It is called once,
        when the last rank is there: until it has left a rank must not change its value.
        """
        self.scheduler.check()
        key = (ranks, self._met[rank, ranks])
        self._met[rank, ranks] += 1
        meeting = self._meetings[key]
        meeting.calls[rank], meeting.values[rank] = call, value
        joined = _Joined(self, rank, ranks, key, call)
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

    def leave(self, joined: _Joined) -> Any:
        """This rank's result, once all have joined."""
        rank, key, ranks = joined.rank, joined.key, joined.ranks
        meeting = self._meetings[key]
        if not meeting.results:
            self.scheduler.wait(rank, key, lambda: _absent(joined.call, ranks, meeting))
        del self._joined[rank, key]
        result = meeting.results.pop(rank)
        if not meeting.results:
            del self._meetings[key]
        return result

    def post(self, end: _Message) -> None:
        """Deliver a message if its other end is there, else keep this end for it."""
        pair = (end.rank, end.peer) if end.sends else (end.peer, end.rank)
        posted = self._posted[pair]
        if not posted or posted[0].sends == end.sends:
            posted.append(end)
            return
        other = posted.popleft()
        sent, received = (end, other) if end.sends else (other, end)
        if sent.carries() != received.carries():
            self._stop("a send and the recv that it meets do not fit", sent, received)
        if sent.x._version != sent.version:
            self._stop("a tensor was changed while it was being sent", sent, received)
        received.x.copy_(sent.x)
        for message in (sent, received):
            message.done = True
            self.scheduler.wake(message)

    def _stop(self, text: str, *ends: _Message) -> NoReturn:
        lines = (f"{self.name(end.rank)}  {end}" for end in ends)
        self.scheduler.stop(Mismatch(_listed(text, lines)))

    def check_messages(self) -> None:
        """Raise Mismatch if a send or a recv has not met its other end, or nobody has
        waited for a collective."""
        lines = [
            f"{self.name(end.rank)}  {end}"
            for posted in self._posted.values()
            for end in posted
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


def _absent(call: _Call, ranks: tuple[int, ...], meeting: _Meeting) -> str:
    absent = [str(rank) for rank in ranks if rank not in meeting.calls]
    word = "rank" if len(absent) == 1 else "ranks"
    return f"waits in {call} for {word} {', '.join(absent)}"


def _typed(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{DTYPES.get(dtype, str(dtype))}[{','.join(map(str, shape))}]"


def _listed(text: str, lines: Iterable[str]) -> str:
    return "\n  ".join([text, *lines])
