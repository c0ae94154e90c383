"""Which rank failed: each publishes its failure, and a sign of life, in the store.

A rank that dies takes the others with it, by errors and timeouts that do not name it.
So a rank that raises writes that to the store of the process group, every rank counts
up a number there twice a second, and who is left reads both. Works for processes that
were killed, as long as the store lives: under torchrun it belongs to the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

import torch.distributed as dist

from passes.errors import AutoparError

BEAT = 0.5  # seconds between signs of life
FAILURE = "autopar/failure"
EXIT = 13  # status of a rank that stops because of another one


class Alarm:
    """One rank's part. Use it as a context around the work.

    silence: seconds without a sign of life that tell, after a failure, who is gone.
    patience: seconds without a sign of life after which the next rank is taken for
    dead though nothing failed yet. A rank stuck in a call that does not return is ended
    half of that after a failure elsewhere.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        patience: float = 10.0,
        silence: float = 3.0,
    ) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.patience, self.silence = patience, silence
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Alarm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2 * BEAT)

    def publish(self, what: str) -> None:
        """Tell the others that this rank failed; the first to fail is kept."""
        self._say(f"rank {self.rank} failed: {what}")

    def reason(self) -> str | None:
        """After an error of communication: which ranks failed, if any did."""
        deadline = time.monotonic() + self.silence
        before = self._beats()
        while time.monotonic() < deadline:
            if (said := self._said()) is not None:
                return said
            time.sleep(BEAT / 2)
        after = self._beats()
        # One that never beat has not started, and may only be slow.
        gone = [r for r in before if r != self.rank and 0 < before[r] == after[r]]
        if not gone:
            return None
        self._say(_no_answer(gone))
        return self._said() or _no_answer(gone)

    # --- the store -----------------------------------------------------------------

    def _say(self, what: str) -> None:
        if self.store.add(f"{FAILURE}/claimed", 1) == 1:
            self.store.set(FAILURE, what)

    def _said(self) -> str | None:
        """What was said first, without waiting for it."""
        return self.store.get(FAILURE).decode() if self.store.check([FAILURE]) else None

    def _beats(self, ranks: Iterable[int] | None = None) -> dict[int, int]:
        chosen = range(self.world) if ranks is None else ranks
        return {r: self.store.add(f"autopar/beat/{r}", 0) for r in chosen}

    # --- the thread ----------------------------------------------------------------

    def _watch(self) -> None:
        """Beat, and look at the next rank: a ring, which does not flood the store."""
        neighbour = (self.rank + 1) % self.world
        seen, since = -1, time.monotonic()
        while not self._stop.wait(BEAT):
            try:
                self.store.add(f"autopar/beat/{self.rank}", 1)
                said = self._said()
                beat = self._beats([neighbour])[neighbour]
            except RuntimeError:
                return  # the store is gone: so is the launcher, or the run is over
            now = time.monotonic()
            if beat != seen or neighbour == self.rank:
                seen, since = beat, now
            elif now - since > self.patience and said is None:
                self._say(_no_answer([neighbour]))
            if said is not None:
                self._end(said)

    def _end(self, said: str) -> None:
        """Give the main thread time to fail by itself, then end the process."""
        if not self._stop.wait(self.patience / 2):
            complain(self.store, said)
            os._exit(EXIT)


def complain(store: dist.Store, what: str) -> None:
    """Print a failure to stderr, once for all ranks."""
    if store.add("autopar/printed", 1) == 1:
        print(f"\nautopar: {what}", file=sys.stderr, flush=True)


class Terminated(BaseException):
    """The launcher ends this process, as it does when another one failed."""


def guarded(alarm: Alarm, body: Callable[[], None]) -> int:
    """Run the body; returns the exit status. Prints, once, which rank failed and why.

    Raises what is no AutoparError and began on this rank.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        body()
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except AutoparError as error:
        alarm.publish(str(error))
        complain(alarm.store, str(error))
        return 2
    except (RuntimeError, Terminated) as error:
        # A peer that is gone or late shows as a plain RuntimeError of gloo.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        said = alarm.reason()
        if said is not None:
            complain(alarm.store, said)
            return EXIT
        if isinstance(error, Terminated):
            return 128 + signal.SIGTERM
        alarm.publish(_first_line(error))
        raise
    except Exception as error:
        alarm.publish(_first_line(error))
        raise


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _no_answer(ranks: list[int]) -> str:
    names = ", ".join(f"rank {r}" for r in ranks)
    return f"{names} {'does' if len(ranks) == 1 else 'do'} not answer (killed or hung?)"
