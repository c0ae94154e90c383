"""`autopar run` goes on bitwise where it ended; `autopar export` writes plain files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from models import gpt2
from plans import tiny_plan
from processes import rank_process, torchrun
from torch import nn

from autopar.checkpoints.checkpoint_files import complete, latest
from autopar.checkpoints.dcp import CheckpointError
from autopar.cli import main
from autopar.training.options import RunOptions
from autopar.training.resume import COUNT, STARTS, check_progress


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A model with dropout, on one rank."""
    return tiny_plan(tmp_path)


def rows(text: str) -> list[tuple[int, float]]:
    """(step, loss) of each line of JSON."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [(row["step"], row["loss"]) for row in found]


def run(
    capsys: pytest.CaptureFixture[str], plan: str, *options: str
) -> list[tuple[int, float]]:
    capsys.readouterr()
    assert main(["run", plan, "--json", "--warmup", "4", *options]) == 0
    return rows(capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_goes_on_bitwise(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(capsys, plan, "--steps", "6", "--save", str(tmp_path / "whole"))
    runs = tmp_path / "parts"
    saving = ("--save", str(runs), "--save-every", "2", "--resume")
    first = run(capsys, plan, "--steps", "3", *saving)
    assert [path.name for path in complete(runs)] == ["step-00000002", "step-00000003"]
    rest = run(capsys, plan, "--steps", "6", *saving)
    assert [step for step, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert first + rest == whole
    assert run(capsys, plan, "--steps", "6", *saving) == []
    for folder in ("whole", "parts"):
        file = str(tmp_path / f"{folder}.pt")
        assert main(["export", str(tmp_path / folder), "-o", file]) == 0
    a, b = (torch.load(tmp_path / f"{f}.pt") for f in ("whole", "parts"))
    assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_reference_warms_up_too(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    options = ("--warmup", "3", "--lr", "0.01", "--steps", "4", "--reference")
    assert main(["run", plan, "--json", *options]) == 0
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-4)


@pytest.mark.slow
def test_another_run_is_refused(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = str(tmp_path / "runs")
    saving = ["run", plan, "--steps", "1", "--save", runs]
    assert main(saving) == 0
    assert main(saving) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main([*saving, "--resume", "--lr", "0.5", "--clip", "2"]) == 2
    said = capsys.readouterr().err
    assert "had --clip 1.0, but this has 2.0; --lr 0.0003, but this has 0.5" in said
    assert "go on with --clip 1.0 --lr 0.0003, or" in said
    model = f"{tmp_path / 'model.py'}:tiny"
    other = ["run", model, "--global-batch", "2", "--plans", str(tmp_path / "plans")]
    assert main([*other, *saving[2:], "--resume"]) == 2
    assert "had --global-batch 4, but this has 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume"], "--resume needs a directory"),
        (["--save-every", "2"], "--save-every needs a directory"),
        (["--save", "x", "--resume", "--reference"], "--reference has no checkpoint"),
        (
            ["--save", "x", "--save-every", "-1"],
            "argument --save-every: '-1' is not a whole number from 0 to",
        ),
        (["--warmup", "-1"], "argument --warmup: '-1' is not"),
        (["--save", "x", "--keep", "0"], "argument --keep: '0' is not"),
    ],
)
def test_options_that_cannot_be(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["run", "plan", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.nightly  # daily: test_elastic.py, and here on one rank
def test_ranks_go_on_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tiny_plan(tmp_path, mesh="pp=2")
    saving = ("--save", str(tmp_path / "runs"), "--save-every", "2", "--resume")
    lines: list[tuple[int, float]] = []
    with on_two_ranks(plan, "--steps", "1000000", *saving) as process:
        assert process.stdout is not None
        while len(lines) < 3:
            lines += rows(process.stdout.readline())
        ranks = [rank_process(process.pid, rank) for rank in range(2)]
        for number in (*ranks, process.pid):
            os.kill(number, signal.SIGKILL)
        process.stdout.read()  # to the end, when all of them are gone
    before = latest(tmp_path / "runs")
    assert before is not None
    done = int(before.name.partition("-")[2])
    steps = ("--steps", str(done + 4))
    with on_two_ranks(plan, *steps, *saving) as process:
        rest = rows(process.communicate()[0])
    with on_two_ranks(plan, *steps) as process:
        whole = rows(process.communicate()[0])
    assert done >= 2 and len(whole) == done + 4
    assert whole[:3] == lines and whole[done:] == rest
    # On one rank, from what the two saved: the same up to rounding.
    shutil.rmtree(latest(tmp_path / "runs") or tmp_path / "runs")
    single = tiny_plan(tmp_path)
    alone = run(capsys, single, *steps, *saving)
    start = alone[0][0] - 1
    assert start == done + 2 and [loss for _, loss in alone] == pytest.approx(
        [loss for _, loss in whole[start:]], rel=1e-5
    )


def on_two_ranks(
    plan: str, *options: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    command = ("-m", "autopar", "run", plan, "--warmup", "4", "--json", *options)
    return torchrun(2, *command, stdout=subprocess.PIPE)


# --- export ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A checkpoint of Hugging Face's GPT-2, with tied embeddings, and the model."""
    case, folder = gpt2(layers=2), tmp_path_factory.mktemp("runs")
    step = case.step()
    step.save(folder)
    return folder, case.model


