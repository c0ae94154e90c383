"""recompute: less is kept, and the gradients are bitwise the same."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from cases import Case, run_all_ranks
from models import (
    Block,
    Stack,
    gpt2,
    llama,
    next_token_loss,
    plain_gpt,
    randomize,
    token_batch,
)
from torch import Tensor

from autopar.passes.graph import InvalidGraph
from autopar.passes.stage import differentiate

MESHES = ["pp=1", "tp=2", "pp=2,tp=2", "dp=2"]


def gradients(case: Case, mesh: str, policy: str):
    program = case.compile(mesh, 2, recompute=policy)
    loss, grads = run_all_ranks(program, case.model, case.batch, seed=1)
    return program, loss, grads


@pytest.mark.matrix(quick=2, daily=6)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_full_recompute_changes_no_bit(build, mesh: str) -> None:
    case = build().double()
    kept, loss, grads = gradients(case, mesh, "none")
    again, loss_again, grads_again = gradients(case, mesh, "full")
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[n], grads_again[n]) for n in grads)
    for before, after in zip(kept.stages, again.stages, strict=True):
        if any(before.layers):
            assert after.footprint.residuals < before.footprint.residuals


@pytest.mark.slow
def test_dropout_masks_are_drawn_again_alike() -> None:
    case = plain_gpt(dropout=0.1).double()
    case.verify("pp=2,tp=2", 2, recompute="full")
    case.verify("pp=2,tp=2", 2, recompute="selective")


@pytest.mark.usefixtures("unrolled")
def test_selective_recompute_keeps_no_scores() -> None:
    """With dropout in it attention is spelled out, [b, h, s, s] many times."""
    case = plain_gpt(dropout=0.1)
    squares = {
        policy: count_square(gradients(case, "pp=1", policy)[0])
        for policy in ("none", "selective")
    }
    assert squares["none"] > 0
    assert squares["selective"] == 0


def test_selective_recompute_gathers_again_and_changes_no_bit() -> None:
    """Each rank keeps its own rows of what products read whole: half of them."""
    case = plain_gpt(layers=4).double()
    kept, loss, grads = gradients(case, "tp=2", "none")
    again, loss_again, grads_again = gradients(case, "tp=2", "selective")
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[n], grads_again[n]) for n in grads)
    (before,), (after,) = kept.stages, again.stages
    hidden = next(iter(kept.parameters.values())).shape[-1]
    batch, seq = case.batch["ids"].shape
    whole = 8 * (batch // 2) * seq * hidden  # one of two microbatches
    less = before.footprint.residuals - after.footprint.residuals
    assert less == 4 * 2 * whole / 2  # of each layer what qkv and the mlp read


def test_selective_recompute_gathers_no_weight_once_more() -> None:
    """With ZeRO-3 these come by block anyway, forward and backward."""
    case = plain_gpt(layers=4)
    calls = {}
    for policy in ("none", "selective"):
        program = case.compile("dp=2,tp=2", 2, recompute=policy, zero=3)
        (stage,) = program.stages
        calls[policy] = {
            (name, beside, e.kind, e.axes): e.calls
            for name, part in stage.account.microbatch.items()
            for beside in (False, True)
            for e in (part.beside if beside else part.exchanges)
        }
    more = {k for k, n in calls["selective"].items() if n > calls["none"].get(k, 0)}
    assert more == {("backward", False, "all_gather", ("tp",))}


def count_square(program) -> int:
    """Values that forward hands to backward and that have seq twice."""
    (text,) = program.modules.values()
    saved = next(x for x in text.splitlines() if x.strip().startswith("return (loss"))
    names = {n.strip() for n in saved.partition("[")[2].rstrip("]").split(",")}
    made = [x for x in text.splitlines() if "seq, seq]" in x]
    return sum(x.split("=")[0].strip() in names for x in made)


def test_full_recompute_keeps_the_input_of_each_layer() -> None:
    case = plain_gpt(layers=4)
    program, _, _ = gradients(case, "pp=1", "full")
    none, _, _ = gradients(case, "pp=1", "none")
    (full,), (kept,) = program.stages, none.stages
    hidden = next(iter(program.parameters.values())).shape[-1]
    batch, seq = case.batch["ids"].shape
    entering = 4 * (batch // 2) * seq * hidden * 4  # float32, two microbatches
    outside = kept.footprint.residuals - full.footprint.residuals
    assert full.footprint.residuals >= entering
    assert outside > 5 * entering  # Korthikanti 2022: 34 bytes an element against 2


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", ["cp=2", "tp=2,cp=2"])
def test_ranks_choose_alike_what_to_make_again(mesh: str) -> None:
    """One rank's 8 rows are as many as a head is wide; the other has 9."""
    case = plain_gpt(layers=1, seq=17, dropout=0.1).double()
    case.verify(mesh, recompute="selective")


def test_ranks_that_do_not_meet_are_found_when_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them does a collective of its backward twice."""
    finish, made = differentiate.finish, []

    def finish_one(joint, policies):
        made.append(finish(joint, policies))
        nodes = made[-1].backward
        last = next(n for n in reversed(nodes) if n.op == "comm.reduce_scatter")
        again = replace(last, outs=(replace(last.out, name="again"),))
        twice = replace(made[-1], backward=(*nodes, again))
        return twice if len(made) > 1 else made[-1]

    monkeypatch.setattr("autopar.passes.emit_modules.finish", finish_one)
    with pytest.raises(InvalidGraph, match="ranks do not meet over cp in backward"):
        plain_gpt(layers=1, seq=17).compile("cp=2")


class Logits(NamedTuple):
    logits: Tensor


class PostNorm(Block):
    """Its last norm's result goes to the next layer; what the norm keeps does not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", ["pp=1", "pp=2,tp=2"])
def test_a_result_that_crosses_layers_is_not_made_again(mesh: str) -> None:
    model = randomize(Stack(PostNorm, 2))
    case = Case(model, token_batch(), lambda x, b: next_token_loss(Logits(x), b))
    case.double().verify(mesh, 2, recompute="full")
