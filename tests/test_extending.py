"""A newcomer adds an op, a schedule, a mesh axis, a recomputation policy or a
collective in one place: each is added here as its guide shows it, and proved on all
ranks against the untouched model, with nothing else touched.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import cut_gpt
from test_rules import SEEDS, declared, draws, splittable
from torch import Tensor, nn

from autopar.passes.dims.probe import holds
from autopar.passes.graph import OWN, Node, Value
from autopar.passes.mesh import AXES, Axis, Mesh
from autopar.passes.ops.cotangents import Cotangents
from autopar.passes.ops.op import OPS, Op, OutCotangents, Place, op_of
from autopar.passes.ops.rules import equation
from autopar.passes.price.candidate import Candidate
from autopar.passes.recompute.recompute import POLICIES, Again, Run
from autopar.passes.schedule.check_schedule import peak_in_flight
from autopar.passes.schedule.make_schedule import (
    SCHEDULES,
    NamedSchedule,
    in_phases,
    make_schedule,
)
from autopar.passes.schedule.schedule import Schedule
from autopar.passes.search.by_formula import in_flight
from autopar.passes.search.candidates import searched
from autopar.runtime.comm.comm import Comm


def add_op(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """What `declare` does, undone when the test ends."""
    monkeypatch.setitem(OPS, op.name, op)
    if not op.name.startswith("aten."):
        arguments = {a: (i, None) for i, a in enumerate(op.heeds.split())}
        monkeypatch.setitem(OWN, op.name, arguments)


class Toy(nn.Module):
    """Samples [batch, 6, 8] through a layer that is to be extended, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)
        self.both = nn.Bilinear(4, 8, 4, bias=False)
        self.down = nn.Linear(4, 2)

    def layer(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(self.layer(x)).flatten(0, 1), labels.flatten())


def case(model: Toy) -> Case:
    batch = {"x": torch.randn(4, 6, 8), "labels": torch.randint(2, (4, 6))}
    return Case(model, batch).double()


# --- An op ------------------------------------------------------------------------

BILINEAR = Op(
    "aten.bilinear",
    "input1 input2 weight",
    "... i+, ... j+, k i+ j+ -> ... k",
    "default(x(a, b), x(a, c), x(d, b, c))",
    linear="in each",
    is_product=True,
    flops=lambda node: 2 * node.out.numel * prod(node.operands[2].shape[1:]),
    autocast="equal",
)


class Bilinear(Toy):
    def layer(self, x: Tensor) -> Tensor:
        return self.both(self.up(x), x)


def test_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sums away may be split then, which trials on shards do not find out."""
    split = {"tp": ("d5",)}  # what `up` makes

    def splits_weight() -> bool:
        spec = case(Bilinear()).compile("tp=2", split=split).parameters["both.weight"]
        return any("tp" in axes for axes_of_dim in spec.slots for axes in axes_of_dim)

    assert not splits_weight()
    add_op(monkeypatch, BILINEAR)
    assert splits_weight()
    case(Bilinear()).verify("tp=2", split=split)
    for example in declared(BILINEAR):
        for one in draws(example):
            rule = equation(one)
            assert rule is not None
            for letter in splittable(one, rule):
                role = rule.roles[letter]
                assert all(holds(one, rule, letter, role, seed) for seed in SEEDS)


# --- A schedule -------------------------------------------------------------------


def one_ahead(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1F1B with a forward more ahead on each rank."""
    phases = [[(ranks - rank, "F0"), (microbatches, "F0 B0")] for rank in range(ranks)]
    return in_phases("one-ahead", microbatches, range(ranks), phases)


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = NamedSchedule(one_ahead, in_flight=lambda p, m, v: p + 1)
    monkeypatch.setitem(SCHEDULES, "one-ahead", ahead)
    case(Bilinear()).verify("pp=2", 4, schedule="one-ahead")
    schedule = make_schedule("one-ahead", 2, 4)
    peaks = [peak_in_flight(actions) for actions in schedule.ranks]
    candidate = Candidate(Mesh.parse("pp=2"), 1, 4, "one-ahead", 1, 0, "none", (1, 1))
    assert max(peaks) == in_flight(candidate) == 3
    assert "one-ahead" in searched()


