"""Models as people have them: each is compiled as it is, split, and equal to itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, randomize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.passes.program import Program

HEADS, SEQ, SAMPLES, LONGEST = 4, 12, 8, 20
SIZE = WIDTH // HEADS


def tokens(*names: str) -> dict[str, Tensor]:
    """int64 [samples, seq], the last one with labels to be ignored."""
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, SEQ)
    batch = {n: torch.randint(VOCAB, shape, generator=generator) for n in names}
    batch[names[-1]][0, :5] = -100
    return batch


class Packed(nn.Module):
    """One projection for q, k and v, and the flash kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        pieces = self.c_attn(x).split(c, dim=2)
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in pieces)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Masked(nn.Module):
    """Three projections and a registered mask."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        self.register_buffer("mask", torch.tril(torch.ones(1, 1, LONGEST, LONGEST)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        made = (layer(x) for layer in (self.query, self.key, self.value))
        q, k, v = (m.view(b, t, HEADS, SIZE).transpose(1, 2) for m in made)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(SIZE))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Rotary(nn.Module):
    """Grouped queries, with rotations as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(LONGEST), 0.5 ** torch.arange(SIZE // 2))
        self.register_buffer("turn", torch.polar(torch.ones(angles.shape), angles))

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * self.turn[: x.shape[1]].view(1, x.shape[1], 1, -1)
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.rotate(self.wq(x).view(b, t, HEADS, SIZE))
        k = self.rotate(self.wk(x).view(b, t, HEADS // 2, SIZE))
        v = self.wv(x).view(b, t, HEADS // 2, SIZE)
        k, v = (m.repeat_interleave(2, dim=2) for m in (k, v))
        q, k, v = (m.transpose(1, 2) for m in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Einsums(nn.Module):
    """A weight for each head, and a bias that grows with the distance (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Parameter(torch.zeros(WIDTH, HEADS, SIZE)) for _ in range(4)
        )
        place = torch.arange(LONGEST)
        far = (place[:, None] - place[None, :]).float()
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
        self.register_buffer("bias", (-slopes * far).masked_fill(far < 0, -1e9))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.einsum("btd,dhk->bhtk", x, w) for w in (self.wq, self.wk, self.wv)
        )
        scores = torch.einsum("bhik,bhjk->bhij", q, k) * SIZE**-0.5
        weights = (scores + self.bias[:, : x.shape[1], : x.shape[1]]).softmax(-1)
        return torch.einsum("bhij,bhjk,dhk->bid", weights, v, self.wo)


class Folded(nn.Module):
    """Heads folded into the batch, as for `bmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape

        def fold(y: Tensor) -> Tensor:
            return y.view(b, t, HEADS, SIZE).movedim(2, 1).reshape(b * HEADS, t, SIZE)

        q, k, v = fold(self.q(x)), fold(self.k(x)), fold(self.v(x))
        mask = torch.triu(torch.full((t, t), float("-inf"), device=x.device), 1)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) + mask, -1)
        y = torch.bmm(weights, v).view(b, HEADS, t, SIZE)
        return self.o(y.swapaxes(1, 2).reshape(b, t, c))


class Loop(nn.Module):
    """A Python loop over heads: nothing that could be split along them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, SIZE, bias=False) for _ in range(3))
            for _ in range(HEADS)
        )
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for head in self.heads:
            q, k, v = (layer(x) for layer in head)
            scores = (q @ k.transpose(-2, -1)).tril()
            found.append(scores.softmax(-1) @ v)
        return self.proj(torch.cat(found, dim=-1))


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attn
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tied, with positions, that returns logits and loss."""

    def __init__(self, attn: Callable[[], nn.Module], checkpointed: bool = False):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(LONGEST, WIDTH)
        self.h = nn.ModuleList(Block(attn()) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        self.checkpointed = checkpointed

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        return_dict: bool = False,
    ) -> object:
        if position_ids is None:
            position_ids = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(position_ids)
        for block in self.h:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
        return {"logits": logits, "loss": loss} if return_dict else (logits, loss)


class Torchs(nn.Module):
    """Layers of torch's own, on an input named as messages between stages are."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.add = nn.Parameter(torch.zeros(LONGEST, WIDTH))  # as an op is named
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 96, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=x.device)
        h = self.emb(x) + self.add[:t]
        for layer in self.layers:
            h = layer(h, src_mask=mask.to(h.dtype), is_causal=True)
        return F.cross_entropy(self.head(h)[:, :-1].transpose(1, 2), x[:, 1:])


def case(attn: Callable[[], nn.Module], **options: bool) -> Case:
    torch.manual_seed(0)
    return Case(randomize(GPT(attn, **options)), tokens("idx", "targets"))


def whole_weights(program: Program) -> list[str]:
    """Matrices of the layers that tp does not split."""
    return [
        name
        for name, spec in program.parameters.items()
        if ".attn." in name and len(spec.shape) > 1 and "tp" not in spec.split_axes
    ]


def gathered(program: Program) -> int:
    """Bytes that a forward gathers."""
    found = [c for c in program.communication if c.part == "forward"]
    return sum(c.bytes for c in found if c.kind == "all_gather")


MESHES = ("pp=2,tp=2", "dp=2,tp=2")


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("attn", (Packed, Masked, Rotary, Einsums, Folded))
def test_attention_of_any_spelling_is_split_by_heads(
    attn: Callable[[], nn.Module], mesh: str
) -> None:
    one = case(attn)
    program = one.compile(mesh, 2)
    assert whole_weights(program) == [] and program.remarks == ()
    one.verify(mesh, 2)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_over_heads_is_right_and_says_what_it_costs(mesh: str) -> None:
    one = case(Loop)
    program = one.compile(mesh, 2)
    assert len(whole_weights(program)) == 2 * (3 * HEADS + 1)
    (note,) = program.remarks
    assert "h.*.attn.heads.*.* (test_own_models.py:" in note
    assert "along 'seq' only: its ranks all hold the weights" in note
    one.verify(mesh, 2)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("mesh", MESHES)
def test_layers_of_torch_and_names_that_are_taken(mesh: str) -> None:
    torch.manual_seed(0)
    one = Case(randomize(Torchs()), {"x": tokens("x")["x"].clamp(min=0)})
    one.verify(mesh, 2)


class Small(nn.Module):
    """Adds to the loss of a model what keeps its logits small (z-loss)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits, loss = self.model(idx, targets)
        return loss + 0.01 * logits.logsumexp(-1).square().mean()


def test_a_z_loss_leaves_the_vocabulary_split() -> None:
    plain = case(Packed)
    one = plain._replace(model=Small(plain.model))
    program = one.compile("tp=2")
    assert program.remarks == ()
    assert gathered(program) == gathered(plain.compile("tp=2")) > 0
    one.verify("tp=2", 2)


def test_checkpointed_blocks_compile() -> None:
    one = case(Packed, checkpointed=True)
    one.model.eval()
    one.verify("pp=2,tp=2", 2)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("first", (False, True))
@pytest.mark.parametrize("shape", ((SEQ,), (1, SEQ), (SAMPLES, SEQ)))
def test_positions_may_have_no_samples(
    shape: tuple[int, ...], first: bool, mesh: str
) -> None:
    positions = {"position_ids": torch.arange(SEQ).expand(shape).contiguous()}
    one = case(Packed)
    both = (positions, one.batch) if first else (one.batch, positions)
    one._replace(batch={**both[0], **both[1]}).verify(mesh, 2)


def test_fields_that_are_no_tensors_are_passed_on() -> None:
    one = case(Packed)
    batch = {**one.batch, "use_cache": False, "return_dict": True}
    one._replace(batch=batch).verify("tp=2", 2)
