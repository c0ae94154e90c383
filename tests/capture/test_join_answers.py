"""Forwards that compute one thing or another, as values decide: whatever the answer is,
and however the batch is split, loss and gradients are those of the untouched model."""

from __future__ import annotations

import pytest
from models_that_ask import SHARED, WHOLE, Loss, batches, case_of, many_classes

from autopar.passes.errors import CaptureError, LossNotSeparable
from autopar.verify import verify

MESHES = (("dp=2", 1), ("dp=1", 2), ("dp=2", 2), ("tp=2", 1))


def check(loss: Loss, mesh: str, microbatches: int) -> None:
    case = case_of(loss)
    program = case.compile(mesh, microbatches)
    for batch in batches():
        verify(program, case.model, batch, drawn=False, tolerance=1e-10).check()


@pytest.mark.matrix(quick=4, daily=48)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("loss", SHARED, ids=lambda f: f.__name__)
def test_what_the_batch_decides_is_that_of_all_of_it(loss, mesh, microbatches):
    check(loss, mesh, microbatches)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("loss", WHOLE, ids=lambda f: f.__name__)
def test_what_weights_decide_takes_the_whole_batch(loss, mesh):
    check(loss, mesh, 1)
    with pytest.raises(LossNotSeparable):
        case_of(loss).compile(mesh, 2)


def test_how_many_of_many_answers_were_yes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"by if, while or bool|how many rows"):
        case_of(many_classes).trace()
