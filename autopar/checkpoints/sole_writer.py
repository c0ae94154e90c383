"""One process at a time writes to a directory of checkpoints.

Two would take away what the other is writing, as if a killed save had left it. The lock
is the system's own (`flock`), so none is left when a process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.checkpoints.dcp import CheckpointError

LOCK = ".writer"
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_held: dict[Path, list[int]] = {}  # of this process: the file, once for each holder


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Keep other processes from writing there; this one may ask several times.

    Raises: CheckpointError, naming the process that does; OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    where = directory.resolve()
    held = _held.setdefault(where, [])
    if not held:
        held.append(_lock(where / LOCK))
    held.append(held[0])
    try:
        yield
    finally:
        held.pop()
        if len(held) == 1:
            del _held[where]
            # While it is ours: who waits for it looks whether it is still there.
            (where / LOCK).unlink(missing_ok=True)
            os.close(held[0])


def _lock(path: Path) -> int:
    """An open file that stands for the right to write."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = os.pread(file, 200, 0).decode(errors="replace").strip()
            if error.errno in TAKEN:
                os.close(file)
                raise CheckpointError(
                    f"'{path.parent}' has checkpoints written to it by another run: "
                    f"{who or 'a process'}",
                    fix="give each run a directory of its own, or end that one first",
                ) from None
            # A file system without locks: there is no more to be done.
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.truncate(file, 0)
            os.pwrite(
                file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
            )
            return file
        os.close(file)  # who had it took it away
