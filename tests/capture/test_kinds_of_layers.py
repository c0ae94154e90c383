"""Whether few layers stand for all of them is not told by their attributes alone: what
a forward does with each counts, and where it can be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from cases import Case
from draw_carried import Carrying, Drawn
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.machine.hardware import cluster_of
from autopar.passes.errors import CaptureError
from autopar.passes.mesh import Mesh
from autopar.planner.infeasible import NothingToChoose
from autopar.planner.planner import ShortModel, find_plans, plan_of

WIDTH, VOCAB, COUNT = 16, 32, 12

Body = Callable[["Layered", Tensor], Tensor]


class Layered(nn.Module):
    """body: what is done with the embedded tokens."""

    def __init__(self, body: Body, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.embed, self.adapter = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = layers if isinstance(layers, nn.Module) else nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self, self.embed(ids))
        return (x @ self.embed.weight.T).logsumexp(-1).mean()

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        yield from enumerate(self.layers)


class Table(nn.Linear):
    """Has a table that is no buffer, as rotary embeddings keep theirs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table = torch.linspace(0.5, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x * self.table))


def linears(count: int = COUNT) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def in_turn(model: Layered, x: Tensor) -> Tensor:
    for _, layer in model.numbered():
        x = x + torch.tanh(layer(x))
    return x


def with_adapters(model: Layered, x: Tensor) -> Tensor:
    for i, layer in model.numbered():
        x = x + torch.tanh(layer(x))
        if i % 3 == 2:
            x = x + model.adapter(x)
    return x


def with_first_values(model: Layered, x: Tensor) -> Tensor:
    first = x
    for i, layer in model.numbered():
        values = layer(x)
        if i == 0:
            first = values
        else:
            values = 0.5 * values + 0.5 * first
        x = x + torch.tanh(values)
    return x


def with_few_adapters(model: Layered, x: Tensor) -> Tensor:
    for i, layer in model.numbered():
        x = x + torch.tanh(layer(x))
        if i in (3, 4, 8):
            x = x + model.adapter(x)
    return x


def from_the_last(model: Layered, x: Tensor) -> Tensor:
    for layer in reversed([*model.layers]):
        x = x + torch.tanh(layer(x))
    return x


def case_of(body: Body, layers: Sequence[nn.Module] = ()) -> Case:
    model = Layered(body, layers or linears())
    return Case(model, {"ids": torch.randint(VOCAB, (16, 6))})


@pytest.mark.parametrize(
    ("body", "layers", "period"),
    [
        (in_turn, linears(), 1),
        (in_turn, nn.Sequential(*linears()), 1),
        (with_adapters, linears(), 3),
        (with_first_values, linears(), 1),
        (with_few_adapters, linears(), 4),
        (in_turn, linears(3) * 4, None),  # the same three, again and again
        (from_the_last, linears(), None),
    ],
)
def test_few_layers_stand_for_all_where_they_do_what_all_do(
    body, layers, period
) -> None:
    of = case_of(body, layers).short()
    assert (of.layers.period if of.layers else None) == period


class Wide(nn.Linear):
    """Another layer, as of a mixture's first ones, which are dense."""


@pytest.mark.parametrize("body", [in_turn, with_first_values])
def test_unlike_layers_before_the_pattern_are_of_its_first_repeat(body) -> None:
    case = case_of(body, [*(Wide(WIDTH, WIDTH) for _ in range(3)), *linears()])
    of = case.short()
    assert of.layers is not None
    assert (of.layers.before, of.layers.period, of.layers.kept) == (3, 1, 6)
    assert of.starts == ("layers.0", "layers.4", "layers.5") and of.runs == COUNT
    is_priced_as_whole(of)
    best = find_plans(of, cluster_of("2xA100-80GB"), 16, mesh=Mesh.parse("pp=2"))
    plan = plan_of(best.best[0].candidate, of)
    case.verify("pp=2", plan.microbatches, cuts=plan.cuts[:1])


@pytest.mark.parametrize("body", [with_adapters, with_few_adapters])
def test_a_plan_is_priced_as_the_whole_model_is(body) -> None:
    is_priced_as_whole(case_of(body).short())


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize("seed", [2, 4, 6, 8, 10, 13, 17, 18, 24])  # patterns of layers
def test_drawn_models_are_priced_as_the_whole_ones_are(seed: int) -> None:
    """What all layers read of the first, or of a table by layer, is counted for each:
    memory is 3.4 % off in the farthest of these."""
    drawn = Drawn.of(seed, range(12, 22))
    model = Carrying(drawn.count, drawn.habits, drawn.far, drawn.stray)
    case = Case(model, {"ids": torch.randint(VOCAB, (16, 12))})
    is_priced_as_whole(case.short(), memory=0.04)


def is_priced_as_whole(of: ShortModel, memory: float = 0.01) -> None:
    assert of.again is not None and of.layers is not None
    wishes = {"mesh": Mesh.parse("dp=2"), "zero": (0,), "recompute": ("none",)}
    cluster = cluster_of("2xA100-80GB")
    few, whole = (
        find_plans(short, cluster, 16, **wishes).best[0]
        for short in (of, of.again(few=False))
    )
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert few.peak == pytest.approx(whole.peak, rel=memory)


def test_pipelines_that_cannot_be_planned_are_told_so() -> None:
    of = case_of(from_the_last).short()
    with pytest.raises(NothingToChoose, match="no pipeline can be planned") as error:
        find_plans(of, cluster_of("2xA100-80GB"), 16, mesh=Mesh.parse("pp=2"))
    assert "autopar compile ... --mesh pp=2" in error.value.fix


def test_layers_that_hold_equal_tables_are_captured_once() -> None:
    case = case_of(in_turn, [Table() for _ in range(COUNT)])
    assert case.trace().graph.constants
    case.verify("dp=2,pp=2", 2, cuts=("layers.6",))


def of_unlike_shapes(model: Layered, x: Tensor) -> Tensor:
    return torch.cat([in_turn(model, x), x[:, :, : len(model.layers)]])


def test_torch_does_not_log_what_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    case = case_of(of_unlike_shapes)
    with pytest.raises(CaptureError):
        capture_model(case.model, case.batch)
    assert "failed while attempting" not in caplog.text
