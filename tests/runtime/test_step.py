"""Training on real processes follows training of the plain model on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import gpt2
from processes import run_ranks
from torch import Tensor
from trajectories import (
    build,
    check_trajectory,
    train_on_ranks,
    train_plainly,
)

import autopar
from autopar.passes.errors import AutoparError, BatchError

MESHES = [
    ("plain", "pp=2", 2, 0),
    ("gpt2", "tp=2", 2, 0),
    ("plain", "dp=2", 2, 1),
    ("gpt2", "dp=2", 2, 3),
    ("switch", "ep=2", 1, 0),
    ("plain", "pp=2,tp=2", 4, 0),
    ("llama", "pp=2,dp=2", 2, 0),
    ("llama", "tp=4", 1, 0),
    ("gpt2", "pp=2,dp=2", 2, 1),
    ("llama", "dp=2,tp=2", 1, 3),
    ("switch", "pp=2,ep=2", 2, 0),
]


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize(("model", "mesh", "microbatches", "zero"), MESHES)
def test_the_trajectory_is_that_of_one_device(model, mesh, microbatches, zero):
    check_trajectory(model, mesh, microbatches, {"zero": zero})


@pytest.mark.slow
def test_experts_of_loops_follow_one_device():
    """Each is a parameter on one rank alone."""
    check_trajectory("loops", "ep=2", 2, {"zero": 1})


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [
        ("interleaved", 2),
        ("looped-bfs", 2),
        ("zb-h1", 1),
        ("zb-h2", 1),
        ("zb-v", 2),
    ],
)
def test_every_schedule_follows_one_device(schedule, stages_per_rank):
    options = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    check_trajectory("plain", "pp=2", 4, options)


@pytest.mark.nightly
def test_in_float32_the_losses_are_those_of_one_device():
    losses, norms, _ = train_plainly("gpt2", torch.float32)
    arguments = ("gpt2", "pp=2,tp=2", 2, torch.float32)
    for got_losses, got_norms, _ in run_ranks(train_on_ranks, 4, *arguments):
        assert got_losses == pytest.approx(losses, rel=1e-4)
        assert got_norms == pytest.approx(norms, rel=1e-3)


# --- checkpoints -------------------------------------------------------------------


def load_and_save(mesh: str, zero: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    case = build("plain")
    step = autopar.compile(case.model, mesh, zero=zero, example_inputs=case.batch)
    before = step.state_dict()
    assert any(not torch.equal(before[name], state[name]) for name in state)
    step.load_state_dict(state)
    return step.state_dict()


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize(
    ("mesh", "zero"), [("tp=2", 0), ("pp=2", 0), ("dp=2", 1), ("dp=2", 3)]
)
def test_a_state_dict_loads_under_any_mesh_and_into_the_model(mesh, zero):
    case = build("plain")
    with torch.no_grad():
        for p in case.model.parameters():
            p.add_(1.0)
    state = case.model.state_dict()
    for found in run_ranks(load_and_save, 2, mesh, zero, state):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], state[name]) for name in state)
        build("plain").model.load_state_dict(found)


def test_a_state_dict_that_does_not_fit_changes_nothing():
    case = build("plain")
    step = case.step()
    before = step.state_dict()
    wrong = dict(before)
    wrong["extra"] = wrong.pop("norm.bias")
    wrong["norm.weight"] = torch.zeros(3)
    with pytest.raises(AutoparError) as error:
        step.load_state_dict(wrong)
    assert "missing: norm.bias" in str(error.value)
    assert "unexpected: extra" in str(error.value)
    assert "shape: norm.weight: [3] instead of [32]" in str(error.value)
    after = step.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_state_dict_in_part_loads_as_a_module_does() -> None:
    """A fine-tune's head is not in the checkpoint, whose own nobody has."""
    case = build("plain")
    step = case.step()
    before = step.state_dict()
    wanted = {name: x + 1 for name, x in before.items()}
    part = {**wanted, "extra": torch.zeros(3)}
    del part["norm.bias"]
    differing = step.load_state_dict(part, strict=False)
    theirs = case.model.load_state_dict(part, strict=False)
    assert differing.missing_keys == theirs.missing_keys == ["norm.bias"]
    assert differing.unexpected_keys == theirs.unexpected_keys == ["extra"]
    after = case.model.state_dict()
    assert step.state_dict().keys() == after.keys()
    for name, value in step.state_dict().items():
        assert torch.equal(value, after[name])
    with pytest.raises(AutoparError, match=r"norm\.weight: \[3\] instead of \[32\]"):
        step.load_state_dict({"norm.weight": torch.zeros(3)}, strict=False)


