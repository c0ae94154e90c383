"""What is said when no plan fits: the way out is one, as the planner itself finds."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from models import plain_gpt

from autopar.machine.hardware import cluster_of, with_memory
from autopar.passes.mesh import Mesh
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.price_layers import Prices
from autopar.passes.search.by_formula import rough
from autopar.passes.search.candidates import candidates, searched
from autopar.passes.search.search import Ranking, run_on_paper
from autopar.planner.infeasible import Infeasible, gigabytes, with_devices
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_prices,
    make_space,
)

BATCH = 16
PLAIN = {"schedule": ("1f1b",)}  # which keeps the least


@cache
def of() -> ShortModel:
    case = plain_gpt(batch=BATCH)
    return case.short()


@cache
def prices() -> Prices:
    return make_prices(of(), small(80e9))


@pytest.fixture(autouse=True)
def priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices of layers depend neither on devices' memory nor on how many there are."""
    monkeypatch.setattr("autopar.planner.planner.make_prices", lambda *_: prices())


def plans(cluster: Cluster, **decided: Any) -> Ranking:
    return find_plans(of(), cluster, BATCH, **{**PLAIN, **decided})


def refusal(cluster: Cluster, **decided: Any) -> str:
    with pytest.raises(Infeasible) as caught:
        plans(cluster, **decided)
    return str(caught.value)


def small(memory: float, devices: int = 2) -> Cluster:
    return with_memory(cluster_of(f"{devices}xA100-80GB"), memory)


@cache
def frugal(*schedules: str) -> float:
    """Bytes of the plan that needs the least, by running all of them on paper."""
    wanted = schedules or PLAIN["schedule"]
    space = make_space(of(), small(80e9), BATCH, schedule=wanted)
    peaks = []
    for candidate in candidates(space):
        if ranked := rough(candidate, space, prices()):
            peaks.append(run_on_paper(ranked[-1], prices(), space.cluster).peak)
    return min(peaks)


@pytest.mark.slow
def test_by_how_much_it_does_not_fit() -> None:
    limit = 0.8 * frugal()
    said = refusal(small(limit))
    assert f"needs {gigabytes(frugal() - limit)} more than" in said
    assert f"the {gigabytes(limit)} of a device" in said
    assert "most are" in said and "fix" in said


@pytest.mark.slow
def test_so_much_memory_is_enough() -> None:
    said = refusal(small(0.8 * frugal()))
    enough = re.search(r"devices of (\S+) GB", said)
    assert enough is not None
    memory = 1e9 * float(enough[1])
    assert frugal() <= memory < 1.01 * frugal()
    assert plans(small(memory)).best[0].peak <= memory


@pytest.mark.slow
def test_so_many_devices_are_enough_and_no_fewer() -> None:
    limited = small(0.5 * frugal())
    more = re.search(r"use (\d+) devices: (.*) needs", refusal(limited))
    assert more is not None
    devices = int(more[1])
    assert plans(with_devices(limited, devices)).best[0].peak <= 0.5 * frugal()
    for fewer in (d for d in (2, 4, 8, 16) if d < devices):
        refusal(with_devices(limited, fewer))


@pytest.mark.slow
def test_no_other_schedule_needs_less() -> None:
    assert frugal(*searched()) >= 0.99 * frugal()


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("name", "option", "decided"),
    [
        ("recompute", "recompute", {"recompute": ("none",)}),
        ("microbatches", "microbatches", {"microbatches": 1}),
        ("mesh", "the mesh", {"mesh": Mesh.parse("dp=2")}),
    ],
)
def test_a_wish_less_is_enough(name: str, option: str, decided: dict[str, Any]) -> None:
    limited = small(1.02 * frugal())
    assert f"leave {option} to the planner" in refusal(limited, **decided)
    plans(limited, **{k: v for k, v in decided.items() if k != name})


@pytest.mark.parametrize(
    ("amount", "up", "text"),
    [(1.234e9, False, "1.23 GB"), (1.231e9, True, "1.24 GB"), (0.0, True, "0 GB")],
)
def test_memory_is_rounded_so_that_it_is_enough(amount, up, text) -> None:
    assert gigabytes(amount, up) == text
