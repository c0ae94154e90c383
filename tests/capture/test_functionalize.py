"""Writes in place become new values, or are refused where somebody would see them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpret import loss_of
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.graph import resolve


class Body(nn.Module):
    """Runs a function of its weight and an input."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        self.bias = nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.register_buffer("offset", torch.ones(4))
        self.table = torch.ones(4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).sum()


def chain(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.mul_(2).add_(m.offset)
    h.relu_()
    return h


def named_twice(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    same = h.add_(1)
    same.mul_(3)
    return h + same


def read_before(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    before = h + 0.5
    h.masked_fill_(h > 0, 9.0)
    return before + h


def literal(m: Body, x: Tensor) -> Tensor:
    total = torch.tensor(0.5)
    total += 1
    times = torch.tensor([1, 1, 1])
    return x.repeat_interleave(times, 0, output_size=3) * total


def literals(m: Body, x: Tensor) -> Tensor:
    order = torch.tensor([3, 1, 0, 2])
    return (x * m.weight * torch.tensor([0.5, 1, 2, 3]))[:, order].exp()


def filled(m: Body, x: Tensor) -> Tensor:
    return x * torch.empty_like(x).fill_(3.0) + torch.empty(4).zero_()


def copied(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.copy_(m.offset)
    return h + x


def view_of_dead_base(m: Body, x: Tensor) -> Tensor:
    h = (x * m.weight).view(-1)
    h[h > 0] = 2.0
    return h


def activations(m: Body, x: Tensor) -> Tensor:
    h = F.dropout(x * m.weight, 0.0, training=False, inplace=True)
    return F.silu(h, inplace=True)


def own_input(m: Body, x: Tensor) -> Tensor:
    x[x < 0] = 0.25
    return x * m.weight


def logical(m: Body, x: Tensor) -> Tensor:
    mask = x > 0
    mask |= x < -1
    return x * mask


def returned_as_it_is(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    same = F.dropout(h, 0.5, training=False)
    same.mul_(2)
    return h


def base_read_later(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.view(-1).mul_(2)
    return h


def view_read_later(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    flat = h.view(-1)
    h.mul_(2)
    return flat


def part(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h[:, 0] = 0.0
    return h


def parts_of_parts(m: Body, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    rows = h.t()[1:3]
    first, rest = h[0], h[1:]
    rows[0, ::2] = x[::2, 1] * m.weight[::2, 1]
    rest.transpose(0, 1)[-1].add_(1)
    rest.narrow(1, 1, 3).mul_(m.weight[1:, 1:])
    h.unsqueeze(0).select(2, 0).neg_()
    return h * 2 + rows.sum() * first + rest[0]


def halves(m: Body, x: Tensor) -> Tensor:
    h = torch.empty_like(x, dtype=torch.float64)
    h[:, :2] = x[:, 2:] * m.weight[:, 2:]
    h[:, 2:] = -x[:, :1]
    return h


def of_this_layout(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.reshape(-1).mul_(2)
    h.flatten()[3] = 5.0
    h.t().reshape(-1).mul_(3)  # a copy
    h.t().contiguous().add_(1)
    return h


def of_one_type(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    same = h.type_as(x).to(h.dtype).contiguous()
    same += 1
    h.float().reshape_as(x).expand(3, 4).mul_(2)
    h.double().mul_(9)  # a copy
    return h


def table(m: Body, x: Tensor) -> Tensor:
    """Filled alike in each forward, before it is read."""
    m.offset[:2] = torch.arange(2) * m.bias.detach()
    m.table.copy_(m.offset.flip(0))
    m.table[torch.tensor([1])] = 7.0
    return x * m.weight + m.offset * m.table


def keeps_its_type(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h += torch.full((4,), 0.1, dtype=torch.float64)
    return h


ALLOWED = [
    table, keeps_its_type, literals,
    chain, named_twice, read_before, literal, filled, copied, view_of_dead_base,
    activations, own_input, logical,
    base_read_later, view_read_later, part, parts_of_parts, halves,
    returned_as_it_is, of_this_layout, of_one_type,
]  # fmt: skip


@pytest.mark.parametrize("body", ALLOWED)
def test_later_reads_see_the_new_value(body: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Body(body), torch.randn(3, 4)
    traced = trace(model, {"x": x})
    assert not any(resolve(n.op)._schema.is_mutable for n in traced.graph.nodes)
    for _ in range(2):  # what one forward leaves, the next one finds
        found = loss_of(traced, model, {"x": x})
        torch.testing.assert_close(found, model(x.clone()))


def hidden_from_autograd(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.detach()[0] = 0.0
    return h


def along_the_diagonal(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    h.diagonal().mul_(2)
    return h


VIEWS = [hidden_from_autograd, along_the_diagonal]


@pytest.mark.parametrize("body", VIEWS)
def test_a_write_that_another_name_would_see_is_refused(
    body: Callable[..., Tensor],
) -> None:
    with pytest.raises(
        CaptureError, match="writes in place into what may be a view"
    ) as error:
        trace(Body(body), {"x": torch.randn(3, 4)})
    assert error.value.source.startswith("test_functionalize.py:")
    assert "torch.where" in error.value.fix


def of_parameter(m: Body, x: Tensor) -> Tensor:
    m.weight.detach().mul_(0.9)
    return x * m.weight


def of_attribute(m: Body, x: Tensor) -> Tensor:
    m.table.add_(1)
    return x * m.table


def of_what_is_filled_next(m: Body, x: Tensor) -> Tensor:
    m.table.copy_(m.offset)
    m.offset.fill_(2.0)
    return x * m.table


def of_buffer_by_out(m: Body, x: Tensor) -> Tensor:
    """As torch's spectral_norm does while it trains."""
    F.normalize(x.detach().sum(0), dim=0, out=m.offset)
    return x * m.offset


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (of_parameter, "(?s)changes the model's parameter 'weight'.*after optimizer.s"),
        (of_buffer_by_out, "'div' changes the model's buffer 'offset'"),
        (of_attribute, "'add_' changes the model's constant"),
        (of_what_is_filled_next, "'copy_' changes the model's constant"),
    ],
)
def test_a_write_that_outlives_the_step_is_refused(
    body: Callable[..., Tensor], what: str
) -> None:
    with pytest.raises(CaptureError, match=what):
        trace(Body(body), {"x": torch.randn(3, 4)})


def diagonal(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    return h.fill_diagonal_(1.0)


def into_out(m: Body, x: Tensor) -> Tensor:
    out = torch.empty(3, 4)
    torch.add(x.detach(), 1, out=out)
    return out


def under_no_grad(m: Body, x: Tensor) -> Tensor:
    h = x * m.weight
    with torch.no_grad():
        h.mul_(2)
    return h


def noise(m: Body, x: Tensor) -> Tensor:
    return x * torch.empty_like(x).log_normal_()


def alpha_dropout(m: Body, x: Tensor) -> Tensor:
    return F.alpha_dropout(x * m.weight, 0.5, training=True)


REFUSED = [
    (diagonal, "'fill_diagonal_' writes in place, and has no form that does not"),
    (into_out, "an argument that is not its first one"),
    (under_no_grad, "'mul_' writes in place under no_grad"),
    (noise, "'log_normal_' draws random numbers"),
    (alpha_dropout, "'alpha_dropout' draws random numbers"),
]


@pytest.mark.parametrize(("body", "what"), REFUSED)
def test_what_is_no_function_is_refused(body: Callable[..., Tensor], what: str) -> None:
    with pytest.raises(CaptureError, match=what) as error:
        trace(Body(body), {"x": torch.randn(3, 4)})
    assert error.value.source.startswith("test_functionalize.py:")


def test_an_alpha_dropout_that_is_off_draws_nothing() -> None:
    def body(m: Body, x: Tensor) -> Tensor:
        return F.alpha_dropout(x, 0.5, training=False)

    trace(Body(body), {"x": torch.randn(3, 4)})


class Table(nn.Module):
    """A tensor that is neither a parameter nor a buffer, in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.table = torch.ones(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.table.add_(1.0)
        return self.linear(x * self.inner.table).sum()


def test_a_tensor_of_the_model_is_named_as_the_model_names_it() -> None:
    with pytest.raises(CaptureError, match=r"constant 'inner\.table' in forward"):
        trace(Table(), {"x": torch.ones(2, 4)})


def test_a_table_that_only_the_first_forward_fills_is_to_be_there_before() -> None:
    def kept(m: Body, x: Tensor) -> Tensor:
        if m.rows < len(x):
            m.rows = len(x)
            m.offset.copy_(torch.arange(4.0))
            return x * m.weight * torch.arange(4.0)
        return x * m.weight * m.offset

    model, x = Body(kept), torch.randn(3, 4)
    model.rows = 0
    with pytest.raises(CaptureError, match="run forward once before you compile"):
        capture_model(model, {"x": x})
    assert model.rows == 0 and torch.equal(model.offset, torch.ones(4))
    loss = model(x)
    traced = capture_model(model, {"x": x})
    torch.testing.assert_close(loss_of(traced, model, {"x": x}), loss)
