"""The lifetimes of messages' memory on the ranks that send and get them."""

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
    """Maps each RECV of a rank to the SENDs of that rank that it proves done.

    A message that a peer sends after it has received one shows that it has it, so the
    sender may free it. (gloo tells of a send only to one who waits for it.)
    """
    actions = schedule.ranks[rank]
    return {
        actions[recv]: [actions[send] for send, _ in sends]
        for recv, sends in groupby(schedule.completed[rank], key=itemgetter(1))
    }


def apart(
    actions: Sequence[Action],
) -> Iterator[tuple[Action, list[tuple[Action, ...]]]]:
    """Yields each action, with the messages that begin before it: the receives posted
    there, and its own send. For carriers that tell messages apart by tags."""
    for action, coming in prefetched_receives(actions):
        sends = [action] if action.kind.is_send else []
        yield action, [(message,) for message in (*coming, *sends)]


def prefetched_receives(
    actions: Sequence[Action],
) -> Iterator[tuple[Action, list[Action]]]:
    """Yields each action, with the receives that are posted before it."""
    coming = deque(a for a in actions if a.kind.is_recv)
    open_ = 0
    for action in actions:
        now = []
        while coming and open_ < AHEAD:
            now.append(coming.popleft())
            open_ += 1
        yield action, now
        open_ -= action.kind.is_recv
