"""Spellings that models are published in: split like the plain one, and equal to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from drawn_losses import shifted
from models import WIDTH, Block, Stack, randomize, token_batch
from torch import Tensor, nn

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.errors import CaptureError
from autopar.passes.program import Program
from autopar.proof.expected import TOLERANCE
from autopar.verify import verify

HEADS, SIZE, GROUPS, FFN = 4, 8, 2, 48


def case(block: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Stack(block, 2)), token_batch(), shifted).double()


def whole(program: Program) -> set[str]:
    """Matrices of the first layer that no rank of tp has a share of."""
    return {
        name.removeprefix("blocks.0.")
        for name, spec in program.parameters.items()
        if name.startswith("blocks.0.")
        and len(spec.shape) > 1
        and "tp" not in spec.split_axes
    }


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [b, s, h, d], k and v [b, s, g, d] -> [b, s, h d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class Fused(Block):
    """Grouped queries in one projection, cut into three in one of these ways."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * GROUPS * SIZE)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.reshape(*x.shape[:2], -1, SIZE) for y in CUTS[self.cut](self.qkv(x))
        )
        return self.out(attend(q, k, v))


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "split": lambda y: y.split([WIDTH, 16, 16], -1),
    "tensor_split": lambda y: y.tensor_split((WIDTH, WIDTH + 16), -1),
    "slices": lambda y: (y[..., :WIDTH], y[..., WIDTH:-16], y[..., -16:]),
    "heads": lambda y: y.unflatten(-1, (-1, SIZE)).split([HEADS, 2, 2], 2),
    "permuted": lambda y: tuple(
        p.permute(0, 3, 1, 2, 4)
        for p in y.unflatten(-1, (1, -1, SIZE))
        .permute(0, 2, 3, 1, 4)
        .split([HEADS, 2, 2], 2)
    ),
}


class Parallel(nn.Module):
    """Attention and MLP side by side, in one product before and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 3 * WIDTH + FFN)
        self.last = nn.Linear(WIDTH + FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        *qkv, up = self.first(self.norm(x)).split([WIDTH, WIDTH, WIDTH, FFN], -1)
        y = attend(*(p.unflatten(-1, (HEADS, SIZE)) for p in qkv))
        return x + self.last(torch.cat([y, F.gelu(up)], -1))


class TurnedFused(Fused):
    """A weight that is turned by the model itself."""

    def __init__(self) -> None:
        super().__init__("split")
        shape = self.qkv.weight.shape
        self.qkv = _Turned(*shape)


class _Turned(nn.Linear):
    def __init__(self, out: int, width: int) -> None:
        super().__init__(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Filtered(Fused):
    """Each channel of the projection goes through a filter, and a scale, before the
    cut; read: the whole of them by something else too."""

    def __init__(self, read: bool = False) -> None:
        super().__init__("split")
        width = self.qkv.out_features
        self.filters = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.scale = nn.Parameter(torch.ones(width))
        self.read = read

    def attention(self, x: Tensor) -> Tensor:
        y = F.silu(self.filters(self.mixed(x).mT)[..., : x.shape[1]]).clamp(max=9) * 1.5
        y = y.transpose(1, 2) * self.scale
        q, k, v = (p.unflatten(-1, (-1, SIZE)) for p in CUTS["split"](y))
        scale = y.square().mean() if self.read else 1.0
        return self.out(attend(q, k, v)) * scale

    def mixed(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class Rejoined(Filtered):
    """Projections of their own, joined for the filters."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * GROUPS * SIZE)
        del self.qkv

    def mixed(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), *self.kv(x).chunk(2, -1)], -1)


class Dropped(Fused):
    """Dropout before the cut."""

    def __init__(self) -> None:
        super().__init__("split")
        self.qkv = nn.Sequential(self.qkv, nn.Dropout(0.5))


UNEVEN: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Fused, name) for name in CUTS},
    "parallel": Parallel,
    "turned": TurnedFused,
    "filtered": Filtered,
    "rejoined": Rejoined,
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_pieces_of_a_weight_are_split_each_by_itself(name: str) -> None:
    one = case(UNEVEN[name])
    program = one.compile("tp=2")
    assert whole(program) == set()
    assert program.remarks == ()
    one.verify("dp=2,pp=2,tp=2", 2)


@pytest.mark.slow
def test_channels_that_are_read_together_are_cut_where_the_model_cuts_them() -> None:
    one = case(partial(Filtered, read=True))
    assert len(one.compile("tp=2").remarks) == 1
    one.verify("tp=2", sequence_parallel=False)


def test_dropout_is_of_what_the_model_gives_it() -> None:
    graph = normalize(case(Dropped).trace()).graph
    dropped = [n.out.shape[-1] for n in graph.nodes if n.op == "autopar.dropout"]
    assert dropped == [WIDTH + 2 * GROUPS * SIZE] * 2


