"""Gradients leave in the last backward, and parameters come in the first forward."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from cases import Case, on_rank
from models import Stack, plain_gpt, token_batch
from torch import Tensor

from autopar.passes.program import Program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.comm.virtual_world import Mismatch
from autopar.runtime.execute.gradient_buckets import ALIGNED
from autopar.runtime.execute.running_stage import Batch

LEAVES = ("start_reduce_ranks_", "start_scatter")
Seen = tuple[list[str], dict[str, Tensor]]


def step(case: Case, program: Program, overlaps: bool = True) -> list[Seen]:
    """Each rank's calls from its last backward to the reduction of the loss, and the
    gradients."""

    def body(comm: Comm) -> Seen:
        seen: list[str] = []

        def call(name: str, made: object, *args: object) -> object:
            if comm.state.on_ready:
                seen.append(name)
            return made(*args)  # type: ignore[operator]

        for name in ("ready", *LEAVES):
            setattr(comm, name, partial(call, name, getattr(comm, name)))
        executor = on_rank(program, comm, case.model)
        executor.overlaps = overlaps
        executor.step(case.batch)
        return seen, executor.gradients.by_name

    return run_virtual(program.mesh, program.plan.microbatches, body)


@pytest.mark.parametrize(
    ("mesh", "zero", "schedule"),
    [("dp=2", 0, "1f1b"), ("dp=2", 1, "1f1b"), ("dp=2,pp=2", 0, "zb-h1")],
)
def test_a_block_leaves_before_the_next_is_ready(mesh, zero, schedule, monkeypatch):
    case = plain_gpt(layers=4, tied=False)
    program = case.compile(mesh, 2, zero=zero, schedule=schedule)
    at_once = step(case, program, overlaps=False)
    monkeypatch.setattr("autopar.runtime.execute.gradient_buckets.MOST", 1)
    leaves = LEAVES[zero]
    for (seen, gradients), (late, expected) in zip(
        step(case, program), at_once, strict=True
    ):
        blocks = seen.count("ready")
        assert blocks == (6 if mesh == "dp=2" else 3), "layers, and ends of the model"
        assert late.index(leaves) >= blocks, "all are ready"
        first, last = seen.index(leaves), len(seen) - 1 - seen[::-1].index("ready")
        assert 0 < first < last, "the first leaves when it is ready, not at the end"
        between = seen[seen.index("ready") : last]
        assert all(
            leaves in seen[i:j]
            for i, j in zip(*(_places(between, at) for at in (0, 1)), strict=False)
        ), "each before the next"
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(g, expected[name]) for name, g in gradients.items())


def _places(seen: list[str], skip: int) -> list[int]:
    return [i for i, name in enumerate(seen) if name == "ready"][skip:]


def test_parameters_come_as_they_are_read():
    """One block is on its way when a step begins; the next, when somebody reads it."""
    case = plain_gpt(layers=4, tied=False)
    program = case.compile("dp=2", 2, zero=1)

    def body(comm: Comm) -> list[int]:
        stage = on_rank(program, comm, case.model).stages[0]
        batch, traffic = Batch(case.batch), comm.log["all_gather", ("dp",)]
        batch.begin(stage.module["prologue"], comm, stage.tensors, stage.constants)
        started = [traffic.calls]
        first = next(key for key in keys if key not in batch)
        assert batch[first].shape
        started.append(traffic.calls)
        with pytest.raises(KeyError):
            batch["what nobody makes"]
        return [*started, traffic.calls]

    text = program.modules[program.module_of(0, 0)]
    keys = re.findall(r'b\["(.+?)"\]', text.partition("def forward")[2])
    assert run_virtual(program.mesh, 2, body) == [[1, 2, 6]] * 2


def test_a_gradient_that_nobody_says_is_ready_is_a_bug():
    """Not one that leaves late without a word."""
    case = plain_gpt(layers=1)
    program = case.compile("dp=2")
    for key, text in program.modules.items():
        kept = [line for line in text.splitlines() if "c.ready([" not in line]
        program.modules[key] = "\n".join(kept)  # type: ignore[index]
    with pytest.raises(Exception, match="all gradients are ready"):
        step(case, program)


def test_what_changes_while_it_is_reduced_is_found():
    def body(comm: Comm) -> None:
        x = torch.ones(3)
        reducing = comm.start_reduce_ranks_(x, (0, 1))
        x += 1
        reducing.wait()

    program = plain_gpt(layers=1).compile("dp=2")
    with pytest.raises(Mismatch, match="changed while it was being reduced"):
        run_virtual(program.mesh, 1, body)


@pytest.mark.parametrize("layers", [2, 8])
def test_a_small_model_reduces_several_times(layers, monkeypatch):
    """Of a few bytes too, if they are worth a message, a part leaves early."""
    case = plain_gpt(layers=layers, tied=False)
    program = case.compile("dp=2")

    def sizes(comm: Comm) -> list[int]:
        executor = on_rank(program, comm, case.model)
        return [bucket.flat.nbytes for bucket in executor.gradients.buckets]

    module = "autopar.runtime.execute.gradient_buckets"
    [one] = run_virtual(program.mesh, 1, sizes)[0]
    monkeypatch.setattr(f"{module}.LEAST", 1)
    several = run_virtual(program.mesh, 1, sizes)[0]
    assert 2 <= len(several) <= 5 and sum(several) == one
    assert all(size >= one // 4 for size in several[:-1])


def test_gradients_begin_alike_on_all_ranks():
    """Where memory begins elsewhere, a product that is added to it may be rounded
    otherwise, and replicas are alike no more. Uneven shares lie before some here."""
    case = Case(Stack(layers=1), token_batch(), lambda out, _: out.logsumexp(-1).mean())
    case.batch.pop("labels")
    program = case.compile("tp=2")

    def starts(comm: Comm) -> set[int]:
        gradients = on_rank(program, comm, case.model).gradients
        return {grad.data_ptr() % ALIGNED for grad in gradients.tensors.values()}

    assert run_virtual(program.mesh, 1, starts) == [{0}, {0}]
