"""How long a schedule's messages take up memory on the rank that sends or gets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from ..schedule.schedule import Action, Schedule

# So many receives are posted before they are waited for: one is on its way while
# something is computed.
AHEAD = 2


def send_completions(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For each RECV of a rank, the SENDs of the rank that it proves to be done.

    What a peer sends after it has received a message says that it has it, so the
    sender may let go. (gloo tells of a send only to one who waits for it.)
    """
    actions = schedule.ranks[rank]
    return {
        actions[recv]: [actions[send] for send, _ in sends]
        for recv, sends in groupby(schedule.completed[rank], key=itemgetter(1))
    }


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
