"""Work that may fail on a rank, done so that no other rank waits for it in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autopar.passes.errors import AutoparError
from autopar.runtime.comm.comm import Comm

S = TypeVar("S")
T = TypeVar("T")


def on_first(comm: Comm, work: Callable[[], T]) -> T:
    """Rank 0 works; all ranks return its result, or raise its error as AutoparError.

    Also a barrier: no rank goes on before rank 0 is done.
    """
    return agreed(comm.broadcast_object(outcome_of(work) if comm.rank == 0 else None))


def on_all(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Every rank works; all return all results by rank, or raise the first error."""
    return [agreed(outcome) for outcome in comm.gather_object(outcome_of(work))]


def joined_on_first(
    comm: Comm, work: Callable[[], S], join: Callable[[list[S]], T]
) -> T:
    """Runs `work` on every rank, and `join` on rank 0 with the results; all return what
    it returns, or raise the first error."""
    outcomes = comm.gather_to_first(outcome_of(work))
    return on_first(comm, lambda: join([agreed(one) for one in outcomes]))


def outcome_of(work: Callable[[], T]) -> tuple[T | None, AutoparError | None]:
    """Runs the work; returns its result, or its error as an AutoparError."""
    try:
        return work(), None
    except AutoparError as error:
        return None, error
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror or error}"
        return None, AutoparError(
            message,
            fix="see that the path is right and can be written, on a disk with room",
        )
    except Exception as error:  # of other libraries: the others must not wait for it
        failed = AutoparError(f"{type(error).__name__}: {error}")
        failed.__cause__ = error
        return None, failed


def agreed(outcome: tuple[T, AutoparError | None]) -> T:
    """Returns the result of an outcome, or raises its error."""
    result, error = outcome
    if error is not None:
        raise error
    return result
