"""Random loops over experts: those of usual words are one step for all experts, and all
compute what the model does, or are refused with a line and a fix."""

from __future__ import annotations

import pytest
from draw_expert_loops import draw, outcome

MORE = 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_usual_words_are_one_step(seed: int) -> None:
    assert outcome(draw(seed)) == "one step"


@pytest.mark.matrix(quick=0, daily=5)
@pytest.mark.parametrize("seed", range(5, 25))
def test_draw(seed: int) -> None:
    loop = draw(seed)
    assert outcome(loop) == "one step" or not loop.usual


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(25, 25 + MORE))
def test_more_draws(seed: int) -> None:
    outcome(draw(seed))


def test_a_seed_gives_the_same_draw_each_time() -> None:
    texts = [draw(i).text for i in range(40)]
    assert texts == [draw(i).text for i in range(40)] and len({*texts}) > 30
