"""Layers that drawn models are made of: norms, what mixes positions, MLPs.

Each is written as models are published, in plain PyTorch. x is [batch, seq, width].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from drawn_attention import Attention
from drawn_design import Design
from torch import Tensor, nn


class PlusOne(nn.Module):
    """Scales by 1 + weight, and squares by hand (Gemma)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * (1.0 + self.weight)


class Plain(nn.Module):
    """Nothing to learn: the sizes of what is normed come from the call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer_no_bias": lambda width: nn.LayerNorm(width, bias=False),
    "layer_bare": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
    "rms_bare": lambda width: Plain(),
    "rms_plus_one": PlusOne,
}


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


MIXERS: dict[str, Callable[[Design], nn.Module]] = {
    "attention": Attention,
    "gru": Recurrent,
    "scan": Scan,
    "linear": Linear,
    "linear_running": Linear,
    "conv": Convolution,
}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class MLP(nn.Module):
    """Two products; or three, of which one is a gate, in one of these ways."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.kind = d.mlp
        fused = self.kind in ("chunk", "halves", "turns")
        ffn, bias = d.ffn * 2 if fused else d.ffn, d.has_bias("mlp")
        self.up = nn.Linear(d.width, ffn, bias=bias)
        if self.kind in ("swiglu", "geglu"):
            self.gate = nn.Linear(d.width, ffn, bias=bias)
        self.down = nn.Linear(d.ffn, d.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.kind == "swiglu":
            y = F.silu(self.gate(x)) * y
        elif self.kind == "geglu":
            y = F.gelu(self.gate(x)) * y
        elif self.kind == "chunk":
            gate, y = y.chunk(2, -1)
            y = F.silu(gate) * y
        elif self.kind == "halves":
            half = y.shape[-1] // 2
            y = F.silu(y[..., :half]) * y[..., half:]
        elif self.kind == "turns":
            y = F.silu(y[..., ::2]) * y[..., 1::2]
        else:
            y = ACTIVATIONS[self.kind](y)
        return self.down(y)
