"""`autopar plan -o`, `explain`, and what becomes of the directory that they share."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from models import plain_gpt
from plans import BATCH, model_file, tiny_file
from processes import run_commands

from autopar.cli import main
from autopar.machine.hardware import cluster_of
from autopar.models.batches import with_samples
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.planner.compile_planned import compiled_once
from autopar.planner.planned import mesh_of, read_decided
from autopar.planner.planner import find_plans
from autopar.plans.plan_record import PlanRecord, read_record
from autopar.plans.store import load_plan
from autopar.reports.explain import difference, explanation_data
from examples.gpt import tiny

SAMPLES = 8


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is planned once: model.py, and a plan for pp=2 on four devices."""
    folder = tmp_path_factory.mktemp("planned")
    asked = ["--devices", "4xCPU", "--mesh", "pp=2", "--global-batch", str(SAMPLES)]
    spec = model_file(folder)
    assert main(["plan", spec, *asked, "-o", str(folder / "plan")]) == 0
    return folder


@pytest.fixture
def plan(origin: Path, tmp_path: Path) -> Path:
    """A copy of the planned directory, not compiled yet."""
    return Path(shutil.copytree(origin / "plan", tmp_path / "plan"))


def error(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


# --- what is found, as a file --------------------------------------------------------


def test_what_full_recomputation_leaves_out_is_told(tmp_path: Path, capsys) -> None:
    spec, plan = tiny_file(tmp_path, 4, 32, 4, 16, 64), str(tmp_path / "plan")
    asked = ["--devices", "1xA100-80GB", "--global-batch", "8", "--recompute", "full"]
    assert main(["plan", spec, *asked, "-o", plan]) == 0
    assert "with whole layers" in capsys.readouterr().out
    assert main(["explain", plan]) == 0
    assert "with whole layers" in capsys.readouterr().out
    (best, *_) = read_record(Path(plan)).best
    assert best.whole_layers and best.whole_layers > best.seconds
    assert main(["plan", spec, *asked[:-1], "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["whole_layers"] is None


def test_a_plan_is_priced_as_its_backend_runs(tmp_path: Path, capsys) -> None:
    spec, took = model_file(tmp_path), {}
    for backend in "eager", "inductor":
        asked = ["--devices", "1xA100-80GB", "--global-batch", "8", "--json"]
        assert main(["plan", spec, *asked, "--backend", backend]) == 0
        took[backend] = json.loads(capsys.readouterr().out)[0]["seconds"]
    assert took["inductor"] < took["eager"]


@pytest.mark.slow
def test_findings_are_read_as_they_were_written(plan: Path) -> None:
    record = read_record(plan)
    assert PlanRecord.from_json(record.to_json()) == record
    before = record.to_json().replace('"global_batch"', '"samples"')
    assert PlanRecord.from_json(before) == record
    assert record.global_batch == SAMPLES and len(record.best) > 3
    assert str(record.cluster) == "4xCPU"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d.update(format=7), "not of format 2"),
        (lambda d: d.pop("cluster"), "no 'cluster'"),
        (lambda d: d.update(colour=1), "unknown key 'colour'"),
        (lambda d: d.update(global_batch="8"), "'global_batch' in"),
        (lambda d: d.update(best=[]), "holds no estimate"),
        (lambda d: d["best"][0].pop("parts"), "best[0]"),
        (
            lambda d: d["best"][0]["parts"].update(idle=None),
            "'idle' in 'parts' in best[0]",
        ),
        (lambda d: d["best"][1]["candidate"].update(zero=True), "'zero' in"),
        (lambda d: d["best"][0]["candidate"].update(mesh="xx=2"), "axis 'xx'"),
        (lambda d: d["best"][0]["stages"][0].pop("send"), "no 'send'"),
        (lambda d: d["cluster"]["device"].pop("name"), "device has no 'name'"),
    ],
)
def test_a_damaged_estimate_is_refused(plan: Path, edit, says: str, capsys) -> None:
    path = plan / "estimate.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    assert main(["explain", str(plan)]) == 2
    assert says in error(capsys)


