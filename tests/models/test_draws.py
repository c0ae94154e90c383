"""Random combinations of everything, each proved, and none left out of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draw_options import outcome, spanning
from draws import MODELS, OPTIONS, Draw, DrawFailed, Model, draw, main
from processes import ENVIRONMENT

from autopar.options import LAYOUTS, Options
from autopar.passes.mesh import AXES, Mesh
from autopar.passes.plan import AUTO, CONTEXT_PARALLEL, PRECISION, RECOMPUTE
from autopar.passes.schedule.make_schedule import SCHEDULES


def words(one: Draw) -> set[tuple[str, Any]]:
    """What a draw has of everything that there is to have; sizes as far as they are
    one or more."""
    split = {("axis", axis) for axis, n in Mesh.parse(one.mesh).axes if n > 1}
    written = {("written", axis) for axis, n in Mesh.parse(one.mesh).axes if n == 1}
    options = {(name, str(value)) for name, value in one.options}
    sizes = {(one.model.kind, name, str(value)) for name, value in one.model.sizes}
    return {*split, *written, *options, *sizes, ("model", one.model.kind)}


def pairs(one: set[tuple[str, Any]]) -> set[frozenset[Any]]:
    """Each word; two by two those that decide most; axes with the model."""
    found = {frozenset({word}) for word in one}
    decided = ("axis", "zero", "schedule", "recompute", "precision")
    for kinds in (decided, ("axis", "model")):
        paired = [word for word in one if word[0] in kinds]
        found |= {frozenset(both) for both in itertools.product(paired, repeat=2)}
    return found


DRAWS = [words(draw(seed)) for seed in range(256)]
# Compiling takes as long as some eight ranks. The others are proved at night.
COSTS = [8.0 + Mesh.parse(draw(seed).mesh).size for seed in range(len(DRAWS))]
DAILY = spanning(list(map(pairs, DRAWS)), COSTS)


@pytest.mark.matrix(quick=0, daily=12)
@pytest.mark.parametrize("seed", DAILY)
def test_draw(seed: int) -> None:
    draw(seed).prove()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted({*range(len(DRAWS))} - {*DAILY}))
def test_more_draws(seed: int) -> None:
    draw(seed).prove()


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["draws.py", pytest.param("draw_models.py", marks=pytest.mark.nightly)]
)
def test_a_draw_is_proved_alone_as_its_file_says(script: str, tmp_path: Path) -> None:
    """From any folder, in a Python that finds nothing of the checkout by itself."""
    alone = {k: v for k, v in ENVIRONMENT.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(Path(__file__).parents[1] / script), "3"]
    done = subprocess.run(command, env=alone, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"draw 3: ")


# --- what is drawn ------------------------------------------------------------------


DRAWN = set().union(*(DRAWS[seed] for seed in DAILY))


def test_every_option_of_compile_is_drawn() -> None:
    """A new one needs a line in `OPTIONS` of draws.py. A backend and TF32 change no
    text: see test_inductor.py and test_tf32.py."""
    assert {*OPTIONS, "backend", "tf32"} == set(Options.__annotations__)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", MODELS),
        ("axis", AXES),
        ("written", AXES),
        ("microbatches", range(1, 5)),
        ("schedule", [*SCHEDULES, AUTO]),
        ("stages_per_rank", range(1, 4)),
        ("sequence_parallel", [True, False]),
        ("context_parallel", CONTEXT_PARALLEL),
        ("cp_layout", [None, *LAYOUTS]),
        ("recompute", [*RECOMPUTE, AUTO]),
        ("memory", [0, "1GiB"]),
        ("zero", range(4)),
        ("offload", [True, False]),
        ("precision", PRECISION),
    ],
)
def test_every_value_is_drawn_daily(name, values) -> None:
    assert {(name, str(value)) for value in values} <= DRAWN


def test_every_pair_of_axis_zero_and_schedule_is_drawn() -> None:
    kinds = [
        [("axis", axis) for axis in AXES],
        [("zero", str(zero)) for zero in range(4)],
        [("schedule", name) for name in (*SCHEDULES, AUTO)],
    ]
    pairs = [
        {a, b}
        for of_a, of_b in itertools.combinations(kinds, 2)
        for a, b in itertools.product(of_a, of_b)
    ]
    pairs += [{a, b} for a, b in itertools.combinations(kinds[0], 2)]
    pairs.remove({("axis", "fsdp"), ("zero", "0")})  # refused
    proved = [DRAWS[seed] for seed in DAILY]
    assert not [pair for pair in pairs if not any(pair <= one for one in proved)]


def test_meshes_are_written_in_any_order() -> None:
    orders = {
        tuple(axis for axis, _ in Mesh.parse(draw(seed).mesh).axes)
        for seed in range(len(DRAWS))
    }
    both = [pair for pair in itertools.permutations(AXES, 2) if pair in orders]
    assert len(both) > 10


def test_a_seed_gives_the_same_draw_each_time() -> None:
    assert [str(draw(seed)) for seed in range(20)] == [
        str(draw(seed)) for seed in range(20)
    ]
    assert len({str(draw(seed)) for seed in range(len(DRAWS))}) == len(DRAWS)


# --- what is not drawn --------------------------------------------------------------

SMALL = Model("plain_gpt", (("layers", 1), ("heads", 2), ("batch", 4)), frozen=0.0)


def small(mesh: str, **options: Any) -> Draw:
    return Draw(7, SMALL, mesh, tuple(options.items()))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dp=3", {}, "batch of 4 samples"),
    ("dp=2", {"microbatches": 4}, "batch of 4 samples"),
    ("pp=2", {"schedule": "interleaved"}, "two or more stages a rank, not 1"),
    ("pp=2", {"stages_per_rank": 2}, "one stage a rank, not 2"),
    ("pp=2", {"schedule": "zb-v", "stages_per_rank": 3}, "two stages a rank, not 3"),
    ("pp=50", {}, "too few for 50 stages"),
    ("tp=2,tp=2", {}, "twice"),
    ("xp=2", {}, "'xp'"),
    ("tp=0", {}, "size 0"),
    ("dp=2", {"zero": 4}, "zero=4"),
    ("tp=2", {"zero": 1}, "no axis whose ranks hold the same"),
    (
        "cp=2",
        {"context_parallel": "ulysses", "cp_layout": "zigzag"},
        "every rank sees all rows",
    ),
    ("cp=20", {"context_parallel": "ring"}, "16 rows are too few for 20"),
    ("tp=2", {"recompute": "auto"}, "how much memory"),
    ("tp=2", {"memory": 1000}, "memory"),
    ("fsdp=2", {}, "shares nothing out"),
    ("tp=2", {"hints": {"*.mlp.up.weight": "ffn/dp"}}, "ffn/dp"),
]


@pytest.mark.matrix(quick=7)
@pytest.mark.parametrize(("mesh", "options", "says"), REFUSED)
def test_what_cannot_be_is_refused_with_a_fix(mesh, options, says) -> None:
    result = outcome(small(mesh, **options))
    assert result.startswith("refused") and says in result


def test_a_draw_that_fails_says_how_to_repeat_it_alone() -> None:
    with pytest.raises(DrawFailed) as caught:
        small("dp=3").prove()
    first, *_, last = str(caught.value).splitlines()
    assert first == (
        "draw 7: plain_gpt(layers=1, heads=2, batch=4), 0% frozen, on 'dp=3' with "
    )
    assert last == "alone: python tests/draws.py 7"


def test_the_command_proves_a_draw_and_counts_failures(monkeypatch, capsys) -> None:
    broken = replace(SMALL, kind="none")
    seen = {7: replace(small(""), model=broken), 8: replace(small("dp=2"), seed=8)}
    monkeypatch.setattr("draws.draw", seen.__getitem__)
    assert main(7, 8) == 1
    out = capsys.readouterr().out
    assert "FAILED draw 7" in out and "FAILED draw 8" not in out
