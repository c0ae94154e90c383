"""Simulated bubbles and memory are those published: Qi 2023, tables 4 and 5."""

from __future__ import annotations

import pytest

from examples.benchmarks.bubbles import Row, published, simulated

ROWS = published()


def by_row(row: Row) -> str:
    return f"{row.model}-{row.microbatches}-{row.schedule}"


def test_the_table_is_whole():
    assert len(ROWS) == 2 * 3 * 6
    assert sum(row.memory_gb is not None for row in ROWS) == 2 * 3 * 4


@pytest.mark.matrix(quick=12)
@pytest.mark.parametrize("row", ROWS, ids=by_row)
def test_bubbles_and_memory_are_those_published(row):
    """Bubbles to the last digit, but where the schedule is not the paper's, action by
    action: there at most 0.35 % of a step worse."""
    result = simulated(row)
    if row.memory_gb:
        assert result.memory == pytest.approx(row.memory_gb, rel=0.06)
    found = result.bubble
    if row.schedule in ("1F1B-I", "ZB-2p"):
        assert row.bubble - 0.002 < found < row.bubble + 0.0036
    else:
        assert found == pytest.approx(row.bubble, abs=6e-5)
