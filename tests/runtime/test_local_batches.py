"""Ranks that load their own samples train as one device does on all of them, and
batches of other shapes train the same weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from models import gpt2, plain_gpt, switch_gpt
from processes import RankFailed, run_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar.local_batches import DataRank, batches
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.runtime.agreement.agreement import FIRST
from autopar.runtime.agreement.roll_call import RollCall
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual

BUILD = {"plain": plain_gpt, "gpt2": gpt2, "switch": switch_gpt}
SAMPLES, LOCAL = 22, 2  # the last batch of an epoch is short
Batch = dict[str, Tensor]


class Samples(Dataset[Batch]):
    """Samples like those of a case, each with labels left out of its own."""

    def __init__(self, case: Case) -> None:
        gen = torch.Generator().manual_seed(0)
        self.fields = {}
        for name, x in case.batch.items():
            rows = torch.randint(len(x), (SAMPLES,), generator=gen)
            self.fields[name] = x[rows].clone()
            if name == "labels" and "ignored" not in case.batch:
                out = torch.rand(self.fields[name].shape, generator=gen) < 0.3
                self.fields[name][out] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Batch:
        return {name: x[i] for name, x in self.fields.items()}


def case_of(model: str) -> Case:
    return BUILD[model](layers=2).double()


def loss_of(case: Case, batch: Batch) -> Tensor:
    out = case.model(**batch)
    return case.loss_fn(out, batch) if case.loss_fn else out[1]


def train(model: str, mesh: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Two epochs of what this rank's loader gives; and what that was."""
    case = case_of(model)
    step = autopar.compile(case.model, mesh, loss_fn=case.loss_fn, **options)
    samples = Samples(case)
    sampler = step.sampler(samples, seed=3, drop_last=False)
    update, losses, batches = None, [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(samples, LOCAL, sampler=sampler):
            step.build(local=True, **batch)
            update = update or torch.optim.AdamW(step.parameters(), lr=1e-2)
            losses.append(step(local=True, **batch).item())
            update.step()
            update.zero_grad()
            losses.append(step.evaluate(local=True, **batch).item())
            batches.append(batch)
    return step.data_rank, batches, losses, step.state_dict()


def train_plainly(model: str, batches: list[Batch]) -> tuple[Any, ...]:
    case = case_of(model)
    update, losses = torch.optim.AdamW(case.model.parameters(), lr=1e-2), []
    for batch in batches:
        for again in (False, True):
            loss = loss_of(case, batch)
            losses.append(loss.item())
            if not again:
                loss.backward()
                update.step()
                update.zero_grad()
    return losses, case.model.state_dict()


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("plain", "dp=2", {}),
        ("plain", "dp=2,tp=2", {"zero": 3}),
        ("plain", "pp=2,dp=2", {"microbatches": 2, "zero": 1}),
        ("plain", "cp=2,fsdp=2", {"zero": 2}),
        ("switch", "ep=2,dp=2", {}),
    ],
)
def test_loaders_of_their_own_train_as_one_device(model, mesh, options):
    ranks = DataRank(Plan(autopar.Mesh.parse(mesh), zero=options.get("zero", 0)), 0)
    results = run_ranks(train, autopar.Mesh.parse(mesh).size, model, mesh, options)
    loaded = dict((index, batches) for index, batches, _, _ in results)
    assert sorted(loaded) == list(range(ranks.size))
    parts = [loaded[index] for index in range(ranks.size)]
    whole = [
        {name: torch.cat([part[name] for part in row]) for name in row[0]}
        for row in zip(*parts, strict=True)
    ]
    short = {4, 2} if ranks.size == 2 else {8}
    assert {len(batch["labels"]) for batch in whole} == short
    losses, weights = train_plainly(model, whole)
    for _, _, found, state in results:
        assert found == pytest.approx(losses, rel=1e-9)
        for name, want in weights.items():
            torch.testing.assert_close(state[name], want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("text", ["ep=2,dp=3", "dp=3,tp=2,ep=2", "fsdp=2,pp=2,dp=2"])
def test_a_part_has_the_rows_that_its_rank_computes_with(text):
    """Axes need not lie in a mesh in the order in which they split a batch."""
    mesh = autopar.Mesh.parse(text)
    plan = Plan(mesh, zero=3 if "fsdp" in text else 0, microbatches=2)

    def check(comm):
        part = DataRank(plan, comm.rank)
        row = torch.tensor([part.index])
        short, masks = row.to(torch.int16), row[:, None].expand(1, 3) > 0
        mine = {"rows": row, "short": short, "masks": masks}
        whole = {name: part.gather(comm, x) for name, x in mine.items()}
        assert whole["short"].dtype is torch.int16 and whole["masks"].shape[1:] == (3,)
        assert whole["short"].tolist() == list(range(part.size))
        assert whole["masks"][:, 0].tolist() == [i > 0 for i in range(part.size)]
        assert whole["rows"].tolist() == list(range(part.size))
        assert comm.pieces(part.size, part.axes) == ((part.index, 1),)

    run_virtual(mesh, 2, check)


def test_positions_as_many_as_a_rank_s_samples_are_not_samples() -> None:
    """Where a program tells what is."""
    mesh = autopar.Mesh.parse("dp=2")
    inputs = {"ids": ((8, 4), "int64"), "at": ((4,), "int64"), "mask": ((8, 4), "bool")}
    batch = {"ids": torch.ones(4, 4), "at": torch.arange(4), "mask": torch.ones(4, 4)}
    part = DataRank(Plan(mesh), 0)
    assert part.whole_like(batch)["at"].shape == (8,)
    assert part.whole_like(batch, inputs)["at"].shape == (4,)


# --- shapes -------------------------------------------------------------------------


def shapes_of_one_step() -> int:
    case, plain = case_of("plain"), case_of("plain")
    step = autopar.compile(
        case.model, "tp=2", loss_fn=case.loss_fn, example_inputs=case.batch
    )
    update = torch.optim.AdamW(step.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
    for rows, seq in ((8, 16), (3, 16), (8, 11), (8, 16), (3, 16)):
        batch = {name: x[:rows, :seq] for name, x in case.batch.items()}
        loss, want = step(**batch), loss_of(plain, batch)
        want.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-9), (rows, seq)
        for optimizer in (update, reference):
            optimizer.step()
            optimizer.zero_grad()
    state = step.state_dict()
    for name, want in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], want, rtol=1e-8, atol=1e-9)
    assert step.training_state()["steps"] == 5
    return len(step._shapes._executors)


