"""The normal form: each rule on a tiny module, whose value must stay the same."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hf import CONFIGS, padded_batch, precise_loss, tiny
from interpret import loss_of
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.graph import Node, Value, short
from autopar.passes.traced import Traced


class Body(nn.Module):
    """Runs a function of weights, float input x [4,6,8] and integer input y [4,6]."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self, x, y).sum()


def normal_form(body: Callable[..., Tensor], **changes: Tensor) -> Traced:
    """The normal form of a function, checked to have its value."""
    model = Body(body)
    generator = torch.Generator().manual_seed(1)
    fields = {
        "x": torch.randn(4, 6, 8, generator=generator, dtype=torch.float64),
        "y": torch.randint(8, (4, 6), generator=generator),
        **changes,
    }
    traced = normalize(trace(model, fields))
    found, wanted = loss_of(traced, model, fields), model(**fields).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    return traced


def ops(traced: Traced) -> list[str]:
    """The ops of a graph, without the final sum of `Body`."""
    return [short(n.op) for n in traced.graph.nodes][:-1]


def product(m: Body, x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(m.b, x.view(24, 8), m.w).view(4, 6, 8)


# What models write -> the ops of its normal form.
FORMS: list[tuple[str, Callable[..., Tensor], str]] = [
    ("aliases", lambda m, x, y: x.contiguous().clone() * 2, "mul"),
    ("no cast", lambda m, x, y: x.double() * 2, "mul"),
    ("a cast", lambda m, x, y: x.float() * 2, "to mul"),
    ("a device", lambda m, x, y: x.to("cpu") * 2, "mul"),
    ("views", lambda m, x, y: x.flatten(1).unsqueeze(0).squeeze(0) * 2, "reshape mul"),
    ("a view and back", lambda m, x, y: x.view(-1, 8).view(4, 6, 8) * 2, "mul"),
    ("x + 0", lambda m, x, y: (x + 0) * 2, "mul"),
    ("no expand", lambda m, x, y: x.expand(4, 6, 8) * 2, "mul"),
    ("linear", lambda m, x, y: F.linear(x, m.w, m.b), "linear add"),
    ("addmm", product, "matmul add"),
    ("mm", lambda m, x, y: torch.mm(x.view(24, 8), m.w), "matmul reshape"),
    (
        "scaled addmm",
        lambda m, x, y: torch.addmm(m.b, x[0], m.w, beta=2),
        "select addmm",
    ),
    ("empty cache", lambda m, x, y: torch.cat([torch.ones(0).double(), x]) * 2, "mul"),
    ("cat", lambda m, x, y: torch.cat([x, x], -1) * 2, "cat mul"),
    (
        "rows by number",
        lambda m, x, y: x[..., [3, 4]] * x.narrow(2, 3, 2),
        "slice slice mul",
    ),
    ("halves written", lambda m, x, y: written(x) * 2, "slice slice cat mul"),
    (
        "a row written",
        lambda m, x, y: row(x) * 2,
        "mul select add slice slice reshape cat mul",
    ),
    (
        "a mask written",  # by torch 2.15 itself
        lambda m, x, y: masked(x, x[0] > 0),
        "select gt mul (where|masked_fill)",
    ),
    (
        "rows of a mask written",
        lambda m, x, y: chosen(x, torch.arange(6) % 3 > 0) * 2,
        "arange remainder gt mul slice add cumsum sub clamp index_select reshape "
        "where mul",
    ),
    ("new ones", lambda m, x, y: x * x.new_ones(8), "ones mul"),
    ("full like", lambda m, x, y: x * torch.full_like(x, 3), "full mul"),
    ("mean", lambda m, x, y: x.mean(), "sum mul"),
    (
        "made wider and narrow again",
        lambda m, x, y: x.bfloat16().float().view(-1).bfloat16() * 2,
        "to reshape mul",
    ),
    ("made narrow and wider again", lambda m, x, y: x.bfloat16().float(), "to to"),
    (
        "read wide too",
        lambda m, x, y: twice(x.bfloat16().float(), lambda z: z.bfloat16()),
        "to to to mul",
    ),
    ("dropout off", lambda m, x, y: F.dropout(x, 0.5, False) * 2, "mul"),
    ("dropout of 0", lambda m, x, y: F.dropout(x, 0.0, True) * 2, "mul"),
    ("gelu", lambda m, x, y: gelu(x), "gelu"),
    ("half gelu", lambda m, x, y: 0.4 * x * (1 + torch.tanh(x)), "mul tanh add mul"),
    ("index of all", lambda m, x, y: x[..., 0] * y[grid(4, 6)], "select mul"),
]


def gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def twice(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    return x * f(x)


def written(x: Tensor) -> Tensor:
    h = torch.empty_like(x)
    h[..., :3], h[..., 3:] = x[..., 5:], x[..., :5]
    return h


def row(x: Tensor) -> Tensor:
    h = x * 1.0
    h[:, 2] += 1
    return h


def masked(x: Tensor, mask: Tensor) -> Tensor:
    h = x * 1.0
    h[:, mask] = -1.0
    return h


def chosen(x: Tensor, mask: Tensor) -> Tensor:
    h = x * 1.0
    h[:, mask] = x[:, :4] + 1
    return h


def grid(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(columns)


@pytest.mark.parametrize(
    ("body", "form"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS]
)
def test_each_spelling_has_one_form(body: Callable[..., Tensor], form: str) -> None:
    """form: a regular expression."""
    assert re.fullmatch(form, " ".join(ops(normal_form(body))))


def test_an_index_that_leaves_rows_out_stays() -> None:
    form = ops(normal_form(lambda m, x, y: y[grid(3, 5)] * 2.0))
    assert form[-2:] == ["index", "mul"]


def test_counted_places_may_be_repeated_along_the_others() -> None:
    """As by expand_as(labels), where a loss looks up one class of each place."""

    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        samples, places = (i.expand(4, 6) for i in grid(4, 6))
        return x[samples, places, y % 8] * 2

    assert "index" not in ops(normal_form(body))


def test_what_nobody_reads_is_dropped() -> None:
    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        torch.tensor(3.0) * x.exp()
        return x * torch.tensor(2.0, dtype=torch.float64)

    traced = normal_form(body)
    assert ops(traced) == ["detach", "mul"]
    assert len(traced.literals) == len(traced.graph.constants) == 1


# --- Attention ---------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    """[4, 6, 8] -> [4, 2, 6, 4]."""
    return x.view(4, 6, 2, 4).transpose(1, 2)


def attend(**options: object) -> Callable[..., Tensor]:
    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (heads(a) for a in (x, x @ m.w, x * 2))
        masks = {
            "tril": triangle(),
            "ones": triangle() | True,
            "own": y[0, :, None] > 3,
        }
        given = {k: masks.get(str(o), o) for k, o in options.items()}
        return F.scaled_dot_product_attention(q, k, v, **given)

    return body


def triangle() -> Tensor:
    return torch.ones(6, 6, dtype=torch.bool).tril()


def the(traced: Traced, op: str) -> Node:
    (node,) = [n for n in traced.graph.nodes if n.op == op]
    return node


# Options of the call -> whether a mask and the causal flag are left.
ATTENTION: list[tuple[dict[str, object], bool, bool]] = [
    ({}, False, False),
    ({"is_causal": True}, False, True),
    ({"attn_mask": "tril"}, False, True),
    ({"attn_mask": "ones"}, False, False),
    ({"attn_mask": "own"}, True, False),
    ({"is_causal": True, "scale": 0.3}, False, True),
]


@pytest.mark.parametrize(("options", "masked", "causal"), ATTENTION)
def test_attention(options: dict[str, object], masked: bool, causal: bool) -> None:
    _, _, _, mask, flag, scale = the(
        normal_form(attend(**options)), "autopar.attention"
    ).args
    assert (isinstance(mask, Value), flag) == (masked, causal)
    assert scale == options.get("scale", 0.5)


def test_queries_may_share_keys() -> None:
    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        q, k = heads(x), heads(x @ m.w)[:, :1]
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True, is_causal=True)

    node = the(normal_form(body), "autopar.attention")
    assert [v.shape[1] for v in node.operands] == [2, 1, 1]


@pytest.mark.parametrize("options", [a[0] for a in ATTENTION])
def test_attention_with_dropout_is_spelled_out(options: dict[str, object]) -> None:
    """Without its dropout it is attention without dropout."""
    model, plain = Body(attend(**options, dropout_p=0.5)), Body(attend(**options))
    torch.manual_seed(1)
    fields = {"x": torch.randn(4, 6, 8).double(), "y": torch.randint(8, (4, 6))}
    traced = normalize(trace(model, fields))
    dropped = the(traced, "autopar.dropout")
    assert dropped.args[1:] == (0.5, 0)
    nodes = tuple(
        replace(n, op="aten.detach.default", args=n.args[:1]) if n is dropped else n
        for n in traced.graph.nodes
    )
    silent = replace(traced, graph=replace(traced.graph, nodes=nodes))
    torch.testing.assert_close(loss_of(silent, model, fields), plain(**fields).detach())


def test_dropouts_are_numbered() -> None:
    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.1), 0.2, inplace=True)

    fields = {"x": torch.randn(4, 6, 8), "y": torch.randint(8, (4, 6))}
    nodes = normalize(trace(Body(body), fields)).graph.nodes
    drops = [n.args[1:] for n in nodes if n.op == "autopar.dropout"]
    assert drops == [(0.1, 0), (0.2, 1)]


