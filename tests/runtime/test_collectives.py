"""How often ranks communicate, and where: no collective but those that must be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from cases import Case, on_rank
from models import gpt2, plain_gpt

from autopar.passes.program import Program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual

CALL = re.compile(r"= c\.(all_reduce|all_gather|reduce_scatter|all_to_all)\(")


pytestmark = pytest.mark.usefixtures("unrolled")


def collectives(program: Program) -> list[str]:
    """`forward  all_gather  blocks.+0.mlp  [batch, seq, embed]`, in order.

    Of the first rank of each stage: what its module calls, and the result's dims.
    """
    found = []
    for stage in program.stages:
        text = program.modules[next(iter(stage.modules.values()))]
        for part, body in re.findall(r"def (\w+)\((.*?)(?=\ndef|\Z)", text, re.DOTALL):
            for line in body.splitlines():
                if call := CALL.search(line):
                    dims, *rest = line.partition("  # ")[2].split("  ")
                    module = rest[1] if len(rest) == 2 else "(loss)"
                    dims = re.sub(r"\bd\d+", "d", dims)  # numbers of no meaning
                    found.append(f"{part:8}  {call[1]:14}  {module:29}  {dims}")
    return found


def count(program: Program) -> Counter[tuple[str, str]]:
    """(part, kind) -> calls a microbatch."""
    return Counter((row.split()[0], row.split()[1]) for row in collectives(program))


def traffic(case: Case, program: Program) -> list[Counter[str]]:
    """What each rank calls in a step: kind -> how often, but for what it does alone."""

    def body(comm: Comm) -> Counter[str]:
        on_rank(program, comm, case.model).step(case.batch)
        calls = Counter({kind: t.calls for (kind, _), t in comm.log.items()})
        calls["reduce_ranks_"] -= 1  # the loss at the end of the step
        return +calls

    return run_virtual(program.mesh, program.plan.microbatches, body)


def per_layer(make: Callable[..., Case], **options: bool) -> dict[tuple[str, str], int]:
    """What one more layer adds."""
    few, many = (make(layers=n).compile("tp=2", **options) for n in (2, 3))
    return dict(count(many) - count(few))


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("make", [plain_gpt, gpt2])
def test_a_layer_gathers_twice_and_scatters_twice_each_way(make):
    """Korthikanti 2022, figure 5: g and its conjugate around attention and MLP."""
    assert per_layer(make) == {
        ("forward", "all_gather"): 2,
        ("forward", "reduce_scatter"): 2,
        ("backward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 2,
    }


@pytest.mark.parametrize("make", [plain_gpt, gpt2])
def test_without_sequence_parallel_a_layer_reduces_twice_each_way(make):
    """Shoeybi 2019, figure 4."""
    assert per_layer(make, sequence_parallel=False) == {
        ("forward", "all_reduce"): 2,
        ("backward", "all_reduce"): 2,
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_collectives_of_a_gpt2_of_one_layer(golden, sequence_parallel):
    program = gpt2(layers=1).compile("tp=2", sequence_parallel=sequence_parallel)
    name = "gpt2-tp-sequence-parallel" if sequence_parallel else "gpt2-tp"
    golden(name, "\n".join(collectives(program)))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_data_parallel_reduces_one_bucket_a_step(microbatches):
    case = gpt2(layers=2, padded=True)
    program = case.compile("dp=2", microbatches)
    assert count(program) == {("prologue", "all_reduce"): 1}  # of tokens
    assert traffic(case, program) == [{"reduce_ranks_": 1, "all_reduce": 1}] * 2


@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_pipeline_sends_one_tensor_each_way_for_each_microbatch(microbatches):
    case = plain_gpt(tied=False)
    found = traffic(case, case.compile("pp=2", microbatches))
    assert found == [{"send": microbatches, "recv": microbatches}] * 2


def test_a_tied_weight_is_exchanged_once_a_step():
    """Between the first and the last stage only, whatever lies between."""
    case = plain_gpt()
    program = case.compile("pp=4", 4)
    reductions = [calls["reduce_ranks_"] for calls in traffic(case, program)]
    assert reductions == [1, 0, 0, 1]


def test_tokens_are_counted_once_a_step():
    """The count that a mean is divided by is of the batch, of which a rank has part."""
    case = plain_gpt(layers=1, ignored="uneven")
    program = case.compile("dp=2,pp=2", 2)
    (row,) = collectives(program)  # of the last stage alone
    assert row.startswith("prologue  all_reduce") and row.endswith(" []")
    assert collectives(case.compile("pp=2", 2)) == []
    assert program.loss_pending == ("time", "dp")


def test_a_vocab_parallel_loss_never_gathers_logits():
    """One maximum, one sum of exponentials and one pick of [tokens] each."""
    rows = collectives(plain_gpt(layers=1).compile("tp=2"))
    assert not any("vocab" in row for row in rows)
    assert sum(row.startswith("forward") and "(loss)" in row for row in rows) == 3
