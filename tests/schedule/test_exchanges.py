"""Messages in one order for all ranks, which NCCL needs: proved, and run on gloo."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
import torch
from cases import on_rank
from plans import BATCH, CONFIG, small_program
from processes import run_ranks
from schedules import SIZES, all_schedules, by_name, lowered, named

from autopar.passes.mesh import Mesh
from autopar.passes.program import Program
from autopar.passes.schedule.exchanges import (
    Exchange,
    check_exchanges,
    exchanges,
    in_turn,
    of_kinds,
)
from autopar.passes.schedule.make_schedule import SCHEDULES
from autopar.passes.schedule.messages import AHEAD
from autopar.passes.schedule.schedule import (
    Kind,
    Schedule,
    ScheduleError,
    add_communication,
)
from autopar.runtime.comm.comm import Comm, CommError
from autopar.runtime.comm.process_groups import ProcessComm
from autopar.runtime.comm.virtual import run_virtual
from examples.gpt import build

FORWARD = (Kind.F, Kind.SEND_F, Kind.RECV_F)


def drawn(name: str) -> Schedule:
    """A named schedule of another size for each name."""
    draw = Random(name)
    ranks = draw.randint(2, 6)
    microbatches = ranks * draw.randint(1, 3)  # as interleaved ones want it
    return named(name, ranks, microbatches)


SOME = [*all_schedules(), *map(drawn, SCHEDULES)]


def texts(order: tuple[Exchange, ...]) -> str:
    return " ".join("+".join(map(str, one)) for one in order)


def test_one_forward_one_backward_exchanges_what_it_can():
    first, last = exchanges(add_communication(named("1f1b", 2, 4)))
    assert texts(first) == (
        "0SEND_F0 0SEND_F1 0RECV_B0 0SEND_F2+0RECV_B1 0SEND_F3+0RECV_B2 0RECV_B3"
    )
    assert [len(one) for one in first] == [len(one) for one in last]


@pytest.mark.parametrize("schedule", SOME, ids=by_name)
def test_no_rank_waits_for_ever_and_sends_are_not_held_back(schedule):
    schedule = add_communication(schedule)
    orders = exchanges(schedule)  # which proves it
    only = tuple(tuple(a for a in own if a.kind in FORWARD) for own in schedule.ranks)
    forward = [of_kinds(order, FORWARD) for order in orders]
    check_exchanges(replace(schedule, ranks=only), forward)
    for actions, order in zip(schedule.ranks, orders, strict=True):
        begun: list[Exchange] = []
        for action, begins in in_turn(actions, order):
            begun += begins
            assert action.kind.is_compute or any(action in one for one in begun)
        assert tuple(begun) == order


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v"])
def test_no_more_receives_are_open_than_without_an_order(name):
    for ranks, microbatches in SIZES[2:6]:
        schedule = add_communication(named(name, ranks, microbatches))
        for actions, order in zip(schedule.ranks, exchanges(schedule), strict=True):
            open_ = set()
            for action, begins in in_turn(actions, order):
                open_ |= {a for one in begins for a in one if a.kind.is_recv}
                assert len(open_) <= AHEAD
                open_.discard(action)


SMALL = """\
schedule small: 2 microbatches, stages on ranks 0 1
rank 0 | 0F0 0F1 0B0 0B1
rank 1 | 1F0 1B0 1F1 1B1"""


def test_orders_that_do_not_pair_up_are_told():
    schedule = lowered(SMALL)
    orders = exchanges(schedule)
    for rank in (0, 1):
        for i in range(len(orders[rank]) - 1):
            own = list(orders[rank])
            own[i], own[i + 1] = own[i + 1], own[i]
            changed = [own if r == rank else orders[r] for r in (0, 1)]
            with pytest.raises(ScheduleError, match="do not pair up\n  rank 0 waits"):
                check_exchanges(schedule, changed)
    missing = [orders[0][:-1], orders[1][:-1]]
    with pytest.raises(ScheduleError, match="for nothing that has begun"):
        check_exchanges(schedule, missing)


def test_what_needs_the_other_s_message_does_not_go_with_it():
    """The gradient of a microbatch answers its activations."""
    schedule = lowered(SMALL)
    f0, f1, b0, b1 = [a for a in schedule.ranks[0] if not a.kind.is_compute]
    mine = [(f0, b0), (f1, b1)]
    orders = [mine, [tuple(a.partner for a in one) for one in mine]]
    with pytest.raises(ScheduleError, match="do not pair up"):
        check_exchanges(schedule, orders)


# --- run ------------------------------------------------------------------------------


def step(program: Program, comm: Comm) -> list[torch.Tensor]:
    """The loss of a step, of an evaluation, and this rank's gradients."""
    model, batch = build(CONFIG, BATCH)
    executor = on_rank(program, comm, model)
    found = [executor.step(batch), executor.evaluate(batch)]
    return found + [p.grad for p in executor.parameters.values() if p.grad is not None]


def on_virtual(program: Program, turns: bool) -> list[list[torch.Tensor]]:
    def body(comm: Comm) -> list[torch.Tensor]:
        comm.in_turn = turns
        return step(program, comm)

    return run_virtual(program.mesh, program.plan.microbatches, body)


def in_process(program: Program) -> list[torch.Tensor]:
    wait = timedelta(seconds=200)
    comm = ProcessComm(
        program.mesh,
        program.plan.microbatches,
        groups=program.groups,
        rank_groups=program.reduction_groups(),
        timeout=wait,
        in_turn=True,
    )
    found = step(program, comm)
    apart = ProcessComm(Mesh.parse("dp=2"), timeout=wait, in_turn=True)
    with pytest.raises(CommError, match="along an axis pp"):
        apart.send(torch.zeros(2), 1 - comm.rank, 0)
    return found


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("schedule", [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_step_in_turn_is_the_same_step(schedule):
    program = small_program("pp=2", 4, *schedule)
    torch.testing.assert_close(
        on_virtual(program, True), on_virtual(program, False), rtol=0, atol=0
    )


@pytest.mark.slow
def test_processes_exchange_in_batches():
    program = small_program("pp=2", 4)
    found = run_ranks(in_process, 2, program)
    torch.testing.assert_close(found, on_virtual(program, False), rtol=0, atol=0)
