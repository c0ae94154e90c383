"""`examples/benchmarks/gpu.py` says what it measured, and what it did not and why."""

from __future__ import annotations

import json
import sys

import pytest
from processes import ROOT, output_of

from examples.benchmarks.gpu import SIZES, Done, Job, run, skipped, speed_rows, tables
from examples.benchmarks.gpu_models import TINY


@pytest.mark.nightly
@pytest.mark.slow
def test_it_runs_on_the_cpu(tmp_path):
    """Without compiled ways to train, which take a minute to compile."""
    script, file = ROOT / "examples/benchmarks/gpu.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--tiny", "--json", str(file)]
    printed = output_of([*command, "--ways", "eager,ours-eager"], tmp_path)
    found = json.loads(file.read_text())["jobs"]
    assert " passed" in found["kernels"]["rows"][0]["kernels"]
    plans = [row for n in (2, 4) for row in found[f"{n} ranks"]["rows"]]
    assert len(plans) == 6 and all(row["equal"] for row in plans)
    for name in SIZES:
        predicted, *ways = found[name]["rows"]
        assert predicted["predicted"]["seconds"].keys() == {
            "ours-eager",
            "ours-inductor",
        }
        losses = [row["loss"] for row in ways]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
        assert printed.count(f"\n{name} ") == 2
    assert "skipped" not in printed


@pytest.mark.slow
def test_what_ended_early_is_told():
    assert run(Job(("speed", "none", True, []), 60), 60).why.startswith("it failed: T")
    late = run(Job(("speed", "gpt2-xl", True, ["eager"]), 60), 0.0)
    assert late == Done([], "no time: it was given 0 s")
    row = {"model": "gpt2-xl", "way": "compile", "skipped": "OutOfMemoryError: 40 GiB"}
    wrong = {"plan": "tp=2", "losses": 1.0, "weights": 0.0, "equal": False}
    done = {"gpt2-xl": Done([row], "no time"), "2 ranks": Done([wrong])}
    assert skipped(done, ["compile", "eager"]) == [
        "gpt2-xl: no time, before eager",
        "gpt2-xl, compile: OutOfMemoryError: 40 GiB",
        "WRONG: tp=2 is not the single process",
    ]


def test_speeds_stand_beside_predictions():
    paper = {"samples": 2, "flops": 4e12, "peak flops": 1e13, "bytes": 2 << 30}
    paper["seconds"] = {"ours-eager": 0.5}
    rows = [{"model": "gpt2-xl", "predicted": paper}]
    for way, seconds in {"compile": 1.0, "ours-eager": 0.8}.items():
        one = {"seconds": seconds, "bytes": 1 << 30, "first": 9.0, "loss": 1.0}
        rows.append({"model": "gpt2-xl", "way": way, **one})
    theirs, ours = speed_rows(Done(rows), TINY["gpt2-xl"])
    assert ours["tokens/s"] == 2 * 32 / 0.8 and ours["predicted"] == 2 * 32 / 0.5
    assert ours["MFU"] == pytest.approx(0.5) and ours["of torch.compile"] == 1.25
    assert theirs["predicted"] is None and theirs["predicted  "] is None
    none = dict.fromkeys(SIZES, Done())
    assert tables({"kernels": Done([{"kernels": "8 passed"}]), **none}, TINY) == (
        "kernels: 8 passed"
    )
