"""What several ranks hold alike is compared in later steps too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plans import BATCH, CONFIG, batch_of, made, small_program
from processes import run_ranks
from torch import Tensor

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.runtime.agreement.replicas import (
    ON_CPU,
    ON_GPU,
    WAYS,
    Replicas,
    Tolerance,
    copies,
    held_by,
    sketch,
    square,
)
from autopar.step import Step
from examples.gpt import Config, build

# --- sketches ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (5,), (64, 3), (70_000,), (300, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sketch_tells_how_far_values_are_apart(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    y = x + (0.1 * torch.randn(shape)).to(dtype)
    apart = sketch(x) - sketch(y)
    assert apart.shape == (WAYS,)
    torch.testing.assert_close(apart, sketch(x.double() - y.double()))
    want = (x.double() - y.double()).square().sum().item()
    assert 0.3 * want <= square(apart.tolist()) <= 3 * want
    if x.dim() == 2:
        assert sketch(x.t().contiguous().t()).equal(sketch(x))
        assert not sketch(x.flip(0)).equal(sketch(x))


def test_a_sketch_estimates_a_norm() -> None:
    """The mean over many vectors is right, so that signs do not depend on each other:
    also of what is the same everywhere, and of what is far apart."""
    torch.manual_seed(0)
    for x in (torch.randn(200, 9000), torch.randn(200, 1).expand(200, 70_000)):
        ratios = [
            square(sketch(row).tolist()) / row.double().square().sum().item()
            for row in (x * (torch.rand(x.shape) < 0.1)).unbind()
        ]
        assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.15)


# --- what is judged ------------------------------------------------------------------

State = dict[str, Tensor]
Change = Callable[[State, State], None]
"""What another rank does to its weights, in one update that changes them so."""


def same(held: State, update: State) -> None: ...


def last_bits(held: State, update: State) -> None:
    for x in held.values():
        x *= 1 + 1e-7 * torch.randn_like(x)


def rounded_gradients(held: State, update: State) -> None:
    for name, x in held.items():
        x += 0.1 * update[name].abs().mean() * torch.randn_like(x)


def a_walk_at_random(held: State, update: State) -> None:
    """As by Adam, where gradients are zero but for rounding."""
    x = held["blocks.0.attention.qkv.bias"]
    x += 2**0.5 * 1e-3 * torch.randn_like(x)


def noise(held: State, update: State) -> None:
    for x in held.values():
        x += 1e-3 * torch.randn_like(x)


def twice_the_rate(held: State, update: State) -> None:
    for name, x in held.items():
        x += update[name]


def no_update(held: State, update: State) -> None:
    for name, x in held.items():
        x -= update[name]


def an_edit(held: State, update: State) -> None:
    held["norm.weight"][0] += 1


def an_edit_as_small_as_updates(held: State, update: State) -> None:
    held["norm.weight"] += 2e-3


def not_finite(held: State, update: State) -> None:
    held["norm.weight"][0] = torch.nan


JUDGED: list[tuple[Change, bool, bool]] = [  # whether an error, on CPUs and on GPUs
    (same, False, False),
    (last_bits, False, False),
    (rounded_gradients, True, False),
    (a_walk_at_random, True, False),
    (noise, True, True),
    (twice_the_rate, True, True),
    (no_update, True, True),
    (an_edit, True, True),
    (an_edit_as_small_as_updates, True, False),
    (not_finite, True, True),
]


@pytest.mark.parametrize("change", [change for change, *_ in JUDGED])
def test_what_rounding_does_is_no_error(change: Change) -> None:
    wrong = {c: errors for c, *errors in JUDGED}[change]
    assert [judged(change, x) is not None for x in (ON_CPU, ON_GPU)] == wrong


def test_weights_in_bfloat16_may_differ_by_a_rounding() -> None:
    def one_rounding(held: State, update: State) -> None:
        for x in held.values():
            x *= 1 + 2**-8 * torch.randint_like(x, -1, 2)

    assert judged(one_rounding, ON_GPU, torch.bfloat16) is None
    assert judged(an_edit, ON_GPU, torch.bfloat16) is not None


def test_on_gpus_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert judged(an_edit, ON_GPU, ends=False) is None
    assert "rank 1 drifted apart from rank 0" in caplog.text and "fix" in caplog.text


def judged(
    change: Change,
    tolerance: Tolerance,
    dtype: torch.dtype = torch.float32,
    ends: bool = True,
) -> AutoparError | None:
    """What is told after updates by 1e-3 of each element, where rank 1 did more. ends:
    see `Tolerance`."""
    tolerance = replace(tolerance, ends=ends)
    torch.manual_seed(0)
    program = small_program("dp=2", 1)
    if dtype == torch.bfloat16:
        program = half(program)
    held = {n: torch.randn(s.shape) for n, s in program.parameters.items()}
    ranks = [Replicas(program, rank, tolerance) for rank in range(2)]
    for replicas in ranks:
        replicas.facts(0, {n: x.to(dtype) for n, x in held.items()}, first=True)
    update = {n: 1e-3 * torch.randn_like(x) for n, x in held.items()}
    values = {}
    for rank, replicas in enumerate(ranks):
        now = {n: x + update[n] for n, x in held.items()}
        if rank:
            change(now, update)
        facts = replicas.facts(1, {n: x.to(dtype) for n, x in now.items()}, first=False)
        ((_, steps),), (values[rank],) = facts, facts.values()
    return ranks[0].judge(steps, values)


def half(program: Program) -> Program:
    """The same of weights in bfloat16."""
    specs = program.parameters.items()
    return replace(program, tensors={n: replace(s, dtype="bfloat16") for n, s in specs})


def test_a_rank_that_did_not_tell_is_not_judged() -> None:
    assert (
        Replicas(small_program("dp=2", 1), 0, ON_CPU).judge("", {0: None, 1: b""})
        is None
    )


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        ("dp=2,tp=2", 0),
        ("dp=2,tp=2", 3),
        ("pp=2,dp=2", 0),
        ("pp=2,dp=2", 1),
        ("pp=2,tp=2", 0),
    ],
)
def test_what_several_ranks_hold_is_counted(mesh: str, zero: int) -> None:
    program = small_program(mesh, zero=zero)
    held = [place for rank in range(4) for place in held_by(program, rank)]
    for place in held:
        assert held.count(place) == copies(program, place[0]), place


def test_steps_in_which_replicas_are_compared_grow_rare() -> None:
    replicas = Replicas(small_program("dp=2", 1), 0, ON_CPU)
    due = [i - 7 for i in range(7, 1100) if replicas.due(i)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


# --- ranks that drift apart ----------------------------------------------------------


def trained(step: Step, habit: str) -> str:
    """What is raised in the steps of a loop, and in which."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    torch.manual_seed(7 + (rank if habit == "noise" else 0))
    for i in range(20):
        try:
            step(**batch_of(i))
        except AutoparError as error:
            return f"{i + 1}: {error}"
        for name, p in step.named_parameters():
            assert p.grad is not None
            if "noise" in habit:
                p.grad.add_(torch.randn_like(p.grad))
            if habit == "edit" and rank and i == 5 and name == "norm.weight":
                p.data[0] += 0.5
        step.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return ""


