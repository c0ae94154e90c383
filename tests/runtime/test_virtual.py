import sys
import threading
from queue import SimpleQueue

import pytest
import torch

from autopar.passes.mesh import Mesh
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import RankError, run_virtual
from autopar.runtime.comm.virtual_world import Deadlock, Mismatch


def virtual(body, mesh="tp=2"):
    """Run, and check that no thread stays behind."""
    before = threading.active_count()
    try:
        return run_virtual(Mesh.parse(mesh), 1, body)
    finally:
        assert threading.active_count() == before


def test_time_is_the_axis_of_microbatches():
    def body(comm):
        comm.state.microbatch = 1
        x = torch.arange(7)
        return comm.shard(x, "time", 0).tolist(), comm.pieces(7, ("time", "tp"))

    got = run_virtual(Mesh.parse("tp=2"), 3, body)
    assert got == [([3, 4], ((3, 1),)), ([3, 4], ((4, 1),))]


def test_threads_and_grad_mode_are_those_of_the_caller():
    def body(comm):
        return torch.get_num_threads(), torch.is_grad_enabled()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert virtual(body) == [(1, True)] * 2
        with torch.no_grad():
            assert virtual(body) == [(1, False)] * 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_ranks_run_in_an_order_that_repeats():
    def trace():
        seen = []

        def body(comm):
            for turn in range(3):
                seen.append((comm.rank, turn))
                comm.all_reduce(torch.ones(1), ("tp",) if turn % 2 else ("dp",))

        run_virtual(Mesh.parse("dp=2,tp=2"), 1, body)
        return seen

    assert trace() == trace()


def test_a_deadlock_lists_what_each_rank_waits_for():
    def body(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4), ("tp",))
        elif comm.rank == 1:
            comm.recv((2, 3), torch.float32, 0, 7).wait()
        elif comm.rank == 2:
            comm.send(torch.ones(2), 1, 5)
            comm.flush()

    with pytest.raises(Deadlock) as error:
        virtual(body, "pp=2,tp=2")
    assert str(error.value).splitlines() == [
        "no rank can go on",
        "  rank 0 (pp=0, tp=0)  waits in all_reduce(f32[4], tp, op=sum) for rank 1",
        "  rank 1 (pp=0, tp=1)  waits in recv(f32[2,3], from rank 0, tag=7)",
        "  rank 2 (pp=1, tp=0)  waits in send(f32[2], to rank 1, tag=5)",
        "  rank 3 (pp=1, tp=1)  is done",
    ]


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("calls", "lines"),
    [
        (
            [
                lambda comm: comm.all_gather(ones(4), "tp", 0),
                lambda comm: comm.all_reduce(ones(4), ("tp",)),
            ],
            [
                "  rank 0 (tp=0)  all_gather(f32[4], tp, dims=[0], beside=[()])",
                "  rank 1 (tp=1)  all_reduce(f32[4], tp, op=sum)",
            ],
        ),
        (
            [
                lambda comm: comm.all_reduce(ones(4), ("tp",)),
                lambda comm: comm.all_reduce(ones(5), ("tp",)),
            ],
            [
                "  rank 0 (tp=0)  all_reduce(f32[4], tp, op=sum)",
                "  rank 1 (tp=1)  all_reduce(f32[5], tp, op=sum)",
            ],
        ),
        (
            [
                lambda comm: comm.start_gather([ones(4)], "tp", [0]),
                lambda comm: comm.start_scatter([ones(4)], "tp", [0]),
            ],
            [
                "  rank 0 (tp=0)  all_gather(f32[4], tp, dims=[0], beside=[()])",
                "  rank 1 (tp=1)  reduce_scatter(f32[4], tp, dims=[0])",
            ],
        ),
        (
            [
                lambda comm: comm.reduce_scatter(ones(4, dtype=torch.int64), "tp", 0),
                lambda comm: comm.reduce_scatter(ones(4), "tp", 0),
            ],
            [
                "  rank 0 (tp=0)  reduce_scatter(i64[4], tp, dim=0)",
                "  rank 1 (tp=1)  reduce_scatter(f32[4], tp, dim=0)",
            ],
        ),
        (
            [
                lambda comm: comm.all_gather(ones(2, 3), "tp", 0),
                lambda comm: comm.all_gather(ones(3, 2), "tp", 0),
            ],
            [
                "  rank 0 (tp=0)  all_gather(f32[6], tp, dims=[0], beside=[(3,)])",
                "  rank 1 (tp=1)  all_gather(f32[6], tp, dims=[0], beside=[(2,)])",
            ],
        ),
        (
            [
                lambda comm: comm.all_to_all(ones(4, 2), "tp", 0, 1, 3),
                lambda comm: comm.all_to_all(ones(5, 1), "tp", 0, 1, 3),
            ],
            [
                "  rank 0 (tp=0)  all_to_all(f32[4,2], tp, split=0, concat=1, whole=3)",
                "  rank 1 (tp=1)  all_to_all(f32[5,1], tp, split=0, concat=1, whole=3)",
            ],
        ),
        (
            [
                lambda comm: comm.send(ones(4), 1, 0),
                lambda comm: comm.recv((4,), torch.float32, 0, 1).wait(),
            ],
            [
                "  rank 0 (tp=0)  send(f32[4], to rank 1, tag=0)",
                "  rank 1 (tp=1)  recv(f32[4], from rank 0, tag=1)",
            ],
        ),
    ],
    ids=["kind", "shape", "start", "dtype", "beside", "uneven", "tag"],
)
def test_a_mismatch_shows_each_rank_s_call(calls, lines):
    with pytest.raises(Mismatch) as error:
        virtual(lambda comm: calls[comm.rank](comm))
    assert str(error.value).splitlines()[1:] == lines


