"""Random models that choose rows: each is computed as it should be, or refused with a
line and a fix."""

from __future__ import annotations

import pytest
from draw_options import outcome
from draw_rows import SHARING, draw

MORE = 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 9])
def test_draw(seed: int) -> None:
    assert outcome(draw(seed)) == "right"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(MORE))
def test_more_draws(seed: int) -> None:
    outcome(draw(seed))


def test_a_seed_gives_the_same_draw_each_time() -> None:
    assert [str(draw(i)) for i in range(9)] == [str(draw(i)) for i in range(9)]
    models = {str(draw(i).model) for i in range(0, 40, SHARING)}
    assert len(models) == 20
