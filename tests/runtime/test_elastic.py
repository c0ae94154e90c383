"""A run goes on with the ranks that are there, as if nothing had happened."""

from __future__ import annotations

import json
import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from agents import nodes, until
from plans import tiny_file

from autopar.cli import main

# Appended to the model: rank 1 kills itself when it has taken step 5.
DIES = """
import os, signal
from torch.optim.optimizer import register_optimizer_step_post_hook

def die(optimizer, args, kwargs):
    steps = [state["step"] for state in optimizer.state.values()]
    if os.environ.get("RANK") == "1" and int(max(steps)) == 5:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(die)
"""


def rows(log: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line, as they were written."""
    if not log.exists():
        return []
    lines = log.read_text().splitlines()
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [(row["step"], row["loss"]) for row in found]


@dataclass
class Training:
    """One model, trained into one log; folder: of all that it writes."""

    folder: Path

    def __post_init__(self) -> None:
        tiny_file(self.folder, 2, 128, 4, 64, 64, 0.1, batch=8)

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def model(self) -> list[str]:
        plans = ["--plans", str(self.folder / "plans"), "--log-every", "1"]
        return ["run", f"{self.folder / 'model.py'}:tiny", *plans]

    def endless(self, *more: str) -> list[str]:
        saving = [
            *more,
            "--save",
            str(self.folder / "runs"),
            "--save-every",
            "3",
            "--resume",
        ]
        steps = ["--steps", "1000000", "--log-file", str(self.log)]
        return [*self.model, *saving, *more, *steps]

    def steps(self, more: int) -> float:
        """Wait for so many; returns the seconds that they took."""
        wanted = len(rows(self.log)) + more
        return until(f"{more} steps", lambda: len(rows(self.log)) >= wanted, 60)

    def check(self) -> None:
        """Every loss is that of a single device, and no step is left out."""
        found, alone = rows(self.log), self.folder / "alone.jsonl"
        steps = str(max(step for step, _ in found))
        single = [*self.model, "--unproved", "--log-file", str(alone)]
        assert main([*single, "--steps", steps]) == 0
        expected = dict(rows(alone))
        assert {step for step, _ in found} == set(expected)
        for step, loss in found:
            assert loss == pytest.approx(expected[step], rel=1e-5), step


@pytest.mark.slow
def test_ranks_start_again_after_one_is_killed(tmp_path: Path) -> None:
    """By torchrun alone, whose store has all keys of before."""
    training = Training(tmp_path)
    with nodes(tmp_path, "1", 2) as made:
        again = [*made.torchrun, "--max-restarts", "3", "-m", "autopar"]
        with made.start(*training.endless(), by=again):
            training.steps(random.randrange(4, 20))
            made.kill(1)
            until("a start", lambda: "going on after step" in made.said(0)[1], 60)
            training.steps(4)
    assert made.said(0)[1].count("autopar: rank 1 does not answer") == 1
    training.check()


@pytest.mark.nightly
def test_saves_in_the_background_are_gone_on_from(tmp_path: Path) -> None:
    """Whatever was being written when ranks were killed."""
    training = Training(tmp_path)
    with nodes(tmp_path, "1", 2) as made:
        again = [*made.torchrun, "--max-restarts", "5", "-m", "autopar"]
        command = training.endless("--async-save")
        with made.start(*command, by=again):
            for kills in range(3):
                training.steps(random.randrange(4, 12))
                made.kill(random.randrange(2))

                def gone_on(kills: int = kills) -> bool:
                    return made.said(0)[1].count("going on after step") > kills

                until("a start", gone_on, 60)
            training.steps(4)
    training.check()


@pytest.mark.nightly
def test_a_run_that_gets_nowhere_ends(tmp_path: Path) -> None:
    """Ranks that die in each step 5, where a checkpoint would be after step 6."""
    training = Training(tmp_path)
    with (tmp_path / "model.py").open("a") as file:
        file.write(DIES)
    with nodes(tmp_path, "1", 2) as made:
        again = [*made.torchrun, "--max-restarts", "50", "-m", "autopar"]
        with made.start(*training.endless(), by=again):
            until("the end", lambda: not made.processes(), 240)
        assert "started 10 times after step-00000003, and never" in made.said(0)[1]


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--async-save",)])
def test_nodes_are_lost_and_come(tmp_path: Path, more: tuple[str, ...]) -> None:
    """4 ranks, of which 2 are killed; 2, until others come; 4: one training."""
    training = Training(tmp_path)
    with nodes(tmp_path, "1:2", 2) as made, ExitStack() as started:
        here = ["--nodes", "1:2", "--ranks-per-node", "2", "--rendezvous", made.where]
        run = [sys.executable, "-m", "autopar", *training.endless(*more), *here]

        def plans(ranks: int) -> int:
            """How often one for so many ranks was taken."""
            said = "".join(made.said(n)[1] for n in range(len(made.agents)))
            return said.count(f"-{ranks}xCPU-")

        for _ in range(2):
            started.enter_context(made.start(by=run))
        training.steps(random.randrange(10, 40))
        assert (plans(4), plans(2)) == (1, 0)
        made.kill_torchrun(1)
        until("its end", lambda: len(made.processes()) <= 4, 30)
        training.steps(10)
        assert (plans(4), plans(2)) == (1, 1)
        started.enter_context(made.start(by=run))
        until("4 ranks", lambda: plans(4) > 1, 60)
        training.steps(10)
    training.check()


@pytest.mark.nightly
def test_what_no_longer_fits_ends_on_every_node(tmp_path: Path) -> None:
    """With what would fit; torchrun does not try again and again."""
    training = Training(tmp_path)
    with nodes(tmp_path, "1:2", 1) as made, ExitStack() as started:
        here = ["--nodes", "1:2", "--rendezvous", made.where, "--memory", "6MB"]
        run = [sys.executable, "-m", "autopar", *training.endless(), *here]
        for _ in range(2):
            started.enter_context(made.start(by=run))
        training.steps(5)
        made.kill_torchrun(1)
        until("the end", lambda: not made.processes(), 60)
        assert "autopar: no plan fits into 1xCPU" in made.said(0)[1]
        assert "fix  use 2 devices" in made.said(0)[1]


@pytest.mark.nightly
def test_a_rank_that_nothing_is_for_waits(tmp_path: Path) -> None:
    """5 ranks do not divide 8 samples: 4 train, and all end well."""
    training = Training(tmp_path)
    with nodes(tmp_path, "1", 5) as made:
        again = [*made.torchrun, "--max-restarts", "3", "-m", "autopar"]
        command = [*training.endless()[:-4], "--steps", "4"]
        with made.start(*command, "--log-file", str(training.log), by=again) as first:
            assert made.agents[first].wait(120) == 0
    assert "spare   1 ranks wait" in made.said(0)[1]
    training.check()
