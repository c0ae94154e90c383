"""The work of a rank of ours, whose end, however it comes, is told once."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autopar.passes.errors import AutoparError
from autopar.runtime.launch.watchdog import EXIT, TOLD, Watchdog


class Terminated(BaseException):
    """The launcher ends this process, as it does when another one failed."""


def guarded(watchdog: Watchdog, body: Callable[[], None]) -> int:
    """Run the body; returns the exit status. Prints, once, which rank failed and why.

    Raises what is no AutoparError and began on this rank.
    """
    signal.signal(signal.SIGTERM, _terminate)
    with _waking(watchdog):
        return _guarded(watchdog, body)


def _guarded(watchdog: Watchdog, body: Callable[[], None]) -> int:
    try:
        try:
            body()
            return 0
        finally:  # told to end while it ends, a rank would only say less of why
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except AutoparError as error:
        watchdog.give_up()
        watchdog.publish(str(error))
        watchdog.complain(str(error))
        watchdog.end_launcher()
        return 2
    except BaseException as error:
        by_signal = isinstance(error, Terminated)
        message = watchdog.ended() if by_signal else watchdog.cause(error)
        if message is not None:
            watchdog.complain(message)
            watchdog.end_launcher()
            return EXIT if message != TOLD else 128 + signal.SIGTERM
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        raise


def _terminate(signum: int, frame: object) -> None:
    raise Terminated


@contextmanager
def _waking(watchdog: Watchdog) -> Iterator[None]:
    """Let the watchdog's thread see signals that the main thread cannot handle yet."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        watchdog.signals = ours
        try:
            yield
        finally:
            watchdog.signals = None
            signal.set_wakeup_fd(before)