# --- A mesh axis ------------------------------------------------------------------


def test_a_mesh_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AXES, "rows", Axis(("seq",), shares_parameters=True))
    for mesh, zero in (("rows=2", 0), ("rows=3", 3), ("rows=2,tp=2", 1)):
        case(Bilinear()).verify(mesh, zero=zero)
    program = case(Bilinear()).compile("rows=2", zero=3)
    assert all("rows" in spec.gathered for spec in program.parameters.values())


# --- A recomputation policy -------------------------------------------------------


def rowwise(run: Run) -> Again:
    """What ops make of a row at a time, which costs little to make again."""
    rows = (n for n in run.forward if op_of(n).rowwise)
    return Again({v.name for n in rows for v in n.results})


@pytest.mark.slow
def test_a_recomputation_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "rowwise", rowwise)

    def saved(recompute: str) -> int:
        program = cut_gpt().compile("tp=2", recompute=recompute)
        return program.stages[0].footprint.residuals

    cut_gpt().verify("tp=2", recompute="rowwise")
    assert saved("full") < saved("rowwise") < saved("none")


# --- A collective -----------------------------------------------------------------


def running_sum(
    comm: Comm, x: Tensor, axes: tuple[str], dim: int, back: bool
) -> Tensor:
    """The cumulative sum over the shards of a dim, or that from its end: x -> as x."""
    totals = comm.all_gather(x.sum(dim, keepdim=True), axes, dim)
    place, ranks = comm.coords[axes[0]], totals.shape[dim]
    start, end = (place + 1, ranks) if back else (0, place)
    others = totals.narrow(dim, start, end - start).sum(dim, keepdim=True)
    own = x.flip(dim).cumsum(dim).flip(dim) if back else x.cumsum(dim)
    return own + others


def d_running_sum(
    cts: Cotangents, node: Node, dys: OutCotangents
) -> list[Value | None]:
    x, axes, dim, back = node.args
    return [cts.emit(node.op, x, node, dys[0], axes, dim, not back)]


def over_ranks(at: Place, node: Node, local: Node) -> Node:
    axes = at.axes_of(node.operands[0], 1)
    args = (*local.operands, axes, 1, False)
    return replace(local, op="comm.running_sum", args=args) if axes else local


class Cumulative(Toy):
    def layer(self, x: Tensor) -> Tensor:
        return self.up(x).cumsum(1)


def test_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cumulative sum over rows that ranks share: without it they are gathered."""
    collective = Op(
        "comm.running_sum",
        "x axes dim back",
        kind="all_gather",
        derivative=d_running_sum,
    )
    add_op(monkeypatch, collective)
    monkeypatch.setattr(Comm, "running_sum", running_sum, raising=False)
    spread = replace(OPS["aten.cumsum"], rule="b s~ k -> b s~ k", on_rank=over_ranks)
    monkeypatch.setitem(OPS, "aten.cumsum", spread)
    case(Cumulative()).verify("cp=2")
    case(Cumulative()).verify("cp=3,dp=2", zero=1)
    (text,) = case(Cumulative()).compile("cp=2").modules.values()
    assert text.count("c.running_sum(") == 2 and "all_gather" not in text


# --- The guide --------------------------------------------------------------------


def test_the_guide_shows_each_in_at_most_fifteen_lines() -> None:
    root = Path(__file__).parents[1]
    section = (root / "examples/guides/contributing.md").read_text()
    shown = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    own = Path(__file__).read_text()
    assert len(shown) == 5
    for diff in shown:
        lines = diff.splitlines()
        assert len(lines) <= 15
        assert all((root / line[4:]).exists() for line in lines if line[:3] == "---")
        words = {
            w for line in lines if line[0] == "+" for w in re.findall(r"\w+", line)
        }
        assert {w for w in words if w not in own} <= {"self", "Axes"}
