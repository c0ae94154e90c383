"""A newcomer adds an op, a schedule, a mesh axis, a recomputation policy or a
collective in one place: each is added here as its guide shows it, and proved on all
ranks against the untouched model, with nothing else touched.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from declared import SEEDS, declared, draws, splittable
from models import cut_gpt
from torch import Tensor, nn

from autopar.passes.dims.probe import holds
from autopar.passes.graph import OWN, Node, Value
from autopar.passes.mesh import Mesh
from autopar.passes.ops import op as op_module
from autopar.passes.ops.cotangents import Cotangents
from autopar.passes.ops.op import OPS, Op, OutCotangents, Place, declaration
from autopar.passes.ops.rules import equation
from autopar.passes.price.candidate import Candidate
from autopar.passes.schedule.check_schedule import peak_in_flight
from autopar.passes.schedule.make_schedule import (
    make_schedule,
)
from autopar.passes.search.by_formula import in_flight
from autopar.passes.search.candidates import searched
from autopar.runtime.comm.comm import Comm

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "examples/guides/contributing.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", GUIDE, re.DOTALL)


def add_op(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """What `declare` does, undone when the test ends."""
    monkeypatch.setitem(OPS, op.name, op)
    monkeypatch.setattr(op_module, "declaration", declaration.__wrapped__)
    if not op.name.startswith("aten."):
        arguments = {a: (i, None) for i, a in enumerate(op.heeds.split())}
        monkeypatch.setitem(OWN, op.name, arguments)


def perform(number: int, monkeypatch: pytest.MonkeyPatch, **known: Any) -> Any:
    """Does what a diff of the guide shows, until the test ends. known: names that its
    files would have. Returns all that is known then."""
    names = SimpleNamespace(**known)
    for path, changes in re.findall(r"--- (\S+)\n((?:(?!---).*\n)*)", DIFFS[number]):
        dotted = path.removesuffix(".py").replace("/", ".")
        module = import_module(
            f"autopar.{dotted}".replace("autopar.autopar", "autopar")
        )
        source, table = (ROOT / path).read_text(), ""
        vars(names).update({**vars(module), **vars(names)})
        for sign, lines in re.findall(r"^((?:\+.*\n)+)|^([^+].*\n)", changes, re.M):
            if lines:
                assert lines[1:] in source, f"{path} has no line '{lines[1:]}'"
                table = lines[1:].partition(":")[0]
                continue
            text = dedent(sign.replace("\n+", "\n")[1:])
            if text.startswith('"'):
                for name, made in eval(f"{{{text}}}", vars(names)).items():
                    monkeypatch.setitem(vars(module)[table], name, made)
            elif text.startswith("Op("):
                for op in eval(f"({text})", vars(names)):
                    add_op(monkeypatch, op)
            else:
                exec(text + "    ..." * text.endswith(":\n"), vars(names))
    return names


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
    perform(0, monkeypatch)
    assert splits_weight()
    case(Bilinear()).verify("tp=2", split=split)
    for example in declared(OPS["aten.bilinear"]):
        for one in draws(example):
            rule = equation(one)
            assert rule is not None
            for letter in splittable(one, rule):
                role = rule.roles[letter]
                assert all(holds(one, rule, letter, role, seed) for seed in SEEDS)


# --- A schedule -------------------------------------------------------------------


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    perform(1, monkeypatch)
    case(Bilinear()).verify("pp=2", 4, schedule="one-ahead")
    schedule = make_schedule("one-ahead", 2, 4)
    peaks = [peak_in_flight(actions) for actions in schedule.ranks]
    candidate = Candidate(Mesh.parse("pp=2"), 1, 4, "one-ahead", 1, 0, "none", (1, 1))
    assert max(peaks) == in_flight(candidate) == 3
    assert "one-ahead" in searched()


# --- A mesh axis ------------------------------------------------------------------


def test_a_mesh_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    perform(2, monkeypatch)
    for mesh, zero in (("rows=2", 0), ("rows=3", 3), ("rows=2,tp=2", 1)):
        case(Bilinear()).verify(mesh, zero=zero)
    program = case(Bilinear()).compile("rows=2", zero=3)
    assert all("rows" in spec.gathered for spec in program.parameters.values())


# --- A recomputation policy -------------------------------------------------------


@pytest.mark.slow
def test_a_recomputation_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    perform(3, monkeypatch)

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
    own = perform(4, monkeypatch, d_running_sum=d_running_sum)
    shown, made = signature(own.running_sum), signature(running_sum)
    assert [*shown.parameters][1:] == [*made.parameters][1:]
    monkeypatch.setattr(Comm, "running_sum", running_sum, raising=False)
    spread = replace(OPS["aten.cumsum"], rule="b s~ k -> b s~ k", on_rank=over_ranks)
    add_op(monkeypatch, spread)
    case(Cumulative()).verify("cp=2")
    case(Cumulative()).verify("cp=3,dp=2", zero=1)
    (text,) = case(Cumulative()).compile("cp=2").modules.values()
    assert text.count("c.running_sum(") == 2 and "all_gather" not in text


# --- The guide --------------------------------------------------------------------


def test_the_guide_shows_each_in_at_most_fifteen_lines() -> None:
    assert len(DIFFS) == 5
    assert all(len(diff.splitlines()) <= 15 for diff in DIFFS)
