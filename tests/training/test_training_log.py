"""What a run logs is what plain torch computes, and what is not finite stops it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from plans import rows, tiny_plan
from torch import nn
from torch.distributed.run import get_args_parser
from torch.utils.flop_counter import FlopCounterMode

from autopar.cli import main
from autopar.models.load import load_model
from autopar.planner.compile_planned import compiled
from autopar.training import run as training
from autopar.training.data.token_batches import open_data
from autopar.training.options import RunOptions
from autopar.training.reports import metrics


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return tiny_plan(tmp_path, 2, 32, 4, 16, 64)


def spec(folder: Path) -> str:
    return f"{folder / 'model.py'}:tiny"


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("clip", ["0", "0.1"])
def test_the_log_has_what_plain_torch_computes(
    clip: str, plan: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    given = ["--steps", "4", "--warmup", "8", "--lr", "0.08", "--clip", clip]
    assert main(["run", plan, *given, "--log-file", str(log), "--log-every", "1"]) == 0
    model = load_model(spec(tmp_path)).model
    ids, labels = open_data("synthetic", 64).batch(0, 4, 16)
    loss = model(ids, labels)[1]
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    found = rows(log.read_text())
    assert found[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert [row["lr"] for row in found] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    for row in found:
        assert row["tokens_per_second"] > 0 and row["peak_memory"] > 1e6
        assert "mfu" not in row  # nobody knows the peak of this CPU


@pytest.mark.slow
def test_a_run_that_goes_on_appends(plan: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = ["run", plan, "--save", str(tmp_path / "runs"), "--resume"]
    line += ["--log-file", str(log), "--log-every", "2", "--eval-every", "3"]
    assert main([*line, "--steps", "3"]) == 0
    with log.open("a") as file:
        file.write('{"step": 4, "lo')  # as a crash leaves it
    assert main([*line, "--steps", "5"]) == 0
    lines = log.read_text().splitlines()
    assert lines.pop(3) == '{"step": 4, "lo'
    found = [json.loads(each) for each in lines]
    assert [(row["step"], "loss" in row) for row in found] == [
        *((2, True), (3, True), (3, False)),
        *((4, True), (5, True), (5, False)),
    ]


def test_a_log_that_cannot_be_written_is_told_first(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["run", plan, "--log-file", str(tmp_path / "none" / "log")]) == 2
    told = capsys.readouterr()
    assert "none/log" in told.err and not told.out


def test_mfu_counts_as_torch_counts(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(spec(tmp_path)).model
    ids, labels = open_data("synthetic", 64).batch(0, 4, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, labels)
    program = compiled(Path(plan), True).program
    assert program.forward_flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    monkeypatch.setattr(metrics, "peak_flops", lambda *_: 1e12)
    log = tmp_path / "log.jsonl"
    assert main(["run", plan, "--steps", "2", "--log-file", str(log)]) == 0
    (row,) = rows(log.read_text())
    seconds = 4 * 16 / row["tokens_per_second"]
    assert row["mfu"] == pytest.approx(3 * program.forward_flops / seconds / 1e12)


def test_no_flag_looks_like_the_start_of_one_of_torchrun() -> None:
    """It reads those of the script too, and takes them for its own, shortened."""
    theirs = [o for a in get_args_parser()._actions for o in a.option_strings]
    for name in RunOptions.__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}"
        assert not [option for option in theirs if option.startswith(flag)], flag


# --- what is not finite ------------------------------------------------------------


@pytest.fixture
def third_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the third step are not finite."""
    usual, calls = training.Step.__call__, iter(range(100))

    def poisoned(self, **batch):
        loss = usual(self, **batch)
        if next(calls) == 2:
            next(self.parameters()).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(training.Step, "__call__", poisoned)


@pytest.mark.usefixtures("third_fails")
def test_a_run_stops_and_names_the_step(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    saving = ["--save", str(runs), "--save-every", "4"]
    assert main(["run", plan, "--steps", "30", *saving]) == 2
    said = capsys.readouterr().err
    assert "step 3: the loss or a gradient is not finite" in said
    assert not list(runs.glob("step-*"))  # none of such weights


@pytest.mark.slow
@pytest.mark.usefixtures("third_fails")
def test_a_step_that_is_skipped_changes_nothing(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    given = ["--steps", "5", "--on-nonfinite", "skip", "--log-file", str(log)]
    assert main(["run", plan, *given, "--log-every", "1", "--eval-every", "1"]) == 0
    found = rows(log.read_text())
    norms = [row["grad_norm"] for row in found if "loss" in row]
    held_out = [row["eval_loss"] for row in found if "eval_loss" in row]
    assert norms[2] is None and all(norms[i] > 0 for i in (0, 1, 3, 4))
    assert held_out[1] == held_out[2] and len(set(held_out)) == 4
