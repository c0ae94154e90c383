"""What `autopar inspect` says: checked against the program and the emitted text."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import pytest
from cases import on_rank
from plans import BATCH, CONFIG, small_program

from autopar.passes.mesh import MeshError
from autopar.passes.program import Program
from autopar.passes.schedule.simulate_schedule import Timeline, grid
from autopar.reports.inspection import (
    communication_table,
    devices_of,
    messages_of_a_step,
    report,
    report_data,
    schedule_text,
    stage_table,
)
from autopar.reports.memory_table import memory_table
from autopar.reports.parameters import parameter_table
from autopar.reports.simulation import simulate_program
from autopar.reports.tables import Table, ranges
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.execute.emitted import InspectionError, listing, sends_of
from autopar.runtime.execute.running_stage import load_module
from autopar.terminal import WIDTH
from autopar.units import count, seconds, size
from examples.gpt import build

SCHEDULES = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
SCHEDULES += [("looped-bfs", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


def on_paper(program: Program) -> Timeline:
    return simulate_program(program, devices_of(program)).timeline


def test_fused_qkv_is_named_without_invented_names() -> None:
    specs = small_program().parameters
    qkv = specs["blocks.0.attention.qkv.weight"]
    assert qkv.pattern == "(3 heads/tp head_dim) embed"
    assert specs["blocks.1.mlp.down.weight"].pattern == "embed ffn/tp"


def test_equal_layers_are_one_row() -> None:
    table = parameter_table(small_program())
    names = [row[0] for row in table.rows]
    assert "blocks.0-1.mlp.up.weight" in names and "tokens.weight" in names
    assert len(names) == len(set(names)) == 3 + 12 + 1
    every = [row[0] for row in parameter_table(small_program(), every=True).rows]
    assert every == list(small_program().parameters)


def test_layers_that_differ_are_rows_of_their_own() -> None:
    program = small_program()
    name = "blocks.1.mlp.up.weight"
    other = replace(program.parameters[name], slots=(((),), ((),)))
    changed = replace(program, tensors={**program.tensors, name: other})
    rows = [r for r in parameter_table(changed).rows if r[0].endswith("mlp.up.weight")]
    assert [(r[0], r[2]) for r in rows] == [
        ("blocks.0.mlp.up.weight", "ffn/tp embed"),
        ("blocks.1.mlp.up.weight", "ffn embed"),
    ]


def test_long_names_take_two_lines() -> None:
    program = small_program()
    long = "model.layers.0.self_attention_block.query_projection.weight"
    spec = program.parameters["norm.weight"]
    changed = replace(program, tensors={long: spec}, aliases={})
    [row] = parameter_table(changed).rows
    assert row[0] == "model.layers.0.self_attention_block.\n  query_projection.weight"


@pytest.mark.slow
def test_tied_weights_and_pending_gradients_are_shown() -> None:
    table = parameter_table(small_program("pp=2,dp=2,tp=2"))
    rows = {row[0]: row for row in table.rows}
    assert rows["norm.weight"][2] == "embed +dp +tp"
    assert rows["tokens.weight"][3] == "0-1"
    assert "tied: head.weight is tokens.weight" in table.notes


@pytest.mark.slow
def test_it_is_shown_where_parameters_rest_and_when_they_are_gathered() -> None:
    program = small_program("pp=2,dp=2,tp=2", zero=3)
    table = parameter_table(program)
    assert table.columns[-1] == "gathered"
    rows = {row[0]: row for row in table.rows}
    assert parameter_table(small_program("dp=2", zero=2)).rows[0][4] == "once a step"
    up = rows["blocks.0-1.mlp.up.weight"]
    assert up[2] == "ffn/tp/dp embed" and up[4] == "a block ahead"
    assert max(map(len, report(program).splitlines())) <= WIDTH
    data = report_data(program)
    assert data["zero"] == 3
    assert {tuple(p["gathered"]) for p in data["parameters"]} == {("dp",)}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "ranks"), [("dp=2,tp=2", 2), ("dp=2,fsdp=2", 2), ("pp=2,dp=2,cp=2", 4)]
)
def test_bytes_at_rest_are_those_of_the_formula(mesh: str, ranks: int) -> None:
    program = small_program(mesh, microbatches=1, zero=3)
    model, _ = build(CONFIG, BATCH)
    total = sum(p.numel() for p in model.parameters())
    for share in report_data(program)["shares"]:
        held = report_data(program)["stages"][share["stage"]]["parameters"]
        assert share["at_rest"] == 16 * held  # parameter, gradient, two moments
        assert share["formula"] == share["whole"] / ranks
        assert share["at_rest"] == pytest.approx(share["formula"], rel=0.02)
        if "tp" not in mesh and "pp" not in mesh:
            assert share["whole"] == 16 * total
    assert "one block ahead" in report(program)
    assert "one block ahead" not in report(small_program())


@pytest.mark.slow
def test_an_optimizer_on_the_cpu_is_shown() -> None:
    text = report(small_program("dp=2", zero=1, offload=True))
    assert "optimizer on the CPU" in text and "moments are on the CPU" in text
    assert "on the CPU" not in report(small_program("dp=2", zero=1))


@pytest.mark.parametrize(("zero", "times"), [(1, 2), (2, 1), (3, 0)])
def test_more_in_a_step_is_what_is_whole_for_all_of_it(zero: int, times: int) -> None:
    (share,) = report_data(small_program("dp=2", zero=zero))["shares"]
    assert share["step"] == times * share["whole"] / 4


def test_each_stage_has_its_layers() -> None:
    layers = [" ".join(row[1].split()) for row in stage_table(small_program()).rows]
    assert layers == ["tokens, positions, blocks.0", "blocks.1, norm, head"]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("mesh", ["", "pp=2", "dp=2,tp=2", "pp=2,tp=2"])
def test_parameters_per_rank_add_up(mesh: str) -> None:
    program = small_program(mesh)
    stages = report_data(program)["stages"]
    for stage in stages:
        module = load_module(program.modules[stage["modules"][0]], "m")
        held = sum(prod(shape) for shape, _ in module["PARAMETERS"].values())
        assert stage["parameters"] == held
        assert stage["parameter_bytes"] == 4 * held


def test_what_is_sent_is_read_without_running() -> None:
    for text in small_program().modules.values():
        sends = load_module(text, "m")["SENDS"]
        assert [(s, f"torch.{d}") for s, d in sends_of(text)] == [
            (s, str(d)) for s, d in sends
        ]


@pytest.mark.slow
def test_activations_grow_with_what_is_in_flight() -> None:
    stages = report_data(small_program(microbatches=4))["stages"]
    made = [stage.footprint for stage in small_program(microbatches=4).stages]
    peaks = [max(f.forward_peak, f.backward_peak) for f in made]
    waiting = (
        made[0].residuals + made[0].sent
    )  # of one microbatch beside the one that runs
    assert stages[0]["activation_bytes"] == peaks[0] + waiting
    assert stages[1]["activation_bytes"] == peaks[1]


def test_memory_of_each_rank_is_shown_term_by_term() -> None:
    program = small_program("pp=2", 4)
    table = memory_table(program)
    assert [row[0] for row in table.rows] == [0, 1]
    assert all(row[-1] == "none" for row in table.rows)
    said = report_data(program)["memory"]
    stages = report_data(program)["stages"]
    for rank, stage in zip(said, stages, strict=True):
        assert rank["parameters"] == stage["parameter_bytes"] == rank["gradients"]
        assert rank["optimizer"] == 2 * rank["gradients"]
    assert str(table) in report(program)


def test_a_single_rank_communicates_nothing() -> None:
    table = communication_table(small_program(""))
    assert table.rows == () and table.notes == ("none",)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_communication_is_what_ranks_do(zero: int) -> None:
    """The table is the log of a real step, but for what finds the loss."""
    program = small_program("pp=2,dp=2,tp=2", zero=zero)
    model, batch = build(CONFIG, BATCH)

    def body(comm: Comm) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        on_rank(program, comm, model).step(batch)
        return {k: (t.calls, t.bytes) for k, t in comm.log.items()}

    logs = run_virtual(program.mesh, program.plan.microbatches, body)
    for stage, rank in ((0, 0), (1, 4)):
        expected: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for c in messages_of_a_step(program):
            if c.stage == stage and (c.part, c.kind) != ("step", "all_reduce"):
                key = (c.kind, () if c.kind == "send" else c.axes)
                calls, total = expected.get(key, (0, 0))
                expected[key] = (calls + c.calls, total + c.bytes)
        for key, traffic in expected.items():
            assert logs[rank][key] == traffic, (rank, key)


def test_gradients_are_reduced_once_a_step() -> None:
    rows = communication_table(small_program(microbatches=4)).rows
    table = CONFIG.vocab // 2 * CONFIG.width * 4  # the tied embedding, split on tp
    assert (0, "step", "all_reduce", "pp", "f32", 1, size(table)) in rows


def test_the_schedule_is_drawn_with_its_bubble() -> None:
    text = schedule_text(small_program(microbatches=4))
    assert "rank 0 | F0 F1" in text and "rank 1 | .  F0 B0" in text
    assert f"bubble {on_paper(small_program(microbatches=4)).bubble:.1%}" in text


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_every_schedule_is_drawn_with_its_stages(schedule: str, stages: int) -> None:
    program = small_program("pp=2", 4, schedule, stages)
    text = schedule_text(program)
    assert f"schedule {schedule}: F forward" in text
    assert grid(program.schedule, WIDTH) in text
    assert text.count("the stage") == (stages > 1)
    in_flight = " ".join(map(str, on_paper(program).in_flight))
    assert f"by rank: {in_flight} priced" in " ".join(text.split())
    assert max(map(len, report(program).splitlines())) <= WIDTH


def test_activations_are_those_in_flight_of_their_own_stage() -> None:
    program = small_program("pp=2", 4, "looped-bfs", 2)
    rows = report_data(program)["stages"]
    for row, stage in zip(rows, program.stages, strict=True):
        made = stage.footprint
        peak = max(made.forward_peak, made.backward_peak)
        assert row["activation_bytes"] == 3 * made.each + peak


def test_a_report_fits_the_page_and_json() -> None:
    program = small_program("pp=2,dp=2,tp=2")
    assert max(map(len, report(program).splitlines())) <= WIDTH
    data = json.loads(json.dumps(report_data(program)))
    assert len(data["parameters"]) == len(program.parameters)
    assert data["mesh"] == "pp=2,dp=2,tp=2"


def test_a_rank_is_listed_with_its_layers() -> None:
    program = small_program()
    text = listing(program, rank=3)
    head = text.splitlines()[:2]
    assert head == ["# stage 1 of 2: rank 3 (pp=1, tp=1)", "#   blocks: +0 is 1"]
    assert program.modules[program.module_of(3, 1)] in text
    compile(text, "listing", "exec")


def test_a_stage_is_listed_with_its_ranks() -> None:
    head = listing(small_program(), stage=0).splitlines()[0]
    assert head == "# stage 0 of 2: rank 0 (pp=0, tp=0), rank 1 (pp=0, tp=1)"


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InspectionError, match=r"no stage 2\n.*0 to 1"):
        listing(small_program(), stage=2)
    with pytest.raises(InspectionError, match="rank 3 does not run stage 0"):
        listing(small_program(), rank=3, stage=0)
    with pytest.raises(MeshError, match="no rank 4"):
        listing(small_program(), rank=4)


def test_a_table_as_text() -> None:
    table = Table("things", ("name", "n"), (("a", 1), ("b", 1200)), ("and a note",))
    lines = ["things", "", "name        n", "------  -----", "a           1"]
    assert str(table).splitlines() == [*lines, "b       1,200", "and a note"]


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (count(0), "0"), (count(999), "999"), (count(1234), "1.23 k"),
        (count(999_700), "1 M"), (count(174_604_259_328), "175 G"),
        (size(0), "0 B"), (size(1023), "1023 B"), (size(1536), "1.5 KiB"),
        (size(5 << 30), "5 GiB"),
        (seconds(1234.5), "1,234 s"), (seconds(2.5), "2.5 s"),
        (seconds(0.0125), "12.5 ms"), (seconds(4e-6), "4 us"),
        (ranges([3, 0, 1, 2, 7]), "0-3,7"), (ranges([]), ""),
    ],
)  # fmt: skip
def test_numbers_for_people(shown: str, text: str) -> None:
    assert shown == text
