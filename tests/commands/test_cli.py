"""The command line, from a model's name to a proof and a training run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from plans import BATCH, CONFIG, model_file, small_program
from processes import ENVIRONMENT, rank_process, torchrun

import autopar
from autopar.cli import main
from autopar.commands.run import check_devices
from autopar.passes.mesh import MeshError
from autopar.plans.store import load_plan, save_plan
from autopar.verify import room_needed

HF = (
    "hf:llama?num_hidden_layers=2,hidden_size=32,intermediate_size=64,"
    "num_attention_heads=4,num_key_value_heads=2,vocab_size=96"
)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan for pp=2, tp=2 of a model in a file."""
    spec = model_file(tmp_path)
    return str(save_plan(small_program(prove=True), tmp_path / "plan", spec))


@pytest.fixture
def single(tmp_path: Path) -> str:
    """A plan for one rank."""
    spec = model_file(tmp_path)
    program = small_program("", 2, prove=True)
    return str(save_plan(program, tmp_path / "plan", spec))


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.slow
def test_compile_inspect_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / "p")
    sizes = ["--batch", "8", "--seq", "16", "--microbatches", "2"]
    assert main(["compile", HF, "--mesh", "pp=2,tp=2", *sizes, "-o", where]) == 0
    text = out(capsys)
    assert "layers.0" in text and "rank 1 | .  F0" in text and where in text
    program = load_plan(where).program
    assert program.inputs["input_ids"] == ((8, 16), "int64")
    assert main(["inspect", where]) == 0
    assert "kv_heads" in out(capsys)
    assert main(["verify", where]) == 0
    text = out(capsys)
    assert "PASSED" in text and "with drawn weights and batch" in text
    assert main(["verify", where, "--as-given", "--json"]) == 0
    assert json.loads(out(capsys))["drawn"] == []


@pytest.mark.slow
def test_microbatches_and_the_batch_count_all_ranks_with_samples(
    tmp_path: Path,
) -> None:
    where = tmp_path / "p"
    mesh = ["--mesh", "pp=2,dp=2,fsdp=2,ep=2", "--zero", "1", "--seq", "8", "--meta"]
    tiny = "hf:gpt2?n_layer=2,n_embd=16,n_head=2,vocab_size=64,n_positions=8"
    assert main(["compile", tiny, *mesh, "-o", str(where)]) == 0
    program = load_plan(where).program
    assert program.batch_extent == 4 * 2 * 8 and program.plan.microbatches == 8


@pytest.mark.slow
def test_what_is_left_to_the_compiler_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, where = model_file(tmp_path), str(tmp_path / "p")
    auto = ["--schedule", "auto", "--recompute", "auto", "--microbatches", "4"]
    command = ["compile", spec, "--mesh", "pp=2", *auto, "-o", where]
    assert main(command) == 2
    assert 'give memory="16GiB"' in capsys.readouterr().err
    assert main([*command, "--memory", "1GiB"]) == 0
    capsys.readouterr()
    assert main(["inspect", where]) == 0
    text = out(capsys)
    assert "memory of a rank at its most, which may be 1 GiB" in text
    assert "schedule auto (" in text
    assert main(["verify", where]) == 0


@pytest.mark.slow
def test_options_become_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, where = model_file(tmp_path), str(tmp_path / "p")
    options = ["--schedule", "gpipe", "--hint", "*.mlp.up.weight=ffn/tp", "--seed", "5"]
    more = ["--no-sequence-parallel", "--zero", "3", "--offload", "--meta", "--json"]
    more += ["-o", where]
    assert main(["compile", spec, "--mesh", "dp=2,tp=2", *options, *more]) == 0
    data = json.loads(out(capsys))
    assert data["mesh"] == "dp=2,tp=2" and data["zero"] == 3
    assert data["offload"]
    assert data["schedule"]["name"] == "gpipe"
    stored = load_plan(where)
    plan = stored.program.plan
    assert (stored.model_spec, stored.seed) == (spec, 5)
    assert plan.hints == {"*.mlp.up.weight": "ffn/tp"}
    assert plan.split["tp"] and "seq" not in plan.split["tp"]


@pytest.mark.slow
def test_several_stages_a_rank_are_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, where = model_file(tmp_path), str(tmp_path / "p")
    options = ["--mesh", "pp=2", "--microbatches", "2", "-o", where]
    more = ["--schedule", "interleaved", "--stages-per-rank", "2"]
    assert main(["compile", spec, *options, *more]) == 0
    assert "rank 0 | 0F0 0F1 2F0" in out(capsys)
    assert main(["verify", where, "--float64"]) == 0
    assert main(["compile", spec, *options, *more[:2]]) == 2
    assert "fix  stages_per_rank=2" in capsys.readouterr().err


