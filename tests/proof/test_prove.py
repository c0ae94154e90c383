"""Plans of any size are proved by small ones: what is kept, what carries over."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import Case
from hf import SEQ, VOCAB, tiny
from plans import model_file, small_program
from proofs import BIG, changed, compiled, prove, run_full_size
from torch import Tensor, nn

import autopar
import autopar.proof.prove_program as prover
from autopar.cli import main
from autopar.models.load import example_batch, load_model
from autopar.passes.emit.emit import emit
from autopar.passes.errors import AutoparError
from autopar.passes.graph import Node
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.proof.choose_sizes import NotShrunk
from autopar.passes.proof_record import SMALL, WHOLE
from autopar.passes.stage.local_stage import LocalStage
from autopar.plans.store import load_plan, save_plan
from autopar.proof.prove_program import NotProved, prove_program
from autopar.proof.ranks import VerificationFailed
from autopar.proof.small import make_small
from examples.gpt import Config, build


@pytest.fixture
def only_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of any size are proved small or not at all."""
    monkeypatch.setattr(prover, "LITTLE", 0)
    monkeypatch.setattr(prover, "MUCH", 0)


# --- the whole way -------------------------------------------------------------------


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.usefixtures("only_small")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,pp=2,tp=2", {}),
        ("dp=4", {"zero": 3}),
        ("pp=6", {"schedule": "zb-h1"}),
        ("tp=4", {"recompute": "full"}),
        ("dp=2,cp=4", {"zero": 2}),
        ("pp=2,dp=3", {"zero": 1, "precision": "bf16"}),
        ("pp=3", {"schedule": "interleaved", "stages_per_rank": 2}),
    ],
    ids=str,
)
def test_a_plan_is_proved_small(mesh: str, options: dict) -> None:
    parts = {"dp=4": 1, "pp=3": 3}.get(mesh, 2)
    proof = prove(*compiled(mesh, parts, **options))
    assert proof.size == SMALL and proof.passed
    assert proof.error < 1e-13 and proof.compared > 40
    assert proof.ranks <= Mesh.parse(mesh).size


@pytest.mark.slow
def test_what_is_little_is_run_as_it_is() -> None:
    model, batch = build(Config(2, 16, 2, 8, 19), batch=4)
    plan = Plan(Mesh.parse("tp=2"), 2)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN, prove=True)
    assert program.proof is not None and program.proof.size == WHOLE
    assert program.proof.error < 1e-13


class ManyRows(nn.Module):
    """Parameters of which a step needs few."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(700_000, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


@pytest.mark.parametrize("shrunk", [True, False])
def test_many_parameters_are_not_run_as_they_are(
    shrunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if their model cannot be made small either, as it takes much memory."""
    case = Case(ManyRows(), {"ids": torch.randint(700_000, (4, 8))})
    program = case.compile("dp=2")
    if shrunk:
        proof = prove_program(program, *case[:2], case.trace())
        assert proof.size == SMALL and proof.passed
        return

    def refuse(*_: object) -> None:
        raise NotShrunk("no small sizes")

    monkeypatch.setattr(prover, "make_small", refuse)
    monkeypatch.setattr(prover, "HELD", 2e7)
    with pytest.raises(NotProved, match="could not be proved: no small sizes"):
        prove_program(program, *case[:2], case.trace())


class Pairs(nn.Module):
    """Elements of pairs are read and written apart; a token in the middle pads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 64, padding_idx=123)
        self.up, self.down = nn.Linear(64, 2 * 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 300)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        both = self.up(x)
        x = x + self.down(both[..., ::2] * both[..., 1::2].sigmoid())
        turned = torch.empty_like(x)
        turned[..., ::2] = -x[..., 1::2]
        turned[..., 1::2] = x[..., ::2]
        return nn.functional.cross_entropy(self.out(turned + x).mT, ids)


@pytest.mark.usefixtures("only_small")
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_pairs_and_a_token_that_pads_are_proved_small(mesh: str) -> None:
    case = Case(Pairs(), {"ids": torch.randint(300, (8, 40))})
    proof = prove_program(case.compile(mesh), *case[:2], case.trace())
    assert proof.size == SMALL and proof.passed


class Normed(nn.Module):
    """torch takes an eps for the norm that follows from the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).pow(3).sum()


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_norm_without_an_eps_is_proved_in_another_dtype(precision: str) -> None:
    case = Case(Normed(), {"x": torch.randn(4, 8)})
    program = case.compile("dp=2", precision=precision)
    prove_program(program, *case[:2], case.trace(program.plan.lowering))


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_wide_deep_models_on_many_ranks_take_little() -> None:
    spec = (
        "hf:llama?num_hidden_layers=8,hidden_size=8192,intermediate_size=28672,"
        "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256"
    )
    loaded = load_model(spec, device="meta")
    assert loaded.vocab is not None
    batch = example_batch(loaded.vocab, 64, 2048)
    plan = Plan(Mesh.parse("dp=16,pp=2,tp=8"), 4, zero=1)
    program = autopar.compile_offline(loaded.model, batch, plan, cluster=PLAIN)
    proof = prove(loaded.model, batch, program)
    assert proof.size == SMALL and proof.passed and proof.ranks <= 12