class Decayed(Fused):
    """A weight that is read in pieces, and whole too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * self.qkv.weight.square().mean())


@pytest.mark.slow
def test_a_weight_that_is_read_whole_too_is_held_whole_and_a_note_says_so() -> None:
    one = case(partial(Decayed, "split"))
    program = one.compile("tp=2")
    assert whole(program) == {"qkv.weight"}
    (note,) = program.remarks
    assert note.startswith("tp splits the work of blocks.*.qkv.weight, but its ranks")
    one.verify("tp=2")


class Gated(Block):
    """A gated unit whose halves come out of one product."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit
        self.up, self.down = nn.Linear(WIDTH, 2 * FFN), nn.Linear(FFN, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(UNITS[self.unit](self.up(x)))


UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda y: F.silu(y[..., :FFN]) * y[..., FFN:],
    "glu": F.glu,
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("name", UNITS)
def test_even_pieces_stay_one_split_weight(name: str) -> None:
    one = case(partial(Gated, name))
    program = one.compile("tp=2")
    assert whole(program) == set() and program.remarks == ()
    one.verify("pp=2,tp=2", 2)


class Turned(Block):
    """Rotations as complex numbers, a head for each query, as Llama was published."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16), 0.5 ** torch.arange(SIZE // 2))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(3)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.heads(x))
        return self.out(attend(self.rotate(q), self.rotate(k), v))


class Written(Block):
    """Rotations of pairs that are written into an empty tensor; scores [b, s, h, t]."""

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        turned = torch.empty_like(x)
        turned[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        turned[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return turned

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in self.heads(x))
        scores = torch.einsum("bshd,bthd->bsht", self.rotate(q), self.rotate(k))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        return self.out(torch.einsum("bsht,bthd->bshd", weights, v).flatten(2))


class Retention(Block):
    """Scores that decay, without a softmax; a norm for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        far = place[:, None] - place
        y = (q @ k.mT * torch.where(far >= 0, 0.9**far, 0.0)) @ v
        y = y.transpose(1, 2).flatten(2)
        return self.out(self.norm(y.flatten(0, 1)).view_as(y))


class Convolved(Block):
    """A short filter for each hidden channel, over time; weights that are normed."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(FFN, FFN, 3, padding=2, groups=FFN)
        norm = nn.utils.parametrizations.weight_norm
        self.up, self.down = norm(nn.Linear(WIDTH, FFN)), nn.Linear(FFN, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        y = self.filter(self.up(x).mT)[..., : x.shape[1]].mT
        return self.down(F.silu(y))


class Interleaved(Gated):
    """Gates and values in turns, and keys and values repeated for all queries."""

    def __init__(self) -> None:
        super().__init__("glu")

    def mlp(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(F.silu(y[..., ::2]) * y[..., 1::2])


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("block", [Turned, Written, Retention, Convolved, Interleaved])
def test_no_matrix_of_a_layer_is_whole(block: Callable[[], nn.Module]) -> None:
    one = case(block)
    program = one.compile("tp=2")
    assert whole(program) == set() and program.remarks == ()
    one.verify("pp=2,tp=2", 2)


def looked_up(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    labels = batch["labels"][:, 1:]
    rows = logits[:, :-1].log_softmax(-1)
    nll = -rows.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return (nll * (labels >= 0)).sum() / (labels >= 0).sum()


def in_two_steps(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    rows = F.log_softmax(logits[:, :-1], -1)
    return F.nll_loss(rows.flatten(0, 1), batch["labels"][:, 1:].flatten())


def by_number(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    rows, labels = logits[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    sample, place = (torch.arange(n) for n in labels.shape)
    nll = -rows[sample[:, None], place, labels.clamp(min=0)]
    return (nll * (labels >= 0)).sum() / (labels >= 0).sum()


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("loss_fn", [looked_up, in_two_steps, by_number])
def test_a_loss_by_hand_leaves_the_vocabulary_split(
    loss_fn: Callable[[Tensor, Mapping[str, Any]], Tensor],
) -> None:
    one = case(Block)._replace(loss_fn=loss_fn)
    program = one.compile("tp=2")
    assert "tp" in program.parameters["head.weight"].split_axes
    assert program.remarks == ()
    one.verify("tp=2", 2)


def test_float32_inside_a_float64_model_is_rounded_as_such() -> None:
    class Halfway(Block):
        def mlp(self, x: Tensor) -> Tensor:
            y = F.gelu(self.up(x)).float()
            return F.linear(y, self.down.weight.float()).double()

    one = case(Halfway)
    program = one.compile("tp=2")
    proof = verify(program, one.model, one.batch, one.loss_fn)
    assert proof.tolerance == TOLERANCE[torch.float32]
    assert 1e-12 < proof.check().worst[1] < 1e-6


class Encoder(nn.Module):
    """Torch's own stack, which looks into a mask unless it is told what it is."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, self.mask(x), is_causal=self.causal)

    def mask(self, x: Tensor) -> Tensor:
        return nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)


class Told(Encoder):
    """Its mask depends on the batch, of which it adds zero."""

    def mask(self, x: Tensor) -> Tensor:
        return super().mask(x) + 0.0 * x[0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [None, True])
def test_a_mask_made_of_numbers_alone_may_be_looked_into(causal: bool | None) -> None:
    one = case(Encoder)
    for encoder in one.model.blocks:
        encoder.causal = causal
    one.verify("tp=2", 2)


@pytest.mark.slow
def test_a_mask_that_is_looked_into_is_named_with_a_way_out() -> None:
    one = case(Told)
    with pytest.raises(CaptureError, match=r"is_causal=True\), or is_causal=False"):
        one.compile("tp=2")
    for encoder in one.model.blocks:
        encoder.causal = True
    one.verify("tp=2", 2)