@pytest.mark.slow
def test_a_tied_weight_loads_by_either_of_its_names() -> None:
    step = build("gpt2").step()
    state = step.state_dict()
    value = state["lm_head.weight"] + 1
    del state["transformer.wte.weight"]
    state["lm_head.weight"] = value
    assert step.load_state_dict(state, strict=False).missing_keys == []
    assert torch.equal(step.state_dict()["transformer.wte.weight"], value)
    both = {**step.state_dict(), "lm_head.weight": value - 1}
    step.load_state_dict(both)
    case = build("gpt2")
    case.model.load_state_dict(both)
    for name, of_module in case.model.state_dict().items():
        assert torch.equal(step.state_dict()[name], of_module)


def test_parameters_are_asked_for_as_those_of_a_module() -> None:
    case = build("plain")
    step = case.step()
    own, theirs = dict(step.named_parameters("model")), case.model
    assert own.keys() == dict(theirs.named_parameters("model")).keys()
    assert len([*step.parameters(recurse=False)]) == len(
        [*theirs.parameters(recurse=False)]
    )


# --- gradients and batches ---------------------------------------------------------


def test_gradients_add_up_until_they_are_cleared():
    case = build("plain")
    step = case.step()
    step(**case.batch)
    once = {name: p.grad.clone() for name, p in step.named_parameters()}
    step(**case.batch)
    for name, p in step.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
        p.grad = None
    step(**case.batch)
    for name, p in step.named_parameters():
        assert torch.equal(p.grad, once[name])


def test_a_norm_below_the_limit_changes_nothing():
    case = build("plain")
    step = case.step()
    step(**case.batch)
    before = {name: p.grad.clone() for name, p in step.named_parameters()}
    norm = step.clip_grad_norm_(1e6)
    total = sum(g.square().sum() for g in before.values())
    torch.testing.assert_close(norm, total.sqrt())
    for name, p in step.named_parameters():
        assert torch.equal(p.grad, before[name])


WRONG = {
    "has no 'labels'": lambda b: {"ids": b["ids"]},
    r"int64\[8\], but the step was compiled": lambda b: {
        k: v[:, 0] for k, v in b.items()
    },
    r"int32[\s\S]*fix  pass ids\.to\(torch\.int64\)": lambda b: {
        **b,
        "ids": b["ids"].int(),
    },
    "compiled without 'mask'": lambda b: {**b, "mask": torch.ones(8)},
}


@pytest.mark.parametrize("says", WRONG)
def test_another_batch_than_was_compiled_for(says):
    case = build("plain")
    step = case.step()
    with pytest.raises(BatchError, match=says):
        step(**WRONG[says](case.batch))


@pytest.mark.parametrize("options", [{}, {"offload": True}])
def test_shards_have_the_marks_of_the_models_parameters(
    options: dict[str, Any],
) -> None:
    """By which scripts tell an optimizer what decays, and how fast it learns."""
    case = gpt2(layers=1)
    for name, p in case.model.named_parameters():
        p.place = name
    case.model.transformer.wte.weight._no_weight_decay = True
    step = case.step(**options)
    kept = {p.place for p in step.parameters() if hasattr(p, "_no_weight_decay")}
    assert kept == {"transformer.wte.weight"}
    assert all(name.startswith(p.place) for name, p in step.named_parameters())