def drifting(program: Program, habit: str, folder: Path) -> list[str]:
    """What is raised, and then once each of the fixes was followed."""
    step = made(program)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
    step.save(folder, optimizer)
    errors = [trained(step, habit)]
    step.load_state_dict(step.state_dict())
    errors.append(trained(step, "none"))
    errors.append(trained(step, habit))
    step.load(folder, optimizer)
    return [*errors, trained(step, "none")]


NOISE = "noise drawn from a seed with the rank in it"
DRIFT = {
    ("dp=2", "noise"): ("2: rank 1", "steps 1 and 2, in 28 of 28 parameters", NOISE),
    ("tp=2", "noise"): ("2: rank 1", "15 of 15 parameters", NOISE),
    ("pp=2", "noise"): ("2: rank 1", "1 of 1 parameters", "in 'tokens.weight'", NOISE),
    ("dp=2", "edit"): ("9: rank 1", "steps 5 and 9", "in 'norm.weight'", "one rank"),
    ("tp=2", "edit"): ("9: rank 1", "steps 5 and 9", "in 'norm.weight'", "one rank"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "habit"), DRIFT)
def test_all_ranks_are_told_that_they_drift_apart(
    mesh: str, habit: str, tmp_path: Path
) -> None:
    program = small_program(mesh, 2 if mesh == "pp=2" else 1, prove=True)
    first, second = run_ranks(drifting, 2, program, habit, tmp_path)
    assert first == second
    error, healed, again, loaded = first
    for text in (*DRIFT[mesh, habit], "drifted apart from rank 0", "  fix  "):
        assert text in error
    assert "drifted apart" in again or habit == "edit"  # which is seen in step 64 then
    assert healed == loaded == ""


# --- what is right stays so ----------------------------------------------------------


@cache
def with_dropout(mesh: str, zero: int = 0) -> Program:
    config = Config(**{**vars(CONFIG), "dropout": 0.1})
    model, batch = build(config, BATCH)
    plan = Plan(Mesh.parse(mesh), 2 if "pp" in mesh else 1, "1f1b", zero=zero)
    return autopar.compile_offline(model, batch, plan, cluster=PLAIN)


def honest(programs: list[Program]) -> list[str]:
    errors = []
    for program in programs:
        config = Config(**{**vars(CONFIG), "dropout": 0.1})
        torch.manual_seed(0)
        model = build(config, BATCH)[0]
        step = autopar.compile(model, program.mesh, program=program)
        step.build(**batch_of(0))
        alike = str(program.mesh) == "dp=2"  # all ranks have the same parameters
        errors.append(trained(step, "noise alike" if alike else ""))
    return errors


@pytest.mark.slow
def test_honest_training_is_no_error() -> None:
    """With dropout, noise that is the same on all ranks, and clipped gradients."""
    programs = [with_dropout("dp=2", zero) for zero in range(4)]
    programs += [with_dropout("tp=2"), with_dropout("pp=2")]
    assert run_ranks(honest, 2, programs) == [[""] * 6] * 2
    four = [with_dropout("dp=2,tp=2"), with_dropout("dp=2,pp=2", 1)]
    assert run_ranks(honest, 4, four) == [[""] * 2] * 4
