"""All of `autopar run`: planned, killed twice, resumed, exported, sampled; its losses
are those of one device, but for what rounding explains."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import ROOT, output_of


@pytest.mark.nightly
@pytest.mark.parametrize(("asked", "limit"), [([], 1e-3), (["--double"], 1e-9)])
def test_a_run_that_is_killed_trains_as_one_device_does(
    asked: list[str], limit: float, tmp_path: Path
) -> None:
    script = [sys.executable, "-m", "examples.train_stdlib", "--steps", "40", *asked]
    said = output_of([*script, "--folder", str(tmp_path / "trained")], ROOT)
    pattern = r"loss (\S+) to (\S+), of one device (\S+); at most (\S+) apart"
    [found] = re.findall(pattern, said)
    first, last, plain, apart = map(float, found)
    assert last < 0.7 * first and abs(last - plain) < 1e-3 and apart < limit
    assert "killed rank 3" in said and "killed torchrun" in said
    assert "wrote 52 tensors" in said
