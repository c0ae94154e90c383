"""Layers that do the same are captured once: the graph is that of the whole capture."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from loops_of_numbers import PRESENT
from losses_of_rows import of_all
from models import gpt2, llama, plain_gpt
from models_of_rows import case as experts
from models_of_rows import copies, in_place
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.options import make_plan
from autopar.passes.builder import prune
from autopar.passes.capture import trace as tracing
from autopar.passes.capture.called import Calls, RowsCounted
from autopar.passes.capture.trace import run_without_data, trace
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Value
from autopar.passes.layers import Repeats
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.traced import Traced
from autopar.verify import verify

ROWS, SEQ, DIM = 2, 4, 8


def lines(traced: Traced) -> list[str]:
    """All that a capture says, with values that are computed named by their order, and
    literals by their numbers."""
    graph = prune(traced.graph)
    names = {v.name: v.name for v in graph.sources}
    names |= {k: str((x.dtype, x.tolist())) for k, x in traced.literals.items()}

    def named(v: Value) -> Value:
        return replace(v, name=names[v.name])

    text = [str(v) for group in (graph.params, graph.buffers) for v in group]
    numbers = itertools.count()
    for node in graph.nodes:
        call = node.substitute(named)
        for v in node.results:
            names[v.name] = f"v{next(numbers)}"
        made = [(v.type, traced.autocast.get(v.name)) for v in node.results]
        text.append(f"{made} = {replace(call, outs=())}  {node.location}")
    tables = sorted(traced.trainable), sorted(traced.aliases.items()), traced.outputs
    return [*text, str([named(v) for v in graph.outputs]), *map(str, tables)]


@pytest.fixture
def folded(monkeypatch) -> list[Repeats]:
    """What was captured once."""
    folded: list[Repeats] = []

    def noted(*given: Any) -> Traced | None:
        traced = capture_repeats(*given)
        folded.extend([given[-1]] if traced else [])
        return traced

    capture_repeats = tracing._capture_repeats
    monkeypatch.setattr(tracing, "_capture_repeats", noted)
    return folded


def check(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> None:
    assert lines(capture_model(model, batch, **options)) == lines(
        trace(model, batch, **options)
    )


class Layer(nn.Module):
    """One of a list; `kind` decides what it computes."""

    def __init__(self, number: int, kind: str = "") -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.tensor(1.0 + number))
        self.plain = torch.tensor(1.0 + number)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, first: Tensor, before: Tensor) -> Tensor:
        y = self.linear(x)
        match self.kind:
            case "buffer":
                y = y * self.scale
            case "constant":
                y = y / (self.number + 1)
            case "plain":
                y = y * self.plain
            case "first":
                y = y + first
            case "before":
                y = y + before
            case "literal":
                y = y * torch.tensor(0.5)
            case "no_grad":
                with torch.no_grad():
                    y = y + x.mean()
            case "wide":
                with torch.autocast("cuda", enabled=False):
                    y = self.linear(x)
            case "again":
                y = self.linear(x)
            case "in place":
                y.mul_(2.0)
            case "stream":
                return x.add_(y)
            case "dropout":
                y = self.dropout(y)
            case "written":
                first[0].mul_(2.0)
                y = y + first
        return x + y


class Layers(nn.Module):
    """Layers of given kinds; between: what is done after each, outside of it."""

    def __init__(
        self, kinds: list[str], between: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(Layer(i, kind) for i, kind in enumerate(kinds))
        self.gains = nn.Parameter(torch.ones(len(kinds)))
        self.between = between

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first, before = x.clone(), x
        for i, layer in enumerate(self.layers):
            x, before = layer(x, first, before), x
            if self.between:
                x = self.between(i, x)
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"tokens": torch.arange(ROWS * SEQ).reshape(ROWS, SEQ)}


@pytest.mark.slow
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_of_many_layers_few_are_captured(build, folded) -> None:
    case = build(layers=9)
    check(case.model, case.batch, loss_fn=case.loss_fn)
    (repeats,) = folded
    assert (repeats.total, repeats.first, repeats.period) == (9, 2, 1)
    assert len(repeats.kept) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        (["", "first"] * 6, (0, 1, 2, 3, 10, 11)),
        ([""] * 9 + ["constant"], (0, 1, 2, 8, 9)),
        (["buffer"] * 9, (0, 1, 2, 8)),
        (["literal"] * 9, (0, 1, 2, 8)),
        (["no_grad"] * 9, (0, 1, 2, 8)),
        (["in place"] * 9, (0, 1, 2, 8)),
        (["stream"] * 9, (0, 1, 2, 8)),
        (["dropout"] * 9, (0, 1, 2, 8)),
    ],
    ids=str,
)
def test_patterns_are_found(kinds, kept, folded) -> None:
    check(Layers(kinds), batch())
    assert [one.kept for one in folded] == [kept]


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    "model",
    [
        Layers(["constant"] * 9),
        Layers(["plain"] * 9),
        Layers(["before"] * 9),
        Layers(["", "written", *[""] * 3, *["first"] * 5]),
        Layers(["written"] * 9),
        Layers([""] * 9, lambda i, x: x * (i + 1)),
    ],
)
def test_what_differs_is_captured_as_it_is(model, folded) -> None:
    check(model, batch())
    assert not folded


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.parametrize("add", [in_place, copies, *PRESENT])
def test_loops_over_experts_repeat(add, folded) -> None:
    """Nobody knows how many rows an expert has, in whatever layer."""
    one = experts(of_all, *[add] * 8)
    check(one.model, one.batch)
    assert [repeats.kept for repeats in folded] == [(0, 1, 2, 7)]


@pytest.mark.slow
def test_layers_that_differ_where_no_expert_is_hit_do_not_repeat(folded) -> None:
    def add(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        some = False
        for e in chosen.unique():
            some = True
            row, _ = torch.where(chosen == e)
            x = x.index_add(0, row, m.experts[int(e)](x[row]))
        return x if some or not m.differs else x + 1

    one = experts(of_all, *[add] * 7)
    for layer in one.model.layers:
        layer.differs = layer is one.model.layers[4]
    with pytest.raises(CaptureError, match="unique"):
        capture_model(one.model, one.batch)
    assert not folded


@pytest.mark.slow
def test_what_asks_how_many_rows_there_are_is_captured_as_it_is(folded) -> None:
    def by_count(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            row, place = torch.where(chosen == e)
            own = expert(x[row].view(row.shape[0], -1))
            y[row] += own * weight[row, place, None]
        return y

    one = experts(of_all, *[by_count] * 6)
    check(one.model, one.batch)
    assert not folded


@pytest.mark.slow
def test_what_stands_between_layers_repeats_too(folded) -> None:
    check(Layers([""] * 9, lambda i, x: x.tanh()), batch())
    assert len(folded) == 1


def test_layers_repeat_that_do_not_run_on_the_meta_device(folded) -> None:
    def add(_: int, x: Tensor) -> Tensor:
        return x + torch.arange(DIM, device="cpu")

    check(Layers([""] * 9, add), batch())
    assert len(folded) == 1


@pytest.mark.slow
def test_a_layer_that_runs_twice_is_captured_as_it_is(folded) -> None:
    model = Layers([""] * 9)
    model.layers[5] = model.layers[4]
    check(model, batch())
    assert not folded


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask", [len, Tensor.numel, lambda rows: rows.shape[0], lambda rows: rows.size(0)]
)
def test_how_many_rows_there_are_is_seen_however_it_is_asked(ask) -> None:
    """A forward may go on as it says: calls of one without data say nothing then."""

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = x[x[:, 0] > 0]
            return rows.sum() / ask(rows)

    how = {"x": torch.ones(4, 2)}, None, None, (), None
    with pytest.raises(RowsCounted):
        run_without_data(Asking(), *how, True, Calls(Asking()).in_one)


def test_frozen_layers_and_shared_weights(folded) -> None:
    model = Layers([""] * 10)
    for layer in list(model.layers)[:6]:
        layer.requires_grad_(False)
    for layer in list(model.layers)[1:]:
        layer.linear.bias = model.layers[0].linear.bias
    check(model, batch())
    assert len(folded) == 1


@pytest.mark.slow
def test_autocast_is_noted_of_all_layers(folded) -> None:
    case = plain_gpt(layers=8)
    check(case.model, case.batch, loss_fn=case.loss_fn, precision=torch.bfloat16)
    assert len(folded) == 1


@pytest.mark.slow
def test_layers_under_another_autocast_are_others(folded) -> None:
    """They call the same with the same, but compute in another precision."""
    kinds = [*["again"] * 4, "wide", *["again"] * 3]
    check(Layers(kinds), batch(), precision=torch.bfloat16)
    assert not folded


@pytest.mark.slow
def test_outputs_by_layer_are_captured_as_they_are(folded) -> None:
    case = gpt2(layers=8)
    case.model.config.output_hidden_states = True
    check(case.model, case.batch, outputs=("hidden_states.3",))
    assert not folded


@pytest.mark.slow
def test_the_untouched_model_is_what_runs() -> None:
    case = llama(layers=8).double()
    traced = capture_model(case.model, case.batch)
    program = compile_program(traced, make_plan("pp=2,tp=2", microbatches=2), PLAIN)
    assert "model.layers.7.mlp.down_proj.weight" in program.parameters
    verify(program, case.model, case.batch).check()


def draw(seed: int) -> Layers:
    """Layers of a pattern, with some that are others."""
    rng = random.Random(seed)
    kinds = "", "buffer", "first", "before", "literal", "in place", "stream", "dropout"
    kinds += "wide", "again", "no_grad"
    pattern = rng.choices(kinds, k=rng.choice((1, 1, 2, 3)))
    drawn = (pattern * 14)[: rng.randint(6, 14)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        drawn[rng.randrange(len(drawn))] = rng.choice((*kinds, "constant", "written"))
    between = rng.choice((None, None, lambda i, x: x.tanh(), lambda i, x: x * (i > 3)))
    return Layers(drawn, between)


def check_drawn(seed: int) -> None:
    check(draw(seed), batch(), precision=torch.bfloat16 if seed % 2 else None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_layers(seed) -> None:
    check_drawn(seed)


@pytest.mark.nightly
def test_many_drawn_layers(folded) -> None:
    for seed in range(4, 100):
        check_drawn(seed)
    assert len(folded) > 20
