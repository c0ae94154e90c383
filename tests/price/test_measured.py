"""Measured points, what lies between them, and prices that are made of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from graphs import nodes_of
from plans import small_model
from pytest import approx

from autopar.machine.hardware import cluster_of
from autopar.machine.measured_cluster import how_priced
from autopar.passes.cost import Exchange, flops, signature, traffic
from autopar.passes.graph import Node
from autopar.passes.mesh import Mesh
from autopar.passes.price.account import Account, Held, PartCost
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.estimate import Estimate
from autopar.passes.price.measured import (
    BETWEEN,
    BEYOND,
    MEASURED,
    TABLE,
    Messages,
    Ops,
    Timed,
    between,
    fit_line,
)
from autopar.passes.price.price import compute_part, price
from autopar.passes.price.stage_seconds import stage_seconds
from autopar.passes.search.search import run_on_paper
from autopar.passes.stage.differentiate import differentiate
from autopar.passes.stage.local_stage import LocalStage
from autopar.passes.stage.one_op import one_op
from autopar.planner.planner import capture_short, make_prices

CPU = cluster_of("4xCPU")


def linear(rows: int, width: int = 64) -> Node:
    (node,) = nodes_of(f"""
        input %x f32[{rows},{width}]
        input %w f32[{width},{width}]
        f32[{rows},{width}] %y = linear(%x, %w)
    """)
    return node


def ops_of(seconds: dict[int, float], **more) -> Ops:
    """rows -> seconds, of `linear`."""
    timed = {}
    for rows, took in seconds.items():
        node = linear(rows)
        timed[signature(node)] = Timed(took, traffic(node), flops(node))
    return Ops(timed, **more)


# --- points -----------------------------------------------------------------------


def test_a_message_lies_between_those_of_other_sizes() -> None:
    points = ((1e3, 1e-4), (1e5, 1e-3), (1e6, 1e-2))
    assert between(points, 1e5) == (1e-3, MEASURED)
    took, how = between(points, 1e4)
    assert (took, how) == (approx(math.sqrt(1e-4 * 1e-3)), BETWEEN)
    # Ten times the time for ten times the bytes, and so on above; the least below.
    assert between(points, 4e6) == (approx(4e-2), BEYOND)
    assert between(points, 10) == (1e-4, BEYOND)
    falling = ((1e3, 2e-4), (1e4, 1e-4))
    assert between(falling, 1e5) == (approx(1e-4), BEYOND)  # noise is no trend


def test_the_line_through_ops_is_found() -> None:
    sizes = [(1e3, 0.0), (1e4, 1e6), (1e6, 1e5), (1e7, 1e9), (0.0, 3e8)]
    points = [Timed(1e-6 + 1e-10 * b + 1e-11 * f, b, f) for b, f in sizes]
    line = fit_line(points)
    assert [line.start, line.per_byte, line.per_flop] == approx([1e-6, 1e-10, 1e-11])


def test_no_term_of_a_line_is_negative() -> None:
    """Where more bytes took less time, there is no gain in bytes."""
    line = fit_line([Timed(2e-6, 1e3, 0.0), Timed(1e-6, 1e6, 0.0)])
    assert line.per_byte == 0 == line.per_flop and line.start > 0


def test_an_op_of_another_size_is_read_off_the_nearest() -> None:
    def exact(rows: int) -> float:
        return 1e-6 + 1e-9 * traffic(linear(rows))

    ops = ops_of({rows: exact(rows) for rows in (1, 16, 256)})
    assert ops.seconds(linear(16)) == (exact(16), MEASURED)
    assert ops.seconds(linear(40)) == (approx(exact(40), rel=1e-3), BETWEEN)
    assert ops.seconds(linear(1024)) == (approx(exact(1024), rel=1e-3), BEYOND)
    other = replace(linear(16), op="aten.gelu.default")
    assert ops.seconds(other) == (0.0, TABLE)
    half = linear(16).substitute(lambda v: replace(v, dtype=torch.bfloat16))
    assert ops.seconds(half) == (0.0, TABLE)


# --- prices ------------------------------------------------------------------------


def local_of(node: Node) -> LocalStage:
    return differentiate(one_op(node), {}, {})


def test_measured_ops_have_their_own_seconds_and_others_those_of_the_table() -> None:
    device = replace(CPU.device, ops=ops_of({16: 0.25}, update=((64.0, 0.5),)))
    found, table = (price(local_of(linear(16)), d) for d in (device, CPU.device))
    assert found.forward.seconds == 0.25 == found.forward.measured
    assert found.backward.seconds == approx(table.backward.seconds)
    assert found.forward.flops == table.forward.flops
    assert found.update == approx(0.5 * 64 * 64 * 4 / 64)
    assert compute_part([linear(16)], device).seconds == 0.25


def test_links_go_by_measured_groups() -> None:
    points = {("all_reduce", 2, 2): ((8.0, 1.0),), ("send", 2, 2): ((8.0, 2.0),)}
    cluster = replace(CPU, messages=Messages(points))
    mesh = Mesh.parse("pp=2,tp=2")
    assert cluster.link(mesh, ("pp",)).seconds("all_reduce", 8) == 1.0
    assert cluster.link(mesh, ("pp",)).find("send", 8) == (2.0, MEASURED)
    of_table = CPU.link(mesh, ("tp",)).seconds("all_reduce", 8)
    assert cluster.link(mesh, ("tp",)).find("all_reduce", 8) == (of_table, TABLE)
    # A pipeline of four talks in pairs.
    assert cluster.link(Mesh.parse("pp=4"), ("pp",)).find("send", 8)[1] == TABLE


def test_ranks_wait_for_the_last_by_the_root_of_what_they_compute() -> None:
    mesh, axes = Mesh.parse("pp=2,tp=2"), ("tp",)
    messages = Messages(skew={(2, 1): 0.5, (2, 2): 0.25})
    cluster = replace(CPU, messages=messages, cores=4)
    assert cluster.link(mesh, axes).skew(4.0) == 1.0
    assert cluster.link(mesh, axes).skew(4.0, meetings=4) == 2.0
    assert CPU.link(mesh, axes).skew(4.0) == 0.0
    part = PartCost(seconds=4.0, exchanges=(Exchange("all_reduce", axes, 4.0, 64.0),))
    account = Account(backward=part, sent=8.0)
    took, plain = (stage_seconds(account, mesh, c) for c in (cluster, CPU))
    assert took.backward == approx(plain.backward + 2.0)
    (late,) = (w for w in took.exposed if w.label == "skew tp")
    assert (late.part, late.seconds) == ("backward", 2.0)
    # A message follows the half of what a microbatch takes.
    assert took.send == approx(plain.send + 0.25 * (took.backward / 2) ** 0.5)
    # Where processes share cores, others compute meanwhile; and who waits for a message
    # has to be given one.
    crowded = replace(cluster, cores=2, messages=replace(messages, wakeup=0.1))
    took = stage_seconds(account, mesh, crowded)
    assert [w.kind for w in took.exposed] == ["all_reduce"]
    assert took.send == 0.1


@pytest.mark.slow
def test_gradients_leave_when_the_last_rank_is_there() -> None:
    ids = torch.zeros(8, 16, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids.clone()}
    skewed = estimated(Ops(), Messages(skew={(2, 2): 0.5}), batch)
    plain = estimated(Ops(), Messages(), batch)
    last = plain.stages[0].halves.backward
    assert skewed.parts["skew dp"] == approx(0.5 * last**0.5)
    assert skewed.seconds == approx(plain.seconds + skewed.parts["skew dp"])
    assert "skew tp" not in skewed.parts  # nobody measured it


def estimated(ops: Ops, messages: Messages, batch: dict, samples: int = 1) -> Estimate:
    cluster = replace(
        CPU, device=replace(CPU.device, ops=ops), messages=messages, profile="here"
    )
    of = capture_short(small_model(), batch)
    candidate = Candidate(
        Mesh.parse("dp=2,tp=2"), samples, 2, "1f1b", 1, 0, "none", (of.runs,)
    )
    return run_on_paper(candidate, make_prices(of, cluster), cluster)


def test_an_estimate_tells_what_it_is_made_of() -> None:
    ids = torch.zeros(8, 16, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids.clone()}
    points = {("all_reduce", 2, 2): ((1.0, 9.0), (1e9, 9.0))}
    ops = Ops({"aten.linear.default(f32[9])": Timed(1e-3, 1e3, 1e3)})
    found = estimated(ops, Messages(points), batch)
    compute, messages = found.sources["compute"], found.sources["messages"]
    assert set(compute) == {BETWEEN, TABLE} or set(compute) == {BEYOND, TABLE}
    assert sum(compute.values()) == approx(1) == approx(sum(messages.values()))
    assert messages[BETWEEN] > 0.9  # the gradients' 9 s
    hidden = 9.0 - found.parts["gradients dp"]  # beside the last backward
    assert 0 < hidden < 0.01
    text = how_priced(found, replace(CPU, profile="here"))
    assert text.startswith("priced by the profile of here; computing: ")
    assert "of the table of hardware" in text
    assert text.endswith("autopar profile MODEL --ranks 4 measures the model's own")
    assert how_priced(found, CPU) == "priced by the table of hardware, for CPU"


@pytest.mark.slow
def test_measured_ops_are_priced_at_the_size_of_the_microbatch() -> None:
    """Not on a line through one sample and two: four of them take their own time."""
    ids = torch.zeros(16, 16, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids.clone()}
    key = "aten.linear.default(f32[{},16,32], f32[64,32], f32[64])"  # mlp.up, tp=2
    took = {n: Timed(s, 1e3, 1e3) for n, s in ((1, 1e-3), (2, 1e-3), (4, 7.0))}
    ops = Ops({key.format(n): timed for n, timed in took.items()})
    of_one, of_four = (estimated(ops, Messages(), batch, n) for n in (1, 4))
    more = of_four.parts["compute"] - of_one.parts["compute"]
    assert more > 6 * 2 * 2  # in two layers, and two microbatches


# --- accounts ----------------------------------------------------------------------


def test_accounts_add_up_field_by_field() -> None:
    sent, gathered = (
        Exchange("send", ("cp",), 1, 8.0),
        Exchange("send", ("tp",), 2, 6.0),
    )
    one = Account(
        PartCost(seconds=2.0, exchanges=(sent,)), held=Held(4.0), residuals=1.0
    )
    other = Account(PartCost(flops=3.0, exchanges=(gathered, sent)), pending=(sent,))
    both = one.plus(other, 2.0)
    assert both.forward.seconds == 2.0 and both.forward.flops == 6.0
    assert both.forward.exchanges == (
        Exchange("send", ("cp",), 3.0, 24.0),
        Exchange("send", ("tp",), 4.0, 12.0),
    )
    assert (
        both.held == Held(4.0)
        and both.residuals == 1.0
        and both.pending[0].calls == 2.0
    )
    assert one + one == one * 2 and (one - one).forward.seconds == 0.0
    assert hash(one + one) == hash(one * 2)
    with pytest.raises(AssertionError, match="no such fields"):
        one.changed(seconds=1.0)


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_what_compiled_functions_take_is_as_it_was_measured(gain: float) -> None:
    """Products are called as they are."""
    product = {"aten.mm.default(f32[8], f32[8])": Timed(3.0, 96, 1024)}
    timed = {"aten.add.Tensor(f32[8], f32[8])": Timed(3.0, 96, 8)} | product
    ops = Ops(timed, compiled=gain)
    device = replace(cluster_of("1xA100-80GB").device, ops=ops)
    took = {
        backend: device.running(False, backend).ops.timed
        for backend in ("eager", "inductor", "auto")
    }
    assert all(x.items() >= product.items() for x in took.values())
    seconds = {k: next(iter(x.values())).seconds for k, x in took.items()}
    assert seconds == {
        "eager": 3.0,
        "inductor": 3.0 * gain,
        "auto": 3.0 * min(1.0, gain),
    }


def test_each_model_gains_what_it_gained_itself() -> None:
    one, other = Timed(3.0, 96, 8, compiled=0.25), Timed(2.0, 64, 8)
    compiled = Ops({"one": one, "other": other}, compiled=0.5).by_inductor.timed
    assert [t.seconds for t in compiled.values()] == [0.75, 1.0]


def test_what_was_measured_without_tf32_is_no_price_of_it() -> None:
    shapes = "(f32[64,64], f32[64,64])"
    timed = {
        f"aten.mm.default{shapes}": Timed(1.0, 3 * 4 * 64**2, 2 * 64**3),
        f"aten.add.Tensor{shapes}": Timed(1.0, 3 * 4 * 64**2, 64**2),
        f"aten.mm.default{shapes.replace('f32', 'bf16')}": Timed(1.0, 1.0, 2.0),
    }
    device = replace(cluster_of("1xA100-80GB").device, ops=Ops(timed))
    _, *others = timed.items()
    assert device.running(True, "auto").ops == Ops(dict(others))
    assert device.running(True, "auto").peak("float32") == 8 * device.peak("float32")
    assert device.running(False, "auto") == device
    assert cluster_of("1xV100").device.running(True, "auto").flops == (
        cluster_of("1xV100").device.flops
    )
