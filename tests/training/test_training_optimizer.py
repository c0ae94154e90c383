"""Learning rates are those of torch's schedulers, weights those of the model itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans import rows, tiny_plan
from torch import nn
from torch.optim import SGD, lr_scheduler

from autopar.cli import main
from autopar.passes.errors import AutoparError
from autopar.training import run as training
from autopar.training.optimizer import learning_rate, make_optimizer
from autopar.training.options import RunOptions
from autopar.training.schedules import DECAY


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return tiny_plan(tmp_path)


# --- learning rates ----------------------------------------------------------------


def torchs(options: RunOptions) -> lr_scheduler.LRScheduler:
    """What torch has for it, on an optimizer of its own."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=options.lr)
    low, warmup = options.min_lr / options.lr, options.warmup
    decaying = options.steps - warmup
    if options.lr_schedule == "wsd":
        decaying = round(options.decay_ratio * options.steps)
    decay: lr_scheduler.LRScheduler
    if options.lr_schedule == "cosine":
        decay = lr_scheduler.CosineAnnealingLR(optimizer, decaying, options.min_lr)
    elif options.lr_schedule == "constant":
        decay = lr_scheduler.ConstantLR(optimizer, 1.0)
    else:
        decay = lr_scheduler.LinearLR(optimizer, 1.0, low, decaying)
    rising = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
    stable = lr_scheduler.ConstantLR(optimizer, 1.0)
    return lr_scheduler.SequentialLR(
        optimizer, [rising, stable, decay], [warmup, options.steps - decaying]
    )


@pytest.mark.parametrize("name", DECAY)
def test_learning_rates_are_those_of_torch(name: str) -> None:
    low = 0.0 if name == "constant" else 0.02
    options = RunOptions(
        steps=40, lr=0.3, lr_schedule=name, warmup=7, min_lr=low, decay_ratio=0.3
    )
    theirs = torchs(options)
    for step in range(options.steps):
        assert learning_rate(step, options) == pytest.approx(theirs.get_last_lr()[0])
        theirs.optimizer.step()
        theirs.step()


def test_a_decay_comes_near_to_its_end_in_the_last_step() -> None:
    for name in ("cosine", "linear", "wsd"):
        options = RunOptions(steps=1000, lr=1.0, lr_schedule=name, min_lr=0.1)
        assert 0.1 <= learning_rate(999, options) < 0.11
        assert learning_rate(999, replace(options, steps=10**9)) > 0.99


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--min-lr", "1e-5"], "the rate is constant"),
        (["--lr-schedule", "cosine", "--min-lr", "1"], "--min-lr 1 is above --lr"),
        (["--lr-schedule", "cosine", "--warmup", "20"], "20 steps of warmup and 1"),
        (["--lr-schedule", "wsd", "--warmup", "17"], "17 steps of warmup and 4"),
        (["--lr-schedule", "wsd", "--steps", "1", "--warmup", "1"], "1 steps of"),
    ],
)
def test_a_schedule_that_cannot_be_says_what_can(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "plan", *given]) == 2
    said = capsys.readouterr().err
    assert says in said
    fix = re.search(r"use (--[a-z-]+) (\S+?),? ", said.replace("\n", " "))
    if fix:  # the last of a flag counts
        assert main(["run", "no_plan", *given, fix[1], fix[2]]) == 2
        assert "no_plan" in capsys.readouterr().err


def test_an_unknown_schedule_is_an_error() -> None:
    with pytest.raises(AutoparError, match="use one of constant, cosine"):
        RunOptions(lr_schedule="sine")


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_with_a_schedule_goes_on_bitwise(
    schedule: str,
    plan: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["run", plan, "--json", "--steps", "6", "--lr-schedule", schedule]
    given += ["--lr", "0.01", "--warmup", "2", "--decay-ratio", "0.5"]
    saving = ["--save", str(tmp_path / "runs"), "--save-every", "2", "--resume"]
    capsys.readouterr()
    assert main(given) == 0
    whole = [row["loss"] for row in rows(capsys.readouterr().out)]
    usual, calls = training.train_step, iter(range(4))

    def interrupted(*arguments):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return usual(*arguments)

    monkeypatch.setattr(training, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run(plan, options_of(given, saving))
    monkeypatch.setattr(training, "train_step", usual)
    capsys.readouterr()
    assert main([*given, *saving]) == 0
    assert [row["loss"] for row in rows(capsys.readouterr().out)] == whole[2:]
    assert main([*given, *saving, "--steps", "8"]) == 2
    assert "had --steps 6, but this has 8" in capsys.readouterr().err


def options_of(*given: list[str]) -> RunOptions:
    from autopar.cli import parser

    read = parser().parse_args([x for each in given for x in each])
    return RunOptions(**{k: getattr(read, k) for k in RunOptions.__dataclass_fields__})


# --- AdamW -------------------------------------------------------------------------


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    options = RunOptions(weight_decay=0.5, beta1=0.8, beta2=0.7)
    optimizer = make_optimizer(((p, p.dim()) for p in model.parameters()), options)
    decayed, plain = optimizer.param_groups
    assert [p.dim() for p in decayed["params"]] == [2, 2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert decayed["betas"] == plain["betas"] == (0.8, 0.7) and decayed["fused"]


def test_a_rank_may_have_nothing_that_decays() -> None:
    held = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([(held, 1)], RunOptions())
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]


def test_the_reference_is_trained_alike(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--lr-schedule", "cosine", "--lr", "0.02", "--warmup", "1"]
    given += ["--min-lr", "0.001", "--weight-decay", "0.9", "--beta2", "0.9"]
    capsys.readouterr()
    assert main(["run", plan, "--json", "--steps", "6", "--reference", *given]) == 0
    found = rows(capsys.readouterr().out)
    assert len(found) == 6 and found[0]["loss"] > found[-1]["loss"]
    for row in found:
        assert row["loss"] == pytest.approx(row["reference_loss"], rel=1e-4)
