"""An error that a script handles by a collective is seen where other ranks wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.agreement.roll_call import RollCall
from autopar.runtime.launch import hidden_error
from autopar.runtime.launch.hidden_error import HiddenError


@pytest.mark.parametrize("waiting", [0, 1])
def test_an_error_that_a_collective_hides_is_seen_where_others_wait(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_error, "LATE", 0.1)
    store, seen, done = dist.HashStore(), list[object](), threading.Event()
    store.add(hidden_error.WAITING, waiting)
    of_torch: dict[str, Any] = {"__name__": "torch.distributed.own", "done": done}
    exec("def barrier(): done.wait(30)", of_torch)

    def look() -> None:
        hidden = HiddenError()
        for _ in range(50):
            seen.append(hidden.look(store))
            threading.Event().wait(0.01)
        done.set()

    thread = threading.Thread(target=look)
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        try:
            raise error
        finally:
            thread.start()
            of_torch["barrier"]()
    thread.join()
    assert seen[0] is None and seen[-1] is (error if waiting else None)


def test_an_operation_that_lasts_is_told_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, store = HiddenError(), dist.HashStore()
    for operation, told in [(1, 0), (1, 1), (2, 0), (2, 1), (2, 1), (None, 0)]:
        monkeypatch.setattr(RollCall, "under_way", operation)
        assert hidden.look(store) is None
        assert store.add(hidden_error.WAITING, 0) == told
