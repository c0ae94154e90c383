"""When a rank fails, the others say which one it was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import pytest
import torch.distributed as dist

from autopar.passes.errors import AutoparError
from autopar.runtime.launch.guarded import Terminated, guarded
from autopar.runtime.launch.nodes import Node
from autopar.runtime.launch.watchdog import BEAT, EXIT, NO_LAUNCHER, TOLD, Watchdog

end_by_signal = partial(signal.raise_signal, signal.SIGTERM)
NO_STORE = "rank 0 does not answer (killed or hung?)"  # it keeps it, without torchrun


def lose_connection() -> None:
    raise dist.DistNetworkError("Connection closed by peer")


class Clock:
    """As much of `time` as a watchdog reads; while it sleeps, ranks that live beat."""

    def __init__(self) -> None:
        self.now, self.living = 0.0, list[Watchdog]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for watchdog in self.living:
            watchdog._beat()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("autopar.runtime.launch.watchdog.time", made)
    return made


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def watchdogs(store: dist.Store, clock: Clock) -> Iterator[list[Watchdog]]:
    """Three ranks of one process, which have all begun to beat."""
    before = signal.getsignal(signal.SIGTERM)
    clock.living = [Watchdog(store, rank, 3) for rank in range(3)]
    clock.sleep(BEAT)
    yield list(clock.living)
    signal.signal(signal.SIGTERM, before)


def test_a_failure_reaches_the_others(watchdogs: list[Watchdog]) -> None:
    watchdogs[1].publish("OutOfMemoryError: too big")
    assert watchdogs[0].reason() == "rank 1 failed: OutOfMemoryError: too big"


def test_the_first_failure_is_the_reason(watchdogs: list[Watchdog]) -> None:
    watchdogs[2].publish("ValueError: root cause")
    watchdogs[1].publish("RuntimeError: connection closed")
    assert watchdogs[0].reason() == "rank 2 failed: ValueError: root cause"


def test_a_silent_rank_is_found(watchdogs: list[Watchdog], clock: Clock) -> None:
    clock.living.remove(watchdogs[2])
    assert watchdogs[0].reason() == "rank 2 does not answer (killed or hung?)"
    assert watchdogs[1]._said() == "rank 2 does not answer (killed or hung?)"


def test_ranks_that_are_well_are_not_blamed(
    watchdogs: list[Watchdog], clock: Clock
) -> None:
    assert watchdogs[0].reason() is None
    for _ in range(200):
        clock.sleep(BEAT)
    assert watchdogs[0]._said() is None


def test_a_rank_that_has_not_started_is_not_blamed(
    store: dist.Store, clock: Clock
) -> None:
    watchdog = Watchdog(store, 0, 2)
    clock.living = [watchdog]
    assert watchdog.reason() is None
    for _ in range(200):
        clock.sleep(BEAT)
    assert watchdog._said() is None


def test_a_neighbour_in_silence_is_reported(
    watchdogs: list[Watchdog], clock: Clock
) -> None:
    clock.living.remove(watchdogs[1])
    began = clock.now
    while watchdogs[2]._said() is None:
        clock.sleep(BEAT)
    assert watchdogs[2]._said() == "rank 1 does not answer (killed or hung?)"
    assert watchdogs[0].patience < clock.now - began < watchdogs[0].patience + 3 * BEAT


@pytest.mark.slow
def test_who_waits_for_the_store_still_beats(store: dist.Store) -> None:
    """Its main thread waits for another rank's word, as while rank 0 compiles."""
    with Watchdog(store, 0, 1) as watchdog, ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.wait, ["word"])
        start = watchdog._beats([0])[0]
        while watchdog._beats([0])[0] < start + 2:
            assert not waiting.done()
        Watchdog(store, 0, 1).store.set("word", "")
        waiting.result()


