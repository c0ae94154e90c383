"""What fewer bits would save is told beside a plan: of products in float32, and of what
layers add to under autocast, which is offered where no plan fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import llama
from plans import tiny_file

from autopar.cli import main
from autopar.machine.hardware import cluster_of, with_memory
from autopar.planner.infeasible import Infeasible
from autopar.planner.planner import find_plans
from autopar.planner.reprice import price

BATCH = 16
WISHED = {"schedule": ("1f1b",), "zero": (1,), "recompute": ("none",)}


@pytest.mark.slow
def test_a_plan_is_priced_with_both() -> None:
    case, cluster = llama(batch=BATCH), cluster_of("2xA100-80GB")
    wide = case.short(precision="bf16")
    best = find_plans(wide, cluster, BATCH, **WISHED).best[0]
    assert wide.narrow is not None
    (narrow,) = price([best.candidate], wide.narrow, cluster)
    (same,) = price([best.candidate], case.short(precision="bf16-stream"), cluster)
    assert (narrow.seconds, narrow.peak) == (same.seconds, same.peak)
    assert narrow.peak < best.peak


@pytest.mark.parametrize("precision", [None, "fp16", "bf16-stream"])
def test_nothing_is_narrower_than_what_is(precision: str | None) -> None:
    options = {"precision": precision} if precision else {}
    assert llama(batch=BATCH).short(**options).narrow is None


def test_half_the_bits_are_suggested(tmp_path: Path, capsys) -> None:
    asked = ["--devices", "1xA100-80GB", "--global-batch", "8"]
    assert main(["plan", tiny_file(tmp_path), *asked]) == 0
    faster = "with --precision bf16 up to 16 times as fast, with --tf32 up to 8 times"
    assert faster in " ".join(capsys.readouterr().out.split())


def test_it_is_told_of_the_best_plan(tmp_path: Path, capsys) -> None:
    spec = tiny_file(tmp_path, 4, 32, 4, 16, 64)
    asked = ["plan", spec, "--devices", "1xA100-80GB", "--global-batch", "8"]
    assert main([*asked, "--precision", "bf16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    told = re.search(r"first plan takes (\S+) s and (\S+) GB", said)
    assert told is not None
    assert main([*asked, "--precision", "bf16-stream"]) == 0
    assert "first plan takes" not in capsys.readouterr().out


@pytest.mark.slow
def test_it_is_a_way_out_where_no_plan_fits() -> None:
    case = llama(batch=BATCH, seq=64)
    wide, cluster = case.short(precision="bf16"), cluster_of("2xA100-80GB")
    peak = min(e.peak for e in find_plans(wide, cluster, BATCH, **WISHED).best)
    limited = with_memory(cluster, 0.97 * peak)
    with pytest.raises(Infeasible) as caught:
        find_plans(wide, limited, BATCH, **WISHED)
    told = re.search(r'use precision "([^"]*)"', caught.value.fix or "")
    assert told is not None
    find_plans(case.short(precision=told[1]), limited, BATCH, **WISHED)
