"""What of a batch comes to a rank: its own rows, which it counts, and no field that it
does not read."""

from __future__ import annotations

import pytest
import torch
from cases import Case, on_rank
from models import plain_gpt
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.local_batches import DataRank
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual

# Rows that come to each rank: labels are counted where they are computed with.
BOTH, FIRST_STAGE, LAST_STAGE = {"ids": 4, "labels": 4}, {"ids": 4}, {"labels": 4}


@pytest.mark.parametrize(
    ("mesh", "microbatches", "local", "held", "gathered"),
    [
        ("dp=2", 2, False, [BOTH] * 2, 0),
        ("dp=2", 1, True, [BOTH] * 2, 0),
        # Rows of each microbatch lie on all ranks: each loaded half of its own.
        ("dp=2", 2, True, [BOTH] * 2, 2),
        ("dp=2,tp=2", 4, True, [BOTH] * 4, 2),
        ("dp=2,ep=2", 2, True, [{"ids": 8, "labels": 8}] * 4, 2),
        ("dp=2,ep=2", 1, True, [{"ids": 2, "labels": 2}] * 4, 0),
        ("pp=2,dp=2", 2, False, [FIRST_STAGE] * 2 + [LAST_STAGE] * 2, 0),
    ],
)
def test_what_no_rank_reads_comes_to_none(mesh, microbatches, local, held, gathered):
    case = plain_gpt(layers=2).double()
    case.batch["labels"][:3, 2:9] = -100  # of some ranks more than of others
    program = case.compile(mesh, microbatches)

    def run(comm: Comm) -> tuple[Tensor, int, dict[str, int]]:
        executor = on_rank(program, comm, case.model)
        data = DataRank(program.plan, comm.rank)
        own = {n: x.chunk(data.size)[data.index] for n, x in case.batch.items()}
        fields = data.fields(executor, own if local else case.batch, local)
        sent = sum(traffic.bytes for traffic in comm.log.values())
        parts = {n: getattr(x, "parts", (x,)) for n, x in fields.items()}
        rows = {name: sum(map(len, tensors)) for name, tensors in parts.items()}
        return executor.step(fields), sent, rows

    found = run_virtual(program.mesh, microbatches, run)
    assert [rows for _, _, rows in found] == held
    part = 8 * 8 * 16 // DataRank(program.plan, 0).size  # bytes of a field
    assert {sent for _, sent, _ in found} == {gathered * part}
    _, want = case.model(**case.batch)
    for loss, _, _ in found:
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=0)


class WeighedLoss(nn.Module):
    """Divided by what is made of one field of the batch, of another, and of both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = self.model(ids)[0].flatten(0, 1)
        nll = F.cross_entropy(logits, labels.flatten(), reduction="none")
        nll, kept = nll.view(labels.shape), labels != -100
        weighed = (nll * weights).sum() / (weights * kept).sum()
        each = nll.sum() / kept.sum().clamp(min=1) + nll.sum() / weights.sum()
        return weighed + each + (nll.sum(1) / (kept.sum(0) + 1).sum()).sum()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_made_of_several_fields_is_counted_of_the_whole_batch(microbatches):
    """Of each field alone ranks count their own rows."""
    plain = plain_gpt(layers=1)
    batch = {**plain.batch, "weights": torch.rand(plain.batch["labels"].shape)}
    batch["labels"][:3, 2:9] = -100
    case = Case(WeighedLoss(plain.model), batch).double()
    case.verify("dp=2,cp=2", microbatches)
    (text,) = case.compile("dp=2", microbatches).modules.values()
    prologue = text[text.index("def prologue") :].partition("\n\n\n")[0]
    assert prologue.count("c.all_reduce(") == 3
    assert "'labels': (), 'weights': ()" in text
