"""Ids and labels that the model has no row or class for: an error as torch's own, on
every mesh, where a shard alone takes an index that is not its own for another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from cases import Case, run_all_ranks
from models import Stack, plain_gpt, randomize, token_batch
from torch import Tensor

from autopar.passes.errors import IndexOutOfRange
from autopar.runtime import kernels
from autopar.runtime.comm.virtual import RankError

Batch = Mapping[str, Tensor]
VOCAB = 101


def by_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def by_nll(logits: Tensor, batch: Batch) -> Tensor:
    rows = logits.log_softmax(-1).flatten(0, 1)
    return F.nll_loss(rows, batch["labels"].flatten(), ignore_index=7)


def by_gather(logits: Tensor, batch: Batch) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, batch["labels"][..., None]).mean()


def run(case: Case, mesh: str, **changes: tuple[int, int, int]) -> None:
    """One step of all ranks; changes: field -> (row, position, value)."""
    program = case.compile(mesh, 2)
    batch = {k: v.clone() for k, v in case.batch.items()}
    for field, (row, position, value) in changes.items():
        batch[field][row, position] = value
    run_all_ranks(program, case.model, batch)


MESHES = ["dp=1", "tp=2", "dp=2,tp=3", "pp=2,tp=2"]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("value", [VOCAB, -7, 2**40])
@pytest.mark.parametrize("field", ["ids", "labels"])
def test_an_index_out_of_range_is_an_error_on_every_mesh(field, value, mesh):
    case = plain_gpt(layers=2)
    with pytest.raises(RankError, match=r"index.* out of range"):
        run(case, mesh, **{field: (6, 2, value)})
    run(case, mesh, labels=(6, 2, -100))


LOSSES: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = [
    (by_cross_entropy, (VOCAB, -1)),
    (by_nll, (VOCAB, -100)),
    (by_gather, (VOCAB, -100)),
]


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(("loss_fn", "values"), LOSSES)
def test_each_way_to_look_labels_up_is_checked(loss_fn, values):
    model = randomize(Stack(layers=1))
    case = Case(model, token_batch(seq=4, ignored="none"), loss_fn)
    run(case, "tp=2", labels=(3, 1, 7))
    for value in values:
        with pytest.raises(RankError, match=r"IndexOutOfRange.* out of range"):
            run(case, "tp=2", labels=(3, 1, value))


def test_the_error_names_the_index_and_what_there_is():
    labels = torch.tensor([3, 64, -100])
    with pytest.raises(IndexError, match=r"index 64 .* 0 to 63 \(or -100.*\n  fix  "):
        kernels.check_indices(labels, 64, -100)
    with pytest.raises(IndexOutOfRange, match="index -100"):
        kernels.check_indices(labels.minimum(torch.tensor(3)), 64)
    kernels.check_indices(labels, 65, -100)
    kernels.check_indices(labels.to("meta"), 1)
    kernels.check_indices(labels[:0], 1)
