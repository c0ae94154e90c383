"""Runs on several nodes: they compute what a single device does, and end by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Nodes, nodes, until
from plans import rows, tiny_file

from autopar.cli import main


@pytest.fixture
def model(tmp_path: Path) -> str:
    return tiny_file(tmp_path)


def losses(text: str) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in rows(text)}


def compiled(model: str, mesh: str, folder: Path) -> str:
    assert main(["compile", model, "--mesh", mesh, "-o", str(folder)]) == 0
    return str(folder)


@pytest.fixture
def two(model: str, tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes of two ranks each, that train without an end."""
    plan = compiled(model, "dp=2,tp=2", tmp_path / "plan")
    run = ("-m", "autopar", "run", plan, "--steps", "1000000", "--json")
    with nodes(tmp_path, "2", 2) as made, made.start(*run), made.start(*run):
        until("steps", lambda: any(max(losses(made.said(n)[0]), default=0) > 3
                                   for n in (0, 1)), 60)  # fmt: skip
        yield made


def gone(two: Nodes) -> list[str]:
    """What each node said, once all have ended, in half a minute."""
    until("the end", lambda: not two.processes(), 30)
    return [two.said(n)[1] for n in (0, 1)]


@pytest.mark.nightly
def test_a_lost_node_ends_the_run_by_name(
    two: Nodes, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until then the losses are those of a single device."""
    two.agents[1].kill()
    texts = gone(two)
    said = re.compile(
        r"torchrun on node \d \(host .*\) is gone or out of reach, and so its ranks"
    )
    named = {found[0] for text in texts if (found := said.search(text))}
    assert len(named) == 1 and all(said.search(text) for text in texts)
    found = losses(two.said(0)[0]) | losses(two.said(1)[0])
    capsys.readouterr()
    alone = compiled(model, "tp=1", tmp_path / "alone")
    assert main(["run", alone, "--steps", "6", "--json"]) == 0
    expected = losses(capsys.readouterr().out)
    assert len(expected) == 6
    for step in set(found) & set(expected):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_is_named_on_every_node(two: Nodes, rank: int) -> None:
    two.kill(rank)
    node = rank // 2
    said = re.compile(rf"autopar: rank {rank} on node {node} \(host .*\) does not")
    assert [len(said.findall(text)) for text in gone(two)] == [1, 1]


@pytest.mark.nightly
def test_three_of_four_ranks_do_not_begin(model: str, tmp_path: Path) -> None:
    plan = compiled(model, "dp=2,tp=2", tmp_path / "plan")
    run = ("-m", "autopar", "run", plan)
    with nodes(tmp_path, "3", 1) as made:
        with made.start(*run), made.start(*run), made.start(*run):
            until("the end", lambda: not made.processes(), 60)
        for number in range(3):
            said = made.said(number)[1]
            assert "is for 4 ranks, but 3 processes run" in said
            assert "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend" in said


@pytest.mark.nightly
def test_a_node_that_does_not_come_is_told(model: str, tmp_path: Path) -> None:
    with nodes(tmp_path, "2", 1) as made:
        run = [sys.executable, "-m", "autopar", "run", model, "--timeout", "2"]
        with made.start("--nodes", "2", "--rendezvous", made.where, by=run):
            until("the end", lambda: not made.processes(), 60)
        said = made.said(0)[1]
    assert "autopar: this node did not meet the others: fewer came in time" in said
