"""A loss by chunks of positions as the planner prices it, and as a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import Case
from models import plain_gpt

from autopar.machine.hardware import cluster_of, with_memory
from autopar.passes.mesh import Mesh
from autopar.planner.infeasible import Infeasible
from autopar.planner.planner import find_plans

BATCH = 16
WISHED: dict[str, Any] = {
    "mesh": Mesh.parse("dp=2"),
    "microbatches": 2,
    "zero": (1,),
    "recompute": ("full",),
}
DEVICES = cluster_of("2xA100-80GB")


def case() -> Case:
    return plain_gpt(layers=3, vocab=4096, seq=64, batch=BATCH)


def least(**options: int) -> float:
    plans = find_plans(case().short(**options), DEVICES, BATCH, **WISHED)
    return min(e.peak for e in plans.best)


@pytest.mark.slow
def test_it_is_a_way_out_where_no_plan_fits() -> None:
    limit = (least() + least(loss_chunks=8)) / 2
    limited = with_memory(DEVICES, limit)
    with pytest.raises(Infeasible) as caught:
        find_plans(case().short(), limited, BATCH, **WISHED)
    told = re.search(r"use loss_chunks=(\d+)", caught.value.fix or "")
    assert told is not None
    find_plans(case().short(loss_chunks=int(told[1])), limited, BATCH, **WISHED)


def test_of_a_loss_by_chunks_no_chunks_are_offered() -> None:
    assert case().short().in_chunks is not None
    assert case().short(loss_chunks=2).in_chunks is None
