"""Plans for a model that takes samples together, so that no microbatches share them
out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, Block, Stack, plain_gpt, randomize
from torch import Tensor

from autopar.machine.hardware import cluster_of
from autopar.passes.errors import LossNotSeparable
from autopar.passes.search.search import run_on_paper
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_prices,
    plan_of,
)
from autopar.planner.shard_ops_of_best import shard_ops_of_best

SAMPLES = 8


def contrast(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Each sample is to be told from all others."""
    z = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(z @ z.mT, torch.arange(len(z)))


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (SAMPLES, 4))
    return Case(randomize(Stack(Block, 4)), {"input_ids": ids}, contrast)


@pytest.fixture(scope="module")
def of(case: Case) -> ShortModel:
    return case.short()


@pytest.mark.slow
def test_plans_have_one_microbatch(case: Case, of: ShortModel) -> None:
    cluster = cluster_of("4xA100-80GB")
    found = find_plans(of, cluster, SAMPLES, recompute=("none",), zero=(0, 1))
    assert {e.candidate.microbatches for e in found.best} == {1}
    assert {e.candidate.mesh.axis_size("dp") for e in found.best} >= {1, 2}
    sharded, _ = shard_ops_of_best(found, of, cluster)
    assert {e.candidate.microbatches for e in sharded.best} == {1}
    chosen = plan_of(found.best[0].candidate, of)
    case.verify(str(chosen.mesh), zero=chosen.zero)


@pytest.mark.slow
def test_prices_are_those_of_microbatches_where_there_may_be_some() -> None:
    plain, cluster = plain_gpt(batch=8), cluster_of("1xA100-80GB")
    of = plain.short()
    for e in find_plans(of, cluster, SAMPLES, recompute=("none",)).best:
        apart, at_once = (
            run_on_paper(e.candidate, make_prices(of, cluster, at_once), cluster)
            for at_once in (False, True)
        )
        assert at_once.seconds == pytest.approx(apart.seconds, rel=0.02)
        assert at_once.peak == pytest.approx(apart.peak, rel=0.02)


def test_more_samples_take_more_memory(of: ShortModel) -> None:
    few, many = (
        find_plans(of, cluster_of("1xA100-80GB"), n).best[0] for n in (8, 4096)
    )
    assert many.peak > 10 * few.peak and many.seconds > few.seconds


def test_more_microbatches_are_refused(of: ShortModel) -> None:
    with pytest.raises(LossNotSeparable, match="use microbatches=1"):
        find_plans(of, cluster_of("4xA100-80GB"), SAMPLES, microbatches=2)


@pytest.mark.parametrize("cut", ["chunk", "split", "tensor_split", "slices"])
def test_a_loss_by_chunks_of_the_sequence_may_have_microbatches(cut: str) -> None:
    """As the error about means over chunks of all rows has it."""
    cuts = {
        "chunk": lambda x, dim: x.chunk(4, dim),
        "split": lambda x, dim: x.split(x.shape[dim] // 4, dim),
        "tensor_split": lambda x, dim: x.tensor_split(4, dim),
        "slices": lambda x, dim: [x.narrow(dim, 0, 2), x.narrow(dim, 2, 2)],
    }

    def by_rows(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        rows, labels = logits.flatten(0, 1), batch["input_ids"].flatten()
        pieces = zip(cuts[cut](rows, 0), cuts[cut](labels, 0), strict=True)
        return sum(F.cross_entropy(*piece) for piece in pieces)

    def along(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        labels = cuts[cut](batch["input_ids"], 1)
        pieces = zip(cuts[cut](logits.mT, 2), labels, strict=True)
        return sum(F.cross_entropy(*piece, reduction="sum") for piece in pieces)

    torch.manual_seed(0)
    model = randomize(Stack(Block, 1))
    batch = {"input_ids": torch.randint(VOCAB, (SAMPLES, 4))}
    with pytest.raises(LossNotSeparable) as error:
        Case(model, batch, by_rows).compile("pp=1", 2)
    assert "x.chunk(8, 1)" in error.value.fix
    Case(model, batch, along).double().verify("dp=2", 2)
