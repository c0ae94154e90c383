"""Threads of which one runs at a time, and which know when none of them can go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import NoReturn


class Stopped(BaseException):
    """Unwinds a thread after another one failed; no handler of Exception stops it."""


class CooperativeScheduler:
    """Threads 0 to n-1; one of them runs at a time.

    The order in which they run depends on their calls alone, so it repeats. When all
    wait, `on_stuck` makes the error of it, from what each waiting thread says.
    """

    def __init__(self, n: int, on_stuck: Callable[[dict[int, str]], Exception]) -> None:
        self._on_stuck = on_stuck
        self._ready = deque(range(n))
        self._waits: dict[int, tuple[Hashable, Callable[[], str]]] = {}
        self._gates = [threading.Lock() for _ in range(n)]
        self._failure: BaseException | None = None
        self._ended: SimpleQueue[int] = SimpleQueue()

    def run(self, body: Callable[[int], None]) -> None:
        """Runs body(i) in every thread to its end, then raises what one of them raised.

        An interrupt of the caller ends the threads where they next wait, and then it.
        """
        threads = []
        for i, gate in enumerate(self._gates):
            gate.acquire()
            thread = threading.Thread(target=self._run_one, args=(body, i), daemon=True)
            thread.start()
            threads.append(thread)
        self._hand_on()
        try:
            for _ in threads:
                # Not by join: interrupted, it takes a thread that still runs for ended.
                self._ended.get()
        except BaseException as interrupt:
            self._failure = interrupt
            raise
        finally:  # a thread that outlives Python may abort the process
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def wait(self, i: int, key: Hashable, why: Callable[[], str]) -> None:
        """Let others run until one of them wakes `key`; called by thread i."""
        self.check()
        self._waits[i] = (key, why)
        self._hand_on()
        self._gates[i].acquire()
        self.check()

    def wake(self, key: Hashable) -> None:
        """Let the threads that wait for `key` go on, in their turn."""
        for i in sorted(i for i, (waited, _) in self._waits.items() if waited == key):
            del self._waits[i]
            self._ready.append(i)

    def stop(self, error: BaseException) -> NoReturn:
        """Make all threads end; `run` raises the error. A later error is dropped: it
        comes of the first one."""
        self._failure = self._failure or error
        raise Stopped

    def check(self) -> None:
        """Raise Stopped if a thread has failed."""
        if self._failure is not None:
            raise Stopped

    def _run_one(self, body: Callable[[int], None], i: int) -> None:
        self._gates[i].acquire()
        try:
            self.check()
            body(i)
        except Stopped:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._hand_on()
            self._ended.put(i)

    def _hand_on(self) -> None:
        """Lets the next thread run that can."""
        if self._waits and not self._ready and self._failure is None:
            waits = {i: why() for i, (_, why) in sorted(self._waits.items())}
            self._failure = self._on_stuck(waits)
        if self._failure is not None:
            self._ready.extend(sorted(self._waits))
            self._waits.clear()
        if self._ready:
            self._gates[self._ready.popleft()].release()
