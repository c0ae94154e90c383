"""Bytes that a rank keeps, by its schedule; and bytes that it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ..schedule.messages import AHEAD
from ..schedule.schedule import KINDS, Kind, Schedule

# Parts of a microbatch, where the weights' half of a backward is one; of messages.
FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
COMMUNICATION_PARTS = (FORWARD, BACKWARD, "step")  # of `Communication`
RECEIVES = [KINDS[Kind.RECV_F], KINDS[Kind.RECV_B]]


@dataclass(frozen=True)
class Communication:
    """One kind of message of a stage's rank.

    part: "forward" or "backward" (calls and bytes are of one microbatch), or "step"
    (of one step). kind: a collective, "shift" (to the next rank of a ring), or "send".
    dtype: as `f32`. bytes: of the tensors that the rank gives, all calls together.
    """

    stage: int
    part: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank.

    residuals: from a microbatch's forward to its backward. forward_peak, backward_peak:
    the most that these have alive at once, with what they were given; where the
    backward is split, that is of the input half. weight_residuals: what it keeps for
    the weight half; weight_peak: the most that this has alive. step: of what is made of
    parameters for a whole step, gathered or in another precision, and of gradients
    whole as long. edges: the most before the first forward or after the last backward,
    when some of these are in messages. received, sent: of a forward's messages;
    gradients are as large, the other way.
    """

    residuals: int
    forward_peak: int
    backward_peak: int
    weight_residuals: int
    step: int
    weight_peak: int = 0
    edges: int = 0
    received: int = 0
    sent: int = 0

    @property
    def each(self) -> int:
        """Bytes of a microbatch in flight, at most, while something else runs."""
        return max(self.residuals + self.sent, self.weight_residuals)

    @property
    def working(self) -> int:
        """Bytes that an action has alive beyond those of microbatches in flight."""
        forward = max(self.forward_peak, self.backward_peak) - self.residuals
        messages = AHEAD * max(self.received, self.sent)
        return messages + max(0, forward, self.weight_peak - self.weight_residuals)

    def peak(self, in_flight: int) -> int:
        """Bytes at most, with this many microbatches between forward and backward."""
        most = max(self.forward_peak, self.backward_peak, self.weight_peak)
        return max((in_flight - 1) * self.each + most + self.step, self.edges)


NO_BYTES = Footprint(0, 0, 0, 0, 0)


def rough_peak(own: Sequence[Footprint], in_flight: int) -> float:
    """Estimates `peak_bytes` of a rank without its schedule.

    own: footprints of its stages. in_flight: most microbatches on all of them together,
    which are spread evenly. What is made for a whole step counts for each stage.
    """
    spread = fmean(of.peak(in_flight) - of.step for of in own)
    return max(spread + sum(of.step for of in own), sum(of.edges for of in own))


def peak_bytes(
    schedule: Schedule,
    rank: int,
    footprints: Sequence[Footprint] | Mapping[int, Footprint],
) -> int:
    """The most bytes of activations and messages that a rank has alive at once.

    schedule: with its messages. footprints: of each stage, by its index.
    """
    own = [s for s, r in enumerate(schedule.stage_to_rank) if r == rank]
    ends = sum(footprints[s].edges for s in own)
    first, most, _ = bytes_alive(schedule, rank, footprints)
    return max(ends, first, int(most.max(initial=0)))


def bytes_alive(
    schedule: Schedule,
    rank: int,
    footprints: Sequence[Footprint] | Mapping[int, Footprint],
) -> tuple[int, np.ndarray, np.ndarray]:
    """Bytes alive before the first action of a rank; the most until each of them ends,
    and those alive then, [actions]."""
    own = [s for s, r in enumerate(schedule.stage_to_rank) if r == rank]
    kinds, stages = schedule.numbers[rank]
    table = np.zeros((3, len(KINDS), len(schedule.stage_to_rank)), dtype=np.int64)
    size = np.zeros_like(table[0])
    for stage in own:
        of = footprints[stage]
        for kind, alive in _alive(of).items():
            table[:, KINDS[kind], stage] = alive
        for kind in (Kind.RECV_F, Kind.SEND_B):
            size[KINDS[kind], stage] = of.received
        for kind in (Kind.SEND_F, Kind.RECV_B):
            size[KINDS[kind], stage] = of.sent
    before, most, after = table[:, kinds, stages]
    first = sum(footprints[stage].step for stage in own)
    coming, freed = np.zeros((2, len(kinds)), dtype=np.int64)
    receives = np.flatnonzero(np.isin(kinds, RECEIVES))
    # A receive is posted as soon as another one has come.
    prefetched = np.concatenate([np.zeros(AHEAD, dtype=np.int64), receives + 1])
    moved = size[kinds, stages]
    np.add.at(coming, prefetched[: len(receives)], moved[receives])
    for send, recv in schedule.completed[rank]:
        freed[recv] += moved[send]
    change = after - before - freed
    now = first + np.cumsum(coming) + np.cumsum(change) - change
    return first, np.maximum(now, now - before + most), now + change


def _alive(of: Footprint) -> dict[Kind, tuple[int, int, int]]:
    """Bytes of a microbatch before an action, the most in it, and after it."""
    return {
        Kind.F: (of.received, of.forward_peak, of.residuals + of.sent),
        Kind.B: (of.residuals + of.sent, of.backward_peak, of.received),
        Kind.I: (
            of.residuals + of.sent,
            of.backward_peak,
            of.weight_residuals + of.received,
        ),
        Kind.W: (of.weight_residuals, of.weight_peak, 0),
    }