def test_what_is_no_estimate_is_refused(plan: Path, tmp_path: Path, capsys) -> None:
    (plan / "estimate.json").write_text("{")
    assert main(["explain", str(plan)]) == 2
    assert "is not JSON" in error(capsys)
    assert main(["explain", str(tmp_path)]) == 2
    assert "autopar plan MODEL" in error(capsys)


@pytest.mark.slow
def test_what_is_planned_is_compiled_at_once(tmp_path: Path, capsys) -> None:
    """To the same programs as by a command of its own."""
    spec, once, twice = model_file(tmp_path), tmp_path / "once", tmp_path / "twice"
    asked = [spec, "--devices", "2xA100-80GB", "--mesh", "tp=2", "--op-shardings"]
    assert main(["plan", *asked, "-o", str(once), "--compile"]) == 0
    shown = capsys.readouterr().out
    assert "proved" in shown and f"autopar run {once}" in shown
    assert main(["plan", *asked, "-o", str(twice)]) == 0
    assert main(["compile", spec, "--plan", str(twice), "-o", str(twice)]) == 0
    names = {path.relative_to(once) for path in once.rglob("*") if path.is_file()}
    assert Path("program.json") in names
    for name in names:
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name
    assert main(["plan", *asked, "--compile"]) == 2
    assert "--compile has nowhere to write" in error(capsys)


@pytest.mark.slow
def test_what_is_decided_is_kept_with_the_plan(tmp_path: Path, capsys) -> None:
    spec, where = model_file(tmp_path), tmp_path / "p"
    asked = ["--devices", "2xCPU", "--mesh", "2", "--precision", "bf16", "--zero", "1"]
    asked += ["--microbatches", "2", "--recompute", "none", "--tf32"]
    assert main(["plan", spec, *asked, "-o", str(where)]) == 0
    assert "precision bf16" in capsys.readouterr().out
    chosen = read_decided(where)
    assert chosen.plan.precision == "bf16" and chosen.plan.zero == 1
    assert chosen.plan.tf32
    assert str(chosen.plan.mesh) == "dp=2" and chosen.plan.microbatches == 2
    assert main(["explain", str(where)]) == 0
    before = capsys.readouterr().out
    assert ", precision bf16, tf32 True" in before
    assert main(["explain", str(where), "--reprice"]) == 0
    assert capsys.readouterr().out == before
    assert main(["verify", str(where), "--json"]) == 0


# --- explain -------------------------------------------------------------------------


def test_parts_add_up_to_the_step(plan: Path) -> None:
    record = read_record(plan)
    best = record.best[0]
    for e in record.best:
        assert sum(e.parts.values()) == pytest.approx(e.seconds)
        assert min(e.parts.values()) >= -1e-12
    for other in explanation_data(record)["others"]:
        assert sum(other["parts"].values()) == pytest.approx(other["seconds"])
    assert difference(best, best) == ["+0 us other"]


@pytest.mark.slow
def test_explain_tells_seconds_bytes_and_why(plan: Path, capsys) -> None:
    assert main(["explain", str(plan)]) == 0
    text = capsys.readouterr().out
    best = read_record(plan).best[0]
    assert str(best.candidate) in text
    for wanted in (*best.parts, *best.memory[0]):
        assert wanted in text or not best.parts.get(wanted)
    assert "why not another" in text and "MFU" in text
    assert "embed*vocab" not in text
    assert main(["explain", str(plan), "--formulas"]) == 0
    assert "embed*vocab" in capsys.readouterr().out


