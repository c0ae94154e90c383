"""Held-out loss is that of the untouched model in eval mode, on unseen tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import rows, tiny_file, tiny_plan

from autopar.cli import main
from autopar.models.load import load_model
from autopar.training.data.token_batches import Corpus, open_data
from autopar.training.data.tokens import Tokens
from autopar.training.evaluation import runs_of


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return tiny_plan(tmp_path)


def spec(folder: Path) -> str:
    return f"{folder / 'model.py'}:tiny"


def evaluations(capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    return [row for row in rows(capsys.readouterr().out) if "eval_loss" in row]


def drawn_text(folder: Path, tokens: int) -> np.ndarray:
    """Draws the tokens of `a.bin`."""
    text = np.random.default_rng(0).integers(0, 64, tokens).astype(np.uint16)
    text.tofile(folder / "a.bin")
    return text


def on_all(folder: Path) -> list[str]:
    """Evaluates on all of the last tenth of `a.bin`, after each step."""
    given = ["--data", str(folder / "a.bin"), "--eval-batches", "0", "--lr", "0"]
    return [*given, "--eval-fraction", "0.1", "--eval-every", "1"]


def plain_loss(folder: Path, text: np.ndarray) -> object:
    """Is equal to the model's loss of all sequences of 16, as one batch."""
    tokens = torch.from_numpy(text.astype(np.int64))
    model = load_model(spec(folder)).model.eval()
    with torch.no_grad():
        loss = model(tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16))[1]
    return pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.slow
def test_it_is_the_loss_of_the_model_on_the_end_of_the_data(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = drawn_text(tmp_path, 1000)
    given = ["--lr", "0", "--data", str(tmp_path / "a.bin"), "--eval-batches", "3"]
    given += ["--eval-fraction", "0.2", "--steps", "5", "--eval-every", "2"]
    capsys.readouterr()
    assert main(["run", plan, "--json", *given]) == 0
    found = evaluations(capsys)
    model = load_model(spec(tmp_path)).model.eval()
    losses = []
    for i in range(3):
        ids, labels = Corpus("its end", Tokens.of("its end", text[800:]), 0, 64).batch(
            i, 4, 16
        )
        with torch.no_grad():
            losses.append(model(ids, labels)[1].item())
    want = sum(losses) / 3
    assert [row["step"] for row in found] == [2, 4, 5]
    for row in found:
        assert row["eval_loss"] == pytest.approx(want, rel=1e-6)
        assert row["eval_perplexity"] == pytest.approx(math.exp(want), rel=1e-5)


@pytest.mark.slow
def test_all_that_is_held_out_is_seen_once_the_short_last_batch_too(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = drawn_text(tmp_path, 1000)
    capsys.readouterr()
    assert main(["run", plan, "--json", "--steps", "3", *on_all(tmp_path)]) == 0
    losses = [row["eval_loss"] for row in evaluations(capsys)]
    # Six sequences of 16 with a token after each: a batch of four, and two.
    assert losses == [plain_loss(tmp_path, text[900:997])] * 3
    assert main(["run", plan, "--eval-every", "1", "--eval-batches", "0"]) == 2
    assert "synthetic data has no end" in capsys.readouterr().err


@pytest.mark.nightly
def test_ranks_evaluate_a_rest_that_they_cannot_share(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seven sequences: a batch of four, two that ranks share, and one."""
    where = str(tmp_path / "plan")
    line = ["compile", tiny_file(tmp_path), "--mesh", "dp=2", "--zero", "2"]
    assert main([*line, "-o", where]) == 0
    text = drawn_text(tmp_path, 1130)
    capfd.readouterr()
    assert main(["run", where, "--json", "--steps", "2", *on_all(tmp_path)]) == 0
    losses = [row["eval_loss"] for row in evaluations(capfd)]
    assert losses == [plain_loss(tmp_path, text[1017:1130])] * 2


def test_a_rest_that_ranks_cannot_share_is_run_one_by_one() -> None:
    assert [*runs_of(8, 4, 2)] == [(0, 4), (4, 4)]
    assert [*runs_of(11, 8, 2)] == [(0, 8), (8, 2), (10, 1)]
    assert [*runs_of(15, 8, 4)] == [(0, 8), (8, 4), (12, 1), (13, 1), (14, 1)]


def test_a_mixture_is_evaluated_on_all_of_each_source(tmp_path: Path) -> None:
    names = [f"{tmp_path / name}.bin" for name in "ab"]
    for name, first, size in zip(names, (0, 50), (22, 31), strict=True):
        np.arange(first, first + size, dtype=np.uint16).tofile(name)
    data = open_data(names, 1000)
    assert data.count(5) == 4 + 6
    ids, labels = data.samples(np.arange(2, 7), 5)
    assert ids[:, 0].tolist() == [10, 15, 50, 55, 60] and (labels == ids + 1).all()


def test_training_never_sees_what_is_held_out() -> None:
    train, held_out = Corpus("a", Tokens.of("a", np.arange(100)), 3, 100).split(0.25)
    drawn = {x for i in range(200) for x in train.batch(i, 4, 8)[1].flatten().tolist()}
    unseen = {
        x for i in range(200) for x in held_out.batch(i, 4, 8)[0].flatten().tolist()
    }
    assert drawn == set(range(1, 75)) and unseen == set(range(75, 99))


def test_synthetic_data_is_drawn_anew() -> None:
    data = open_data("synthetic", 1000)
    train, held_out = data.split(0.1)
    assert torch.equal(train.batch(0, 4, 8)[0], data.batch(0, 4, 8)[0])
    assert not torch.equal(train.batch(0, 4, 8)[0], held_out.batch(0, 4, 8)[0])


@pytest.mark.slow
def test_evaluation_leaves_training_as_it_is(
    plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for given in ([], ["--eval-every", "1"]):
        capsys.readouterr()
        assert main(["run", plan, "--json", "--steps", "4", *given]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_held_out_end_that_is_too_short_is_told_before_training(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(100, dtype=np.uint16).clip(0, 63).tofile(tmp_path / "a.bin")
    given = ["--data", str(tmp_path / "a.bin"), "--eval-every", "5"]
    capsys.readouterr()
    assert main(["run", plan, "--json", *given]) == 2
    told = capsys.readouterr()
    assert not told.out and "has 10 tokens, but a sequence of 16" in told.err
    assert "the held-out end of" in told.err
    assert main(["run", plan, *given, "--eval-fraction", "0"]) == 2
    assert "use --eval-fraction 0.1" in capsys.readouterr().err


@pytest.mark.slow
def test_another_split_is_refused(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", plan, "--steps", "1", "--save", str(tmp_path / "runs"), "--resume"]
    assert main([*line, "--eval-every", "1"]) == 0
    capsys.readouterr()
    assert main(line) == 2
    said = capsys.readouterr().err
    assert "had --eval-fraction 0.1, but this has 0.0" in said
    assert main([*line, "--eval-fraction", "0.1"]) == 0  # as it says
