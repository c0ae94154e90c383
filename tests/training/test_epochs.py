"""Each sample once an epoch, in an order that nobody has to keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from plans import rows, tiny_plan

from autopar.cli import main
from autopar.models.load import load_model
from autopar.training.data.epochs import Epochs, shuffled
from autopar.training.data.token_batches import open_data
from autopar.training.data.tokens import DataError


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return tiny_plan(tmp_path)


def write(path: Path, tokens: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    draw.integers(0, 64, tokens).astype(np.uint16).tofile(path)
    return str(path)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 1000, 4097])
def test_an_order_has_each_number_once(count: int) -> None:
    orders = {tuple(shuffled(np.arange(count), count, 7, epoch)) for epoch in range(9)}
    assert all(sorted(order) == [*range(count)] for order in orders)
    assert len(orders) > 6 or count < 5


def test_an_order_is_computed_where_it_is_asked_for() -> None:
    """Of more samples than fit anywhere."""
    count = 10**15 + 37
    some = np.arange(count - 1000, count)
    found = shuffled(some, count, 3)
    assert len(set(found.tolist())) == 1000 and found.min() >= 0 and found.max() < count
    assert np.array_equal(shuffled(some[5:7], count, 3), found[5:7])


@pytest.mark.slow
def test_an_order_is_as_good_as_chance() -> None:
    """Neighbours do not stay so, and each number goes everywhere alike."""
    count, draws = 101, 2000
    found = np.stack([shuffled(np.arange(count), count, 0, i) for i in range(draws)])
    places = np.stack([np.bincount(column, minlength=count) for column in found.T])
    chi_squared = ((places - draws / count) ** 2).sum() / (draws / count)
    assert abs(chi_squared - count**2) < 6 * (2 * count**2) ** 0.5
    close = (abs(np.diff(found, axis=1)) == 1).mean()
    assert abs(close - 2 / count) < 0.002


def test_two_epochs_have_each_sample_twice(tmp_path: Path) -> None:
    names = [f"{tmp_path / name}.bin" for name in "ab"]
    for name, first, size in zip(names, (0, 50), (22, 31), strict=True):
        np.arange(first, first + size, dtype=np.uint16).tofile(name)
    data = Epochs(open_data(names, 1000), 5)
    assert data.count(5) == 10 and data.steps(2, 4, 5) == 5 and data.steps(1, 4, 5) == 2
    seen = [x for i in range(5) for x in data.batch(i, 4, 5)[0][:, 0].tolist()]
    every = [0, 5, 10, 15, 50, 55, 60, 65, 70, 75]
    assert sorted(seen[:10]) == sorted(seen[10:]) == every
    assert seen[:10] != seen[10:] and seen[:10] != every


@pytest.mark.slow
def test_a_run_of_epochs_goes_on_bitwise(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.bin", 16 * 10 + 1)
    line = ["run", plan, "--json", "--lr", "0.01", "--data", data]
    capsys.readouterr()
    assert main([*line, "--epochs", "2"]) == 0
    whole = [row["loss"] for row in rows(capsys.readouterr().out)]
    assert len(whole) == 5
    saving = [*line, "--save", str(tmp_path / "runs"), "--resume"]
    assert main([*saving, "--epochs", "1"]) == 0
    assert main([*saving, "--epochs", "2"]) == 0
    assert [row["loss"] for row in rows(capsys.readouterr().out)] == whole
    assert main([*saving, "--steps", "9"]) == 2  # random samples, not epochs
    assert "the tokens of" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluation_has_data_of_its_own(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.bin", 1000), write(tmp_path / "b.bin", 65, seed=1)
    line = ["run", plan, "--json", "--lr", "0", "--data", a, "--eval-data", b]
    every = [*line, "--eval-every", "1", "--eval-batches", "0", "--epochs", "1"]
    capsys.readouterr()
    assert main(every) == 0
    found = rows(capsys.readouterr().out)
    steps = [row["loss"] for row in found if "loss" in row]
    assert len(steps) == 62 // 4
    tokens = torch.from_numpy(np.fromfile(b, np.uint16).astype(np.int64))
    model = load_model(f"{tmp_path / 'model.py'}:tiny").model.eval()
    with torch.no_grad():
        want = model(tokens[:-1].view(4, 16), tokens[1:].view(4, 16))[1].item()
    evaluated = [row["eval_loss"] for row in found if "eval_loss" in row]
    assert evaluated == [pytest.approx(want, rel=1e-6)] * len(steps)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--epochs", "1", "--steps", "5"], "both given"),
        (["--epochs", "1"], "synthetic data has no end"),
        (["--epochs", "1", "--data", "SHORT"], "2 samples of 16 tokens, which in 1"),
        (["--epochs", "1", "--data", "LONG:1"], "each sample is there once"),
        (["--data", "SHORT"], "has 40 tokens, but each batch takes 64"),
        (["--data", "SHORT:0.5", "--data", "LONG:0.5"], ""),
        (["--eval-data", "LONG"], "nobody says when"),
        (
            ["--eval-data", "LONG", "--eval-every", "1", "--eval-fraction", "0.1"],
            "both",
        ),
        (["--eval-data", "nowhere.bin", "--eval-every", "1"], "nowhere.bin"),
    ],
)
def test_data_that_does_not_do_is_told(
    given: list[str],
    told: str,
    plan: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {
        "SHORT": write(tmp_path / "short.bin", 40),
        "LONG": write(tmp_path / "long.bin", 900),
    }
    for name, path in names.items():
        given = [text.replace(name, path) for text in given]
    assert main(["run", plan, *given]) == (2 if told else 0)
    assert told in capsys.readouterr().err


def test_epochs_of_nothing(tmp_path: Path) -> None:
    data = Epochs(open_data(write(tmp_path / "a.bin", 10), 64), 0)
    with pytest.raises(DataError, match="has 10 tokens, but a sequence of 16"):
        data.steps(1, 2, 16)
