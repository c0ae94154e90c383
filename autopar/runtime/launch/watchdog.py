"""Names the rank that failed: each puts its failure, and signs of life, in the store.

A rank that dies takes the others with it, by errors and timeouts that do not name it.
So a rank that raises writes that to the store of the process group, every rank counts
up a number there twice a second, and who is left reads both. Works for processes that
were killed, as long as the store lives: under torchrun it belongs to the launcher. When
that is killed, ranks end too. A script of the user's own is watched as well, see
`autopar.runtime.launch.uncaught`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from autopar.runtime.launch.errors_of_ranks import of_communication, record
from autopar.runtime.launch.hidden_error import HiddenError
from autopar.runtime.launch.meet import first_line, of_agent
from autopar.runtime.launch.nodes import Node, starts_again, this_node

BEAT = 0.5  # seconds between signs of life
FAILURE = "autopar/failure"
NO_LAUNCHER = "torchrun{} is gone or out of reach, and so its ranks stop"
TOLD = "torchrun ends this run"
FINAL = "autopar/final"  # whether a failure would come again
ENDED = "autopar/ended"  # ranks that were told to end, in order
LEFT = "autopar/left"  # ranks of a user's script that came to its end
LET_GO = "autopar/let go"  # how many ranks ask the store no more
KEPT = 5.0  # seconds, at most, that rank 0 keeps a store of its own for others
EXIT = 13  # status of a rank that stops because of another one


class Watchdog:
    """One rank's part. Use it as a context around the work.

    silence: seconds without a sign of life that tell, after a failure, who is gone.
    patience: seconds after which the next rank, once alive and silent since, is taken
    for dead though nothing failed yet; and the store for gone that does not answer: of
    a machine without power, or beyond a network that is cut, no connection ever breaks.
    grace: seconds after a failure elsewhere, until a rank stuck in a call that does not
    return is ended, by `leave`.
    to_the_end: whether ranks work together until all are done. Those of a user's script
    do not: one may end before others, and with it the store, or be busy for so long
    that it seems dead. It is ended where a failure was told, or its torchrun is gone.
    """

    at_work: ClassVar[Watchdog | None] = None  # in this process

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        *,
        silence: float = 5.0,
        patience: float = 30.0,
        grace: float = 5.0,
        leave: Callable[[int], object] = os._exit,
        node: Node | None = None,
        to_the_end: bool = True,
    ) -> None:
        # Who waits for something in a store keeps all others off its connection.
        self.store = store.clone()
        self.rank, self.world = rank, world
        self.silence, self.patience, self.grace = silence, patience, grace
        self._leave, self.to_the_end = leave, to_the_end
        self.node = node or this_node()
        self._parent = os.getppid()
        self._seen, self._since = 0, time.monotonic()  # of the next rank
        # Gets a byte for each signal, also where the main thread is in a long call.
        self.signals: socket.socket | None = None
        self._stop = threading.Event()
        self._answered = time.monotonic()  # when the store last did
        self._failure: str | None = None
        self._complained = set[str]()
        self._hidden = HiddenError()
        self._ended: str | None = None  # who has ended, where ranks have
        # One is in the store, which may never answer; the other is not.
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._ask, self._watch)
        ]

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        Watchdog.at_work = self
        self.tell_node()
        self._answered = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        Watchdog.at_work = None
        self._stop.set()
        # Not without it: a thread that is in the store when Python ends aborts it.
        asking, watching = self._threads
        watching.join()
        asking.join(self.patience)
        if asking.is_alive():
            self._end(self._no_store())
        if self.rank == 0 and not of_agent():
            self._await_others()

    def _await_others(self) -> None:
        """Keep the store, which ends with this process, until others ask it no more."""
        deadline = time.monotonic() + KEPT
        with suppress(RuntimeError):
            while self.store.add(LET_GO, 0) < self.world:
                if time.monotonic() > deadline:
                    return
                time.sleep(BEAT / 10)

    def publish(self, message: str) -> None:
        """Tell the others that this rank failed; the first to fail is kept."""
        self.agree(f"rank {self.rank}{self.node.on} failed: {message}")

    def cause(self, error: BaseException) -> str | None:
        """The failure elsewhere that made this rank fail; None: the error began here,
        and the others are told."""
        if of_communication(error) and (message := self.reason()) is not None:
            return message
        interrupted = isinstance(error, KeyboardInterrupt)
        self.publish("interrupted" if interrupted else first_line(error))
        return None

    def give_up(self) -> None:
        """Tell all ranks that they would fail again: no torchrun is to start them."""
        with suppress(RuntimeError):
            self.store.set(FINAL, "")

    def end_launcher(self) -> None:
        """End this node's torchrun, which would start ranks again that gave up; or
        would wait for a store that does not answer, and not even hear SIGTERM."""
        if os.getppid() != self._parent:
            return
        if self.store is GONE and of_agent() and not starts_again():
            os.kill(self._parent, signal.SIGKILL)
        with suppress(RuntimeError):
            if starts_again() and self.store.check([FINAL]):
                os.kill(self._parent, signal.SIGTERM)

    def agree(self, message: str) -> str:
        """Say this unless something was said; returns what was said first."""
        with suppress(RuntimeError):  # without a store there are no others
            return self.store.compare_set(FAILURE, "", message).decode()
        return message

    def reason(self) -> str | None:
        """Tells, after an error of communication, which ranks failed, if any did."""
        if self._failure is not None:
            return self._failure
        deadline = time.monotonic() + self.silence
        try:
            before = self._all_beats()
            while time.monotonic() < deadline:
                if (message := self._said()) is not None:
                    return message
                if (message := self.left()) is not None:
                    return self.agree(message)
                time.sleep(BEAT / 2)
            after = self._all_beats()
            # One that never beat has not started, and may only be slow.
            gone = [r for r in before if r != self.rank and 0 < before[r] == after[r]]
            return self.agree(self._no_answer(gone)) if gone else self._said()
        except RuntimeError:
            return self._ended or self._no_store()

    def ended(self) -> str:
        """Tells, after SIGTERM, what failed before, or who was sent it.

        torchrun tells all of its ranks to end. Where other ranks are well and were not
        told, someone else ended this one, and that is the reason for all that follows.
        """
        try:
            self.note_end()
            deadline, before = time.monotonic() + self.silence, self._all_beats()
            while time.monotonic() < deadline:
                if (message := self._said()) is not None:
                    return message
                if len(self._told()) == self.world:
                    return self.agree(TOLD)
                time.sleep(BEAT / 2)
            told, after = self._told(), self._all_beats()
            gone = [r for r in before if r not in told and 0 < before[r] == after[r]]
            return self.agree(
                self._no_answer(gone) if gone else self._told_to_end(told)
            )
        except RuntimeError:
            return self._no_store()

    def _all_beats(self) -> dict[int, int]:
        return self._beats(range(self.world))

    def tell_node(self) -> None:
        """Tells the others which node this rank is on."""
        self.store.set(f"autopar/node/{self.rank}", self.node.on)

    def note_end(self) -> None:
        """Tell the others that this rank was told to end; once is enough."""
        if self.rank not in self._told():
            self.store.append(ENDED, f"{self.rank} ")

    def note_left(self) -> None:
        """Tells the others that this rank has ended its script."""
        with suppress(RuntimeError):  # without a store there are no others
            self.store.append(LEFT, f"{self.rank} ")

    def left(self) -> str | None:
        """Names the ranks that have ended, if any did."""
        with suppress(RuntimeError):
            if ranks := self._listed(LEFT):
                self._ended = (
                    f"{self._named(ranks)} ended while others still wait for it\n"
                    "  fix  call the step as often on all ranks: step.batches(loader) "
                    "gives each as many batches"
                )
        return self._ended

    def _told(self) -> list[int]:
        """The ranks that were told to end."""
        return self._listed(ENDED)

    def _listed(self, key: str) -> list[int]:
        """The ranks that were appended to a key."""
        if not self.store.check([key]):
            return []
        return sorted({int(rank) for rank in self.store.get(key).split()})

    def complain(self, message: str) -> None:
        """Print a failure to stderr: each node once, each rank without a store."""
        if message in self._complained:
            return
        self._complained.add(message)
        try:
            first = self.store.add(f"autopar/printed/{self.node.number}", 1) == 1
        except RuntimeError:
            first = True
        if first:
            with suppress(OSError):  # a terminal that is gone
                print(f"\nautopar: {message}", file=sys.stderr, flush=True)

    # --- the store -----------------------------------------------------------------

    def _said(self) -> str | None:
        """The first message, if there is one by now."""
        return self.store.get(FAILURE).decode() if self.store.check([FAILURE]) else None

    def _beats(self, ranks: Iterable[int]) -> dict[int, int]:
        return {r: self.store.add(f"autopar/beat/{r}", 0) for r in ranks}

    def _named(self, ranks: list[int]) -> str:
        """`rank 1, rank 2`; where there are more nodes, `rank 3 on node 1 (host b)`."""
        keys = [f"autopar/node/{r}" for r in ranks]
        known = (
            self.store.multi_get(keys) if self.store.check(keys) else [b""] * len(keys)
        )
        on_node: dict[bytes, list[str]] = {}
        for rank, on in zip(ranks, known, strict=True):
            on_node.setdefault(on, []).append(f"rank {rank}")
        return ", ".join(", ".join(who) + on.decode() for on, who in on_node.items())

    def _told_to_end(self, ranks: list[int]) -> str:
        names = self._named(ranks)
        return f"{names} got SIGTERM, and no other rank did (killed, or out of time?)"

    def _no_answer(self, ranks: list[int]) -> str:
        verb = "does" if len(ranks) == 1 else "do"
        return f"{self._named(ranks)} {verb} not answer (killed or hung?)"

    def _no_store(self) -> str:
        """Tells who held the store that is gone, and asks it no more."""
        self.store = GONE
        host = os.environ.get("MASTER_ADDR", "")
        on = f" on host {host}" if self.node.nodes > 1 else ""
        if os.getppid() == self._parent and not of_agent():
            return f"rank 0{on} does not answer (killed or hung?)"
        return NO_LAUNCHER.format(on)

    # --- the threads ---------------------------------------------------------------

    def _ask(self) -> None:
        """Sends beats until there is a failure, and tells it."""
        while self._failure is None and not self._stop.wait(BEAT):
            try:
                self._failure = self._beat()
            except RuntimeError:
                if not self.to_the_end:
                    self.store = GONE
                    break
                self._failure = self._no_store()
            self._answered = time.monotonic()
            if self._keeper_left():
                break
        if self._failure is not None and not self._stop.is_set():
            self.complain(self._failure)
        with suppress(RuntimeError):
            self.store.add(LET_GO, 1)
        if self._keeper_left():
            self.store = GONE

    def _keeper_left(self) -> bool:
        """Whether rank 0, which holds the store, has ended its script."""
        if self.to_the_end or self.rank == 0 or of_agent():
            return False
        with suppress(RuntimeError):
            return self.left() is not None and 0 in self._listed(LEFT)
        return False

    def _watch(self) -> None:
        """End this rank if it does not end by itself, after a failure or without word
        of the store."""
        while self._failure is None and not self._stop.wait(BEAT):
            late = time.monotonic() - self._answered
            if self.to_the_end and late > self.patience:
                self._failure = self._no_store()
        # The main thread has time to fail by itself, or to end if all is over.
        if self._failure is not None and not self._stop.wait(self.grace):
            self._end(self._failure)

    def _end(self, message: str) -> None:
        self.complain(message)
        self.end_launcher()
        self._leave(EXIT)

    def _beat(self) -> str | None:
        """Give a sign of life, and look for one of the next rank: a ring, which does
        not flood the store. Returns what was said of a failure."""
        self.store.add(f"autopar/beat/{self.rank}", 1)
        if self.signals is not None and _pending(self.signals):
            self.note_end()
        launched = self.to_the_end or dist.is_torchelastic_launched()
        if launched and os.getppid() != self._parent:
            # Its ranks are in sessions of their own, and nobody ends them.
            return self.agree(NO_LAUNCHER.format(self.node.on))
        if (error := self._hidden.look(self.store)) is not None:
            where = error.__traceback__
            traceback.print_exception(type(error), error, where)
            record(error, where)
            self.publish(first_line(error))
        if not self.to_the_end:
            return self._said()
        neighbour = (self.rank + 1) % self.world
        beat, now = self._beats([neighbour])[neighbour], time.monotonic()
        # One that never beat has not started, and may only be slow.
        if beat != self._seen or beat == 0 or neighbour == self.rank:
            self._seen, self._since = beat, now
        elif now - self._since > self.patience:
            return self.agree(self._no_answer([neighbour]))
        return self._said()


class _Gone:
    """A stand-in for a store that does not answer."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("the store is gone")


GONE: Any = _Gone()


def _pending(signals: socket.socket) -> bool:
    """Whether SIGTERM came since this was last asked."""
    try:
        return signal.SIGTERM in signals.recv(64)
    except OSError:  # none came, or the rank ends
        return False