@pytest.mark.slow
def test_prices_of_other_devices(plan: Path, capsys) -> None:
    assert main(["explain", str(plan), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["explain", str(plan), "--reprice", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["seconds"] == pytest.approx(before["seconds"])
    assert again["parts"] == pytest.approx(before["parts"])
    assert main(["explain", str(plan), "--devices", "4xH100", "--json"]) == 0
    faster = json.loads(capsys.readouterr().out)
    assert faster["parts"]["compute"] < before["parts"]["compute"]
    assert main(["explain", str(plan), "--devices", "8xH100"]) == 2
    assert "the plans are for 4 devices, not 8" in error(capsys)


# --- compiling what is planned ----------------------------------------------------


@pytest.mark.slow
def test_a_proof_compiles_first(plan: Path, capsys) -> None:
    found = read_record(plan)
    assert main(["verify", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    program = load_plan(plan).program
    assert program.batch_extent == SAMPLES
    assert program.mesh == found.best[0].candidate.mesh
    assert main(["explain", str(plan)]) == 0  # the estimate is still there
    assert read_record(plan).best == found.best


@pytest.mark.slow
def test_compiling_by_hand_keeps_batch_and_estimate(plan: Path, capsys) -> None:
    spec, other = read_record(plan).model, plan.with_name("other")
    assert main(["compile", spec, "--plan", str(plan), "-o", str(other)]) == 0
    assert load_plan(other).program.batch_extent == SAMPLES
    assert read_record(other).best == read_record(plan).best
    # The estimate is not of an edited plan; the batch is then the model's own.
    file = plan / "plan.json"
    file.write_text(file.read_text() + " ")
    assert main(["compile", spec, "--plan", str(file), "-o", str(other)]) == 0
    assert load_plan(other).program.batch_extent == BATCH
    assert not (other / "estimate.json").exists()


@pytest.mark.slow
def test_planning_again_replaces_what_was_compiled(origin: Path, plan: Path) -> None:
    assert main(["verify", str(plan)]) == 0
    spec = f"{origin / 'model.py'}:small"
    asked = ["--devices", "1xCPU", "--global-batch", "4"]
    assert main(["plan", spec, *asked, "-o", str(plan)]) == 0
    assert mesh_of(plan).size == 1 and read_record(plan).global_batch == 4


@pytest.mark.slow
def test_one_rank_trains_what_is_planned(origin: Path, tmp_path: Path, capsys) -> None:
    spec, where = f"{origin / 'model.py'}:small", str(tmp_path / "p")
    asked = ["--devices", "1xCPU", "--global-batch", "8"]
    assert main(["plan", spec, *asked, "-o", where]) == 0
    capsys.readouterr()
    assert main(["run", where, "--steps", "3", "--reference", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-4)


@pytest.mark.slow
def test_four_ranks_compile_once_and_train(plan: Path) -> None:
    command = ["run", str(plan), "--steps", "3", "--reference", "--json"]
    ended = run_commands(4, command, os.environ)
    assert [status for status, *_ in ended] == [0] * 4, ended
    rows = [json.loads(x) for x in ended[0][1].splitlines() if x.startswith("{")]
    assert len(rows) == 3
    for row in rows:
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-4)


class Store:
    """As much of a torch.distributed store as `compiled_once` asks of one."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.kept: set[str] = set()

    def add(self, key: str, amount: int) -> int:
        return 2

    def set(self, key: str, value: str) -> None:
        self.kept.add(key)

    def wait(self, keys: list[str], timeout: object) -> None:
        assert set(keys) <= self.kept, f"nobody would set {keys}"
        self.waited += keys


@pytest.mark.slow
def test_other_ranks_wait_for_the_first(plan: Path) -> None:
    store = Store()
    with pytest.raises(AssertionError, match="autopar/compiled"):
        compiled_once(plan, store, 1, 2)
    assert not (plan / "manifest.json").exists()
    first = compiled_once(plan, store, 0, 2)
    second = compiled_once(plan, store, 1, 2)
    assert first.program.to_json() == second.program.to_json()


def test_batches_of_another_size() -> None:
    _, batch = tiny()
    own = len(batch["ids"])
    assert with_samples(batch, own)["ids"] is batch["ids"]
    more = with_samples(batch, 2 * own + 1)
    assert len(more["ids"]) == len(more["labels"]) == 2 * own + 1
    assert more["ids"][own].equal(batch["ids"][0])
    assert len(with_samples(batch, 1)["ids"]) == 1


def test_the_search_tells_how_far_it_is() -> None:
    case, seen = plain_gpt(), []
    of = case.short()
    mesh = Mesh.parse("dp=2")
    watch = lambda done, total: seen.append((done, total))  # noqa: E731
    found = find_plans(of, cluster_of("2xCPU"), 4, mesh, watch)
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    assert 0 < found.tried <= len(seen)


# --- bad input -------------------------------------------------------------------

CLUSTER = {"devices": 4, "device": {"name": "A100-80GB"}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({**CLUSTER, "nodes": 2}, "unknown key 'nodes'"),
        ({"devices": 4}, "the cluster has no 'device'"),
        ({**CLUSTER, "devices": 0}, "'devices' is 0"),
        ({**CLUSTER, "devices": True}, "'devices' is True"),
        ({**CLUSTER, "device": {"name": "X"}}, "device has no"),
        ({**CLUSTER, "device": {"name": "CPU", "ram": 1}}, "unknown key 'ram'"),
        ({**CLUSTER, "device": {"name": "CPU", "memory": "8 beans"}}, "device.memory"),
        ({**CLUSTER, "device": {"name": "CPU", "memory": -1}}, "memory of device CPU"),
        ({**CLUSTER, "links": {}}, "'links' is {}, not a list"),
        ({**CLUSTER, "links": [{"devices": 4}]}, "links has no"),
        ([1], "holds no table of keys"),
    ],
)
def test_a_wrong_cluster_file_is_refused(
    data: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(data))
    spec = model_file(tmp_path)
    assert main(["plan", spec, "--cluster", str(file)]) == 2
    assert says in error(capsys)


@pytest.mark.matrix(quick=5)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "4xA1000"], "no device is known as 'A1000'"),
        (["--devices", "0xCPU"], "'0' devices\n  fix  give a whole number from 1"),
        (["--devices", "fourxCPU"], "not a number of devices"),
        (["--cluster", "no.toml"], "cannot read 'no.toml'"),
        (
            ["--devices", "4xCPU", "--global-batch", "0"],
            "--global-batch: '0' is not a whole number",
        ),
        (["--devices", "4xCPU", "--global-batch", "-8"], "--global-batch: '-8' is not"),
        (
            ["--devices", "5xCPU", "--mesh", "dp=5", "--global-batch", "7"],
            "no mesh of 5 devices divides a batch of 7",
        ),
        (["--devices", "4xCPU", "--mesh", "dp=3"], "no mesh of 4 devices"),
        (["--devices", "4xCPU", "--mesh", "3,2"], "axes of 3, 2 has a meaning"),
        (["--devices", "4xCPU", "--mesh", "zz=2"], "unknown axis 'zz'"),
        (["--devices", "4xCPU", "--microbatches", "0"], "--microbatches: '0' is"),
        (["--devices", "4xCPU", "--microbatches", "3"], "as the options decide"),
        (["--devices", "4xCPU", "--memory", "-1"], "--memory: '-1' is not"),
        (["--devices", "4xCPU", "--memory", "much"], "--memory: 'much' is not"),
        (["--devices", "4xCPU", "--memory", "10kB"], "no plan fits into 4xCPU"),
        (["--devices", "4xCPU", "--seq", "8"], "brings its own batch"),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], says: str, tmp_path: Path, capsys
) -> None:
    assert main(["plan", model_file(tmp_path), *arguments]) == 2
    assert says in error(capsys)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seq", "0"], "--seq: '0' is not a whole number from 1"),
        ([], "no --global-batch is given"),
    ],
)
def test_what_a_model_without_a_batch_needs(arguments, says, capsys) -> None:
    tiny_hf = "hf:gpt2?n_layer=2,n_embd=16,n_head=2,vocab_size=64,n_positions=8"
    assert main(["plan", tiny_hf, "--devices", "2xCPU", *arguments]) == 2
    assert says in error(capsys)


def test_a_directory_of_something_else_is_left_alone(origin, tmp_path, capsys) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    asked = ["--devices", "1xCPU", "-o", str(tmp_path)]
    assert main(["plan", f"{origin / 'model.py'}:small", *asked]) == 2
    assert "is not a plan directory" in error(capsys)
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(AutoparError, match="no plan directory"):
        load_plan(tmp_path / "nowhere")