@pytest.mark.slow
def test_batches_of_other_shapes_train_the_same_weights():
    assert run_ranks(shapes_of_one_step, 2) == [3, 3]


@pytest.mark.slow
def test_gradients_of_several_shapes_add_up() -> None:
    case = plain_gpt(layers=1).double()
    step = case.step(microbatches=2)
    parts = [{n: x[a:b] for n, x in case.batch.items()} for a, b in ((0, 2), (2, 8))]
    plain = plain_gpt(layers=1).double()
    for part in parts:
        step(**part)
        loss_of(plain, part).backward()
    for (name, p), q in zip(
        step.named_parameters(), plain.model.parameters(), strict=True
    ):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.nightly
def test_compiling_for_another_shape_leaves_gradients(tmp_path: Path) -> None:
    case, plain = (plain_gpt(layers=1).double() for _ in range(2))
    step = autopar.compile(
        case.model, "tp=1", loss_fn=case.loss_fn, backend="inductor", cache_dir=tmp_path
    )
    for rows in (8, 3):
        part = {name: x[:rows] for name, x in case.batch.items()}
        step(**part)
        loss_of(plain, part).backward()
    for p, q in zip(step.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


# --- mistakes -----------------------------------------------------------------------


def load_what_others_do_not() -> None:
    """Ranks of tp with samples of their own."""
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2,tp=2", example_inputs=case.batch)
    rank = step.comm.rank
    step(local=True, **{n: x[rank : rank + 4] for n, x in case.batch.items()})


def load_more() -> None:
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    rows = 4 + step.comm.rank
    step(local=True, **{n: x[:rows] for n, x in case.batch.items()})


def load_another_size() -> None:
    """Sizes that all ranks know, but at another time."""
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    for _ in range(FIRST):
        for rows in (8, 4):
            step(**{name: x[:rows] for name, x in case.batch.items()})
    rows = 4 + 4 * step.comm.rank
    step(**{name: x[:rows] for name, x in case.batch.items()})


def load_on_one_rank() -> None:
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    for _ in range(FIRST + 1):
        step.evaluate(**case.batch)
    rows = 8 - 4 * step.comm.rank
    part = {name: x[:rows] for name, x in case.batch.items()}
    step.evaluate(local=step.comm.rank == 1, **part)


def load_at_first_on_one_rank() -> None:
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    rows = 8 - 4 * step.comm.rank
    part = {name: x[:rows] for name, x in case.batch.items()}
    step(local=step.comm.rank == 1, **part)


class OverLabels(torch.nn.Module):
    """Divides by the labels of the global batch, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        logits = self.table(ids).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(
            logits, labels.flatten(), reduction="sum"
        )
        return total / count


def step_over_labels(counted_together: bool) -> float:
    torch.manual_seed(0)
    ids, model = torch.arange(32).view(8, 4) % 16, OverLabels()
    labels = ids.roll(1, 1).masked_fill(torch.arange(8)[:, None] > ids, -100)
    whole = {"ids": ids, "labels": labels, "count": (labels >= 0).sum()}
    step = autopar.compile(model, "dp=2,tp=2", example_inputs=whole)
    rows = slice(4 * step.data_rank, 4 * step.data_rank + 4)
    part = {"ids": ids[rows], "labels": labels[rows]}
    part["count"] = (part["labels"] >= 0).sum()
    if counted_together:
        dist.all_reduce(part["count"])
        part["count"] //= dist.get_world_size() // step.data_ranks
    return float(step(local=True, **part)) - float(model(**whole).detach())


def count_what_it_loaded() -> None:
    step_over_labels(counted_together=False)


@pytest.mark.slow
def test_a_count_is_that_of_the_labels_of_all_ranks() -> None:
    """As the error says that there is of one of each rank's own."""
    assert run_ranks(step_over_labels, 4, True) == pytest.approx([0.0] * 4, abs=1e-5)


def load_the_same() -> list[str]:
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore
    logging.getLogger("autopar").addHandler(handler)
    step(local=True, **{n: x[:4] for n, x in case.batch.items()})
    return [text for text in said if "samples" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "ranks", "says"),
    [
        (load_what_others_do_not, 4, r"rank 1 as on rank 0, which both load part 0"),
        (count_what_it_loaded, 4, r"'count' is not the same on rank"),
        (load_more, 2, r"is \[4, 16\] on rank 0, but \[5, 16\] on rank 1\n  fix  pass"),
        (load_another_size, 2, "rank . has .* another local="),
        (load_on_one_rank, 2, r"evaluates, but rank 1 has .* another local="),
        (
            load_at_first_on_one_rank,
            2,
            "rank 0 steps, but rank 1 has .* another local=",
        ),
    ],
)
def test_what_is_loaded_wrongly_is_an_error(body, ranks, says):
    with pytest.raises(RankFailed, match=says):
        run_ranks(body, ranks)


