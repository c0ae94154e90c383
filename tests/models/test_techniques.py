"""Each technique on four real processes: the loss, and weights after a step, are those
of the untouched model; so is the loss of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from draws import Draw, Model, draw
from processes import run_ranks
from torch import Tensor

import autopar
from autopar.passes.mesh import Mesh
from autopar.proof.reference import loss_of, reference_step

RANKS, SEED = 4, 5
Result = tuple[float, float, dict[str, Tensor]]  # evaluated, trained, weights after


def trial(
    kind: str, sizes: dict[str, Any], mesh: str, frozen: float = 0.0, **options: Any
) -> Draw:
    model = Model(kind, tuple({"layers": 2, **sizes}.items()), frozen)
    return Draw(SEED, model, mesh, tuple(options.items()))


PLAIN, PADDED = {"dropout": 0.2}, {"padded": True}
SWITCH = {"top_k": 2}
MIXTURE = {"name": "mixtral", "experts": 4, "top_k": 2}
TRIALS = {
    "cp": trial("plain_gpt", PLAIN, "cp=4", microbatches=2),
    "ring": trial("gpt2", PADDED, "cp=2,dp=2", context_parallel="ring", zero=2),
    "ulysses": trial("gpt2", PADDED, "cp=2,tp=2", context_parallel="ulysses"),
    "no-sequence-parallel": trial("llama", PADDED, "tp=4", sequence_parallel=False),
    "recompute-full": trial("plain_gpt", PLAIN, "pp=2,tp=2", recompute="full"),
    "recompute-selective": trial("gpt2", PLAIN, "dp=2,cp=2", recompute="selective"),
    "frozen": trial("llama", {}, "pp=4", frozen=0.4, microbatches=4),
    "frozen-zero": trial("gpt2", {}, "dp=4", frozen=0.4, zero=3),
    "hybrid": trial("plain_gpt", PLAIN, "dp=2,fsdp=2", zero=1, offload=True),
    "tied": trial("gpt2", PLAIN, "pp=2,dp=2", microbatches=2, zero=2),
    "tied-halves": trial("plain_gpt", {}, "tp=2,pp=2", schedule="zb-h1"),
    "experts": trial("switch_gpt", SWITCH, "ep=2,tp=2", microbatches=2),
    "routed": trial("mixture", MIXTURE, "dp=2,ep=2", microbatches=2, zero=3),
    "hint": trial("plain_gpt", {}, "dp=2,tp=2", hints={"*.up.weight": "embed/tp"}),
}
# They say nothing to other ranks that daily ones do not.
NIGHTLY = {"no-sequence-parallel", "recompute-selective", "hint"}
NAMES = [
    pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ())
    for name in TRIALS
]


def on_ranks(trials: Sequence[Draw]) -> list[Result]:
    """Evaluate, and take a step of plain gradient descent, on the mesh of each."""
    found = []
    for one in trials:
        case, options = one.model.build(), dict(one.options)
        step = autopar.compile(
            case.model, one.mesh, loss_fn=case.loss_fn, seed=one.seed, **options
        ).build(**case.batch)
        evaluated = step.evaluate(**case.batch).item()
        update = torch.optim.SGD(step.parameters(), lr=1.0)
        loss = step(**case.batch).item()
        update.step()
        found.append((evaluated, loss, step.state_dict()))
    return found


def on_one_device(one: Draw) -> Result:
    case = one.model.build()
    loss, grads = reference_step(*case, key=one.seed << 32)
    case.model.eval()
    with torch.no_grad():
        evaluated = loss_of(*case).item()
        for name, p in case.model.named_parameters():
            p -= grads.get(name, torch.zeros(()))
    return evaluated, loss.item(), case.model.state_dict()


def check(one: Draw, results: Sequence[Result]) -> None:
    evaluated, loss, weights = on_one_device(one)
    for got_evaluated, got_loss, got_weights in results:
        assert got_evaluated == pytest.approx(evaluated, rel=1e-10), one
        assert got_loss == pytest.approx(loss, rel=1e-10), one
        assert list(got_weights) == list(weights)
        for name, want in weights.items():
            torch.testing.assert_close(got_weights[name], want, rtol=1e-9, atol=1e-10)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Result]]:
    """The result on each rank of each trial that is asked for: processes start once."""
    asked = {item.name.rpartition("[")[2] for item in request.session.items}
    names = [n for n in TRIALS if f"{n}]" in asked or n in ("cp", "frozen")]
    by_rank = run_ranks(on_ranks, RANKS, [TRIALS[name] for name in names])
    return dict(zip(names, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_processes_do_what_one_device_does(name, results) -> None:
    check(TRIALS[name], results[name])


@pytest.mark.slow
def test_dropout_and_frozen_weights_are_there_to_be_seen(results) -> None:
    evaluated, loss, _ = results["cp"][0]
    assert abs(evaluated - loss) > 1e-6
    before = TRIALS["frozen"].model.build().model.named_parameters()
    _, _, after = results["frozen"][0]
    kept = {p.requires_grad for name, p in before if torch.equal(p, after[name])}
    assert kept == {False}


@pytest.mark.nightly
def test_random_combinations_on_four_processes() -> None:
    drawn = [one for one in map(draw, range(5, 1000, 9)) if size(one) == RANKS][:12]
    by_rank = run_ranks(on_ranks, RANKS, drawn)
    for one, *found in zip(drawn, *by_rank, strict=True):
        check(one, found)


def size(one: Draw) -> int:
    return Mesh.parse(one.mesh).size
