"""All of `autopar run`: planned, killed, resumed, exported, sampled, and its losses are
those of one device."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import ROOT, output_of


@pytest.mark.nightly
def test_a_run_with_a_killed_rank_trains_as_one_device_does(tmp_path: Path) -> None:
    script = [sys.executable, "-m", "examples.train_stdlib", "--steps", "40"]
    said = output_of([*script, "--folder", str(tmp_path / "trained")], ROOT)
    pattern = r"loss (\S+) to (\S+), of one device (\S+); at most (\S+) apart"
    [found] = re.findall(pattern, said)
    first, last, plain, apart = map(float, found)
    assert last < 0.7 * first and abs(last - plain) < 1e-3 and apart < 1e-3
    assert "killed rank 3" in said and "wrote 52 tensors" in said