def test_messages_that_are_left_over_are_an_error():
    def body(comm):
        if comm.rank == 0:
            comm.send(torch.ones(2), 1, 3)

    with pytest.raises(Mismatch, match=r"left\n  rank 0 \(tp=0\)  send\(f32\[2\], to"):
        virtual(body)


def test_what_is_being_sent_must_not_change():
    def body(comm):
        if comm.rank == 0:
            x = torch.ones(2)
            comm.send(x, 1, 3)
            x += 1
        else:
            comm.recv((2,), torch.float32, 0, 3).wait()

    with pytest.raises(Mismatch, match="changed while it was being sent"):
        virtual(body)


def test_a_rank_s_exception_ends_all_ranks():
    unwound = []

    def body(comm):
        try:
            if comm.rank == 2:
                comm.all_gather(torch.ones(1), "tp", 5)
            comm.all_reduce(torch.ones(1), ("pp", "tp"))
        except AttributeError:
            pytest.fail("not what is raised")
        finally:
            unwound.append(comm.rank)

    with pytest.raises(
        RankError, match=r"rank 2 \(pp=1, tp=0\): IndexError: "
    ) as error:
        virtual(body, "pp=2,tp=2")
    assert isinstance(error.value.__cause__, IndexError)
    assert sorted(unwound) == [0, 1, 2]  # rank 3 had not begun


def test_no_handler_hides_that_another_rank_failed():
    went_on = []

    def body(comm):
        if comm.rank == 1:
            sys.exit("rank 1 leaves")
        try:
            comm.all_reduce(torch.ones(1), ("tp",))
        except Exception:
            went_on.append(comm.rank)

    with pytest.raises(RankError, match="SystemExit: rank 1 leaves"):
        virtual(body)
    assert not went_on


def test_traffic_is_counted():
    def body(comm: Comm):
        for _ in range(3):
            comm.all_reduce(torch.ones(2, 5), ("tp",))
        comm.all_gather(torch.ones(4, dtype=torch.bfloat16), "tp", 0)
        return {key: (entry.calls, entry.bytes) for key, entry in comm.log.items()}

    log = {("all_reduce", ("tp",)): (3, 120), ("all_gather", ("tp",)): (1, 8)}
    assert virtual(body) == [log, log]


def test_a_collective_that_nobody_waits_for():
    def body(comm):
        comm.wait(comm.start_gather([ones(2)], "tp", [0]))
        comm.start_scatter([ones(4)], "tp", [0])

    with pytest.raises(Mismatch) as error:
        run_virtual(Mesh.parse("tp=2"), 1, body)
    assert str(error.value).splitlines()[1:] == [
        "  rank 0 (tp=0)  reduce_scatter(f32[4], tp, dims=[0])",
        "  rank 1 (tp=1)  reduce_scatter(f32[4], tp, dims=[0])",
    ]


def test_who_waits_for_a_collective_is_listed():
    def body(comm):
        if comm.rank == 0:
            comm.wait(comm.start_gather([ones(2)], "tp", [0]))

    with pytest.raises(Deadlock, match=r"rank 0 .*waits in all_gather.* for rank 1"):
        run_virtual(Mesh.parse("tp=2"), 1, body)


def test_an_interrupt_leaves_no_thread(monkeypatch):
    """One that outlives Python may abort the process."""
    started = threading.Event()

    class Interrupted(SimpleQueue):
        def get(self):
            started.wait()
            raise KeyboardInterrupt

    def work_on(comm):
        started.set()
        while True:
            comm.all_reduce(torch.ones(1), ("tp",))

    monkeypatch.setattr("autopar.runtime.comm.scheduler.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        virtual(work_on)
