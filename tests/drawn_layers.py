"""Norms and MLPs that drawn models are made of.

Each is written as models are published, in plain PyTorch. x is [batch, seq, width].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
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


class ByHand(nn.Module):
    """Mean and variance, spelled out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias


class ByLength(nn.Module):
    """One scale for all channels of a unit vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * x.shape[-1] ** 0.5


class Squash(nn.Module):
    """No statistics (DyT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class Grouped(nn.Module):
    """GroupNorm of the channels of each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer_no_bias": lambda width: nn.LayerNorm(width, bias=False),
    "layer_bare": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
    "rms_bare": lambda width: Plain(),
    "rms_plus_one": PlusOne,
    "by_hand": ByHand,
    "by_length": ByLength,
    "squash": Squash,
    "grouped": Grouped,
}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class Experts(nn.Module):
    """All experts on all tokens, each as far as its router says; or the best `top`."""

    EXPERTS = 3

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.top = 2 if d.mlp == "top_experts" else 0
        self.router = nn.Linear(d.width, self.EXPERTS, bias=False)
        self.up = nn.Parameter(torch.zeros(self.EXPERTS, d.width, d.ffn))
        self.down = nn.Parameter(torch.zeros(self.EXPERTS, d.ffn, d.width))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        if self.top:
            best = logits.topk(self.top, -1).values[..., -1:]
            logits = logits.masked_fill(logits < best, float("-inf"))
        share = logits.softmax(-1)
        y = F.gelu(torch.einsum("bsw,ewf->besf", x, self.up))
        return torch.einsum("besf,efw,bse->bsw", y, self.down, share)


class MLP(nn.Module):
    """Two products; or three, of which one is a gate, in one of these ways."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.kind = d.mlp
        fused = self.kind in ("chunk", "halves", "turns", "maxout")
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
        elif self.kind == "maxout":
            y = y.unflatten(-1, (-1, 2)).amax(-1)
        elif self.kind == "turns":
            y = F.silu(y[..., ::2]) * y[..., 1::2]
        else:
            y = ACTIVATIONS[self.kind](y)
        return self.down(y)
