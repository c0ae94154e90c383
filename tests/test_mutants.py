"""Proofs notice programs that are broken on purpose: see `mutants`."""

from __future__ import annotations

import pytest
from mutant_plans import PLANS, planned, prepared
from mutants import ALIVE, KINDS, WAYS, follow, main, mutants
from mutate_programs import OF_PROGRAMS
from statements import with_line

V_SHAPED = planned("deep", "pp=2", microbatches=4, schedule="zb-v", stages_per_rank=2)
SAMPLE = (  # of the plans, and every how many of their mutants
    ("verify", planned("dropout", "dp=2,tp=2", microbatches=2), 7),
    ("verify", planned("experts", "ep=2", microbatches=2), 7),
    ("small", PLANS[0], 5),
    ("small", planned("gpt", "pp=2,dp=2", microbatches=2, zero=3), 5),
    ("small", V_SHAPED, 5),
    ("small", planned("long", "cp=2", context_parallel="ring"), 4),
    ("transfer", planned("long", "cp=2,tp=2", microbatches=2), 2),
)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "plan", "every"), SAMPLE, ids=str)
def test_a_proof_notices_what_computes_anything_else(way, plan, every):
    found = list(follow(plan, way, 1, every))
    assert found
    assert [str(mutant) for mutant, end in found if end == ALIVE] == []


@pytest.mark.nightly
def test_a_proof_notices_all_that_computes_anything_else(capsys):
    with capsys.disabled():
        assert main(list(WAYS), 0, len(PLANS) - 1) == 0


@pytest.mark.nightly
def test_there_are_mutants_of_every_kind():
    missing = {*KINDS, *OF_PROGRAMS}
    for plan in PLANS:
        missing -= {mutant.kind for mutant in mutants(plan, prepared(plan)[1], each=1)}
    assert missing == set()


def test_a_mutant_differs_in_one_statement():
    plan = PLANS[0]
    program = prepared(plan)[1]
    text = next(iter(program.modules.values()))
    old = ("backward", "residuals.clear()")
    assert with_line(text, *old, "pass").count("    pass\n") == 1
    assert len(with_line(text, *old, None).split("\n")) == len(text.split("\n")) - 1
    for mutant in mutants(plan, program, each=1):
        assert mutant.program != program, str(mutant)
