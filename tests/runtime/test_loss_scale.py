"""Dynamic loss scaling: its policy, and what overflows do to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, on_rank, run_all_ranks
from models import plain_gpt

import autopar
from autopar.passes.errors import AutoparError
from autopar.proof.reference import reference_step
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.execute.loss_scale import INTERVAL, LossScale


def test_the_scale_halves_grows_and_counts():
    scale = LossScale()
    scale.update(True)
    assert (scale.scale, scale.skipped) == (2.0**15, 1)
    for _ in range(INTERVAL - 1):
        scale.update(False)
    assert scale.scale == 2.0**15
    scale.update(False)
    assert (scale.scale, scale.good) == (2.0**16, 0)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale
    with pytest.raises(AutoparError, match="load what state_dict"):
        other.load_state_dict({"scale": 1.0})


def test_only_float16_has_a_scale():
    for precision in ("model", "bf16"):
        program = plain_gpt(layers=1).compile("tp=1", precision=precision)
        assert "loss_scale" not in "".join(program.modules.values())
    program = plain_gpt(layers=1).compile("pp=2", 2, precision="fp16")
    texts = [program.modules[program.module_of(rank, rank)] for rank in (0, 1)]
    assert ["c.loss_scale(" in text for text in texts] == [False, True]


def steep(gain: float) -> Case:
    """A model whose logits' gradient, times 2^16, is too large for float16."""
    case = plain_gpt(layers=1)
    return case._replace(loss_fn=lambda out, batch: out[1] * gain)


def test_an_overflow_on_one_stage_is_one_on_all():
    case = steep(2.0**6)
    program = case.compile("pp=2,dp=2", 2, precision="fp16")

    def body(comm: Comm) -> list[tuple[float, int, bool]]:
        executor = on_rank(program, comm, case.model)
        held = executor.parameters
        assert executor.loss_scale is not None
        seen = []
        for _ in range(8):
            loss = executor.step(case.batch)
            assert loss.isfinite()
            none = {p.grad is None for p in held.values()}
            assert len(none) == 1  # all or none
            scale = executor.loss_scale
            seen.append((scale.scale, scale.skipped, none.pop()))
        return seen

    first, *others = run_virtual(program.mesh, 2, body)
    assert all(seen == first for seen in others)
    nones = [none for _, _, none in first]
    skipped = nones.count(True)
    assert 0 < skipped < 8 and nones == [True] * skipped + [False] * (8 - skipped)
    assert first[-1][:2] == (2.0 ** (16 - skipped), skipped)


@pytest.mark.slow
def test_what_an_overflow_takes_with_it_is_told(caplog):
    case = steep(2.0**6)
    program = case.compile("dp=1", 1, precision="fp16")

    def body(comm: Comm) -> list[int]:
        executor = on_rank(program, comm, case.model)
        told = []
        for zeroed in (True, False):
            executor.loss_scale = LossScale(scale=1.0)
            executor.step(case.batch)
            if zeroed:
                for p in executor.parameters.values():
                    p.grad = None
            executor.loss_scale = LossScale()
            executor.step(case.batch)
            told.append(caplog.text.count("gradients overflowed that were to be added"))
        return told

    assert run_virtual(program.mesh, 1, body) == [[0, 1]]


def test_verify_looks_for_a_scale_that_does_not_overflow():
    found = steep(2.0**6).verify("pp=2,dp=2", 2, precision="fp16")
    assert found.tolerance < 0.005


@pytest.mark.slow
def test_a_loss_scale_saves_small_gradients_from_becoming_zero():
    case = steep(2.0**-14)
    case.verify("tp=2", precision="fp16")
    program = case.compile("tp=2", precision="fp16")
    texts = {
        k: text.replace("c.loss_scale([], ", "aten.ones.default([], ")
        for k, text in program.modules.items()
    }
    assert texts != program.modules
    wrong = replace(program, modules=texts)
    _, ours = run_all_ranks(wrong, case.model, case.batch)
    _, want = reference_step(*case)
    lost = "blocks.0.attention.qkv.weight"
    ours[lost] *= 2.0**16
    assert (ours[lost] - want[lost]).norm() > 0.05 * want[lost].norm()


@pytest.mark.slow
def test_an_optimizer_on_the_cpu_sees_no_gradients_of_an_overflow():
    case = steep(2.0**6)
    step = autopar.compile(
        case.model,
        "tp=1",
        loss_fn=case.loss_fn,
        precision="fp16",
        offload=True,
        example_inputs=case.batch,
    )
    for p in step.parameters():
        p.grad = torch.zeros_like(p)  # as zero_grad(set_to_none=False) leaves it
    step(**case.batch)
    assert step.skipped == 1
    assert all(p.grad is None for p in step.parameters())
    for _ in range(15):
        step(**case.batch)
    assert step.skipped < 16
    assert all(p.grad is not None for p in step.parameters())


class Decaying(torch.optim.Optimizer):
    """Takes None for zeros, as some forms of Muon do, and counts its updates."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
            group["updates"] += 1
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.mul_(0.9).sub_(grad)


@pytest.mark.slow
def test_an_update_after_an_overflow_changes_nothing() -> None:
    """As `GradScaler` leaves it out."""
    case = steep(2.0**6)
    step = case.step(precision="fp16")
    optimizer = Decaying(step.parameters(), {"updates": 0})
    [group] = optimizer.param_groups
    held, done = [*group["params"]], 0
    for _ in range(12):
        before = [p.detach().clone() for p in held]
        skipped = step.skipped
        step(**case.batch)
        optimizer.step()
        optimizer.zero_grad()
        done += step.skipped == skipped
        assert group["updates"] == done
        assert [*group["params"]] == held
        same = [torch.equal(p, q) for p, q in zip(held, before, strict=True)]
        assert all(same) is (step.skipped > skipped)
    assert 0 < done < 12
