"""Evaluation: the loss of the model in eval mode, forward only, on the same plan."""

import pytest
import torch
from cases import on_rank
from models import gpt2, plain_gpt

from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual


@pytest.mark.matrix(quick=4)
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
        assert not any(stage.saved for stage in executor.stages.values())
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
