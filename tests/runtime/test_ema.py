"""Averages of weights are those of torch's AveragedModel, on shards of any plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from models import plain_gpt
from processes import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.cli import main
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program

DECAY, STEPS = 0.7, 4
State = dict[str, Tensor]


def tiny() -> Case:
    case = plain_gpt(layers=2)
    return Case(case.model.double(), case.batch)


def batch_of(case: Case, i: int) -> dict[str, Tensor]:
    return {k: v.roll(i, 0) for k, v in case.batch.items()}


def averaged_plainly() -> tuple[State, State, float]:
    """Averages, weights, and the loss with averages, of the model on one device."""
    case = tiny()
    average = AveragedModel(case.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    update = torch.optim.AdamW(case.model.parameters(), lr=0.05)
    for i in range(STEPS):
        update.zero_grad()
        case.model(**batch_of(case, i))[1].backward()
        update.step()
        average.update_parameters(case.model)
    with torch.no_grad():
        loss = average.module.eval()(**case.batch)[1].item()
    return average.module.state_dict(), case.model.state_dict(), loss


def averaged(folder: Path, program: Program, half: bool) -> tuple[State, State, float]:
    """The same of a step; half: saved and loaded again in the middle."""
    case = tiny()
    step = case.step(program)
    update = torch.optim.AdamW(step.parameters(), lr=0.05)
    ema = step.start_ema(DECAY)
    for i in range(STEPS):
        if half and i == STEPS // 2:
            step.save(folder, update)
            step = tiny().step(program)
            update = torch.optim.AdamW(step.parameters(), lr=0.05)
            ema = step.start_ema(DECAY)
            step.load(folder, update)
        update.zero_grad()
        step(**batch_of(case, i))
        update.step()
        ema.update()
    with ema.applied():
        loss, averages = step.evaluate(**case.batch).item(), step.state_dict()
    step.save(folder, update)
    return averages, step.state_dict(), loss


def check(
    found: tuple[State, State, float], wanted: tuple[State, State, float]
) -> None:
    for have, want in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(dict(have), dict(want), rtol=1e-9, atol=1e-9)
    assert found[2] == pytest.approx(wanted[2], rel=1e-9)


@pytest.fixture(scope="module")
def plain() -> tuple[State, State, float]:
    return averaged_plainly()


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_one_rank(tmp_path: Path, half: bool, plain: Any) -> None:
    check(averaged(tmp_path, tiny().proved("tp=1"), half), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {"zero": 3}),
        ("pp=2,tp=2", {"microbatches": 2}),
        pytest.param("dp=2,tp=2", {"zero": 1}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_average_what_they_hold(
    mesh: str, options: Mapping[str, Any], tmp_path: Path, plain: Any
) -> None:
    program = tiny().proved(mesh, **options)
    for found in run_ranks(averaged, program.mesh.size, tmp_path, program, True):
        check(found, plain)
    step = tiny().step()
    ema = step.start_ema(DECAY)
    step.load(tmp_path)
    assert ema.updates == STEPS
    with ema.applied():
        check((step.state_dict(), plain[1], plain[2]), plain)
    file = tmp_path / "averages.pt"
    assert main(["export", str(tmp_path), "--ema", "-o", str(file)]) == 0
    torch.testing.assert_close(
        torch.load(file), {**plain[0]}, rtol=1e-9, atol=1e-9, check_dtype=True
    )


def test_weights_in_two_bytes_are_averaged_in_four() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ema = autopar.runtime.parameters.ema.Ema(lambda: {"w": weight}, 0.999)
    ema.update()
    with torch.no_grad():
        weight.fill_(2)
    ema.update()
    assert ema.averages["w"].tolist() == pytest.approx([1.001] * 3, rel=1e-6)


def test_what_no_average_is_for(tmp_path: Path) -> None:
    step = tiny().step()
    with pytest.raises(AutoparError, match="no average of the weights was started"):
        _ = step.ema
    with pytest.raises(AutoparError, match="cannot be copied") as error:
        AveragedModel(step)
    assert "step.ema.update()" in error.value.fix
    with pytest.raises(AutoparError):
        copy.deepcopy(step)
    step.save(tmp_path)
    ema = step.start_ema(0.5)
    with pytest.raises(AutoparError, match="has no averages"):
        step.load(tmp_path)
    with ema.applied(), pytest.raises(AutoparError, match="averages here"):
        ema.update()


@pytest.mark.slow
def test_a_run_evaluates_and_samples_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(
        "from examples.gpt import Config, build\n\n"
        "def tiny():\n    return build(Config(1, 16, 2, 8, 256), batch=4)\n"
    )
    plan, runs = str(tmp_path / "plan"), str(tmp_path / "runs")
    spec = f"{tmp_path / 'model.py'}:tiny"
    assert main(["compile", spec, "--mesh", "tp=1", "-o", plan]) == 0
    line = ["run", plan, "--data", "stdlib", "--ema", "0.9", "--save", runs, "--resume"]
    assert main([*line, "--steps", "4", "--eval-every", "4", "--lr", "0.05"]) == 0
    assert "of averaged weights: loss" in capsys.readouterr().out
    assert main(["sample", runs, "--prompt", "a", "--ema", "--tokens", "3"]) == 0