@pytest.mark.slow
def test_edited_decisions_compile(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(plan) / "plan.json"
    file.write_text(
        file.read_text().replace('"schedule": "1f1b"', '"schedule": "gpipe"')
    )
    assert main(["inspect", plan]) == 2
    error = capsys.readouterr().err
    assert "was changed after it was compiled" in error and f"--plan {file}" in error
    spec = model_file(tmp_path)
    assert main(["compile", spec, "--plan", str(file), "-o", plan]) == 0
    assert load_plan(plan).program.plan.schedule == "gpipe"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compile", "hf:gpt2"], "no mesh is given"),
        (["compile", "hf:gpt2", "--mesh", "xx=2"], "unknown axis 'xx'"),
        (["compile", "hf:gpt2", "--mesh", "tp=2", "--hint", "x"], "'x' is not a hint"),
        (["compile", "hf:gpt2", "--plan", "no.json"], "no file 'no.json'"),
        (["compile", "hf:gpt2", "--plan", "p", "--mesh", "tp=2"], "contradict"),
        (["compile", "hf:nope", "--mesh", "tp=2"], "no model type 'nope'"),
        (["inspect", "nowhere"], "no plan directory 'nowhere'"),
        (["verify", "nowhere"], "no plan directory 'nowhere'"),
        (["run", "nowhere"], "no plan directory 'nowhere'"),
    ],
)
def test_errors_are_text_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopar: ") and says in error


def test_a_factorys_batch_is_not_overruled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = model_file(tmp_path)
    assert main(["compile", spec, "--mesh", "tp=2", "--seq", "8"]) == 2
    assert "brings its own batch" in capsys.readouterr().err
    assert main(["compile", "plans:small_model", "--mesh", "tp=2"]) == 2
    assert "brings no batch" in capsys.readouterr().err


