"""Runs on data of one's own: what they are told of it, and how they go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from autopar.cli import main
from autopar.local_batches import DataRank
from autopar.options import make_plan

MODEL = """
from examples.gpt import Config, build

def tiny():
    return build(Config(2, 32, 4, 16, 64, dropout=0.1), batch=4)
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    where, spec = str(tmp_path / "plan"), f"{tmp_path / 'model.py'}:tiny"
    assert main(["compile", spec, "--mesh", "tp=1", "-o", where]) == 0
    return where


def write(path: Path, seed: int, below: int = 64) -> str:
    draw = np.random.default_rng(seed)
    draw.integers(0, below, 1000).astype(np.uint16).tofile(path)
    return str(path)


def losses(capsys: pytest.CaptureFixture[str]) -> list[float]:
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [row["loss"] for row in rows]


def test_a_run_goes_on_bitwise_with_the_same_data_and_only_so(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.bin", 0), write(tmp_path / "b.bin", 1)
    mixed = ["--data", f"{a}:0.7", "--data", f"{b}:0.3"]
    line = ["run", plan, "--json", "--lr", "0.01"]
    capsys.readouterr()
    assert main([*line, *mixed, "--steps", "6"]) == 0
    whole = losses(capsys)
    saving = ["--save", str(tmp_path / "runs"), "--resume"]
    assert main([*line, *mixed, *saving, "--steps", "3"]) == 0
    assert losses(capsys) == whole[:3]
    other = ["--data", f"{a}:0.6", "--data", f"{b}:0.4"]
    assert main([*line, *other, *saving, "--steps", "6"]) == 2
    told = capsys.readouterr().err
    assert f"was trained on 0.7 {a} and 0.3 {b}" in told and "--other-data" in told
    (tmp_path / "a.bin").rename(tmp_path / "moved.bin")
    moved = ["--data", f"{tmp_path / 'moved.bin'}:7", "--data", f"{b}:3"]
    assert main([*line, *moved, *saving, "--steps", "6"]) == 0
    assert losses(capsys) == whole[3:]
    assert main([*line, "--data", b, *saving, "--steps", "8", "--other-data"]) == 0
    assert len(losses(capsys)) == 2


def test_bad_data_ends_a_run_with_what_and_where(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = write(tmp_path / "a.bin", 0, below=90)
    (tmp_path / "empty.txt").write_text("")
    for data, told in (
        (beyond, "at position"),
        (str(tmp_path / "empty.txt"), "is empty"),
        (str(tmp_path), "is of no kind that is known"),
        ("a.csv", "no data named 'a.csv'"),
    ):
        capsys.readouterr()
        assert main(["run", plan, "--data", data]) == 2
        said = capsys.readouterr()
        assert told in said.err and "fix" in said.err and not said.out


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        return i


# torchdata 0.11 on torch 2.13
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_of_rank_0s_loader_is_that_of_all(workers: int) -> None:
    """So that `step.save(extra=loader.state_dict())` is enough, though rank 0 alone
    writes it."""
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="needs autopar[data]"
    )

    def made(rank: int) -> Any:
        sampler = DataRank(make_plan("dp=2"), rank).sampler(Numbers(), seed=3)
        return stateful.StatefulDataLoader(
            Numbers(), 2, sampler=sampler, num_workers=workers
        )

    first = iter(loader := made(0))
    state = [(next(first), loader.state_dict()) for _ in range(3)][-1][1]
    whole = [batch.tolist() for batch in made(1)]
    again = made(1)
    again.load_state_dict(json.loads(json.dumps(state)) if not workers else state)
    assert [batch.tolist() for batch in again] == whole[3:] and len(whole) == 10