# --- The loss ----------------------------------------------------------------------


def nll(m: Body, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss((x @ m.w).log_softmax(-1).flatten(0, 1), y.flatten())


def cross_entropy(**options: object) -> Callable[..., Tensor]:
    def body(m: Body, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ m.w).flatten(0, 1), y.flatten(), **options)

    return body


def classes_second(m: Body, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ m.w).transpose(1, 2), y)


def weighed(m: Body, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(weight=m.b.detach().abs())(m, x, y)


LOSSES = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "each": cross_entropy(reduction="none"),
    "smooth": cross_entropy(label_smoothing=0.1),
    "ignored": cross_entropy(ignore_index=3),
    "classes second": classes_second,
    "nll": nll,
    "weighed": weighed,
}


@pytest.mark.matrix(quick=6)
@pytest.mark.parametrize("body", LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_in_pieces_has_its_value(body: Callable[..., Tensor]) -> None:
    labels = torch.randint(8, (4, 6))
    labels[1:3, 2:] = -100
    for y in (labels, torch.full((4, 6), 5)):
        if body is not LOSSES["ignored"] or y is not labels:
            form = ops(normal_form(body, y=y))
            assert "autopar.pick" in form
            assert not {"cross_entropy_loss", "nll_loss_nd"} & set(form)


def test_a_loss_of_ignored_tokens_alone_is_not_a_number() -> None:
    normal_form(cross_entropy(), y=torch.full((4, 6), -100))


# --- Whole models ------------------------------------------------------------------


@pytest.mark.matrix(quick=0, daily=5)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("masked", [True, False])
def test_a_model_keeps_its_loss(name: str, masked: bool) -> None:
    model, fields = tiny(name), padded_batch()
    if not masked:
        del fields["attention_mask"]
    traced = normalize(trace(model, fields, precise_loss))
    wanted = precise_loss(model(**fields), fields).detach()
    found = loss_of(traced, model, fields)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    own = normalize(trace(model, fields))
    torch.testing.assert_close(
        loss_of(own, model, fields), model(**fields).loss.detach()
    )