def test_inspect_lists_modules(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", plan, "--rank", "3"]) == 0
    assert out(capsys).startswith("# stage 1 of 2: rank 3")
    assert main(["inspect", plan, "--stage", "0"]) == 0
    assert "def backward" in out(capsys)
    assert main(["inspect", plan, "--stage", "9"]) == 2


@pytest.mark.slow
def test_inspect_and_verify_speak_json(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", plan, "--json"]) == 0
    data = json.loads(out(capsys))
    assert {row["parameter"] for row in data["parameters"]} == set(
        small_program().parameters
    )
    assert main(["verify", plan, "--json"]) == 0
    proof = json.loads(out(capsys))
    assert proof["passed"] and set(proof["errors"]) > {"loss", "tokens.weight"}


@pytest.mark.slow
def test_verify_in_double_precision(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", plan, "--float64", "--json"]) == 0
    proof = json.loads(out(capsys))
    assert proof["tolerance"] <= 1e-10 and max(proof["errors"].values()) < 1e-12


@pytest.mark.slow  # ops of its width are timed
def test_a_model_too_big_to_run_is_proved_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its own sizes, and fewer layers, for speed: it is on meta all the same."""
    spec, plan = "hf:gpt3-175b-like", str(tmp_path / "plan")
    few = f"{spec}?n_layer=3"
    sizes = ["--batch", "4", "--seq", "64", "--microbatches", "2"]
    compile_ = ["compile", few, "--mesh", "tp=8", *sizes, "--meta", "-o", plan]
    assert main(compile_) == 0
    assert "proved small (tp=2" in capsys.readouterr().out
    assert main(["verify", plan, "--json"]) == 0
    assert json.loads(out(capsys))["size"] == "small"
    save_plan(small_program(), tmp_path / "plan", spec)
    assert main(["verify", plan]) == 2
    assert "ModelMismatch" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_too_big_to_compare_is_proved_small(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load_plan(plan).program
    monkeypatch.setattr(
        "autopar.commands.verify.host_memory", lambda: room_needed(program)
    )
    assert main(["verify", plan]) == 0
    assert "PASSED" in out(capsys)
    monkeypatch.setattr(
        "autopar.commands.verify.host_memory", lambda: room_needed(program) - 1
    )
    assert main(["verify", plan]) == 0
    assert "proved on all 4 ranks" in out(capsys)


@pytest.mark.slow
def test_a_wrong_program_fails_its_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = small_program("", 2)
    [(key, text)] = program.modules.items()
    wrong = text.replace("1e-05", "1e-01")  # of the layer norms
    assert wrong != text
    program = type(program)(**{**vars(program), "modules": {key: wrong}})
    save_plan(program, tmp_path / "plan", model_file(tmp_path))
    assert main(["verify", str(tmp_path / "plan")]) == 1
    assert "FAILED" in out(capsys)


@pytest.mark.slow
def test_training_follows_the_reference(
    single: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", "30", "--lr", "1e-2", "--reference", "--json"]
    assert main(["run", single, *options]) == 0
    rows = [json.loads(line) for line in out(capsys).splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    for row in rows:
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-3)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


def test_training_prints_its_progress(
    single: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", single, "--steps", "3"]) == 0
    lines = out(capsys).splitlines()
    assert lines[0].startswith("step 1/3  loss 4.") and "tokens/s" in lines[-1]
    assert lines[-1].startswith("step 3/3")


def test_run_says_how_to_start_it(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(["run", plan]) == 2
    assert "torchrun --nproc-per-node 4 -m autopar run" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "autopar", "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.split() == ["autopar", autopar.__version__]


def trained(plan: str, *options: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = ("-m", "autopar", "run", plan, *options)
    return torchrun(4, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.nightly  # daily: the demo, and test_run_model.py
def test_four_ranks_train_as_one_device(plan: str) -> None:
    """On processes that the command starts itself."""
    line = [sys.executable, "-m", "autopar", "run", plan, "--steps", "4"]
    line += ["--reference", "--json"]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(one) for one in done.stdout.splitlines() if one[0] == "{"]
    assert len(rows) == 4
    for row in rows:
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-4)


def test_a_plan_for_more_gpus_than_there_are_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(MeshError, match=r"--nnodes 3 .*node 2 .*run 'a plan'"):
        check_devices(6, ["run", "a plan"])
    check_devices(2, [])


def first_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    first = next(line for line in process.stdout if line.startswith("{"))
    assert json.loads(first)["step"] == 1


@pytest.mark.nightly  # daily: test_elastic.py
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "autopar: rank 2 does not answer"),
        (signal.SIGTERM, "autopar: rank 2 got SIGTERM, and no other rank did"),
    ],
)
def test_a_killed_rank_is_named_and_all_stop(
    plan: str, number: signal.Signals, told: str
) -> None:
    with trained(plan, "--steps", "1000000", "--json") as process:
        first_step(process)
        os.kill(rank_process(process.pid, 2), number)
        _, said = process.communicate()
    assert process.returncode != 0
    assert told in said and said.count("autopar: ") == 1


@pytest.mark.nightly
def test_ranks_stop_when_their_launcher_is_killed(plan: str) -> None:
    with trained(plan, "--steps", "1000000", "--json") as process:
        first_step(process)
        process.kill()
        _, said = process.communicate()  # to the end: of all ranks, which hold it too
    assert "autopar: torchrun is gone or out of reach, and so its ranks stop" in said


@pytest.mark.slow
def test_the_demo_shows_proves_and_trains(
    tmp_path: Path,
    forked_ranks: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "(3 heads/tp head_dim) embed" in text
    assert "rank 1 | .  F0 B0" in text and "gradients agree" in text
    [ours, theirs] = re.findall(
        r"^step 3/3  loss (\S+)  single device (\S+) ", text, re.M
    )[0]
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
    module = re.search(r"readable Python: (\S+)", text)
    assert module and (tmp_path / module[1]).is_file()


def test_the_small_model_is_what_plans_are_of() -> None:
    assert small_program().inputs["ids"] == ((BATCH, CONFIG.context), "int64")


@pytest.mark.slow
def test_microbatches_fill_the_pipeline_unless_told_otherwise(tmp_path) -> None:
    plan = tmp_path / "plan"
    model = model_file(tmp_path)  # a batch of 4
    for mesh, wanted in (("pp=2", 4), ("pp=2,dp=2", 2), ("tp=2", 1)):
        assert main(["compile", model, "--mesh", mesh, "-o", str(plan)]) == 0
        assert load_plan(plan).program.plan.microbatches == wanted
    command = ["compile", model, "--mesh", "pp=2", "--microbatches", "1"]
    assert main([*command, "-o", str(plan)]) == 0
    assert load_plan(plan).program.plan.microbatches == 1
