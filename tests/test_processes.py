"""A rank of a test that fails is named, whatever way it fails."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from collections.abc import Callable

import pytest
import torch.distributed as dist
from processes import ENVIRONMENT, PRELOADED, RankFailed, collect, run_ranks


def fail(how: Callable[[], None]) -> None:
    if dist.get_rank() == 0:
        how()


def raise_error() -> None:
    raise ValueError("rank 0 has a problem")


def die() -> None:
    os._exit(3)


def missing() -> list[str]:
    return [name for name in PRELOADED if name not in sys.modules]


@pytest.mark.slow
def test_ranks_begin_with_what_takes_long_to_import() -> None:
    """A server has one list of modules, which nothing else that tests import sets."""
    assert run_ranks(missing, 1) == [[]]


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 raised.*ValueError: rank 0 has"):
        run_ranks(fail, 4, raise_error)
    with pytest.raises(RankFailed, match="rank 0 died without a word"):
        run_ranks(fail, 4, die)


def test_a_rank_that_hangs_is_named() -> None:
    pipes = [mp.Pipe() for _ in range(3)]
    for _, theirs in pipes[1:]:
        theirs.send(("done", None))
    with pytest.raises(RankFailed, match=r"ranks \[0\] were not done in time"):
        collect([ours for ours, _ in pipes], deadline=0.0)


def test_processes_read_nothing_of_the_user() -> None:
    """What tests start has the environment that the whole suite has."""
    for name in ("XDG_CACHE_HOME", "AUTOPAR_CHECK", "COLUMNS"):
        assert ENVIRONMENT[name] == os.environ[name]
