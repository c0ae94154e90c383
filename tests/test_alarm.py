"""When a rank fails, the others say which one it was."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from autopar.runtime.alarm import EXIT, Alarm, Terminated, guarded
from passes.errors import AutoparError


@pytest.fixture
def alarms() -> Iterator[list[Alarm]]:
    """Three ranks of one process, which beat until the test ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        yield [
            stack.enter_context(Alarm(store, rank, 3, silence=1.5)) for rank in range(3)
        ]
    signal.signal(signal.SIGTERM, before)


def wait_for_beats(alarm: Alarm) -> None:
    for _ in range(100):
        if all(alarm._beats().values()):
            return
        alarm._stop.wait(0.05)
    raise AssertionError("some rank never beat")


def test_a_failure_reaches_the_others(alarms: list[Alarm]) -> None:
    alarms[1].publish("OutOfMemoryError: too big")
    assert alarms[0].reason() == "rank 1 failed: OutOfMemoryError: too big"


def test_the_first_failure_is_the_reason(alarms: list[Alarm]) -> None:
    alarms[2].publish("ValueError: root cause")
    alarms[1].publish("RuntimeError: connection closed")
    assert alarms[0].reason() == "rank 2 failed: ValueError: root cause"


def test_a_silent_rank_is_found(alarms: list[Alarm]) -> None:
    wait_for_beats(alarms[0])
    alarms[2].__exit__()
    assert alarms[0].reason() == "rank 2 does not answer (killed or hung?)"


def test_ranks_that_are_well_are_not_blamed(alarms: list[Alarm]) -> None:
    wait_for_beats(alarms[0])
    assert alarms[0].reason() is None


def test_a_rank_that_has_not_started_is_not_blamed() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert Alarm(store, 0, 2, silence=0.5).reason() is None


def test_a_neighbour_in_silence_is_reported(alarms: list[Alarm]) -> None:
    wait_for_beats(alarms[0])
    store = alarms[0].store
    with Alarm(store, 3, 5, patience=1.0) as watcher:  # watches rank 4
        for _ in range(100):
            if watcher._said() is not None:
                break
            watcher._stop.wait(0.05)
        assert watcher._said() == "rank 4 does not answer (killed or hung?)"


def test_an_error_of_another_rank_is_told(
    alarms: list[Alarm], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        alarms[1].publish("KeyError: 'x'")
        raise RuntimeError("Connection closed by peer")

    assert guarded(alarms[0], body) == EXIT
    assert capsys.readouterr().err == "\nautopar: rank 1 failed: KeyError: 'x'\n"
    assert guarded(alarms[2], body) == EXIT
    assert capsys.readouterr().err == ""  # said once


def test_an_error_of_this_rank_is_raised_and_published(alarms: list[Alarm]) -> None:
    def body() -> None:
        raise ValueError("mine\nand more")

    with pytest.raises(ValueError, match="mine"):
        guarded(alarms[0], body)
    assert alarms[1].reason() == "rank 0 failed: ValueError: mine"


def test_an_error_of_the_users_is_text(
    alarms: list[Alarm], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise AutoparError("wrong mesh", fix="another")

    assert guarded(alarms[0], body) == 2
    assert capsys.readouterr().err == "\nautopar: wrong mesh\n  fix  another\n"


def test_a_launcher_that_stops_us_is_obeyed(alarms: list[Alarm]) -> None:
    def body() -> None:
        wait_for_beats(alarms[0])
        signal.raise_signal(signal.SIGTERM)

    assert guarded(alarms[0], body) == 128 + signal.SIGTERM
    assert issubclass(Terminated, BaseException)
    assert not issubclass(Terminated, Exception)


def test_work_that_ends_well_is_status_0(alarms: list[Alarm]) -> None:
    assert guarded(alarms[0], lambda: None) == 0