def test_inspect_shows_what_is_saved(
    saved: tuple[Path, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = saved
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "step-00000000: step 0, saved on mesh 'tp=1' by torch" in text
    assert re.search(r"^transformer\.wte\.weight +101x32 +float32 +1$", text, re.M)
    assert "tied: lm_head.weight is transformer.wte.weight" in text
    assert main(["inspect", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["tensors"]) == {name for name, _ in model.named_parameters()}
    assert data["bytes"]["__0_0.distcp"] > sum(p.nbytes for p in model.parameters())


def test_hugging_face_loads_the_safetensors(
    saved: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    from safetensors import safe_open

    folder, model = saved
    file = tmp_path / "hub" / "model.safetensors"
    assert main(["export", str(folder), "-o", str(file)]) == 0
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert "transformer.wte.weight" in opened.keys()  # noqa: SIM118
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118
    model.config.save_pretrained(file.parent)
    loaded, report = type(model).from_pretrained(file.parent, output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_torch_loads_the_file(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, model = saved
    file = tmp_path / "model.pt"
    assert main(["export", str(latest(folder)), "-o", str(file)]) == 0
    state = torch.load(file)
    assert set(state) == set(model.state_dict())
    other = gpt2(layers=2).model
    other.load_state_dict(state)
    wte = state["transformer.wte.weight"]
    assert state["lm_head.weight"].data_ptr() == wte.data_ptr()


def test_what_cannot_be_exported(
    saved: tuple[Path, nn.Module],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = saved

    def refused(checkpoint: Path, file: Path) -> str:
        assert main(["export", str(checkpoint), "-o", str(file)]) == 2
        assert not file.exists()
        return capsys.readouterr().err

    assert "unknown kind of file" in refused(folder, tmp_path / "model.bin")
    assert "no complete checkpoint" in refused(tmp_path, tmp_path / "model.pt")
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(folder, tmp_path / "file" / "model.pt")
    monkeypatch.setattr("autopar.checkpoints.pretrained.find_spec", lambda name: None)
    said = refused(folder, tmp_path / "model.safetensors")
    assert "pip install 'autopar[hf]'" in said


def test_starts_that_get_nowhere_are_counted(tmp_path: Path) -> None:
    options = RunOptions(save=tmp_path / "runs", resume=True)
    for _ in range(2):  # told, they count anew
        for _ in range(STARTS):
            check_progress(options)
        with pytest.raises(CheckpointError, match="10 times after the beginning"):
            check_progress(options)
    check_progress(options)
    (tmp_path / "runs" / "step-00000003").mkdir()
    for _ in range(STARTS):
        check_progress(options)
    with pytest.raises(CheckpointError, match="after step-00000003, and never"):
        check_progress(options)
    (tmp_path / "runs" / COUNT).write_text("{")  # half of one
    check_progress(options)
    check_progress(RunOptions())
