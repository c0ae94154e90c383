"""Random ways to sort rows by their experts: what is put back is done where it was, and
what is not is right or refused."""

from __future__ import annotations

import pytest
from draw_sorted_rows import draw, outcome

MORE = 300


@pytest.mark.parametrize("seed", range(2))
def test_draw(seed: int) -> None:
    outcome(draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 18))
def test_more_draws(seed: int) -> None:
    outcome(draw(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(18, 18 + MORE))
def test_many_draws(seed: int) -> None:
    outcome(draw(seed))
