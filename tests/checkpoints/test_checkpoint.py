"""What one mesh saved goes on under another, in the plain model, and bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import cut_gpt, switch_gpt
from processes import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from trained import (
    HALF,
    STEPS,
    Trained,
    build,
    compiled,
    go_on,
    optimizer,
    rates,
    run,
    train,
    train_plainly,
)  # fmt: skip

from autopar.checkpoints.checkpoint_files import latest
from autopar.passes.program import Program


@pytest.fixture(scope="module")
def expected() -> Trained:
    return train_plainly()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: Trained) -> Path:
    """The first half of the steps, on pp=2,tp=2."""
    folder = tmp_path_factory.mktemp("runs")
    for losses, _ in run(folder, compiled("pp=2,tp=2", microbatches=2), 0, HALF):
        assert losses == pytest.approx(expected[0][:HALF], rel=1e-9)
    return folder


def check_end(found: Trained, expected: Trained) -> None:
    losses, weights = found
    assert losses == pytest.approx(expected[0][-len(losses) :], rel=1e-9)
    assert list(weights) == list(expected[1])
    for name, want in expected[1].items():
        torch.testing.assert_close(weights[name], want, rtol=1e-9, atol=1e-9, msg=name)


# --- another mesh ------------------------------------------------------------------

ELSEWHERE = [
    ("dp=2", {"zero": 3}),
    ("tp=1", {}),
    pytest.param("dp=4", {}, marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", {"zero": 1}, marks=pytest.mark.slow),
    pytest.param("tp=2,dp=2", {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
    pytest.param(
        "pp=2", {"schedule": "zb-v", "stages_per_rank": 2, "microbatches": 4},
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize(("mesh", "options"), ELSEWHERE)
def test_another_mesh_goes_on_as_one_device(saved, expected, mesh, options):
    for found in run(saved, compiled(mesh, **options), HALF, STEPS):
        check_end(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_shares_of_zero_go_on_in_a_pipeline(tmp_path, expected, mesh):
    run(tmp_path, compiled(mesh, zero=3), 0, HALF)
    pipeline = compiled("pp=2,tp=2", microbatches=4)
    for found in run(tmp_path, pipeline, HALF, STEPS):
        check_end(found, expected)


@pytest.mark.slow
def test_experts_go_on_on_one_device(tmp_path):
    model = {"make": switch_gpt}
    expected = train_plainly(**model)
    run(tmp_path, compiled("ep=2,dp=2", model, zero=1), 0, HALF, model)
    for found in run(tmp_path, compiled("tp=1", model), HALF, STEPS, model):
        check_end(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [("tp=2", "dp=2"), ("dp=2", "tp=2"), ("tp=2", "pp=2")]
)
def test_pieces_of_a_weight_go_on_where_it_is_whole(tmp_path, before, after):
    model = {"make": cut_gpt}
    zero = {"dp=2": {"zero": 3}}
    expected = train_plainly(**model)
    program = compiled(before, model, **zero.get(before, {}))
    run(tmp_path, program, 0, HALF, model)
    for found in run(
        tmp_path, compiled(after, model, **zero.get(after, {})), HALF, STEPS, model
    ):
        check_end(found, expected)


# --- the same mesh, bitwise --------------------------------------------------------


def train_twice(folder: Path, program: Program, model: Any) -> list[Trained]:
    """In one go; then half of the steps, and from their checkpoint the other half."""
    return [
        train(None, program, 0, STEPS, model),
        train(folder, program, 0, HALF, model),
        train(folder, program, HALF, STEPS, model),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2", {"microbatches": 2}),
        ("dp=2", {"zero": 3}),
        ("pp=2,dp=2", {"zero": 1}),
    ],
)
def test_resuming_is_bitwise_with_dropout(tmp_path, mesh, options):
    model = {"dropout": 0.2, "dtype": torch.float32}
    program = compiled(mesh, model, **options)
    found = run_ranks(train_twice, program.mesh.size, tmp_path, program, model)
    (losses, weights), (before, _), (after, again) = found[0]
    assert [*before, *after] == losses
    assert len(set(losses)) == STEPS
    assert all(torch.equal(again[name], weights[name]) for name in weights)


# --- the plain model, with torch's own tools ---------------------------------------


@pytest.mark.slow
def test_the_plain_model_goes_on(saved, expected):
    """`dcp.load` into a model's and optimizer's own state dicts."""
    case = build()
    update = optimizer(case.model.named_parameters())
    schedule = rates(update)
    for p in case.model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    update.step()  # makes the state that is loaded into
    names = {id(p): name for name, p in case.model.named_parameters()}
    trained = [names[id(p)] for g in update.param_groups for p in g["params"]]
    state = update.state_dict()["state"]
    held = {
        "model": case.model.state_dict(),
        "optimizer": {"state": {n: state[i] for i, n in enumerate(trained)}},
        "extra": {},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(held, checkpoint_id=latest(saved))
    case.model.load_state_dict(held["model"])
    by_number = {i: held["optimizer"]["state"][n] for i, n in enumerate(trained)}
    groups = update.state_dict()["param_groups"]
    update.load_state_dict({"state": by_number, "param_groups": groups})
    path = latest(saved)
    assert path is not None
    step = build().step()
    schedule.load_state_dict(step.load(path))
    for group, rate in zip(update.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    losses = go_on(case.model, case, update, schedule, HALF)
    check_end((losses, case.model.state_dict()), expected)


def test_torch_makes_one_file_of_it(saved, tmp_path):
    dcp_to_torch_save(latest(saved), tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    model = build().model
    model.load_state_dict(found["model"])
    assert set(found["model"]) == set(model.state_dict())  # the tied head too
    decay, rest = found["optimizer"]["param_groups"]
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert decay["lr"] == rest["lr"] < 1e-2
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(decay["params"] + rest["params"]) == sorted(trained)
    assert set(found["optimizer"]["state"]) == set(trained)
    assert found["training"] == {"steps": HALF, "seed": 0}
