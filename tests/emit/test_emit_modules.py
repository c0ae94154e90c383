"""One text for ranks whose shapes, and those beside them, are equal."""

from __future__ import annotations

import pytest
from models import plain_gpt


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    ("mesh", "kinds"), [("dp=3,tp=2", 6), ("tp=2,dp=5", 9), ("cp=2,dp=3,tp=2", 6)]
)
def test_ranks_of_one_kind_have_the_text_that_each_would_get(
    mesh: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 7 heads and 37 words: parts, and parts of these, of unlike sizes.
    case = plain_gpt(layers=1, heads=7, vocab=37, batch=30)
    together = case.compile(mesh, zero=3).stages[0].modules
    monkeypatch.setattr(
        "autopar.passes.emit_modules.shape_class",
        lambda splits, sizes, coords: tuple(coords.values()),
    )
    assert case.compile(mesh, zero=3).stages[0].modules == together
    assert len(set(together.values())) == kinds
