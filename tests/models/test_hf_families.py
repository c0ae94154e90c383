"""Families of Hugging Face that can be built small: what comes of each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hf_families import MESHES, names, row

TABLE = Path(__file__).parents[1] / "golden" / "hf_families.txt"
KNOWN: dict[str, list[str]] = {}
for _line in TABLE.read_text().splitlines():
    KNOWN.setdefault(re.split(r"[: ]", _line)[0], []).append(_line)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", KNOWN)
def test_a_family_is_as_the_table_says(name: str) -> None:
    """Where it is better now, `python tests/hf_families.py` prints the new row."""
    assert row(name).splitlines() == KNOWN[name]


@pytest.mark.nightly
def test_no_family_is_left_out() -> None:
    assert set(names()) == set(KNOWN)


def test_most_families_are_right_and_none_is_wrong() -> None:
    right = [name for name, lines in KNOWN.items() if lines == [f"{name}: right"]]
    assert len(right) > 90 and len(MESHES) == 4
    text = TABLE.read_text()
    assert "WRONG" not in text and "FAILED" not in text
