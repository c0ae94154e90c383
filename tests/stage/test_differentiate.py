"""Blocks written in every manner: forward and backward are those of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Block, Stack, gpt2, randomize, token_batch
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.options import make_plan
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.stage.local_stage import LocalStage
from autopar.verify import verify

SEQ, HEADS = 16, 4
BLOCKS: dict[str, Callable[[], nn.Module]] = {}


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def block(
    forward: Callable[[Block, Tensor], Tensor], **extra: Callable[[], object]
) -> None:
    """A block that first changes its input by `forward`; extra: what it owns."""

    class Changed(Block):
        def __init__(self) -> None:
            super().__init__()
            for name, make in extra.items():
                made = make()
                if isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
                    self.register_buffer(name, made)
                else:
                    setattr(self, name, made)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(forward(self, x))

    BLOCKS[forward.__name__] = Changed


def weight(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.zeros(shape))


# --- views -------------------------------------------------------------------------


def unequal_pieces(m, x):
    a, b, c = m.up(x).split([WIDTH, 24, 40], -1)
    return x + m.down(torch.cat([a, b.relu(), c.tanh()], -1))


def stacked_and_unbound(m, x):
    y = torch.stack([m.norm1(x), m.norm2(x)], 2)
    a, b = y.unbind(2)
    return a + b * x + torch.stack([a, b], -1).mean(-1)


def rolled_flipped_repeated(m, x):
    return (x.roll(1, 1) + x.flip(2)).repeat(1, 1, 2)[..., :WIDTH] + x


def shifted_tokens(m, x):
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + shifted + F.pad(x, (0, 0, 1, -1))


def fixed_batch(m, x):
    return x + m.norm1(x.reshape(8 * SEQ, WIDTH)).view(8, SEQ, WIDTH)


def reordered(m, x):
    last_first = torch.arange(SEQ).flip(0)
    order = x.detach().argsort(-1)
    picked = x.index_select(1, last_first) + x[:, last_first]
    return x + picked + x.gather(-1, order)


for forward in (
    unequal_pieces,
    stacked_and_unbound,
    rolled_flipped_repeated,
    shifted_tokens,
    fixed_batch,
    reordered,
):
    block(forward)


# --- arithmetic and reductions -----------------------------------------------------


def scalars(m, x):
    return (2 * x - 1) / 3 + (1 - x) * 0.5 + 1 / (x.abs() + 1) - x**2 * 0.1


def scaled_sums(m, x):
    return torch.add(x, m.norm1(x), alpha=0.5) + torch.sub(x, m.norm2(x), alpha=3)


def mixed_types(m, x):
    return m.norm1(x).float() + x + m.mixed * x.float()


def kept_dims(m, x):
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centered / scale + x.amax(-1, keepdim=True) + x.norm(dim=-1, keepdim=True)


def over_the_sequence(m, x):
    y = m.norm1(x)
    return x + y.cumsum(1) / SEQ + y.mean(1, keepdim=True) + x.sum(1, keepdim=True)


def broadcast(m, x):
    return (x + m.rows) * m.columns + m.both - m.single * m.scalar


def detached(m, x):
    with torch.no_grad():
        scale = x.std(-1, keepdim=True)
    return x / scale + x.detach() * m.norm1(x.detach())


def in_place(m, x):
    y = m.norm1(x) * 2
    y += x
    y.mul_(0.5)
    h = m.up(y)
    F.relu_(h)
    return x + m.down(h)


for forward in (scalars, scaled_sums, kept_dims, over_the_sequence, detached, in_place):
    block(forward)
block(mixed_types, mixed=weight(WIDTH))
block(
    broadcast,
    rows=weight(SEQ, 1),
    columns=weight(1, 1, WIDTH),
    both=weight(SEQ, WIDTH),
    single=weight(1),
    scalar=weight(),
)


# --- parameters --------------------------------------------------------------------


def read_twice(m, x):
    y = m.mlp(x)
    return y + m.mlp(y) @ m.out.weight.T @ m.out.weight


def seen_otherwise(m, x):
    w = m.flat.view(96, WIDTH)
    return x + F.relu(x @ w.t()) @ w


def normalized_weight(m, x):
    w = m.gain * m.up.weight / m.up.weight.norm(dim=1, keepdim=True)
    v = m.down.weight * m.down.weight.square().sum().rsqrt()
    return x + F.linear(F.gelu(F.linear(x, w)), v)


def low_rank(m, x):
    return x + m.qkv(x)[..., :WIDTH] + x @ m.a.T @ m.b.T


def statistics_of_weights(m, x):
    gate = m.up.weight.sigmoid().mean() + m.up.bias.sum() / 50
    return x * gate + m.down.weight.sum(1)


def by_einsum(m, x):
    hidden = torch.einsum("bsd,dgf->bsgf", x, m.into).relu()
    mixed = torch.einsum("st,btd->bsd", m.tokens.tril(), x)
    return x + torch.einsum("bsgf,gfd->bsd", hidden, m.back) + mixed


def convolved(m, x):
    y = F.pad(x.transpose(1, 2), (3, 0))
    return x + m.convolution(y).transpose(1, 2)


block(read_twice)
block(seen_otherwise, flat=weight(96 * WIDTH))
block(normalized_weight, gain=weight(96, 1))
block(low_rank, a=weight(4, WIDTH), b=weight(WIDTH, 4))
block(statistics_of_weights)
block(
    by_einsum,
    into=weight(WIDTH, 4, 12),
    back=weight(4, 12, WIDTH),
    tokens=weight(SEQ, SEQ),
)
block(convolved, convolution=lambda: nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH))


# --- attention ---------------------------------------------------------------------


def eager_attention(m, x):
    q, k, v = m.heads(m.norm1(x))
    scores = (q @ k.transpose(-2, -1)) * 8**-0.5
    scores = scores.masked_fill(m.causal[:, :, :SEQ, :SEQ] == 0, float("-inf"))
    return x + m.join(F.softmax(scores, dim=-1) @ v)


def learned_mask(m, x):
    return x + m.join(F.scaled_dot_product_attention(*m.heads(x), attn_mask=m.bias))


def relative_positions(m, x):
    q, k, v = m.heads(x)
    at = torch.arange(SEQ)
    near = (at[:, None] - at).clamp(-7, 7) + 7
    bias = m.table(near).permute(2, 0, 1)[None]
    return x + m.join((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)


def one_key_head(m, x):
    q, _, _ = m.heads(x)
    k, v = (t.unsqueeze(1).expand(q.shape) for t in m.kv(x).split(8, -1))
    return x + m.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def two_key_heads(m, x):
    q, _, _ = m.heads(x)
    k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in m.kv(x).chunk(2, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + m.join(y)


def rotated_by_complex_numbers(m, x):
    q, k, v = m.heads(x)
    angles = torch.outer(torch.arange(SEQ), 0.1 ** torch.arange(4)).to(x.dtype)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (4, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    return x + m.join(
        F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    )


def scaled_heads(m, x):
    y = F.scaled_dot_product_attention(*m.heads(x), is_causal=True)
    return x + m.join(m.scale * m.norm(y))


def parallel_block(m, x):
    y = m.norm1(x)
    return x + m.gate * m.attention(y) + torch.tanh(m.gate) * m.mlp(y)


def local_attention(m, x):
    pieces = (t.unflatten(2, (4, 4)).transpose(1, 2).flatten(0, 1) for t in m.heads(x))
    y = F.scaled_dot_product_attention(*pieces, is_causal=True)
    return x + m.join(y.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2, 3))


def module_of_torch(m, x):
    later = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    return x + m.mha(x, x, x, attn_mask=later, need_weights=False)[0]


block(eager_attention, causal=lambda: torch.ones(1, 1, 20, 20).tril())
block(learned_mask, bias=weight(HEADS, SEQ, SEQ))
block(relative_positions, table=lambda: nn.Embedding(15, HEADS))
block(one_key_head, kv=lambda: nn.Linear(WIDTH, 16))
block(two_key_heads, kv=lambda: nn.Linear(WIDTH, 32))
block(rotated_by_complex_numbers)
block(scaled_heads, scale=weight(HEADS, 1, 1), norm=lambda: nn.RMSNorm(8))
block(parallel_block, gate=weight())
block(local_attention)
block(
    module_of_torch, mha=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
)


@pytest.mark.matrix(quick=1, daily=11)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "mesh", ["dp=2,tp=2", pytest.param("pp=2,tp=4", marks=pytest.mark.slow)]
)
def test_a_block_of_any_kind(name, mesh):
    model = randomize(Stack(BLOCKS[name], layers=2))
    case = Case(model, token_batch(), cross_entropy).double()
    # Half of that one runs in single precision, whatever the model's own is.
    tolerance = 1e-6 if name == "mixed_types" else None
    verify(case.compile(mesh, 2), *case, tolerance=tolerance).check()


@pytest.mark.matrix(quick=3, daily=17)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_any_kind_with_its_backward_in_halves(name):
    model = randomize(Stack(BLOCKS[name], layers=2))
    case = Case(model, token_batch(), cross_entropy).double()
    tolerance = 1e-6 if name == "mixed_types" else None
    program = case.compile("pp=2,tp=2", 2, schedule="zb-h1")
    verify(program, *case, tolerance=tolerance).check()


def test_the_row_of_padding_gets_no_gradient_from_a_lookup():
    case = Case(randomize(Stack(layers=2)), token_batch(), cross_entropy).double()
    case.model.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=7, dtype=torch.float64)
    case.batch["input_ids"][:, ::3] = 7
    found = case.verify("tp=4", 2)
    assert found.errors["embed.weight"] < 1e-12


@pytest.mark.slow
def test_layers_of_different_width():
    class Bottlenecks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [24, 36, 20, 44, 28]
            self.embed = nn.Embedding(VOCAB, widths[0])
            pairs = pairwise(widths)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
            self.head = nn.Linear(widths[-1], VOCAB)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = F.gelu(layer(x))
            return self.head(x)

    case = Case(randomize(Bottlenecks()), token_batch(), cross_entropy).double()
    for mesh in ("pp=2,tp=2", "pp=3", "tp=8"):
        case.verify(mesh, 2)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_comment_has_a_dim_for_each_of_its_value_s(precision):
    """Gradients have names of their own: d_x_1 is that of x_1, not x's second."""
    case = gpt2(layers=2, dropout=0.1)
    plan = make_plan("dp=2,tp=2", zero=3, precision=precision)
    locals_: list[LocalStage] = []

    def watch(_: str, made: object) -> None:
        if isinstance(made, LocalStage):
            locals_.append(made)

    traced = capture_model(case.model, case.batch, None, plan.lowering)
    compile_program(traced, plan, PLAIN, watch)
    told = [
        (local.texts[v.name], v)
        for local in locals_
        for node in local.whole_backward
        for v in node.results
        if v.name in local.texts
    ]
    assert len(told) > 50
    for text, v in told:
        dims = re.sub(r"\([^)]*\)", "merged", text.partition("]")[0][1:])
        assert len([d for d in dims.split(",") if d]) == len(v.shape), (v, text)


class Skips(nn.Module):
    """Values of the first layers that all others read, the last one by a sum."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__()
        self.of_rows = of_rows
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        a, b = self.layers[0](x), self.layers[1](x)
        for layer in self.layers[2:]:
            x = x + layer(x * a).tanh() + 2 * b
        x = x * a.sum(-1, keepdim=True) if self.of_rows else x + (a + b)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("of_rows", [True, False])
def test_what_a_stage_hands_back_may_be_added_to(of_rows: bool) -> None:
    torch.manual_seed(0)
    case = Case(randomize(Skips(of_rows)), token_batch(4, 6)).double()
    case.verify("tp=1", 2, schedule="interleaved", stages_per_rank=3)
