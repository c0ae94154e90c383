"""Proofs notice programs that are broken on purpose: see `mutants`."""

from __future__ import annotations

import pytest
from mutants import EACH, HOLE, PLANS, Mutant, fate, mutants, planned, prepared
from mutate_programs import OF_PROGRAMS
from mutate_text import KINDS, with_line

SAMPLE = (  # of the plans, and every how many of their mutants
    (PLANS[0], 5),
    (planned("gpt", "pp=2,dp=2", microbatches=2, zero=3), 5),
    (planned("deep", "pp=2", microbatches=4, schedule="zb-v", stages_per_rank=2), 5),
    (planned("dropout", "dp=2,tp=2", microbatches=2), 5),
    (planned("long", "cp=2", context_parallel="ring"), 5),
    (planned("experts", "ep=2", microbatches=2), 5),
)


def holes(found: list[Mutant]) -> list[str]:
    assert found
    return [str(mutant) for mutant in found if fate(mutant) == HOLE]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "every"), SAMPLE, ids=str)
def test_a_proof_notices_what_computes_anything_else(plan, every):
    assert holes(list(mutants(plan, each=1))[::every]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_proof_notices_all_that_computes_anything_else(plan):
    assert holes(list(mutants(plan, EACH))) == []


@pytest.mark.nightly
def test_there_are_mutants_of_every_kind():
    missing = {*KINDS, *OF_PROGRAMS}
    for plan in PLANS:
        missing -= {mutant.kind for mutant in mutants(plan, each=1)}
    assert missing == set()


def test_a_mutant_differs_in_one_statement():
    plan = PLANS[0]
    program = prepared(plan)[1]
    text = next(iter(program.modules.values()))
    old = "saved.clear()"
    assert with_line(text, old, "pass").count("    pass\n") == 1
    assert len(with_line(text, old, None).split("\n")) == len(text.split("\n")) - 1
    for mutant in mutants(plan, each=1):
        assert mutant.program != program, str(mutant)
