"""What rank 0 leaves on a disk is there when the others look."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from autopar.runtime.launch.first_then_all import first_then_all


def test_rank_0_is_done_before_others_begin_and_none_goes_on_before_all_are() -> None:
    store, told = dist.HashStore(), list[str]()

    def rank(number: int) -> None:
        def work() -> None:
            told.append(f"{number} begins")
            time.sleep(0.02 * (3 - number))
            told.append(f"{number} is done")

        first_then_all(store, number, 3, work)
        told.append(f"{number} goes on")

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(rank, number) for number in (2, 1, 0)]:
            done.result(timeout=30)
    assert told[:2] == ["0 begins", "0 is done"]
    assert all(line.endswith("goes on") for line in told[-3:])