@pytest.mark.parametrize("cause", ["a failure", "no launcher"])
def test_a_rank_that_is_stuck_is_ended(
    store: dist.Store, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    left = SimpleQueue[int]()
    with Watchdog(store, 0, 2, grace=0.1, leave=left.put) as watchdog:
        if cause == "a failure":
            Watchdog(store, 1, 2).publish("KeyError: 'x'")
        else:
            watchdog.store = LostStore()
        assert left.get() == EXIT
    said = "rank 1 failed: KeyError: 'x'" if cause == "a failure" else NO_STORE
    assert capsys.readouterr().err == f"\nautopar: {said}\n"


class LostStore:
    """The store of a launcher that was killed."""

    def clone(self) -> LostStore:
        return self

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were sent a signal."""
    found: list[int] = []
    monkeypatch.setattr("os.kill", lambda process, number: found.append(process))
    return found


def test_who_kept_the_store_is_told(
    watchdogs: list[Watchdog],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ended: list[int],
) -> None:
    """torchrun is ended, which would wait for it too."""

    def body() -> None:
        watchdogs[0].store = LostStore()
        lose_connection()

    assert guarded(watchdogs[0], body) == EXIT
    assert capsys.readouterr().err == f"\nautopar: {NO_STORE}\n"
    assert ended == []
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert guarded(watchdogs[0], body) == EXIT
    assert capsys.readouterr().err == f"\nautopar: {NO_LAUNCHER.format('')}\n"
    assert ended == [os.getppid()]


class Silent:
    """A store beyond a network that is cut."""

    def __init__(self) -> None:
        self.cut = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.cut.wait(60)
        return 0


def test_a_store_that_does_not_answer_is_not_waited_for(
    store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    left, silent = SimpleQueue[int](), Silent()
    with Watchdog(store, 0, 2, patience=0.1, grace=0.1, leave=left.put) as watchdog:
        watchdog.store = silent
        assert left.get(timeout=30) == EXIT
        silent.cut.set()
    assert capsys.readouterr().err == f"\nautopar: {NO_STORE}\n"


def test_in_a_script_ranks_that_are_silent_or_gone_end_no_others(
    store: dist.Store, clock: Clock
) -> None:
    """A rank may be busy, or at its end; so may be the one that has the store."""
    ranks = [Watchdog(store, rank, 3, to_the_end=False) for rank in range(3)]
    clock.living = ranks
    clock.sleep(BEAT)
    clock.living = ranks[:1]
    for _ in range(200):
        clock.sleep(BEAT)
    assert ranks[0]._beat() is None
    assert ranks[0].reason() == "rank 1, rank 2 do not answer (killed or hung?)"
    with Watchdog(LostStore(), 0, 3, to_the_end=False, grace=0.1) as watchdog:  # type: ignore[arg-type]
        watchdog._threads[0].join(30)
        assert not watchdog._threads[0].is_alive() and watchdog._failure is None


def test_in_a_script_a_rank_that_others_wait_for_in_vain_is_named(
    store: dist.Store, clock: Clock
) -> None:
    ranks = [Watchdog(store, rank, 3, to_the_end=False) for rank in range(3)]
    for each in ranks:
        each.tell_node()
    ranks[1].note_left()
    said = ranks[0].reason()
    assert said is not None and said.startswith("rank 1 ended while others still wait")
    assert ranks[2]._said() == said == ranks[0].left()


@pytest.fixture
def two_nodes(store: dist.Store, clock: Clock) -> Iterator[list[Watchdog]]:
    """Four ranks on two nodes, which have all begun to beat."""
    nodes = [Node(n, 2, 2, host) for n, host in enumerate("ab")]
    ranks = [Watchdog(store, r, 4, node=nodes[r // 2]) for r in range(4)]
    for each in ranks:
        each.tell_node()
    clock.living = ranks
    clock.sleep(BEAT)
    yield list(ranks)


def test_the_node_of_a_rank_is_named(
    two_nodes: list[Watchdog], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.living = two_nodes[:1]
    said = two_nodes[0].reason()
    assert said == (
        "rank 1 on node 0 (host a), rank 2, rank 3 on node 1 (host b) do not answer "
        "(killed or hung?)"
    )
    for each in two_nodes:  # once on each node
        each.complain(said)
    assert capsys.readouterr().err == f"\nautopar: {said}\n" * 2


def test_a_failure_of_another_node_is_named(two_nodes: list[Watchdog]) -> None:
    two_nodes[3].publish("KeyError: 'x'")
    assert two_nodes[0].reason() == "rank 3 on node 1 (host b) failed: KeyError: 'x'"


def test_ranks_whose_torchrun_is_gone_stop(
    two_nodes: list[Watchdog], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in sessions of their own; the store lives, on another node."""
    clock.sleep(BEAT)
    assert two_nodes[0].reason() is None
    said = "torchrun on node 1 (host b) is gone or out of reach, and so its ranks stop"
    with monkeypatch.context() as patch:
        patch.setattr("os.getppid", lambda: 1)
        assert two_nodes[2]._beat() == said
    assert two_nodes[0].reason() == said


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("restarts", ["0", "3"])
def test_ranks_that_would_fail_again_are_not_started_again(
    watchdogs: list[Watchdog],
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    restarts: str,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)

    def infeasible() -> None:
        raise AutoparError("no plan fits", fix="use 4 devices")

    assert guarded(watchdogs[0], infeasible) == 2
    assert guarded(watchdogs[1], lose_connection) == EXIT
    assert ended == ([] if restarts == "0" else [os.getppid()] * 2)


def test_ranks_that_lost_another_are_started_again(
    watchdogs: list[Watchdog], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def lost() -> None:
        watchdogs[1].publish("OutOfMemoryError")
        lose_connection()

    assert guarded(watchdogs[0], lost) == EXIT and not ended


@pytest.mark.slow
def test_an_error_of_another_rank_is_told(
    watchdogs: list[Watchdog], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        watchdogs[1].publish("KeyError: 'x'")
        lose_connection()

    assert guarded(watchdogs[0], body) == EXIT
    assert capsys.readouterr().err == "\nautopar: rank 1 failed: KeyError: 'x'\n"
    assert guarded(watchdogs[2], body) == EXIT
    assert capsys.readouterr().err == ""  # said once


def test_an_error_of_this_rank_is_raised_and_published(
    watchdogs: list[Watchdog],
) -> None:
    def body() -> None:
        raise ValueError("mine\nand more")

    with pytest.raises(ValueError, match="mine"):
        guarded(watchdogs[0], body)
    assert watchdogs[1].reason() == "rank 0 failed: ValueError: mine"


def test_an_error_of_the_users_is_text(
    watchdogs: list[Watchdog], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise AutoparError("wrong mesh", fix="another")

    assert guarded(watchdogs[0], body) == 2
    assert capsys.readouterr().err == "\nautopar: wrong mesh\n  fix  another\n"


def test_a_launcher_that_stops_us_is_obeyed(watchdogs: list[Watchdog]) -> None:
    for watchdog in watchdogs[1:]:
        watchdog.note_end()
    assert guarded(watchdogs[0], end_by_signal) == 128 + signal.SIGTERM
    assert watchdogs[1].reason() == TOLD
    signal.raise_signal(signal.SIGTERM)  # it is ending: nothing is raised any more
    assert guarded(watchdogs[1], end_by_signal) == 128 + signal.SIGTERM
    assert not issubclass(Terminated, Exception)


def test_a_rank_that_alone_is_told_to_end_is_named(
    watchdogs: list[Watchdog], capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(watchdogs[1], end_by_signal) == EXIT
    said = "rank 1 got SIGTERM, and no other rank did (killed, or out of time?)"
    assert capsys.readouterr().err == f"\nautopar: {said}\n"
    assert guarded(watchdogs[0], end_by_signal) == EXIT  # torchrun ends the others now
    assert watchdogs[2].reason() == said


@pytest.mark.slow
def test_who_ends_because_another_was_killed_names_that_one(
    watchdogs: list[Watchdog], clock: Clock
) -> None:
    clock.living.remove(watchdogs[2])
    watchdogs[1].note_end()
    assert guarded(watchdogs[0], end_by_signal) == EXIT
    assert watchdogs[1].reason() == "rank 2 does not answer (killed or hung?)"


@pytest.mark.slow
def test_a_signal_is_seen_while_a_call_does_not_return(store: dist.Store) -> None:
    """The main thread runs no handler then: its own thread tells the others."""
    with pytest.raises(SystemExit), Watchdog(store, 0, 2) as watchdog:
        told = Watchdog(store, 1, 2)

        def body() -> None:
            signal.signal(signal.SIGTERM, lambda *_: None)  # as if it came later
            signal.raise_signal(signal.SIGTERM)
            while told._told() != [0]:
                pass
            raise SystemExit

        guarded(watchdog, body)


def test_work_that_ends_well_is_status_0(watchdogs: list[Watchdog]) -> None:
    assert guarded(watchdogs[0], lambda: None) == 0


def test_a_rank_that_is_interrupted_is_told(
    watchdogs: list[Watchdog], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    assert guarded(watchdogs[1], body) == 128 + signal.SIGINT
    assert capsys.readouterr().err == ""
    assert watchdogs[0].reason() == "rank 1 failed: interrupted"
