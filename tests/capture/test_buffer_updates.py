"""Buffers that forward writes to: loads of experts, averages, counts of calls. Loss,
gradients and buffers of a step are those of the untouched model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
import torch.nn.functional as F
from cases import plan
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.compiler import compile_offline, proved
from autopar.passes.capture.exported.buffer_updates import after_step
from autopar.passes.capture.trace import trace
from autopar.passes.errors import AutoparError, CaptureError, LossNotSeparable
from autopar.passes.graph import Graph
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.read_program import read_program
from autopar.passes.traced import Traced
from autopar.proof.errors import VerificationFailed
from autopar.proof.ranks import StepInputs, run_steps
from autopar.reports.inspection import report, report_data

BATCH, SEQ, WIDTH, VOCAB, EXPERTS, CHOICES = 8, 6, 16, 32, 4, 2
Write = Callable[["Experts", Tensor, Tensor], None]


class Experts(nn.Module):
    """A mixture that knows its loads. write: how, of choices [tokens, CHOICES] and
    gates [tokens, EXPERTS]."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.register_buffer("bias", 0.01 * torch.randn(EXPERTS))
        self.register_buffer("load", torch.full((EXPERTS,), 3.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("counts", torch.zeros(EXPERTS, dtype=torch.long))
        self.register_buffer("table", torch.ones(EXPERTS, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).sigmoid()
        chosen = (scores + self.bias).topk(CHOICES, dim=-1).indices
        gates = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        with torch.no_grad():
            self.write(self, chosen, gates)
        hidden = torch.einsum("td,edf->tef", flat, self.up).relu()
        each = torch.einsum("tef,efd->ted", hidden, self.down)
        return torch.einsum("ted,te->td", each, gates).view_as(x)


class Block(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Experts(write)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Mixture(nn.Module):
    def __init__(self, write: Write, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Block(write) for _ in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def counts(chosen: Tensor) -> Tensor:
    return F.one_hot(chosen, EXPERTS).sum((0, 1))


def histogram(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    flat = chosen.flatten().float()
    moe.load.add_(torch.histc(flat, bins=EXPERTS, min=0, max=EXPERTS))


def bincount(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    moe.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)


def one_hot(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    moe.load += counts(chosen)
    moe.seen += 1


def scattered(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    moe.load.scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel()))


def scattered_counts(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    ones = torch.ones(chosen.numel(), dtype=torch.long)
    moe.counts.scatter_add_(0, chosen.flatten(), ones)
    moe.counts.index_add_(0, chosen[:, 1], ones[: len(chosen)])


def rows(moe: Experts, chosen: Tensor, gates: Tensor) -> None:
    moe.table.index_add_(0, chosen[:, 0], gates.repeat(1, WIDTH // EXPERTS))


def averaged(moe: Experts, _: Tensor, gates: Tensor) -> None:
    moe.load.mul_(0.9).add_(gates.mean(0), alpha=0.1)


def blended(moe: Experts, _: Tensor, gates: Tensor) -> None:
    moe.load.lerp_(gates.mean(0), 0.1)


def assigned(moe: Experts, _: Tensor, gates: Tensor) -> None:
    moe.load = 0.9 * moe.load + 0.1 * gates.mean(0)


def last(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    moe.load.copy_(counts(chosen))


def of_the_step(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    moe.load.zero_()
    moe.load += counts(chosen)


def one_row(moe: Experts, chosen: Tensor, gates: Tensor) -> None:
    moe.table[1] += gates.sum(0).repeat(WIDTH // EXPERTS)
    moe.table[:, :EXPERTS].mul_(0.5)


def balanced(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    """By a step against the load, which is no sum over tokens."""
    load = counts(chosen).float()
    moe.bias += 0.01 * (load.mean() - load).sign()


def kept(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    """What it was before, in another buffer, which looks as a table that is filled."""
    moe.table[0, :EXPERTS].copy_(moe.load)
    moe.load += counts(chosen)


def in_training(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    if moe.training:
        moe.load += counts(chosen)


def nothing(moe: Experts, chosen: Tensor, _: Tensor) -> None:
    pass


WRITES = (
    histogram,
    bincount,
    one_hot,
    scattered,
    scattered_counts,
    rows,
    averaged,
    blended,
    assigned,
    last,
    of_the_step,
    one_row,
    balanced,
    kept,
    in_training,
)
MESHES = (("dp=2", 2), ("pp=2,tp=2", 2), ("ep=2", 1), ("cp=2", 1), ("dp=2,tp=2", 2))


def batch_of(seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=drawn)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def model_of(write: Write, layers: int = 2) -> Mixture:
    torch.manual_seed(0)
    return Mixture(write, layers)


@cache
def captured(write: Write) -> Traced:
    return capture_model(model_of(write), batch_of())


def check_step(program: Program, model: nn.Module) -> None:
    """A step on all ranks against a forward and backward of the untouched model."""
    batch, before = batch_of(), dict(model.named_buffers())
    [ours] = run_steps(
        program, before, [StepInputs(dict(model.named_parameters()), batch, None)], 0
    )
    reference = copy.deepcopy(model)
    loss = reference(**batch)
    loss.backward()
    torch.testing.assert_close(ours.loss, loss.detach())
    for name, p in reference.named_parameters():
        torch.testing.assert_close(ours.gradients[name], p.grad, msg=name)
    after = dict(reference.named_buffers())
    changed = {n for n, x in after.items() if not torch.equal(x, before[n])}
    assert changed == program.updates.keys()
    for name in changed:
        torch.testing.assert_close(ours.outputs[after_step(name)], after[name])


@pytest.mark.matrix(quick=4, daily=50)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
@pytest.mark.parametrize("write", WRITES)
def test_a_step_is_that_of_the_model(write, mesh, microbatches) -> None:
    model = model_of(write)
    how = plan(mesh, microbatches)
    program = compile_program(captured(write), how, PLAIN)
    assert program.updates
    check_step(program, model)
    again = read_program(program.to_json(), how, program.modules)
    assert again.updates == program.updates


@pytest.mark.parametrize("write", [one_hot, balanced])
def test_layers_that_repeat_write_each_their_own(write) -> None:
    model = model_of(write, layers=10)
    program = compile_offline(model, batch_of(), plan("pp=2,tp=2", 2))
    check_step(program, model)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("seed", [*range(12), 24, 40])
def test_writes_in_turn_are_those_of_the_model(seed: int) -> None:
    """Several that are drawn, each to what those before have left."""
    drawn = Random(seed)
    writes = drawn.choices(WRITES, k=drawn.randint(2, 4))

    def write(moe: Experts, chosen: Tensor, gates: Tensor) -> None:
        for one in writes:
            one(moe, chosen, gates)

    model = model_of(write, drawn.choice([2, 8]))
    mesh, microbatches = drawn.choice(MESHES)
    check_step(compile_offline(model, batch_of(), plan(mesh, microbatches)), model)


def test_a_text_does_not_grow_with_its_counters() -> None:
    lines = []
    for layers in (10, 20):
        model = model_of(one_hot, layers)
        program = compile_offline(model, batch_of(), plan("tp=2", 2))
        [text] = {*program.modules.values()}
        lines.append(len(text.splitlines()))
    assert lines[1] <= lines[0] + 2 * 10  # a name for each, where they are returned


def test_what_is_written_is_shown() -> None:
    program = compile_offline(model_of(averaged), batch_of(), plan("dp=2", 2))
    assert re.search(
        r"layers\.0-1\.moe\.load +f32\[4\] +f32\[4\] +mul", report(program)
    )
    update = report_data(program)["updates"]["layers.1.moe.load"]
    assert Graph.parse("\n".join(update)) == program.updates["layers.1.moe.load"]


def test_another_value_of_a_buffer_is_refused() -> None:
    model, batch = model_of(averaged), batch_of()
    program = compile_offline(model, batch, plan("dp=2", 2), prove=True)
    assert program.proof is not None
    name, update = next(iter(program.updates.items()))
    nodes = [
        n.with_args(alpha=0.2) if n.arg("alpha") == 0.1 else n for n in update.nodes
    ]
    wrong = replace(update, nodes=tuple(nodes))
    assert wrong != update
    other = replace(program, updates={**program.updates, name: wrong})
    with pytest.raises(VerificationFailed, match=after_step(name)):
        proved(other, model, batch)


class Tokens(nn.Module):
    """Counts tokens of the batch alone, which is computed ahead of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("each", torch.zeros(VOCAB))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += (labels > 0).sum()
            self.each += torch.histc(ids.float(), bins=VOCAB, min=0, max=VOCAB)
        logits = self.embed(ids) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 2), ("pp=2,tp=2", 2)])
def test_tokens_of_the_batch_are_counted(mesh, microbatches) -> None:
    model = Tokens()
    program = compile_offline(model, batch_of(), plan(mesh, microbatches), prove=True)
    check_step(program, model)


class Reads(nn.Module):
    """Reads what it has counted."""

    def __init__(self, first: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(4, 4), first
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.first(self.total, y.detach().sum(0))
        return (y * self.total).square().mean()


@pytest.mark.parametrize("first", [Tensor.add_, Tensor.copy_])
def test_a_buffer_may_be_read_after_a_write(first) -> None:
    """It then has sums of the batch, which microbatches have parts of."""
    torch.manual_seed(0)
    model, x = Reads(first), torch.randn(4, 4)
    for mesh in ("dp=2", "tp=2"):
        compile_offline(model, {"x": x}, plan(mesh), prove=True)
    with pytest.raises(LossNotSeparable, match="microbatches=1") as error:
        compile_offline(model, {"x": x}, plan("dp=2", 2))
    assert "test_buffer_updates.py" in error.value.source


def test_a_buffer_that_microbatches_cannot_share_out_is_named() -> None:
    class Most(Reads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.total.copy_(y.detach().amax(0))
            return y.square().mean()

    model, x = Most(Tensor.copy_), torch.randn(4, 4)
    compile_offline(model, {"x": x}, plan("dp=2"), prove=True)
    with pytest.raises(LossNotSeparable, match="between microbatches, for 'total'"):
        compile_offline(model, {"x": x}, plan("dp=2", 2))


def test_an_assigned_buffer_keeps_its_kind() -> None:
    class Wider(Reads):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.total = torch.cat([self.total, y.detach().sum(0)])
            return y.mean()

    with pytest.raises(CaptureError, match=r"assigns to the model's buffer 'total'"):
        trace(Wider(Tensor.add_), {"x": torch.randn(2, 4)})


def test_statistics_of_a_batch_that_normalize_it_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(AutoparError, match="running_mean"):
        trace(model, {"input": torch.randn(8, 4)}, lambda y, _: y.square().mean())