# --- what is wrong is noticed ----------------------------------------------------


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("llama", "dp=2", {"zero": 3}),
        ("llama", "dp=2,tp=2", {"zero": 3}),  # what is scattered behind is carried
        ("gpt_neox", "dp=2", {"zero": 3}),
        ("falcon", "tp=2", {}),
        ("bloom", "tp=2", {}),
    ],
)
def test_deep_models_of_others_are_proved_small(
    family: str, mesh: str, options: dict
) -> None:
    """Parallel residuals, pieces of fused weights, positions that count from 1."""
    model = tiny(family, num_hidden_layers=8, num_attention_heads=8, hidden_size=64)
    ids = torch.randint(1, VOCAB, (8, SEQ))
    batch = {"input_ids": ids, "labels": ids}
    plan = Plan(Mesh.parse(mesh), 2, **options)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN)
    proof = prove(model, batch, program)
    assert proof.size == SMALL and proof.passed


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_a_wrong_pass_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong at every size is found at a small one."""
    model, batch = build(BIG, batch=12)
    monkeypatch.setattr(
        "autopar.passes.emit_modules.emit",
        lambda *arguments: emit(*arguments).replace("1e-05", "1e-02"),
    )
    plan = Plan(Mesh.parse("dp=2"), 2)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN)
    with pytest.raises(VerificationFailed, match="more than rounding explains"):
        prove(model, batch, program)


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_what_stays_too_large_to_be_run_is_refused(monkeypatch) -> None:
    """It is told which sizes stay, rather than that memory ran out."""
    model, batch = build(BIG, batch=8)
    plan = Plan(Mesh.parse("dp=2"), 2)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN, prove=False)
    monkeypatch.setattr("autopar.proof.small.VALUES", 1000)
    with pytest.raises(NotShrunk, match=r"is not small .*numbers made"):
        make_small(program, model, batch)


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_an_extent_may_be_larger_in_the_small_program() -> None:
    """8 is the head's extent and the batch's, of which three microbatches need 9."""
    model, batch = build(BIG, batch=8)
    plan = Plan(Mesh.parse("pp=2"), 4)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN, prove=False)
    sizes = make_small(program, model, batch).sizes
    assert {m for extent, m in sizes.items() if extent.size == 8} == {9}
    assert prove(model, batch, program).size == SMALL


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_what_cannot_be_proved_says_so() -> None:
    model, batch, program = compiled("tp=2")
    [(key, text)] = program.modules.items()
    wrong = replace(program, modules={key: changed(text, "'tp', 1)", "'tp', 0)")})
    with pytest.raises(NotProved, match="stage 0 is not what it is with small sizes"):
        prove(model, batch, wrong)


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_a_dim_found_by_its_extent_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 positions a rank has 32, as many as a head is wide: at full size alone
    shapes fit both ways."""

    def by_extent(node: Node) -> Node:
        if node.op != "aten.transpose.int":
            return node
        x, a, b = node.args
        last = len(x.shape) - 1 - x.shape[::-1].index(x.shape[b])
        return replace(node, args=(x, a, last))

    def wrong(local: LocalStage, stages: int) -> str:
        forward = tuple(map(by_extent, local.forward))
        return emit(replace(local, forward=forward), stages)

    monkeypatch.setattr("autopar.passes.emit_modules.emit", wrong)
    config = Config(layers=1, width=192, heads=6, context=64, vocab=64)
    model, batch, program = compiled("cp=2", 1, config)
    assert run_full_size(model, batch, program) == ()
    with pytest.raises(NotProved, match=r"is not what it is with small sizes.*transpo"):
        prove(model, batch, program)


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_noticed() -> None:
    """Uneven shares: ranks run different texts, which must make the same calls."""
    model, batch, program = compiled("tp=4")
    assert len(program.modules) > 1
    assert run_full_size(model, batch, program) == ()
    key, text = next(iter(program.modules.items()))
    wrong = {
        **program.modules,
        key: changed(text, "c.all_gather(", "c.reduce_scatter("),
    }
    with pytest.raises(VerificationFailed):
        run_full_size(model, batch, replace(program, modules=wrong))


