"""One order of a pipeline's messages for all ranks, and which of them go together.

NCCL has no tags, and what a communicator carries runs one after the other: a send may
last until its receive has begun, and neither may be passed by what was called later.
Two ranks that call theirs in different orders wait for each other for ever; so may two
communicators, one for each direction, as kernels of one can hold the device while the
other's wait (NVIDIA/nccl issue 783). With one communicator, and all ranks' calls in an
order that is part of one order of all messages, none does (issue 784, J. Bachan).

That order is by when messages leave, were each forward half as long as a backward. Two
that then cross between two ranks are one exchange, if each rank has what it sends
before it needs what it gets; those that leave earlier are not held back for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..cost import Seconds
from ..schedule.messages import AHEAD
from ..schedule.schedule import Action, Kind, Schedule, ScheduleError
from ..schedule.simulate_schedule import simulate

Exchange = tuple[Action, ...]  # messages of one rank with another one, at once


def exchanges(schedule: Schedule) -> tuple[tuple[Exchange, ...], ...]:
    """What each pipeline rank sends and receives in turn, for a schedule with messages.

    Raises: ScheduleError, if that schedule cannot run, or not so.
    """
    spans = simulate(schedule, [Seconds(1.0, 1.0, 1.0)] * schedule.stages).spans
    sends = sorted(
        (span.end, rank, index, span.action)
        for rank, own in enumerate(spans)
        for index, span in enumerate(own)
        if span.action.kind.is_send
    )
    place = {a: i for own in schedule.ranks for i, a in enumerate(own)}
    exchanged: list[list[list[Action]]] = [[] for _ in schedule.ranks]
    begun: dict[int, float] = {}  # rank -> when its last exchange was
    for now, rank, _, send in sends:
        recv, peer = send.partner, schedule.peer(send)
        mine, theirs = exchanged[rank], exchanged[peer]
        if (
            begun.get(rank) == begun.get(peer) == now
            and {a.partner for a in mine[-1]} == set(theirs[-1])
            and _go_together(mine[-1], send, place)
            and _go_together(theirs[-1], recv, place)
        ):  # fmt: skip
            mine[-1].append(send)
            theirs[-1].append(recv)
        else:
            mine.append([send])
            theirs.append([recv])
            begun[rank] = begun[peer] = now
    orders = tuple(tuple(map(tuple, own)) for own in exchanged)
    check_exchanges(schedule, orders)
    return orders


def _go_together(
    begun: Sequence[Action], more: Action, place: Mapping[Action, int]
) -> bool:
    """Whether messages can be exchanged at once: the rank has all that it sends before
    it needs what it receives, with one message each way."""
    if len(begun) > 1 or begun[0].kind.is_send == more.kind.is_send:
        return False
    recv, send = sorted((begun[0], more), key=lambda a: a.kind.is_send)
    return place[send] < place[recv]


def in_turn(
    actions: Sequence[Action], order: Sequence[Exchange]
) -> Iterator[tuple[Action, list[Exchange]]]:
    """Yields each action of a rank, with the exchanges that it begins before it.

    One begins when all before it have, and the actions that send are reached. One that
    only receives waits until fewer than `AHEAD` are open, unless messages wait behind.
    """
    coming, open_ = deque(order), 0
    ready: set[Action] = set()
    begun: set[Action] = set()
    for action in actions:
        if action.kind.is_send:
            ready.add(action)
        needed = action.kind.is_recv and action not in begun
        now = []
        while coming and (sends := _sends(coming[0])) <= ready:
            receives = len(coming[0]) - len(sends)
            if open_ + receives > AHEAD and not (ready or needed):
                break
            now.append(coming.popleft())
            begun.update(now[-1])
            ready -= sends
            open_ += receives
            needed = needed and action not in begun
        yield action, now
        open_ -= action.kind.is_recv


def _sends(exchange: Exchange) -> set[Action]:
    return {a for a in exchange if a.kind.is_send}


def of_kinds(order: Sequence[Exchange], kinds: Collection[Kind]) -> list[Exchange]:
    """The same order of some messages alone, as those of a forward."""
    chosen = (tuple(a for a in one if a.kind in kinds) for one in order)
    return [one for one in chosen if one]


def check_exchanges(schedule: Schedule, orders: Sequence[Sequence[Exchange]]) -> None:
    """Prove that ranks that begin exchanges in these orders never wait in a circle.

    It runs all ranks' actions where that is worst: an exchange lasts until the same one
    has begun on the other rank, and until then none behind it does anything.
    Raises: ScheduleError, which names what is left.
    """
    left = [deque(in_turn(*both)) for both in zip(schedule.ranks, orders, strict=True)]
    begun: list[deque[Exchange]] = [deque() for _ in orders]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(left):
            while own:
                action, begins = own[0]
                begun[rank].extend(begins)
                begins.clear()
                if action.kind.is_recv and action not in done:
                    break
                own.popleft()
                moved = True
            while begun[rank]:
                mine = begun[rank][0]
                others = begun[schedule.peer(mine[0])]
                if not others or set(others[0]) != {a.partner for a in mine}:
                    break
                done.update(begun[rank].popleft(), others.popleft())
                moved = True
    messages = {a for own in schedule.ranks for a in own if not a.kind.is_compute}
    if done != messages or any(left):
        waiting = [
            f"rank {rank} waits at {own[0][0] if own else 'its end'}, for "
            f"{' '.join(map(str, queue[0])) if queue else 'nothing that has begun'}"
            for rank, (own, queue) in enumerate(zip(left, begun, strict=True))
            if own or queue
        ]
        raise ScheduleError(
            f"schedule {schedule.name}: ranks begin messages in orders that do not "
            "pair up\n  " + "\n  ".join(waiting)
        )
