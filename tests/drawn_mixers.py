"""What mixes the positions of drawn models, beside attention.

Each is written as models are published, in plain PyTorch. x is [batch, seq, width].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from drawn_attention import Attention
from drawn_design import Design
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A cell of torch's, one position after the other."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.cell = nn.GRUCell(d.width, d.head_dim, bias=d.has_bias("qkv"))
        self.out = nn.Linear(d.head_dim, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        states = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        return self.out(torch.stack(states, 1))


class Scan(nn.Module):
    """A state of each channel that forgets by what it reads (Mamba), in a loop."""

    STATE, TAPS = 3, 3

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.inner = d.heads * d.head_dim
        self.pieces = [self.inner, self.inner, self.STATE, self.STATE, d.heads]
        self.heads, self.head_dim = d.heads, d.head_dim
        self.first = nn.Linear(d.width, sum(self.pieces), bias=d.has_bias("qkv"))
        self.conv = nn.Conv1d(
            self.inner, self.inner, self.TAPS, groups=self.inner, padding=self.TAPS - 1
        )
        self.decay = nn.Parameter(torch.zeros(d.heads))
        self.skip = nn.Parameter(torch.zeros(d.heads))
        self.out = nn.Linear(self.inner, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        u, gate, into, from_, step = self.first(x).split(self.pieces, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., :s]).transpose(1, 2)
        u = u.view(b, s, self.heads, self.head_dim)
        step = F.softplus(step)
        keep = torch.exp(-step * torch.exp(self.decay))
        h = u.new_zeros(b, self.heads, self.head_dim, self.STATE)
        rows = []
        for t in range(s):
            add = (step[:, t, :, None] * u[:, t])[..., None] * into[:, t, None, None]
            h = h * keep[:, t, :, None, None] + add
            rows.append((h * from_[:, t, None, None]).sum(-1))
        y = torch.stack(rows, 1) + self.skip[:, None] * u
        return self.out(y.reshape(b, s, -1) * F.silu(gate))


class Linear(nn.Module):
    """Attention without a softmax: sums over what came before."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        inner = d.heads * d.head_dim
        self.heads, self.running = d.heads, d.mixer == "linear_running"
        self.qkv = nn.Linear(d.width, 3 * inner, bias=d.has_bias("qkv"))
        self.out = nn.Linear(inner, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in self.qkv(x).chunk(3, -1)
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.running:
            kv = torch.einsum("bhsd,bhse->bhsde", k, v).cumsum(2)
            y = torch.einsum("bhsd,bhsde->bhse", q, kv)
            y = y / (q * k.cumsum(2)).sum(-1, keepdim=True)
        else:
            scores = (q @ k.transpose(-2, -1)).tril()
            y = scores @ v / scores.sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A short convolution of each channel between two gates (LFM2)."""

    TAPS = 3

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.first = nn.Linear(d.width, 3 * d.width, bias=d.has_bias("qkv"))
        self.conv = nn.Conv1d(d.width, d.width, self.TAPS, groups=d.width, bias=False)
        self.out = nn.Linear(d.width, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        before, after, y = self.first(x).transpose(1, 2).chunk(3, 1)
        y = self.conv(F.pad(before * y, (self.TAPS - 1, 0)))
        return self.out((after * y).transpose(1, 2))


class Heads(nn.Module):
    """Four products of a model with heads: what `mix` makes of q, k and v goes out."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        inner, bias = d.heads * d.head_dim, d.has_bias("qkv")
        self.heads, self.head_dim = d.heads, d.head_dim
        self.q, self.k, self.v = (
            nn.Linear(d.width, inner, bias=bias) for _ in range(3)
        )
        self.out = nn.Linear(inner, d.width, bias=d.has_bias("out"))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [batch, heads, seq, head_dim] -> the same."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Retention(Heads):
    """Scores fade with the distance, at a pace of each head; a norm by head."""

    def __init__(self, d: Design) -> None:
        super().__init__(d)
        self.norm = nn.RMSNorm(d.head_dim, elementwise_affine=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        far = (place[:, None] - place).to(q.dtype)
        pace = 1 - 2.0 ** (-1.0 - torch.arange(self.heads)).to(q.dtype)
        fade = (pace[:, None, None] ** far.clamp(min=0)).tril()
        return self.norm(((q @ k.mT) * fade) @ v)


class Differential(Heads):
    """The difference of two attentions, each of one half of the channels."""

    def __init__(self, d: Design) -> None:
        super().__init__(d)
        self.weight = nn.Parameter(torch.zeros(d.heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (
            F.scaled_dot_product_attention(a, b, v, is_causal=True)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return first - torch.sigmoid(self.weight)[:, None, None] * second


class Near(Heads):
    """A query sees the last few keys, which are windows of a padded sequence."""

    WINDOW = 3

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = (0, 0, self.WINDOW - 1, 0)
        k, v = (F.pad(x, before).unfold(2, self.WINDOW, 1) for x in (k, v))
        weights = torch.einsum("bhsd,bhsdw->bhsw", q, k).softmax(-1)
        return torch.einsum("bhsw,bhsdw->bhsd", weights, v)


class Latent(nn.Module):
    """Keys and values come out of few channels, which are normed (MLA)."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        inner = d.heads * d.head_dim
        self.heads, self.turned = d.heads, d.head_dim // 2
        self.q = nn.Linear(d.width, inner + d.heads * self.turned, bias=False)
        self.down = nn.Linear(d.width, d.head_dim + self.turned, bias=d.has_bias("qkv"))
        self.norm = nn.RMSNorm(d.head_dim)
        self.up = nn.Linear(d.head_dim, 2 * inner, bias=False)
        self.out = nn.Linear(inner, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, -1).transpose(1, 2)
        small, shared = self.down(x).split([self.norm.weight.shape[0], self.turned], -1)
        both = self.up(self.norm(small)).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = both.chunk(2, -1)
        shared = shared.view(b, s, 1, self.turned).transpose(1, 2)
        k = torch.cat((k, shared.expand(b, self.heads, s, self.turned)), -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Torchs(nn.Module):
    """Torch's own attention, with a mask."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.inside = nn.Linear(d.width, d.heads * d.head_dim)
        self.attn = nn.MultiheadAttention(
            d.heads * d.head_dim, d.heads, bias=d.has_bias("qkv"), batch_first=True
        )
        self.out = nn.Linear(d.heads * d.head_dim, d.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        s = x.shape[1]
        hidden = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        y = self.inside(x)
        y, _ = self.attn(y, y, y, attn_mask=hidden, need_weights=False)
        return self.out(y)


class Shift(nn.Module):
    """A share of what came just before, of each channel (RWKV), and a running mean."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(1, 1, d.width))
        self.first = nn.Linear(d.width, d.ffn, bias=d.has_bias("qkv"))
        self.gate = nn.Linear(d.width, d.ffn, bias=d.has_bias("qkv"))
        self.out = nn.Linear(d.ffn, d.width, bias=d.has_bias("out"))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        y = torch.lerp(x, before, torch.sigmoid(self.share))
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        mean = self.first(y).cumsum(1) / count[:, None]
        return self.out(mean * torch.sigmoid(self.gate(x)))


MIXERS: dict[str, Callable[[Design], nn.Module]] = {
    "attention": Attention,
    "gru": Recurrent,
    "scan": Scan,
    "linear": Linear,
    "linear_running": Linear,
    "conv": Convolution,
    "retention": Retention,
    "differential": Differential,
    "near": Near,
    "latent": Latent,
    "torchs": Torchs,
    "shift": Shift,
}