@pytest.mark.slow
def test_masks_and_declarations_that_fit_no_model_are_noticed() -> None:
    config = Config(3, 16, 2, 8, 19, 0.2)
    model, batch, program = compiled("", 1, config, recompute="full")
    assert run_full_size(model, batch, program) == ()
    [(key, text)] = program.modules.items()
    for old, new, says in (
        ("3 * i + 2", "3 * i + 1", "draws random"),  # of what is computed again
        ("3 * i + 3", "4 * i + 3", "draws random"),
        ("c.dropout_counters(0, ", "c.dropout_counters(1, ", "draws"),
        ('"norm.weight": ((16,)', '"norm.weight": ((17,)', "was compiled for"),
    ):
        modules = {key: changed(text, old, new)}
        with pytest.raises(AutoparError, match=says):
            run_full_size(model, batch, replace(program, modules=modules))


class Aside(nn.Module):
    """Of its last layer a dropout goes into what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCAB, 32), nn.Dropout(0.2)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = y = self.embed(ids)
        for layer in self.layers:
            x, y = x + self.drop(layer(y)), y + self.drop(layer(x))
        return (self.drop(x) @ self.embed.weight.T).logsumexp(-1).mean()


@pytest.mark.usefixtures("only_small")
def test_masks_that_nobody_reads_are_left_out() -> None:
    case = Case(Aside(), {"ids": torch.randint(VOCAB, (4, SEQ))})
    program = case.compile("pp=2", 2)
    assert "c.dropout_counters(6, " in "".join(program.modules.values()), "not 5"
    assert prove_program(program, *case[:2], case.trace()).size == SMALL


@pytest.mark.slow
def test_a_rank_that_runs_the_module_of_another_is_noticed() -> None:
    model, batch, program = compiled("dp=2,tp=4")
    (stage,) = program.stages
    first, last = "dp=1,tp=0", "dp=1,tp=3"
    one, other = stage.modules[first], stage.modules[last]
    assert one != other, "shares are uneven"
    modules = {**stage.modules, first: other, last: one}
    wrong = replace(program, stages=(replace(stage, modules=modules),))
    with pytest.raises(VerificationFailed, match="shares of other shapes"):
        run_full_size(model, batch, wrong)


# --- where users meet it -------------------------------------------------------------


@pytest.mark.slow
def test_compiling_proves_and_running_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, plan = model_file(tmp_path), str(tmp_path / "plan")
    assert main(["compile", spec, "--mesh", "tp=2", "-o", plan]) == 0
    assert "proved on all 2 ranks" in capsys.readouterr().out
    proof = load_plan(plan).program.proof
    assert proof is not None and proof.passed
    assert main(["inspect", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["size"] == WHOLE
    alone = str(tmp_path / "alone")
    save_plan(small_program("", 2), alone, spec)
    assert main(["run", alone, "--steps", "1"]) == 2
    assert "--unproved" in capsys.readouterr().err
    assert main(["run", alone, "--steps", "1", "--unproved"]) == 0


@pytest.mark.slow
def test_a_step_proves_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = build(Config(1, 16, 2, 8, 19), batch=4)
    with caplog.at_level(logging.WARNING, "autopar"):
        step = autopar.compile(model, "", example_inputs=batch)
        assert step.program.proof is not None and not caplog.messages
        unproved = autopar.compile(model, "", example_inputs=batch, prove=False)
    assert unproved.program.proof is None
    assert "nobody proved" in caplog.text
    # A program that was compiled elsewhere, without a proof, is proved here.
    given = autopar.compile(model, "", program=unproved.program, example_inputs=batch)
    assert given.program.proof is not None
