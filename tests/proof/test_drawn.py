"""Proofs with drawn weights and batches notice what initial values hide."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from cases import Case
from models import VOCAB, plain_gpt

from autopar.passes.program import Program
from autopar.proof.differences import EVALUATED, NORM
from autopar.proof.ranks import VerificationFailed
from autopar.runtime.comm.virtual import RankError
from autopar.verify import verify
from examples.gpt import GPT, Config, build


def as_initialised(mesh: str) -> tuple[Program, GPT, dict[str, torch.Tensor]]:
    """A GPT whose biases are 0 and whose norms' weights are 1, and a program of it."""
    model, batch = build(Config(2, 32, 4, 16, VOCAB), batch=4)
    model = model.double()
    case = Case(model, batch)
    return case.compile(mesh), model, batch


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_program_that_forgets_its_biases_fails(mesh):
    """Biases begin at 0: with the model's own weights it computes the same."""
    program, model, batch = as_initialised(mesh)
    pattern = re.compile(r'p\["[\w.+]+\.bias"\]')
    changed = {
        key: pattern.sub(lambda found: f"({found[0]} * 0.0)", text)
        for key, text in program.modules.items()
    }
    assert changed != program.modules
    wrong = replace(program, modules=changed)
    assert not verify(wrong, model, batch).passed
    assert verify(wrong, model, batch, drawn=False).passed


def test_the_model_and_the_batch_stay_as_they_are():
    program, model, batch = as_initialised("tp=2")
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    given = {name: x.clone() for name, x in batch.items()}
    proof = verify(program, model, batch).check()
    assert proof.drawn == ("weights", "batch")
    assert proof.loss != verify(program, model, batch, drawn=False).check().loss
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0], name
        assert torch.equal(p, before[name][1]), name
    assert all(torch.equal(batch[name], x) for name, x in given.items())


class Picky(torch.nn.Module):
    """Refuses batches whose samples do not begin with 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            assert bool((ids[:, 0] == 1).all()), "samples begin with 1"
        return self.tokens(ids).exp().sum()


def test_what_the_model_cannot_take_is_taken_as_given():
    batch = {"ids": torch.ones(4, 5, dtype=torch.int64)}
    case = Case(Picky().double(), batch)
    assert verify(case.compile("dp=2"), *case).check().drawn == ("weights",)
    with pytest.raises(AssertionError, match="samples begin with 1"):
        case._replace(batch={"ids": torch.zeros(4, 5, dtype=torch.int64)}).verify(
            "dp=2"
        )


@pytest.mark.slow
def test_what_a_step_leaves_behind_must_not_show_in_the_next():
    """Here the residuals of the first, which is right as long as it is alone."""
    program, model, batch = as_initialised("tp=2")
    pattern = re.compile(r"(    return \(.*\), \[\w+, )(\w+),")
    stale = {
        key: pattern.sub(r'\1k.setdefault("old", \2),', text)
        for key, text in program.modules.items()
    }
    assert stale != program.modules
    wrong = replace(program, modules=stale)
    assert verify(wrong, model, batch, drawn=False).passed
    assert not verify(wrong, model, batch).passed


def test_the_norm_that_clips_is_compared():
    program, model, batch = as_initialised("tp=2")
    name = "blocks.0.mlp.up.weight"
    spec = program.parameters[name]
    assert spec.split_axes == ("tp",)
    proof = verify(program, model, batch).check()
    assert proof.errors[NORM] < 1e-10
    # Whole on both ranks: each has half of its gradient, and takes it for all of it.
    whole = tuple(tuple(() for _ in factors) for factors in spec.slots)
    parameters = {**program.tensors, name: replace(spec, slots=whole)}
    with pytest.raises((RankError, VerificationFailed)):
        verify(replace(program, tensors=parameters), model, batch)


@pytest.mark.slow
def test_a_loss_without_dropout_is_compared():
    case = plain_gpt(layers=1, dropout=0.2).double()
    proof = verify(case.compile("tp=2"), *case).check()
    assert proof.errors[EVALUATED] < 1e-10


def test_a_step_that_writes_into_its_batch_is_noticed():
    program, model, batch = as_initialised("tp=2")
    texts = {
        key: text.replace('b["ids"],', 'b["ids"].mul_(1),')
        for key, text in program.modules.items()
    }
    assert texts != program.modules
    with pytest.raises(VerificationFailed, match="writes into the batch field 'ids'"):
        verify(replace(program, modules=texts), model, batch)


class Corrected(torch.nn.Module):
    """Adds a buffer that begins as 0, as the biases of routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 8)
        self.register_buffer("correction", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.tokens(ids) + self.correction + self.table).square().sum()


def test_a_program_that_forgets_a_buffer_fails():
    batch = {"ids": torch.randint(7, (4, 5))}
    case = Case(Corrected(), batch).double()
    program = case.compile("dp=2")
    verify(program, *case).check()
    texts = {
        key: text.replace('p["correction"]', '(p["correction"] * 0.0)')
        for key, text in program.modules.items()
    }
    assert texts != program.modules
    wrong = replace(program, modules=texts)
    assert not verify(wrong, *case).passed
    assert verify(wrong, *case, drawn=False).passed
    assert not bool(case.model.correction.any())


class Thresholds(torch.nn.Module):
    """Half of the draws leave one of its weights without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(7, 8)
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids).square().sum()
        return x + torch.relu(self.gate) * self.tokens.weight.sum()


def test_values_are_drawn_until_all_has_a_gradient():
    batch = {"ids": torch.randint(7, (4, 5))}
    case = Case(Thresholds(), batch).double()
    program = case.compile("dp=2")
    for seed in range(6):
        assert verify(program, *case, seed=seed).check().unmoved == ()
    case.model.gate.data.fill_(-3.0)  # of one sign: it stays below the threshold
    assert verify(program, *case).check().unmoved == ("gate",)
