"""Rows of a run in TensorBoard and Weights & Biases, and traces of its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import tiny_file

from autopar.cli import main
from autopar.models.load import load_model
from autopar.training.data.token_batches import open_data
from autopar.training.reports.trackers import RUN_ID


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """That the planner made, with what it predicts."""
    spec, where = tiny_file(tmp_path, 1, 16, 2, 8, 64), str(tmp_path / "plan")
    assert main(["plan", spec, "--devices", "1", "-o", where]) == 0
    return where


DICT = """from torch import nn
from examples.gpt import GPT, Config, build


class Losses(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids, labels):
        logits, loss = self.inner(ids, labels)
        return {"loss": loss, "z": logits.logsumexp(-1).square().mean()}


def tiny():
    model, batch = build(Config(1, 16, 2, 8, 64), batch=4)
    return Losses(model), batch
"""


@pytest.mark.slow
def test_scalars_beside_the_loss_are_in_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of training, and of evaluations, as of plain torch."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "model.py").write_text(DICT)
    spec, plan = f"{tmp_path / 'model.py'}:tiny", str(tmp_path / "plan")
    assert main(["compile", spec, "--mesh", "tp=1", "-o", plan]) == 0
    log, board = tmp_path / "log.jsonl", tmp_path / "board"
    line = ["run", plan, "--steps", "2", "--log-every", "1", "--eval-every", "2"]
    line += ["--eval-batches", "1", "--log-file", str(log), "--tensorboard", str(board)]
    capsys.readouterr()
    assert main(line) == 0
    first, _, evaluated = (json.loads(text) for text in log.read_text().splitlines())
    model = load_model(spec).model
    ids, labels = open_data("synthetic", 64).batch(0, 4, 8)
    want = model(ids, labels)
    assert first["loss"] == pytest.approx(want["loss"].item(), rel=1e-5)
    assert first["metrics/z"] == pytest.approx(want["z"].item(), rel=1e-5)
    assert f"  z {first['metrics/z']:.5f}" in capsys.readouterr().out
    found = EventAccumulator(str(board)).Reload()
    assert found.Scalars("metrics/z")[0].value == pytest.approx(first["metrics/z"])
    [event] = found.Scalars("eval_metrics/z")
    assert event.value == pytest.approx(evaluated["eval_metrics/z"])
    assert 0.5 < evaluated["eval_metrics/z"] / first["metrics/z"] < 2


@pytest.mark.slow
def test_tensorboard_has_the_rows_of_the_log(plan: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, log = tmp_path / "board", tmp_path / "log.jsonl"
    line = ["run", plan, "--steps", "4", "--log-every", "2", "--eval-every", "4"]
    assert main([*line, "--tensorboard", str(board), "--log-file", str(log)]) == 0
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    found = EventAccumulator(str(board)).Reload()
    for name in ("loss", "grad_norm", "lr", "eval_loss"):
        wanted = [(row["step"], row[name]) for row in rows if name in row]
        have = [(event.step, event.value) for event in found.Scalars(name)]
        assert wanted and have == [(step, pytest.approx(v)) for step, v in wanted]


@pytest.mark.slow
def test_a_run_of_weights_and_biases_goes_on(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline; a resumed run has the name of the first."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs = str(tmp_path / "runs")
    line = ["run", plan, "--wandb", "a project", "--save", runs, "--resume"]
    for steps in ("2", "4"):
        assert main([*line, "--steps", steps, "--log-every", "1"]) == 0
    found = {p.name.rpartition("-")[2] for p in tmp_path.glob("wandb/offline-run-*")}
    assert found == {(tmp_path / "runs" / RUN_ID).read_text()}


def test_what_is_not_installed_is_said(
    plan: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert main(["run", plan, "--steps", "1", "--wandb", "x"]) == 2
    assert "pip install 'autopar[log]'" in capsys.readouterr().err


@pytest.mark.slow
def test_traces_and_seconds_of_steps(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", plan, "--steps", "5", "--save", str(tmp_path / "runs")]
    assert main([*line, "--profile-steps", "4:5"]) == 0
    said = capsys.readouterr().err
    assert "steps 4 to 5: " in said and "s profiled" in said and "s predicted" in said
    [trace] = (tmp_path / "runs" / "traces").iterdir()
    assert trace.name == "steps-4-5-rank-0.json"
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("mm" in str(event.get("name")) for event in events)
    assert main([*line, "--resume", "--profile-steps", "5:6"]) == 2
    assert "from 1 to 5" in capsys.readouterr().err
