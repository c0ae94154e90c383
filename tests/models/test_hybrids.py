"""Hybrids: layers of several kinds in a pattern that a stage begins and ends within,
and which read more than what the layer before gives.

What a rank runs of these is as long however many there are, is proved with a few of
them, and computes what the model does.
"""

from __future__ import annotations

import pytest
import torch
from cases import Case
from draw_carried import HYPER, Carrying
from draw_carried import Drawn as DrawnCarried
from draw_layers import EMBEDDED, MIXERS, READS, ROUTERS, VOCAB, Drawn, Reading
from proofs import prove, run_full_size

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.program import Program
from autopar.passes.proof_record import SMALL
from autopar.proof import prove_program


def lines(program: Program) -> list[int]:
    return [len(text.splitlines()) for text in program.modules.values()]


@pytest.mark.matrix(quick=0, daily=6)
@pytest.mark.parametrize("seed", range(40))
def test_a_hybrid_is_proved_with_a_few_of_its_layers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LITTLE", "MUCH"):  # none is run as it is
        monkeypatch.setattr(prove_program, limit, 0)
    case, program = Drawn.of(seed).compiled()
    proof = prove(case.model, case.batch, program)
    few, every = proof.layers
    assert proof.size == SMALL and few < every


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize("seed", range(12))
def test_the_text_of_a_hybrid_is_as_long_however_many_layers_it_has(seed: int) -> None:
    drawn = Drawn.of(seed)
    (_, low), (_, high) = drawn.compiled(), drawn.compiled(periods=2)
    assert max(lines(high)) <= max(lines(low))


@pytest.mark.matrix(quick=0, daily=8)
@pytest.mark.parametrize("seed", range(100))
def test_layers_read_whatever_was_made_before(seed: int) -> None:
    kinds = [*MIXERS, "attention", "attention"]
    case, program = Drawn.of(seed, kinds, (4, 7), READS).compiled()
    prove(case.model, case.batch, program)
    run_full_size(case.model, case.batch, program)


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize("seed", range(100))
def test_layers_hand_over_more_than_one_tensor(seed: int) -> None:
    case, program = DrawnCarried.of(seed).compiled()
    prove(case.model, case.batch, program)
    run_full_size(case.model, case.batch, program)


@pytest.mark.slow
def test_streams_of_a_residual_are_not_split() -> None:
    """Hyper-connections (arXiv:2409.19606) mix them by matrices that both sum and make
    them: what tp splits is inside of a layer."""
    model = Carrying(4, [HYPER], far=2, stray=())
    case = Case(model, {"ids": torch.randint(VOCAB, (8, 12))})
    case.verify("pp=2,tp=2", 2, cuts=("layers.2",))
    dims = name_dims(normalize(case.trace())).dims
    names = {name: [[d.name for d in dim] for dim in dims[name]] for name in dims}
    assert ["ffn"] not in names["streams"]
    assert names["layers.0.up.base.weight"] == [["ffn"], ["embed"]]


def test_a_model_is_cut_where_layers_add_to_a_loss_and_read_the_embeddings() -> None:
    model = Reading(["plain"] * 6, (ROUTERS, EMBEDDED), far=2)
    case = Case(model, {"ids": torch.randint(VOCAB, (8, 12))})
    case.verify("dp=2,pp=2", 2, cuts=("layers.3",))
