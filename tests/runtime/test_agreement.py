"""Ranks that do not do the same with the same are told so, on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plans import BATCH, CONFIG, batch_of, made, small_model, small_program
from processes import run_ranks

import autopar
from autopar.passes.digest import digest
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.agreement.agreement import FIRST
from autopar.runtime.agreement.roll_call import RanksDisagree
from autopar.runtime.comm.comm import CommError
from examples.gpt import build

Scenario = Callable[[Program, int, Path], None]


# --- each does something wrong on a rank ---------------------------------------------


def a_batch_of_its_own(program: Program, rank: int, folder: Path) -> None:
    made(program)(**batch_of(rank))


def a_batch_of_its_own_to_evaluate(program: Program, rank: int, folder: Path) -> None:
    made(program).evaluate(**batch_of(rank))


def one_field_of_its_own_in_a_later_step(
    program: Program, rank: int, folder: Path
) -> None:
    step = made(program)
    for i in range(40):
        batch = batch_of(i)
        if i >= 10 and rank:
            batch["labels"] = batch["labels"].roll(1, 0)
        step(**batch)


def a_part_of_the_batch(program: Program, rank: int, folder: Path) -> None:
    part = slice(0, BATCH // 2) if rank else slice(None)
    made(program)(**{k: v[part] for k, v in batch_of(0).items()})


def a_seed_of_its_own(program: Program, rank: int, folder: Path) -> None:
    made(program, seed=rank)


def permuted_weights(program: Program, rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = small_model()
    if rank:
        with torch.no_grad():
            table = model.get_parameter("blocks.1.mlp.up.weight")
            table.copy_(table.flip(0))
    autopar.compile(model, program.mesh, program=program).build(**batch_of(0))


def weights_drawn_anew(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    torch.manual_seed(rank)
    for p in step.parameters():
        torch.nn.init.normal_(p)
    step(**batch_of(0))


def another_state_dict(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    state = step.state_dict()
    state["norm.weight"] += rank
    step.load_state_dict(state)


def only_one_evaluates(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    step(**batch_of(0))
    if rank == 0:
        step.evaluate(**batch_of(0))
    step(**batch_of(0))


def only_one_saves(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    if rank == 0:
        step.save(folder)
    step.evaluate(**batch_of(0))


def only_one_takes_a_state_dict(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    if rank == 1:
        step.state_dict()
    step.clip_grad_norm_(1.0)


def another_limit_of_the_norm(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    step(**batch_of(0))
    step.clip_grad_norm_(1.0 + rank)


def a_state_of_training_of_its_own(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    step.load_training_state({"steps": 3 * rank, "seed": 0})
    step(**batch_of(0))


def only_one_saves_the_optimizer(program: Program, rank: int, folder: Path) -> None:
    step = made(program)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    step.save(folder, optimizer if rank else None)


WRONG: Mapping[Scenario, str] = {
    a_batch_of_its_own: "'ids' is not the same on rank 1 as on rank 0 of the batch",
    a_batch_of_its_own_to_evaluate: "'ids' is not the same on rank 1 as on rank 0",
    one_field_of_its_own_in_a_later_step: "'labels' is not the same on rank 1",
    a_part_of_the_batch: "rank 0 steps, but rank 1 has a batch of another shape",
    a_seed_of_its_own: "the seed is 0 on rank 0, but 1 on rank 1",
    permuted_weights: "'blocks.1.mlp.up.weight' has other values on rank 1",
    weights_drawn_anew: "on rank 1 than on rank 0, which hold the same part of it",
    another_state_dict: "'norm.weight' is not the same on rank 1 as on rank 0",
    only_one_evaluates: "rank 0 evaluates, but rank 1 steps",
    only_one_saves: "rank 0 saves, but rank 1 evaluates",
    only_one_takes_a_state_dict: "rank 0 clips gradients, but rank 1 takes a state",
    only_one_saves_the_optimizer: "optimizer is not given on rank 0, but given on",
    another_limit_of_the_norm: "max_norm is 1.0 on rank 0, but 2.0 on rank 1",
    a_state_of_training_of_its_own: "'steps' of step.training_state() is 0 on rank 0",
}


def told(program: Program, folder: Path) -> list[str]:
    """What each scenario raises on this rank: all ranks are told, so they go on."""
    said = []
    for scenario in WRONG:
        try:
            scenario(program, dist.get_rank(), folder)
            said.append(f"{scenario.__name__}: nothing was said")
        except AutoparError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_all_ranks_are_told_what_differs(tmp_path: Path) -> None:
    by_rank = run_ranks(
        told, 2, small_program("tp=2", 1, prove=True), tmp_path, seconds=120
    )
    for scenario, *said in zip(WRONG, *by_rank, strict=True):
        for text in said:
            assert WRONG[scenario] in text, scenario.__name__
            assert "  fix  " in text


def gone(program: Program, folder: Path) -> str:
    """A rank that compiles alone, and saves while the other has come to its end."""
    step = made(program)
    if dist.get_rank() == 0:
        says = (
            r"^rank 0 called autopar.compile\(\), but rank 1 did not within 1 s\n  fix"
        )
        with pytest.raises(RanksDisagree, match=says):
            made(program, timeout=timedelta(seconds=1))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(CommError) as error:
        step.save(folder)
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_not_waited_for(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    said, _ = run_ranks(
        gone, 2, small_program("tp=2", 1, prove=True), tmp_path, seconds=120
    )
    assert "rank 0 waits in step.save() for a rank that failed, has ended" in said
    assert time.monotonic() - began < 60


def late(program: Program, habit: str) -> str:
    """What is said after some steps, when ranks no longer wait before they begin."""
    step, rank = made(program), dist.get_rank()
    optimizer = torch.optim.SGD(step.parameters(), lr=1e-3)
    for i in range(FIRST + 2):
        step(**batch_of(i))
        step.clip_grad_norm_(1.0)
        optimizer.step()
    try:
        if habit == "evaluates" and rank == 0:
            step.evaluate(**batch_of(0))
        batch = batch_of(0)
        if habit == "fails" and rank == 1:
            del batch["labels"]
        if habit == "rate":
            step(**batch)
            optimizer.param_groups[0]["lr"] += rank
            optimizer.step()
        step(**batch)
        return "nothing was said"
    except AutoparError as error:
        return str(error)


LATE = {
    "evaluates": ("rank 0 evaluates, but rank 1 steps",) * 2,
    "rate": ("'lr' of SGD's group 0 is 0.001 on rank 0, but 1.001 on rank 1",) * 2,
    "fails": ("rank 1 cannot step", "the batch has no 'labels'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
@pytest.mark.parametrize("habit", LATE)
def test_ranks_that_have_begun_are_told_too(habit: str, mesh: str) -> None:
    if (mesh, habit) == ("pp=2", "rate"):
        return  # of each stage its own
    began = time.monotonic()
    program = small_program(mesh, 2 if mesh == "pp=2" else 1, prove=True)
    for said, text in zip(run_ranks(late, 2, program, habit), LATE[habit], strict=True):
        assert text in said
    assert time.monotonic() - began < 60


# --- what is right stays so ----------------------------------------------------------


def joined(program: Program) -> float:
    """As the error of a batch of its own says, by a rank that has loaded a part."""
    rows = BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    whole = {}
    for name, x in batch_of(0).items():
        x = x[mine].contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        whole[name] = torch.cat(parts)
    return made(program)(**whole).item()


@pytest.mark.slow
def test_parts_that_ranks_have_loaded_are_joined() -> None:
    torch.manual_seed(0)
    want = build(CONFIG, BATCH)[0](**batch_of(0))[1].item()
    for loss in run_ranks(joined, 2, small_program("dp=2", 1, prove=True)):
        assert loss == pytest.approx(want, rel=1e-5)


KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_digest_is_of_values_in_their_order(dtype: torch.dtype) -> None:
    x = (2 * torch.randn(3, 50)).round().to(dtype)
    x[0, 0], x[0, 1] = 0, 1
    swapped = x.clone()
    swapped[0, 0], swapped[0, 1] = 1, 0
    assert digest(x) == digest(x.clone()) == digest(x.t().contiguous().t())
    assert len({digest(x), digest(swapped), digest(x.roll(1)), digest(x.flip(1))}) == 4
    # The same wherever it begins in its memory.
    assert digest(torch.cat([x, x])[3:]) == digest(x)
    assert digest(torch.cat([x.flatten()[:1], x.flatten()])[1:]) == digest(x)
