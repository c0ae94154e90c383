"""Rows that are sorted by their experts, worked on and put back: each rank has its own,
as what is done where they were is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from draw_sorted_rows import EXPERTS, WIDTH, Model
from models import mixture, token_batch
from torch import Tensor, nn

from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.rows.choices import numbers_of
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.ops.experts import PRODUCT
from autopar.passes.pipeline import compile_program
from autopar.passes.proof.extents import Extent
from autopar.proof.small import make_small

CHOSEN = 2


def by_order_of_order(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    y = m.product(x[order // CHOSEN], flat[order])
    y = y * weight.flatten()[order].unsqueeze(-1)
    return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)


def by_written_rows(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    number, order = torch.sort(chosen.view(-1))
    y = torch.empty(len(order), WIDTH, dtype=x.dtype)
    y[order] = m.product(x.repeat_interleave(CHOSEN, 0)[order], number)
    return (y.view(*chosen.shape, -1) * weight[..., None]).sum(1)


def by_scattered_places(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, descending=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    y = m.product(
        x.index_select(0, order.div(CHOSEN, rounding_mode="floor")), flat[order]
    )
    return torch.einsum("nkd,nk->nd", y[places].unflatten(0, chosen.shape), weight)


def by_added_rows(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    token = torch.arange(len(x)).repeat_interleave(CHOSEN)
    number, order = chosen.flatten().sort(0)
    token, share = token.index_select(0, order), weight.flatten()[order]
    y = m.product(x[token], number) * share[:, None]
    return torch.zeros_like(x).index_add(0, token, y)


def by_scattered_sums(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort()
    token = (order // CHOSEN)[:, None].expand(-1, WIDTH)
    y = m.product(x.gather(0, token), chosen.flatten()[order])
    return x.scatter_add(0, token, y * weight.flatten()[order, None])


def sorted_twice(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Where rows come from, and where they go, is asked for apart."""
    flat = chosen.flatten()
    y = m.product(x[flat.argsort() // CHOSEN], flat.sort()[0])
    back = flat.argsort().argsort()
    return (y[back].view(*chosen.shape, -1) * weight[..., None]).sum(1)


def by_slots(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """All first choices come before all second ones."""
    number, order = chosen.T.flatten().sort(stable=True)
    token = order % len(x)
    y = m.product(x[token], number) * weight.T.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


def by_gathered(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    token = order // CHOSEN
    y = m.product(torch.take_along_dim(x, token[:, None], 0), chosen.flatten()[order])
    y = y.gather(0, order.argsort()[:, None].expand(-1, WIDTH))
    return (y.view(*chosen.shape, -1) * weight[..., None]).sum(1)


UNSORTED = (
    by_order_of_order, by_written_rows, by_scattered_places, by_added_rows,
    by_scattered_sums, sorted_twice, by_slots, by_gathered,
)  # fmt: skip


# What is not done row by row.
SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "running sum": lambda y: y.cumsum(0) / 50,
    "roll": lambda y: y + y.roll(1, 0),
    "flip": lambda y: y + y.flip(0),
    "shares": lambda y: y.softmax(0),
    "half": lambda y: torch.cat([y[: len(y) // 2], y[: len(y) // 2]]),
    "first": lambda y: y + y[0],
    "pairs": lambda y: (y.unflatten(0, (-1, 2)) + y[:2]).flatten(0, 1),
    "differences": lambda y: torch.cat([y[:1], y.diff(dim=0)]),
    "rows as columns": lambda y: y + (y @ y.T @ y) / 50,
    "as places": lambda y: y * torch.arange(len(y))[:, None] / 50,
    "largest": lambda y: y * y.argmax(0) / 50,
    "itself again": lambda y: y[torch.arange(len(y) - 1, -1, -1)],
    "diagonal": lambda y: y + torch.tril(torch.ones(len(y), len(y)) / 50).double() @ y,
}


# Of scores and token ids, two numbers a row, which are known to be below 4.
NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hash": lambda scores, ids: ids[:, None] * torch.arange(1, 3) % EXPERTS,
    "stacked": lambda scores, ids: torch.stack(
        [scores.argmax(-1), scores.roll(1, -1).argmax(-1)], 1
    ),
    "repeated": lambda scores, ids: scores.argmax(-1).repeat_interleave(CHOSEN),
    "expanded": lambda scores, ids: scores.argmax(-1)[:, None].expand(-1, CHOSEN),
    "sorted": lambda scores, ids: scores.topk(CHOSEN)[1].sort(-1)[0],
    "gathered": lambda scores, ids: scores.topk(3)[1].gather(1, scores.topk(2)[1] % 3),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_counted_however_they_were_chosen(name: str) -> None:
    def work(m: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, float]:
        flat = NUMBERS[name](m.router(x), ids).flatten()
        order = flat.argsort(stable=True)
        pieces = x[order // CHOSEN].split(flat.bincount(minlength=EXPERTS).tolist())
        y = torch.cat([f(p) for f, p in zip(m.experts, pieces, strict=True)])
        return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1), 0.0

    torch.manual_seed(0)
    case = Case(Model(work), token_batch(4, 8)).double()
    assert sorts(case) == (name == "sorted")  # its own
    case.verify("ep=2", 2)


def test_numbers_that_may_be_any_are_not_counted() -> None:
    def work(m: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, float]:
        return x * m.table[ids].flatten().bincount(minlength=EXPERTS).max(), 0.0

    case = Case(Model(work), token_batch(4, 8))
    with pytest.raises(CaptureError, match=r"bincount(?s:.*)fix .*F\.one_hot"):
        case.trace()


def seen(view: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def work(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        y = view(m.product(x[order // CHOSEN], flat[order]))
        return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)

    return work


def back_by_another(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Of two columns that are sorted, one with the order of the other."""
    first, second = (chosen[:, i].argsort(stable=True) for i in range(2))
    y = m.product(x[first], chosen[first, 0])
    return y[second.argsort()] * weight[:, :1]


def every_column(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The order is one of columns, where rows are as many as these."""
    x, chosen = x[:WIDTH], chosen[:WIDTH, 0]
    order = chosen.argsort(stable=True)
    y = m.product(x[order], chosen[order])
    back = torch.zeros_like(y).scatter_(0, order.expand(WIDTH, WIDTH), y)
    return torch.cat([back * weight[:WIDTH, :1], weight.new_zeros(32 - WIDTH, WIDTH)])


def between_ends(m: Any, x: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sorted rows by the experts between whose ends they lie, put back."""
    number = torch.searchsorted(ends, torch.arange(len(order)), right=True)
    y = m.product(x[order // CHOSEN], number)
    return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)


def by_cast_numbers(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """The order is one of what numbers are cast to, the counts are of the numbers."""
    flat = chosen.flatten()
    order = flat.bool().argsort(stable=True)
    ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0)
    return between_ends(m, x, order, ends)


def by_one_count(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """How many there are of one number is no count of all."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = (flat == 1).sum(0, keepdim=True).cumsum(0)
    return between_ends(m, x, order, ends)


def by_largest(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Ends are of what one of several results is."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = weight.flatten().topk(EXPERTS - 1)[0].cumsum(0)
    number = torch.searchsorted(ends, weight.flatten(), right=True)
    y = m.product(x[order // CHOSEN], number)
    return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)


def columns_of_a_table(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows lie along another dim of what is looked up, in which their order is seen."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    sums = m.router.weight[:, flat[order]].cumsum(1)
    y = m.product(x[order // CHOSEN], flat[order])
    y = y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)
    return y + (sums.sum(0) * torch.arange(len(order))).mean() / 50


def ends_of_rows(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A sum along a dim of one is none."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, EXPERTS).sum(0).view(1, -1).cumsum(0).view(-1)
    number = torch.searchsorted(ends, torch.arange(len(order)), right=True)
    y = m.product(x[order // CHOSEN], number.clamp(max=EXPERTS - 1))
    return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)


SORTED = {k: seen(view) for k, view in SEEN.items()} | {
    "another": back_by_another,
    "cast": by_cast_numbers,
    "one count": by_one_count,
    "largest": by_largest,
    "table": columns_of_a_table,
    "ends": ends_of_rows,
    "columns": every_column,
}


def of(work: Callable[..., Tensor]) -> Case:
    def chosen(m: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, float]:
        return work(m, x, *m.router(x).softmax(-1).topk(CHOSEN, dim=-1)), 0.0

    torch.manual_seed(0)
    return Case(Model(chosen), token_batch(4, 8)).double()


def sorts(case: Case) -> int:
    graph = normalize(case.trace()).graph
    return sum(n.name in ("aten.sort", "aten.argsort") for n in graph.nodes)


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,tp=2"])
@pytest.mark.parametrize("work", UNSORTED)
def test_rows_are_not_sorted(work: Callable[..., Tensor], mesh: str) -> None:
    case = of(work)
    assert not sorts(case)
    case.verify(mesh, 2)
    remarks = case.compile(mesh).remarks
    assert not any("found by trial" in remark for remark in remarks), remarks


def test_a_row_without_a_gradient_has_none() -> None:
    """Rows that are looked up by an embedding have none where it is padding."""

    def work(m: Any, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = F.embedding(order // CHOSEN, x, padding_idx=3)
        y = m.product(rows, chosen.flatten()[order])
        return y[order.argsort()].view(len(x), CHOSEN, WIDTH).sum(1)

    of(work).verify("dp=2", 1)


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("name", SORTED)
def test_an_order_that_is_seen_stays(name: str) -> None:
    case = of(SORTED[name])
    assert sorts(case)
    case.verify("dp=2", 1)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_the_library_s_own_way_is_as_its_looked_up_one(kind: str) -> None:
    ways = [
        mixture(kind, experts_implementation=w) for w in ("grouped_mm", "batched_mm")
    ]
    grouped, looked_up = (
        [n.name for n in normalize(c.trace()).graph.nodes] for c in ways
    )
    assert grouped.count(PRODUCT) == looked_up.count(PRODUCT) == 4
    assert not {"aten.sort", "aten.histc", "aten.searchsorted"} & {*grouped}


def test_the_library_s_own_way_takes_microbatches() -> None:
    case = mixture("mixtral", experts_implementation="grouped_mm")
    case.verify("dp=2", 2)


def test_the_library_s_own_way_is_proved_small() -> None:
    """Also where each number is counted in a bin of its own."""
    case = mixture("mixtral", experts_implementation="grouped_mm")
    batch = dict.fromkeys(case.batch, torch.zeros(64, 128, dtype=torch.long))
    model = case.model.to("meta")
    program = compile_program(trace(model, batch), make_plan("dp=2,ep=2"))
    small = make_small(program, model, batch)
    assert small.sizes[Extent(128)] < 128 and len(small.program.mesh.axes) == 2


class Replaced(nn.Module):
    """Of six numbers the last is none, or some are another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rows = nn.Parameter(torch.ones(6)), nn.Embedding(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x * self.scale).topk(2)[1]
        without_last = chosen.masked_fill(chosen == 5, 0)
        larger = chosen.masked_fill(x[:, :2] > 0, 7)
        as_many = chosen.masked_fill(chosen == 2, 0)
        return sum(self.rows(i).square().sum() for i in (without_last, larger, as_many))


def test_numbers_are_counted_after_some_were_replaced() -> None:
    graph = trace(Replaced(), {"x": torch.randn(4, 6)}).graph
    made = {v.name: node for node in graph.nodes for v in node.results}
    filled = [n.out for n in graph.nodes if n.name == "aten.masked_fill"]
    assert [numbers_of(v, made) for v in filled] == [5, 8, 6]


class Named(nn.Module):
    """A table names numbers, of which scores are gathered, and rows looked up, one of
    them from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6).view(3, 2) % 4)
        self.scores = nn.Parameter(torch.ones(2, 5))

    def forward(self, ids: Tensor) -> Tensor:
        chosen, last = self.table[ids], self.table[ids] - 1
        scores = self.scores.gather(1, chosen) + self.scores.T[last].sum(-1)
        return (scores * chosen.flatten().view(2, 2)).sum()


def test_numbers_are_as_many_as_the_scores_they_pick() -> None:
    """An index of Python's may be less than 0 as well."""
    graph = trace(Named(), {"ids": torch.tensor([0, 2])}).graph
    made = {v.name: node for node in graph.nodes for v in node.results}
    flat = next(n for n in graph.nodes if n.name in ("aten.flatten", "aten.reshape"))
    last = next(n for n in graph.nodes if n.name == "aten.sub")
    assert [numbers_of(v, made) for v in (flat.out, last.out)] == [5, None]


def test_an_expert_that_does_nothing_is_no_expert() -> None:
    """As Zaya has one more choice than experts."""
    transformers = pytest.importorskip("transformers")
    if "zaya" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no Zaya")
    way = {"experts_implementation": "grouped_mm", "num_experts_per_tok": 1}
    case = mixture("zaya", router_hidden_size=8, **way)
    assert not {"aten.sort", "aten.histc"} & {
        n.name for n in normalize(case.trace()).graph.nodes
    }
    case.verify("dp=2", 2)
