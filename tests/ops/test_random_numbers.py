"""Random numbers that a model draws: the same on any mesh as on one device, with the
distribution that was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from test_dropout_mask import STEP, cuts, mix, whole
from torch import Tensor, nn

from autopar.passes.errors import CaptureError
from autopar.passes.ops.random import Kind
from autopar.proof import prove_program
from autopar.proof.reference import OurChance
from autopar.runtime.kernels import draw

f32, f64 = torch.float32, torch.float64
VOCAB, SEQ, WIDTH = 40, 16, 16
MASK_TOKEN = VOCAB - 1


def numbers(kind: Kind, *extents: int, dtype: torch.dtype = f32, op: int = 3) -> Tensor:
    return draw(kind, 1, op, whole(*extents), "cpu", dtype)


# --- what is drawn --------------------------------------------------------------------


def test_bits_are_those_of_splitmix64() -> None:
    seed = mix(mix(1) + 3 * STEP)
    drawn = [mix(seed + i * STEP) >> 1 for i in range(300)]
    assert numbers("bits", 3, 100, dtype=torch.int64).flatten().tolist() == drawn


CDF: dict[Kind, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "exponential": lambda x: -torch.expm1(-x),
}


@pytest.mark.parametrize("dtype", [f32, f64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(CDF))
def test_numbers_have_their_distribution(kind: Kind, dtype: torch.dtype) -> None:
    """Kolmogorov and Smirnov's distance is below what one in 10^6 draws exceeds, and
    the rounding of half precision."""
    count = 400_000
    x = numbers(kind, count, dtype=dtype)
    assert x.dtype == dtype
    assert x.isfinite().all()
    place = CDF[kind](x.double().sort().values)
    distance = (place - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 2.7 / math.sqrt(count) + 2 * torch.finfo(dtype).eps
    low = {"uniform": 0.0, "exponential": 1e-9, "normal": -math.inf}[kind]
    assert x.min() >= low
    assert x.max() < (1.0 if kind == "uniform" else math.inf)
    assert not torch.equal(x, numbers(kind, count, dtype=dtype, op=4))


@pytest.mark.parametrize("kind", [*CDF, "bits"])
def test_a_shard_has_its_slice(kind: Kind) -> None:
    dtype = torch.int64 if kind == "bits" else f32
    full = numbers(kind, 5, 12, 33, dtype=dtype)
    for b, s, w in product(cuts(5, 2), cuts(12, 3), cuts(33, 4)):
        own = draw(kind, 1, 3, [[b], [s], [w]], "cpu", dtype)
        place = (slice(a, a + n) for _, ((a, n),) in (b, s, w))
        assert torch.equal(own, full[tuple(place)])


# --- models that draw -----------------------------------------------------------------

Layer = Callable[[Tensor], Tensor]
Body = Callable[[Layer, Tensor], Tensor]


class Noisy(nn.Module):
    """Three layers whose hidden values [batch, seq, width] pass a body, and a loss."""

    def __init__(self, body: Body, layers: int = 3, masked: bool = False) -> None:
        super().__init__()
        self.body, self.masked = body, masked
        self.name = body.__name__  # cases of one name are captured once
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        weight = torch.ones(())
        if self.masked:  # as diffusion language models are trained
            rate = torch.rand(len(ids), 1)
            hidden = torch.rand(ids.shape) < rate
            ids = torch.where(hidden, MASK_TOKEN, ids)
            weight = hidden / (0.1 + rate)
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + self.body(layer, F.silu(x))
        loss = F.cross_entropy(self.head(x).mT, labels, reduction="none")
        return (loss * weight).mean()


def jitter(layer: Layer, x: Tensor) -> Tensor:
    return layer(x * torch.empty_like(x).uniform_(0.9, 1.1))


def jitter_in_half(layer: Layer, x: Tensor) -> Tensor:
    """Under autocast what it multiplies has half the bits, and so have the numbers."""
    y = layer(x)
    return y * torch.empty_like(y).uniform_(0.9, 1.1)


def noisy_scores(layer: Layer, x: Tensor) -> Tensor:
    scores = layer(x)
    return scores + torch.randn_like(scores) * F.softplus(scores)


def gumbel(layer: Layer, x: Tensor) -> Tensor:
    return x * F.gumbel_softmax(layer(x), tau=0.7)


def stochastic_depth(layer: Layer, x: Tensor) -> Tensor:
    keep = torch.rand(len(x), 1, 1, device=x.device) < 0.8
    return layer(x) * keep / 0.8


def per_sample_path(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * x.new_empty(len(x), 1, 1).bernoulli_(0.8).div_(0.8)


def coin(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    return torch.bernoulli(y.detach().sigmoid()) * y


def bernoulli_like(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    return y * torch.empty_like(y).bernoulli_(y.detach().sigmoid())


def given_moments(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    return torch.normal(y, 0.1) + torch.normal(0.5, y.detach().abs()) * y


def moments_by_number(layer: Layer, x: Tensor) -> Tensor:
    noise = torch.normal(1.0, 0.2, (SEQ, WIDTH)) + torch.empty(SEQ, 1).normal_(0, 0.1)
    return layer(x) * noise


def normal_numbers(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x) + 0.1 * torch.randn(x.shape) + torch.rand(x.shape, dtype=f64).float()
    return y + torch.randn_like(y.detach() > 0, dtype=f32)


def waiting_times(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * torch.empty_like(x).exponential_(2.0)


def steps_of_diffusion(layer: Layer, x: Tensor) -> Tensor:
    step = torch.randint(1, 1000, (len(x),))
    return layer(x) * (step / 1000)[:, None, None]


def other_tokens(layer: Layer, x: Tensor) -> Tensor:
    scale = torch.randint_like(x, 3) + torch.randint(3, x.shape)
    return layer(x) * scale + 0.1 * torch.randint_like(x, 2, 5)


def unread(layer: Layer, x: Tensor) -> Tensor:
    """What is drawn and not read counts as well: what comes after has its number."""
    torch.rand(3)
    F.dropout(torch.randn_like(x), 0.5)
    return layer(F.dropout(x, 0.2)) + torch.rand_like(x)


BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (
        *(
            jitter,
            jitter_in_half,
            noisy_scores,
            gumbel,
            stochastic_depth,
            per_sample_path,
            coin,
        ),
        *(bernoulli_like, given_moments, moments_by_number, normal_numbers),
        *(waiting_times, steps_of_diffusion, other_tokens, unread),
    )
}
PLANS = {
    "dp=2,tp=2": (2, {"zero": 3, "recompute": "full"}),
    "pp=3": (4, {}),
    "cp=2": (1, {"precision": "bf16"}),
    "tp=2": (2, {"precision": "fp16"}),
}


def noisy(body: Body, **options: object) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (8, SEQ))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    return Case(Noisy(body, **options), batch)  # type: ignore[arg-type]


@pytest.mark.matrix(quick=2, daily=13)
@pytest.mark.parametrize("mesh", PLANS)
@pytest.mark.parametrize("body", [*BODIES, "masked"])
def test_numbers_are_the_same_on_any_mesh(body: str, mesh: str) -> None:
    microbatches, options = PLANS[mesh]
    layers = 9 if body == "unread" else 3  # of so many, a few are lowered
    case = noisy(BODIES.get(body, jitter), layers=layers, masked=body == "masked")
    case.verify(mesh, microbatches, **options)


@pytest.mark.slow
@pytest.mark.parametrize("body", ["noisy_scores", "stochastic_depth", "masked"])
def test_a_large_model_is_proved(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a small program, whose vocabulary has the number of the token that masks."""
    monkeypatch.setattr(prove_program, "LITTLE", 0)
    case = noisy(BODIES.get(body, jitter), layers=8, masked=body == "masked")
    assert "of 8 layers" in str(case.proved("dp=2,tp=2", 2).proof)


@pytest.mark.parametrize("body", BODIES)
def test_torch_draws_none_of_its_own(body: str) -> None:
    """Whatever is called: the reference takes all its numbers from us."""
    case = noisy(BODIES[body])
    before = torch.get_rng_state()
    with OurChance(5):
        first = case.model(**case.batch)
    assert torch.equal(torch.get_rng_state(), before)
    with OurChance(6):
        assert case.model(**case.batch) != first


# --- what is refused ------------------------------------------------------------------


def from_a_generator(layer: Layer, x: Tensor) -> Tensor:
    return layer(x) * torch.rand(SEQ, 1, generator=GENERATOR)


def permuted(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)[:, torch.randperm(SEQ)]


def of_chosen_rows(layer: Layer, x: Tensor) -> Tensor:
    y = layer(x)
    chosen = y > 0
    return y.masked_scatter(chosen, y[chosen] * torch.rand_like(y[chosen]))


GENERATOR = torch.Generator()


@pytest.mark.parametrize("body", [from_a_generator, permuted, of_chosen_rows])
def test_other_draws_are_refused(body: Body) -> None:
    with pytest.raises(CaptureError) as error:
        noisy(body).compile("dp=2")
    assert error.value.fix