# --- loaders that end early ---------------------------------------------------------


class Endless:
    """As an iterable dataset: of no length, and ended by `after` of its batches."""

    def __init__(self, batch: dict[str, Any], after: int, error: bool) -> None:
        self.batch, self.after, self.error = batch, after, error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.after):
            yield self.batch
        if self.error:
            raise ValueError("a bad sample")


def run_out(error: bool) -> None:
    """Rank 1 ends, when ranks no longer wait before they begin."""
    case = gpt2(layers=1)
    step = autopar.compile(case.model, "dp=2", example_inputs=case.batch)
    rank = step.comm.rank
    own = {name: x[4 * rank :][:4] for name, x in case.batch.items()}
    for batch in step.batches(Endless(own, FIRST + 2 - rank, error and rank == 1)):
        step(local=True, **batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (False, "rank 0 steps, but rank 1 has no more batches\n  fix  give each"),
        (True, "ValueError: a bad sample|rank 1 cannot step"),
    ],
)
def test_a_loader_that_ends_early_is_told_by_all(error: bool, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=says):
        run_ranks(run_out, 2, error)
    assert time.monotonic() - began < 60


def test_loaders_of_known_lengths_stop_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read(comm: Comm) -> list[int]:
        return [*batches(RollCall(comm, {}), range(5 + comm.rank % 2))]

    caplog.set_level(logging.WARNING, "autopar")
    assert run_virtual(Mesh.parse("dp=3"), 1, read) == [[0, 1, 2, 3, 4]] * 3
    assert "ranks 0 and 2: 5 batches, others up to 6" in caplog.text


@pytest.mark.slow
def test_samples_that_all_ranks_loaded_are_noticed():
    said = run_ranks(load_the_same, 2)
    assert len(said[0]) == 1 and "all ranks loaded the same samples" in said[0][0]
    assert said[1] == []
