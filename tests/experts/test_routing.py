"""Rows go to the ranks of their experts and home: as many as data say, none lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, plan
from models import mixture
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.mesh import Mesh, balanced, usual_split
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.shard.insert_collectives import insert_collectives
from autopar.passes.shard.propagate import propagate
from autopar.passes.stage.chain import Chain
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.fake_comm import FakeComm
from autopar.runtime.comm.virtual import run_virtual
from autopar.verify import verify

WIDTH, VOCAB = 16, 32


# --- The calls -----------------------------------------------------------------------


@pytest.mark.parametrize("experts", [2, 4, 7])
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=2,tp=2"])
@pytest.mark.parametrize("choices", ["many", "the last", "none here"])
def test_rows_meet_their_experts_and_come_home(mesh, experts, choices) -> None:
    def body(comm: Comm) -> None:
        torch.manual_seed(comm.coords["ep"])
        rows = 0 if choices == "none here" and comm.coords["ep"] else 5
        expert = torch.randint(experts, (rows,))
        if choices == "the last":
            expert.fill_(experts - 1)
        x = torch.randn(rows, 3)
        there, order, counts = comm.route(expert, "ep", experts)
        begins = sum(balanced(experts, 2)[: comm.coords["ep"]])
        mine = balanced(experts, 2)[comm.coords["ep"]]
        assert ((there >= begins) & (there < begins + mine)).all()
        labelled = torch.cat([x, expert[:, None].float()], 1)
        moved = comm.dispatch(labelled, "ep", order, counts)
        assert torch.equal(moved[:, 3], there.float())
        assert torch.equal(comm.combine(moved, "ep", order, counts), labelled)
        sizes = comm.gather_object((len(there), rows))
        assert sum(n for n, _ in sizes) == sum(n for _, n in sizes)

    run_virtual(Mesh.parse(mesh), 1, body)


# --- Models as they are shipped ------------------------------------------------------


def on_ep(program: Program) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for c in program.communication:
        if "ep" in c.axes and c.part != "step":
            found[c.part, c.kind, c.dtype] += c.bytes
    return found


def gathered(mesh: str, **options: Any) -> Any:
    """The plan in which each product with experts gathers the rows of all ranks."""
    chosen = plan(mesh, **options)
    experts = tuple(dim for dim in usual_split()["ep"] if not dim.startswith("routed:"))
    return replace(chosen, split={**chosen.split, "ep": experts})


@pytest.mark.slow
def test_rows_move_twice_each_way_and_no_more() -> None:
    """Of each token its top_k rows, embed wide; beside them experts' numbers."""
    case, ranks = mixture("mixtral"), 2
    found = on_ep(case.compile(f"ep={ranks}"))
    rows = case.batch["input_ids"].numel() // ranks * 2  # top_k
    layers, width = 2, 32
    assert found == {
        ("forward", "all_to_all", "f32"): layers * 2 * rows * width * 4,
        ("forward", "all_to_all", "i64"): layers * rows * 8,
        ("backward", "all_to_all", "f32"): layers * 2 * rows * width * 4,
    }


@pytest.mark.slow
def test_gathering_rows_instead_is_a_decision_of_the_plan() -> None:
    case = mixture("mixtral").double()
    program = compile_program(case.trace(), gathered("ep=4", microbatches=2), PLAIN)
    kinds = {kind for _, kind, _ in on_ep(program)}
    assert kinds == {"all_gather", "reduce_scatter"}
    verify(program, case.model, case.batch, case.loss_fn).check()
    usual = on_ep(case.compile("ep=4", 2))
    assert 2 * usual.total() < on_ep(program).total()


# --- What passes rows on -------------------------------------------------------------


class Experts(nn.Module):
    """One of four experts for each token, with all that may lie between its products;
    without a residual, so that nothing but rows goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, 4 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4)
        self.scale = nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        y = torch.bmm(self.up[expert], rows[..., None]).squeeze(-1)
        a, b = y.chunk(2, -1)
        a = F.silu(a) + F.gelu(-b) * torch.sigmoid(b) - F.relu(a) * self.scale
        y = torch.tanh(a) + b.clamp(-1.0, 1.0) + 0.5
        y = torch.bmm(self.down[expert], y[..., None]).squeeze(-1)
        return (y * weight[:, None]).reshape(x.shape)


class OnlyExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def only_experts() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (8, 6))
    return Case(OnlyExperts(), {"ids": ids, "labels": ids.roll(1, 1)})


@pytest.mark.slow
def test_what_computes_row_by_row_keeps_rows_with_their_experts() -> None:
    case = only_experts().double()
    case.verify("ep=2", 2)
    case.verify("ep=4,tp=2", 2)  # where tp moves rows, they go home before
    calls = [c for c in case.compile("ep=2", 2).communication if "ep" in c.axes]
    forward = [c for c in calls if c.part == "forward" and c.kind == "all_to_all"]
    assert sum(c.calls for c in forward) == 2 * (1 + 2)  # a way, there, and home


def test_no_stage_ends_where_rows_are_with_their_experts() -> None:
    """How many there are is not known before they come."""
    case = only_experts()
    named = name_dims(normalize(case.trace()))
    lowered = insert_collectives(propagate(named, plan("ep=2")))
    chain = Chain(lowered)
    away = [
        i
        for i in range(1, len(chain.nodes))
        if any(lowered.shardings[v.name].route for v in chain.crossing(i))
    ]
    assert away and not any(map(chain.is_place, away))
    only_experts().double().verify("pp=2,ep=2", 2)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("favourite", [0, 3])
@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ("ep=4", 1, {}),
        ("ep=2,tp=2", 1, {}),
        ("dp=2,ep=2", 2, {"zero": 3, "recompute": "full"}),
        ("pp=2,ep=2", 4, {"schedule": "zb-h1"}),
    ],
)
def test_all_tokens_may_choose_one_expert(
    mesh, microbatches, options, favourite
) -> None:
    """The others' ranks then get no rows at all; no token is dropped."""
    case = only_experts().double()
    for layer in case.model.layers:
        with torch.no_grad():
            layer.router.weight.mul_(0.1)
            layer.router.bias.fill_(0)[favourite] = 5
        chosen = layer.router(torch.randn(99, WIDTH).double()).argmax(-1)
        assert (chosen == favourite).all()
    case.verify(mesh, microbatches, **options)


# --- Without the other ranks ---------------------------------------------------------


def test_a_rank_that_is_measured_alone_works_on_as_many_rows_as_it_sends() -> None:
    """Of its own experts: rows of others' would cost it nothing."""
    comm = FakeComm(Mesh.parse("ep=4"), 1, torch.device("cpu"))
    expert = torch.arange(8)
    there, order, counts = comm.route(expert, "ep", 8)
    assert len(there) == 8 and there.max() == 1  # of two experts
    x = torch.randn(8, 3)
    there = comm.dispatch(x, "ep", order, counts)
    assert there.shape == comm.combine(there, "ep", order, counts).shape == x.shape
