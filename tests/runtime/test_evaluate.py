"""Evaluation: the loss of the model in eval mode, forward only, on the same plan."""

import logging

import pytest
import torch
import torch.nn.functional as F
from cases import Case, on_rank
from models import gpt2, plain_gpt
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.proof.reference import OurChance
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("mesh", ["pp=1", "tp=2", "pp=2,tp=2", "dp=2,pp=2"])
@pytest.mark.parametrize("build", [plain_gpt, gpt2])
def test_it_is_the_loss_of_eval_mode_and_changes_nothing(build, mesh: str) -> None:
    check_evaluation(build, mesh)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("interleaved", 2), ("looped-bfs", 2), ("zb-h2", 1), ("zb-v", 2)],
)
def test_every_schedule_evaluates(schedule: str, stages_per_rank: int) -> None:
    options = {"schedule": schedule, "stages_per_rank": stages_per_rank}
    check_evaluation(plain_gpt, "pp=2", **options)


def check_evaluation(build, mesh: str, **options) -> None:
    case = build(dropout=0.3).double()
    program = case.compile(mesh, 2, **options)

    def body(comm: Comm):
        executor = on_rank(program, comm, case.model)
        first = executor.evaluate(case.batch)
        assert all(p.grad is None for p in executor.parameters.values())
        assert not any(stage.residuals for stage in executor.stages.values())
        trained = executor.step(case.batch)
        again = executor.evaluate(case.batch)
        return first.item(), trained.item(), again.item()

    results = run_virtual(program.mesh, 2, body)
    assert len(set(results)) == 1
    first, trained, again = results[0]
    case.model.eval()
    with torch.no_grad():
        out = case.model(**case.batch)
        want = out[1] if case.loss_fn is None else case.loss_fn(out, case.batch)
    assert first == again
    assert abs(first - want.item()) < 1e-10
    assert abs(trained - first) > 1e-6  # there is dropout in training


class Trained(nn.Module):
    """What a model does in training alone: noise, a second head, a loss of its own.

    kind: what of it. It is in eval mode what it is without.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.steps = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)
        self.up, self.second, self.head = (
            nn.Linear(8, 8),
            nn.Linear(8, 12),
            nn.Linear(8, 12),
        )

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor] | Tensor:
        x = self.tokens(ids)
        if (self.kind == "noise" and self.training) or self.kind == "always noise":
            x = x + torch.randn_like(x)
        if self.kind == "recurrent":  # an op that has dropout, and is told to train
            x = self.steps(x)[0]
        x = F.dropout(self.up(x).tanh(), 0.3, self.training)
        logits = self.head(x)
        if self.kind == "no loss" and not self.training:
            return logits
        loss = F.cross_entropy(logits.mT, labels)
        total = loss
        if self.kind == "second head" and self.training:
            total = total + F.cross_entropy(self.second(x).mT, labels)
        if self.kind == "penalty" and self.training:
            total = total + 0.1 * logits.square().mean()
        return {"loss": total, "first": loss.detach()}


def trained(kind: str) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (4, 6))
    return Case(Trained(kind), {"ids": ids, "labels": ids.roll(-1, 1)})


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    "kind", ["noise", "second head", "penalty", "dropout", "recurrent"]
)
def test_what_training_adds_is_left_out(kind: str) -> None:
    case = trained(kind)
    step = case.step()
    first = step.evaluate(**case.batch)
    step(**case.batch)
    again = step.evaluate(**case.batch)
    want = case.model.eval()(**case.batch)["loss"]
    assert first == again
    torch.testing.assert_close(first, want.detach())
    torch.testing.assert_close(step.metrics["first"], first)
    trains = {name for name, p in step.named_parameters() if p.grad is not None}
    assert ("second.weight" in trains) == (kind == "second head")
    assert step.state_dict().keys() == case.model.state_dict().keys()
    # Dropout is left out of the same one.
    programs = 1 if kind in ("dropout", "recurrent") else 2
    assert len(step._shapes._executors) == programs


@pytest.mark.slow
def test_what_eval_mode_draws_is_drawn() -> None:
    case = trained("always noise")
    step = case.step()
    first = step.evaluate(**case.batch)
    step(**case.batch)
    assert step.evaluate(**case.batch) != first


def test_an_eval_mode_without_a_loss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    case = trained("no loss")
    step = case.step()
    with caplog.at_level(logging.WARNING, "autopar"):
        loss = step.evaluate(**case.batch)
    assert "a step without dropout: what the model computes in eval mode" in caplog.text
    case.model.kind = ""
    torch.testing.assert_close(loss, case.model.eval()(**case.batch)["loss"].detach())


def evaluate_on_rank(kind: str) -> list[float]:
    case = trained(kind)
    step = autopar.compile(case.model, "dp=2", zero=3, example_inputs=case.batch)
    losses = [
        step.evaluate(**case.batch),
        step(**case.batch),
        step.evaluate(**case.batch),
    ]
    return [x.item() for x in losses]


@pytest.mark.slow
def test_ranks_evaluate_what_eval_mode_is() -> None:
    found = run_ranks(evaluate_on_rank, 2, "second head")
    case = trained("second head")
    with OurChance(0):
        step = case.model(**case.batch)["loss"].item()
    want = case.model.eval()(**case.batch)["loss"].item()
    for losses in found:
        assert losses == pytest.approx([want, step, want])
