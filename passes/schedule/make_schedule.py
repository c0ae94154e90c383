"""The named schedules: for each rank, what it computes, in which order.

With p ranks, v stages a rank and m microbatches, `F0` below is the next forward of a
rank's first stage (0: which of its stages), and so are B, I and W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from ..schedule.schedule import Action, Kind, Schedule, ScheduleError, at_least_one

# How often in turn, and what: (3, "F0 B0") is a forward and a backward, three times.
Phase = tuple[int, str]

# What must have run before on the same stage and microbatch.
_AFTER = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def make_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """Build a named schedule of compute actions; `microbatches` may be below `ranks`.

    Raises ScheduleError: an unknown name, or sizes that the schedule cannot have.
    """
    if name not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise ScheduleError(f"no schedule is named {name!r}", fix=f"one of {names}")
    at_least_one("ranks", ranks)
    at_least_one("microbatches", microbatches)
    at_least_one("stages_per_rank", stages_per_rank)
    return SCHEDULES[name].make(ranks, microbatches, stages_per_rank)


@lru_cache(maxsize=256)  # many candidates of a search ask for the same
def place_stages(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage of a named schedule."""
    return SCHEDULES[name].place(ranks, stages_per_rank)


def naive(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """One rank at a time (Huang 2019, arXiv:1811.06965, figure 2b).

    A microbatch goes all the way there and back before the next one begins: p - 1 of p
    ranks are idle at any time, and one microbatch is in flight. To compare with.
    """
    _one_stage_a_rank("naive", stages_per_rank)
    phases = [(microbatches, "F0 B0")]
    return in_phases("naive", microbatches, range(ranks), [phases] * ranks)


def gpipe(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """All forwards, then all backwards (Huang 2019, arXiv:1811.06965, figure 2c).

    Backwards run from microbatch 0 up, not down as in the paper: it costs the same, and
    gradients then add up in the same order, to the same bits, as under 1F1B.
    """
    _one_stage_a_rank("gpipe", stages_per_rank)
    phases = [(microbatches, "F0"), (microbatches, "B0")]
    return in_phases("gpipe", microbatches, range(ranks), [phases] * ranks)


def one_forward_one_backward(
    ranks: int, microbatches: int, stages_per_rank: int
) -> Schedule:
    """1F1B (PipeDream-Flush; Narayanan 2021, arXiv:2104.04473, section 2.2).

    Rank r runs ahead by the ranks - r - 1 forwards that the ranks behind it need before
    they can answer; then each forward is followed by the oldest backward, which keeps
    min(microbatches, ranks - r) microbatches in flight instead of all of them.
    """
    _one_stage_a_rank("1f1b", stages_per_rank)
    phases = [
        [(ranks - rank - 1, "F0"), (microbatches, "F0 B0")] for rank in range(ranks)
    ]
    return in_phases("1f1b", microbatches, range(ranks), phases)


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Interleaved 1F1B (Narayanan 2021, arXiv:2104.04473, section 2.2.2, figure 4).

    Stages lie around the ranks in v rounds. Groups of p microbatches go through the
    stages of a rank in turn, so that the pipeline fills and drains by stages v times as
    short: p - 1 slots of 1/v of a rank's work are idle. Where p does not divide m the
    groups are larger than p, evenly, and more is in flight; m < p is one group of m.
    """
    _stages_a_rank("interleaved", stages_per_rank, "two or more", stages_per_rank > 1)
    groups = _groups(microbatches, max(microbatches // ranks, 1))
    chunks = range(stages_per_rank)
    forwards = [(c, i) for group in groups for c in chunks for i in group]
    backwards = [(c, i) for group in groups for c in reversed(chunks) for i in group]
    lines = []
    for rank in range(ranks):
        # All but the last round of the first group, and two slots for each rank behind:
        # the way there and back.
        ahead = (stages_per_rank - 1) * len(groups[0]) + 2 * (ranks - rank - 1)
        ahead = min(ahead, len(forwards))
        order = [(Kind.F, *work) for work in forwards[:ahead]]
        for f, b in zip(forwards[ahead:], backwards, strict=False):
            order += [(Kind.F, *f), (Kind.B, *b)]
        order += [(Kind.B, *b) for b in backwards[len(backwards) - ahead :]]
        lines.append(tuple(Action(c * ranks + rank, kind, i) for kind, c, i in order))
    placement = rounds(ranks, stages_per_rank)
    return Schedule("interleaved", microbatches, placement, tuple(lines))


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Breadth first (Lamy-Poirier 2022, arXiv:2211.05953, section 4).

    Stages lie as under `interleaved`, and each runs all microbatches before the rank's
    next stage begins: the same bubble if m >= p, longer runs of one stage, and all
    microbatches in flight on all stages.
    """
    _stages_a_rank("looped-bfs", stages_per_rank, "two or more", stages_per_rank > 1)
    chunks = range(stages_per_rank)
    phases = [
        *((microbatches, f"F{c}") for c in chunks),
        *((microbatches, f"B{c}") for c in reversed(chunks)),
    ]
    placement = rounds(ranks, stages_per_rank)
    return in_phases("looped-bfs", microbatches, placement, [phases] * ranks)


def zero_bubble_h1(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-H1 (Qi 2023, arXiv:2401.10241, section 2.1, figure 2).

    As 1F1B with backwards in halves. Rank r leaves out its first r weight halves: the
    gradients that the ranks before it wait for come sooner, and the weight halves fill
    what was idle at the end. At most p microbatches in flight, on all ranks.
    """
    _one_stage_a_rank("zb-h1", stages_per_rank)
    phases = [
        [(ranks - rank - 1, "F0"), (rank, "F0 I0"), (microbatches, "F0 I0 W0")]
        for rank in range(ranks)
    ]
    return in_phases("zb-h1", microbatches, range(ranks), phases)


def zero_bubble_h2(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-H2 (Qi 2023, arXiv:2401.10241, section 2.2, figure 3).

    As ZB-H1 with twice the forwards ahead, so that no rank waits for its first
    gradient, and twice the weight halves put off: 2 p - 1 microbatches in flight. If F,
    I and W are equally long no rank is idle from its first action to its last; they end
    one after the other, as they began.
    """
    _one_stage_a_rank("zb-h2", stages_per_rank)
    phases = [
        [
            (2 * (ranks - rank - 1), "F0"),
            (2 * rank, "F0 I0"),
            (microbatches, "F0 I0 W0"),
        ]
        for rank in range(ranks)
    ]
    return in_phases("zb-h2", microbatches, range(ranks), phases)


def zero_bubble_v(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-V (Qi 2023, arXiv:2401.10241), for F, I and W of equal length.

    Stages lie down the ranks and up again, so that a microbatch's first gradient is
    made on the rank where it began, and forwards need not run as far ahead: no rank is
    idle in between, as under ZB-H2, with p microbatches in flight, as under 1F1B.
    """
    _stages_a_rank("zb-v", stages_per_rank, "two", stages_per_rank == 2)
    m, p = microbatches, ranks
    phases = [
        [
            (2 * (p - r) - 1, "F0"),  # until the first microbatch is back
            (r, "F1 F0"),
            (p - r, "F1 I1 W1"),
            (max(m - p, 0), "F0 I0 W0 F1 I1 W1"),
            # Drain: gradients first, then the weight halves that were put off.
            (r, "I0 I1"),
            (p - r, "I0 W0"),
            (m, "I1 W1"),
            (m, "I0 W0"),
        ]
        for r in range(p)
    ]
    placement = down_and_up(ranks, stages_per_rank)
    return in_phases("zb-v", m, placement, phases)


def rounds(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage: around the ranks in rounds."""
    return tuple(range(ranks)) * stages_per_rank


def down_and_up(ranks: int, _: int) -> tuple[int, ...]:
    """The rank of each of two stages a rank."""
    return (*range(ranks), *reversed(range(ranks)))


@dataclass(frozen=True)
class NamedSchedule:
    """All that there is to say of a named schedule, for p ranks, m microbatches and v
    stages a rank.

    make: (p, m, v) -> compute actions of every rank. place: (p, v) -> the rank of each
    stage. stages_per_rank: those that the planner tries. in_flight: (p, m, v) ->
    microbatches in flight at most, on all stages of a rank together. put_off: weight
    halves that each rank puts off into others' gaps; None: backwards are whole. gains:
    (p, m) -> whether it may be faster than one that is tried before it; None: never.
    """

    make: Callable[[int, int, int], Schedule]
    place: Callable[[int, int], tuple[int, ...]] = rounds
    stages_per_rank: tuple[int, ...] = (1,)
    in_flight: Callable[[int, int, int], int] = lambda p, _, v: v * p
    put_off: int | None = None
    gains: Callable[[int, int], bool] | None = lambda p, m: True

    @property
    def halves(self) -> bool:
        """Whether backwards run in halves."""
        return self.put_off is not None


# What runs unless another is faster: whole backwards, few microbatches in flight.
USUAL_SCHEDULE = "1f1b"

# GPipe's has 1F1B's bubble and keeps more; naive is to compare with. Breadth first has
# the bubble of interleaved 1F1B, and keeps more; its groups are even where p does not
# divide m.
SCHEDULES: dict[str, NamedSchedule] = {
    "naive": NamedSchedule(naive, in_flight=lambda p, m, v: 1, gains=None),
    "gpipe": NamedSchedule(gpipe, in_flight=lambda p, m, v: m, gains=None),
    "1f1b": NamedSchedule(one_forward_one_backward),
    "interleaved": NamedSchedule(
        interleaved,
        stages_per_rank=(2, 3, 4, 6, 8),
        in_flight=lambda p, m, v: v * p + p - 1,
        gains=lambda p, m: m % p == 0,
    ),
    "looped-bfs": NamedSchedule(
        looped_bfs,
        stages_per_rank=(2, 3, 4, 6, 8),
        in_flight=lambda p, m, v: m * v,
        gains=lambda p, m: m % p != 0,
    ),
    "zb-h1": NamedSchedule(zero_bubble_h1, put_off=1),
    "zb-h2": NamedSchedule(
        zero_bubble_h2, in_flight=lambda p, m, v: 2 * p - 1, put_off=2
    ),
    "zb-v": NamedSchedule(zero_bubble_v, down_and_up, stages_per_rank=(2,), put_off=2),
}


def in_phases(
    name: str,
    microbatches: int,
    placement: Iterable[int],
    phases: Sequence[Sequence[Phase]],
) -> Schedule:
    """Put stage i on rank placement[i], and write out each rank's phases."""
    placement = tuple(placement)
    lines = []
    for rank, own in enumerate(phases):
        stages = [i for i, r in enumerate(placement) if r == rank]
        lines.append(_write_out(stages, microbatches, own))
    return Schedule(name, microbatches, placement, tuple(lines))


def _write_out(
    stages: Sequence[int], microbatches: int, phases: Iterable[Phase]
) -> tuple[Action, ...]:
    """Number the actions of phases from microbatch 0 up, for each stage and kind.

    Left out are forwards beyond the last microbatch, and backwards (or weight halves)
    that have caught up with the forwards (or input halves).
    """
    done: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for times, work in phases:
        steps = [(Kind(word[0]), int(word[1:])) for word in work.split()]
        for _ in range(times):
            for kind, chunk in steps:
                before = _AFTER.get(kind)
                limit = microbatches if before is None else done[before, chunk]
                if done[kind, chunk] < limit:
                    actions.append(Action(stages[chunk], kind, done[kind, chunk]))
                    done[kind, chunk] += 1
    return tuple(actions)


def _groups(count: int, parts: int) -> list[range]:
    """0 .. count - 1 in consecutive parts, the longer ones first."""
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + count // parts + (part < count % parts))
    return [range(*pair) for pair in pairwise(ends)]


def _one_stage_a_rank(name: str, count: int) -> None:
    _stages_a_rank(name, count, "one", count == 1)


def _stages_a_rank(name: str, count: int, wanted: str, fits: bool) -> None:
    if not fits:
        stages = "stage" if wanted == "one" else "stages"
        raise ScheduleError(
            f"schedule {name!r} runs {wanted} {stages} a rank, not {count}",
            fix=f"stages_per_rank={1 if wanted == 'one' else 2}",
        )
