"""`torchrun` for our own commands, whose ranks say themselves what failed, and once."""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """As torchrun, but an end that was asked for, or that ranks told of, is no error
    of the launcher: instead of a traceback there is a status."""
    logging.disable(logging.ERROR)
    try:
        run.main()
    except SignalException as asked:
        sys.exit(128 + asked.sigval)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        # As shells have it, for a rank that was killed.
        sys.exit(128 - first.exitcode if first.exitcode < 0 else first.exitcode)


if __name__ == "__main__":
    main()
