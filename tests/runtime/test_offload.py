"""The optimizer on the CPU: the same trajectory, from copies on the host."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from models import plain_gpt
from processes import run_ranks
from trajectories import batches, build, optimizer, train_on_ranks, train_plainly

from autopar.runtime.parameters.offload import Host
from autopar.step import Step


def compiled(offload: bool) -> Step:
    return build("plain").step(offload=offload)


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "foreach sgd": lambda ps: torch.optim.SGD(ps, 1e-1, 0.9, foreach=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_the_same_steps(name):
    steps = [compiled(offload) for offload in (False, True)]
    updates = [OPTIMIZERS[name](list(step.parameters())) for step in steps]
    for batch in batches(build("plain")):
        losses = [step(**batch).item() for step in steps]
        norms = [step.clip_grad_norm_(0.5).item() for step in steps]
        assert norms[0] > 0.5
        assert losses[0] == losses[1] and norms[0] == norms[1]
        for update in updates:
            update.step()
            update.zero_grad()
    plain, offloaded = (step.state_dict() for step in steps)
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
    last = batches(build("plain"))[0]
    assert steps[0].evaluate(**last) == steps[1].evaluate(**last)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("clear", ["none", "zeros", "never"])
def test_gradients_add_up_until_they_are_cleared(clear):
    found = []
    for step in (compiled(False), compiled(True)):
        update = optimizer(step.parameters())
        for batch in batches(build("plain"))[:2]:
            if clear != "never":
                update.zero_grad(set_to_none=clear == "none")
            step(**batch)
        found.append({n: p.grad.clone() for n, p in step.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_optimizer_has_tensors_of_the_host_alone():
    step = compiled(True)
    update = optimizer(step.parameters())
    step(**build("plain").batch)
    update.step()
    held = step.executor.parameters
    assert all(p.grad is None for p in held.values())
    for name, p in step.named_parameters():
        assert p.data_ptr() != held[name].data_ptr() and p.device.type == "cpu"
        assert update.state[p]["exp_avg"].device.type == "cpu"
        assert not torch.equal(p, held[name])  # updated here, not there yet


@pytest.mark.slow
def test_a_state_that_is_loaded_is_computed_with():
    case, step = build("plain"), compiled(True)
    before = step.evaluate(**case.batch)
    state = {name: x + 0.1 for name, x in step.state_dict().items()}
    step.load_state_dict(state)
    assert all(torch.equal(x, state[n]) for n, x in step.state_dict().items())
    assert step.evaluate(**case.batch) != before


def test_optimizer_state_is_saved_and_loaded_as_ever():
    case = build("plain")
    first, second = compiled(True), compiled(True)
    update = optimizer(first.parameters())
    first(**case.batch)
    update.step()
    update.zero_grad()
    second.load_state_dict(first.state_dict())
    resumed = optimizer(second.parameters())
    resumed.load_state_dict(deepcopy(update.state_dict()))
    for step, each in ((first, update), (second, resumed)):
        step(**case.batch)
        each.step()
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_checkpoint_goes_from_the_cpu_to_the_device(tmp_path):
    case, losses = build("plain"), []
    for offload in (True, False):
        step = compiled(offload)
        update = optimizer(step.parameters())
        if offload:
            step(**case.batch)
            update.step()
            update.zero_grad()
            step.save(tmp_path, update)
        else:
            step.load(tmp_path, update)
        for batch in batches(case):
            losses.append(step(**batch).item())
            update.step()
            update.zero_grad()
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]


def test_frozen_parameters_have_no_gradient():
    case = plain_gpt(layers=1)
    case.model.get_submodule("blocks.0.mlp.up").requires_grad_(False)
    step = case.step(offload=True)
    step(**case.batch)
    without = {name for name, p in step.named_parameters() if p.grad is None}
    assert without == {"blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias"}


def test_copies_are_of_the_same_types():
    held = {"a": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}
    (copy,) = Host(held).parameters.values()
    assert torch.equal(copy, held["a"]) and copy.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2,dp=2"])
def test_four_ranks_follow_one_device(mesh):
    losses, norms, weights = train_plainly("plain")
    options = {"zero": 3, "offload": True}
    for got in run_ranks(train_on_ranks, 4, "plain", mesh, 2, torch.float64, options):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        for name, want in weights.items():
            torch.testing.assert_close(got[2][name], want, rtol=1e-9, atol=1e-9)
