"""Seconds of messages between the ranks that run, by the runtime's own collectives.

Every way to part the ranks into groups of equal strides is measured, all groups at
once, as a plan's ranks talk: in turn with some computing, whose own time is taken off.
Messages in a row would find their tensors in a cache, and ranks that arrive at once.
Rounds over all of them are interleaved, so that what else the machine does falls on
all alike, and the median round counts.

The longer ranks compute, the further apart they come to where they meet. How far is
seen from a small message after little computing and after much. Where processes share
cores, one that waits for a message is not given a core at once: how late it goes on is
seen between two ranks, while all others compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median

import torch

from autopar.passes.mesh import DATA, PIPELINE, TENSOR, Mesh
from autopar.passes.price.measured import Messages, Place, Point
from autopar.runtime.comm.process_groups import ProcessComm

SIZES = tuple(1 << power for power in (10, 14, 17, 20, 22, 24))  # bytes
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
ENOUGH = 1 << 18  # bytes of a message from which on one of them is a sample
LEAST = 1e-6  # seconds of a message, where noise hides it
WIDTH = 256  # of the matrices that are multiplied between messages
MUCH = 24  # times that, before a message, to see what skew it makes
SKEW_ROUNDS, SKEW_TIMES = 5, 4  # of messages, and of each in a round
WAKEUP_SECONDS, BETWEEN = 1.0, 4e-3  # of messages, and of computing before each
BESIDE = 1 << 20  # elements that are read and written there, so that caches are cold
AXIS = PIPELINE  # groups lie along it: NCCL carries messages along that one

Run = Callable[[], None]  # of one message, or of two, one after the other


def measure_messages(
    world: int, device: torch.device, budget: float, sizes: Sequence[int] = SIZES
) -> Messages:
    """What each collective takes between `world` ranks, all of which must call this.

    budget: seconds that it may take, roughly; at least a few rounds are run.
    sizes: of messages, in bytes, ascending; 64 times the ranks at least.
    """
    runs = list(_runs(world, device, sizes))
    computing = _computing(device)
    times: list[list[float]] = [[] for _ in runs]
    began, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or _go_on(runs[0][0], began, budget, rounds):
        for samples, (_, place, bytes, run) in zip(times, runs, strict=True):
            took, _ = _timed(device, computing, run, 8 if bytes < ENOUGH else 2)
            samples.append(took / (2 if place[0] == "send" else 1))
        rounds += 1
    points: dict[Place, list[Point]] = {}
    for samples, (comm, place, bytes, _) in zip(times, runs, strict=True):
        # A rank that came late waited for less: what the ranks took on average.
        took = mean(comm.gather_object(median(samples)))
        points.setdefault(place, []).append((float(bytes), took))
    least = [r for r in runs if r[1][0] == "all_reduce" and r[2] == sizes[0]]
    skew = {
        (ranks, stride): _measure_skew(comm, device, computing, run)
        for comm, (_, ranks, stride), _, run in least
    }
    table = {place: tuple(row) for place, row in points.items()}
    return Messages(table, skew, _measure_wakeup(runs[0][0], device))


def _measure_skew(
    comm: ProcessComm, device: torch.device, computing: Run, run: Run
) -> float:
    """Returns the seconds that ranks wait for the slowest after a second of computing,
    see `passes.price.cluster.Link.skew`: from how much longer a message takes after
    much computing than after little."""

    def much() -> None:
        for _ in range(MUCH):
            computing()

    waits = []
    for _ in range(SKEW_ROUNDS):
        soon, little = _timed(device, computing, run, SKEW_TIMES)
        late, longer = _timed(device, much, run, SKEW_TIMES)
        apart = math.sqrt(longer) - math.sqrt(little)
        waits.append((late - soon) / apart if apart > 0 else 0.0)
    return max(0.0, mean(comm.gather_object(median(waits))))


def _measure_wakeup(comm: ProcessComm, device: torch.device) -> float:
    """Returns seconds from when rank 0 sends rank 1 a message, and goes on computing,
    until rank 1 goes on, while all others compute. They share a clock, as processes of
    one machine do; of others, whose clocks may differ, it is never below 0. 0 on two
    ranks, and where devices compute."""
    if comm.mesh.size == 2 or device.type != "cpu":
        return 0.0
    computing, late, ends = _computing(device), [], time.monotonic() + WAKEUP_SECONDS

    def compute(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            computing()

    stamp = torch.zeros(1, dtype=torch.float64)
    if comm.rank == 0:
        while time.monotonic() < ends:
            compute(BETWEEN)
            stamp.fill_(time.monotonic())
            sending = comm.send(stamp, 1, 0)
            compute(BETWEEN)
            sending.wait()
            comm.recv(stamp.shape, stamp.dtype, 1, 0).wait()
        comm.send(stamp.zero_(), 1, 0).wait()
    elif comm.rank == 1:
        while sent := float(comm.recv(stamp.shape, stamp.dtype, 0, 0).wait()):
            late.append(time.monotonic() - sent)
            compute(BETWEEN)
            comm.send(stamp, 0, 0).wait()
    else:
        compute(WAKEUP_SECONDS)
    comm.flush()
    return max(0.0, comm.gather_object(mean(late) if late else 0.0)[1])


def geometries(world: int) -> list[tuple[int, int]]:
    """(ranks of a group, how far apart they are) of all groups that axes can form."""
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    return [
        (size, stride)
        for size in sizes
        for stride in range(1, world // size + 1)
        if world % (size * stride) == 0
    ]


def _go_on(comm: ProcessComm, began: float, budget: float, rounds: int) -> bool:
    """Whether there is time for one round more; rank 0 decides for all."""
    spent = time.perf_counter() - began
    more = rounds < MOST_ROUNDS and spent * (rounds + 1) / rounds < budget
    return bool(comm.broadcast_object(more))


def _computing(device: torch.device) -> Run:
    """Work between two messages, about a millisecond of a CPU."""
    x = torch.ones(WIDTH, WIDTH, device=device)
    beside = torch.zeros(BESIDE, device=device)

    def run() -> None:
        torch.mm(x, x)
        beside.add_(1.0)

    return run


def _timed(
    device: torch.device, computing: Run, run: Run, times: int
) -> tuple[float, float]:
    """Seconds of one run among computing, of several after one that brings ranks
    together; and those of computing once."""

    def seconds(*steps: Run) -> float:
        _finish(device)
        begin = time.perf_counter()
        for _ in range(times):
            for step in steps:
                step()
        _finish(device)
        return time.perf_counter() - begin

    run()
    both, alone = seconds(computing, run), seconds(computing)
    return max(LEAST, (both - alone) / times), alone / times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runs(
    world: int, device: torch.device, sizes: Sequence[int]
) -> Iterator[tuple[ProcessComm, Place, int, Run]]:
    for size, stride in geometries(world):
        outer = world // (size * stride)
        mesh = Mesh(((DATA, outer), (AXIS, size), (TENSOR, stride)))
        comm = ProcessComm(mesh, groups=((AXIS,),), device=device)
        for bytes in sizes:
            for kind, run in _kinds(comm, size, bytes).items():
                yield comm, (kind, size, stride), bytes, run


def _kinds(comm: ProcessComm, ranks: int, whole: int) -> dict[str, Run]:
    """Calls of each collective with `whole` bytes, see `passes.price.cluster.Link`; two
    samples, so that rows of the sequence lie apart, as in activations."""
    n = whole // 4

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=comm.device)

    x, rows = zeros(n), zeros(2, n // 2)
    shard = zeros(2, n // 2 // ranks)
    heads = zeros(n // 2 // ranks, ranks, 2)
    runs: dict[str, Run] = {
        "all_reduce": lambda: _drop(comm.all_reduce(x, (AXIS,), inplace=True)),
        "all_gather": lambda: _drop(comm.all_gather(shard, AXIS, 1)),
        "reduce_scatter": lambda: _drop(comm.reduce_scatter(rows, AXIS, 1)),
        "all_to_all": lambda: _drop(comm.all_to_all(heads, AXIS, 1, 0)),
    }
    if ranks == 2:
        runs["send"] = _there_and_back(comm, x)
    return runs


def _drop(x: torch.Tensor) -> None:
    """Let go of a result."""


def _there_and_back(comm: ProcessComm, x: torch.Tensor) -> Run:
    """x to the other rank, and then from it."""
    here = comm.coords[AXIS]
    other = comm.mesh.rank({**comm.coords, AXIS: 1 - here})

    def run() -> None:
        for turn in range(2):
            if turn == here:
                comm.send(x, other, 0).wait()
            else:
                comm.recv(x.shape, x.dtype, other, 0).wait()
        comm.flush()

    return run
