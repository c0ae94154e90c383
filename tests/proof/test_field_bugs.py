"""Faults that frameworks of this field have had: a proof notices each of them.

Each is made of a program that is right, by changing its text or what it says of a
parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
from mutant_plans import planned, prepared

from autopar.passes.program import Program
from autopar.proof.differences import NORM
from autopar.proof.expected import expect
from autopar.proof.ranks import VerificationFailed
from autopar.proof.run_beside import prove
from autopar.proof.verification import Verification
from autopar.runtime.parameters import gradient_norm

pytestmark = pytest.mark.slow


def proved(plan, program: Program, drawn: bool = True) -> Verification:
    case, _, expected = prepared(plan)
    if not drawn:
        expected = expect(program, *case, drawn=False)
    return prove(program, dict(case.model.named_buffers()), expected)


def assert_noticed(plan, program: Program, of: str | None = None) -> None:
    """The program fails, and the right one passes. of: what the worst error names."""
    proved(plan, prepared(plan)[1]).check()
    with pytest.raises(VerificationFailed, match=of):
        proved(plan, program).check()


def with_text(plan, pattern: str, new: str | Callable[[re.Match], str]) -> Program:
    """Wherever a pattern is, in the texts of all stages and ranks."""
    program = prepared(plan)[1]
    texts = {k: re.sub(pattern, new, t) for k, t in program.modules.items()}
    assert texts != program.modules
    return replace(program, modules=texts)


@dataclass(frozen=True)
class NeverSummed(Program):
    """Each stage keeps its own gradient of a tied weight."""

    def gradient_ranks(self, name: str, rank: int) -> tuple[int, ...]:
        if len(self.parameters[name].stages) > 1:
            return (rank,)
        return super().gradient_ranks(name, rank)


TIED = planned("gpt", "pp=2", microbatches=2)


def test_a_tied_embedding_that_stages_never_sum():
    program = prepared(TIED)[1]
    own = {f.name: getattr(program, f.name) for f in fields(program)}
    assert_noticed(TIED, NeverSummed(**own), "'tokens.weight'")


def test_a_tied_embedding_that_stages_sum_twice():
    line = r'(?m)^( *)(kernels\.\w+_\(g\["tokens.weight"\].*)$'
    twice = with_text(TIED, line, r"\1\2\n\1\2")
    assert_noticed(TIED, twice, "'tokens.weight'")


@pytest.mark.parametrize("value", ["total", "d_loss"])
def test_a_loss_of_a_pipeline_that_is_scaled_by_its_microbatches(value):
    wrong = with_text(TIED, rf"= {value}\.div_\(", f"= (2 * {value}).div_(")
    assert_noticed(TIED, wrong)


@pytest.mark.parametrize(
    "plan",
    [
        planned("gpt", "tp=2"),
        planned("gpt", "pp=2,dp=2", microbatches=2, zero=1),
        planned("gpt", "dp=2,tp=2", microbatches=2),
    ],
    ids=str,
)
def test_a_norm_that_counts_replicas(plan, monkeypatch):
    right = proved(plan, prepared(plan)[1]).check()
    assert right.errors[NORM] < 1e-12
    monkeypatch.setattr(gradient_norm, "is_owner", lambda *at: True)
    wrong = proved(plan, prepared(plan)[1])
    assert not wrong.passed
    assert wrong.worst[0] == NORM


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_loss_that_is_averaged_by_ranks_and_not_by_tokens(method):
    """Where no label is left out, all ranks have as many, and it is right."""
    plan = planned("long", "cp=2", context_parallel=method)
    program = prepared(plan)[1]
    (text,) = program.modules.values()
    kept = re.search(r'(b\["\w+"\]), b\["tokens"\]\)', text)
    assert kept
    read = r'b\["tokens"\](?! =)'
    wrong = with_text(plan, read, f"({kept[1]}.sum() * 2)")
    assert_noticed(plan, wrong)


def test_a_balance_loss_that_is_scaled_by_the_ranks_of_experts():
    plan = planned("experts", "ep=2", microbatches=2)
    assert_noticed(plan, with_text(plan, r"\.mul_\(0\.5\)", ".mul_(1.0)"))
    forward_only = with_text(plan, r"(= add_\d+)\.mul_\(0\.5\)", r"\1.mul_(1.0)")
    assert_noticed(plan, forward_only, "'loss'")


@pytest.mark.parametrize("norm", ["blocks.0.norm1", "blocks.1.norm2", "norm"])
@pytest.mark.parametrize("of", ["weight", "bias"])
def test_a_norm_that_sequence_parallel_ranks_do_not_sum(norm, of):
    plan = planned("gpt", "tp=2")
    program, name = prepared(plan)[1], f"{norm}.{of}"
    spec = program.parameters[name]
    assert spec.pending == ("tp",)
    own = {**program.parameters, name: replace(spec, pending=())}
    wrong = replace(program, tensors=own)
    assert_noticed(plan, wrong, f"another gradient of '{name}'")


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_dropout_that_is_equal_on_all_ranks(axis):
    plan = planned("dropout", "dp=2,tp=2", microbatches=2)
    axes = r"\((?:'time', )?'dp',?\)" if axis == "dp" else r"\('tp',\)"

    def first(found: re.Match) -> str:
        axes = "('time',)" if "time" in found[2] else "()"
        return f"(({int(found[1]) // 2}, {axes}),)"

    def alike(line: re.Match) -> str:
        return re.sub(rf"\(\((\d+), ({axes})\),\)", first, line[0])

    assert_noticed(plan, with_text(plan, r"c\.dropout_counters\(.*", alike))
