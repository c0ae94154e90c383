"""How long a schedule's messages take up memory on the rank that sends or gets them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..schedule.schedule import Action, Schedule

# So many receives are posted before they are waited for: one is on its way while
# something is computed.
AHEAD = 2


def send_completions(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For each RECV of a rank, the SENDs of the rank that it proves to be done.

    What a peer sends after it has received a message says that it has it, so the
    sender may let go. (gloo tells of a send only to one who waits for it.)
    """
    # peer -> index in its list of what it receives from the rank; and what it answers.
    messages = (a for a in schedule.ranks[rank] if not a.kind.is_compute)
    peers = sorted({schedule.peer(a) for a in messages} - {rank})
    place = {
        action: index
        for peer in peers
        for index, action in enumerate(schedule.ranks[peer])
        if not action.kind.is_compute and schedule.peer(action) == rank
    }
    answers: dict[int, list[tuple[int, Action]]] = defaultdict(list)
    for action, index in place.items():
        if action.kind.is_send:
            answers[schedule.stage_to_rank[action.stage]].append(
                (index, action.partner)
            )
    completions: dict[Action, list[Action]] = defaultdict(list)
    waiting = {peer: deque(sorted(known)) for peer, known in answers.items()}
    for send in (a for a in schedule.ranks[rank] if a.kind.is_send):
        known = waiting.get(schedule.peer(send), deque())
        # Messages of a pair arrive in order, so what is too early stays too early.
        while known and known[0][0] < place[send.partner]:
            known.popleft()
        if known:
            completions[known[0][1]].append(send)
    return dict(completions)


def apart(
    actions: Sequence[Action],
) -> Iterator[tuple[Action, list[tuple[Action, ...]]]]:
    """Each action, with what begins before it, message by message: receives as they are
    posted, and the send that it is. Of carriers that tell messages apart by tags."""
    for action, coming in prefetched_receives(actions):
        sends = [action] if action.kind.is_send else []
        yield action, [(message,) for message in (*coming, *sends)]


def prefetched_receives(
    actions: Sequence[Action],
) -> Iterator[tuple[Action, list[Action]]]:
    """Each action, with the receives that are posted before it."""
    coming = deque(a for a in actions if a.kind.is_recv)
    open_ = 0
    for action in actions:
        now = []
        while coming and open_ < AHEAD:
            now.append(coming.popleft())
            open_ += 1
        yield action, now
        open_ -= action.kind.is_recv


def sizes(
    actions: Iterable[Action], received: Mapping[int, int], sent: Mapping[int, int]
) -> dict[Action, int]:
    """Bytes of each message. received, sent: of a stage's forward, by stage."""
    return {
        a: (received if a.kind.value in ("RECV_F", "SEND_B") else sent)[a.stage]
        for a in actions
        if not a.kind.is_compute
    }
