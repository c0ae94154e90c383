"""The models that `gpu.py` trains, in plain PyTorch: GPT-2 XL, and a Llama of 1B."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, Config


@dataclass(frozen=True)
class LlamaConfig:
    """groups: heads of keys and values. ffn: width of the gated layers."""

    layers: int
    width: int
    heads: int
    groups: int
    ffn: int
    context: int
    vocab: int


class Rotary(nn.Module):
    """Rotates halves of each head by its position (Su 2021, arXiv:2104.09864)."""

    def __init__(self, head_dim: int, context: int, base: float = 500_000.0) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim, 2) / head_dim
        angles = torch.outer(torch.arange(context), base**-powers)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, heads, seq, head_dim], the same out."""
        seq = x.shape[2]
        cos, sin = self.cos[:seq].to(x.dtype), self.sin[:seq].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GroupedAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.head_dim = config.width // config.heads
        shared = self.groups * self.head_dim
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, shared, bias=False)
        self.v = nn.Linear(config.width, shared, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)
        self.rotary = Rotary(self.head_dim, config.context)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q = self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, seq, self.groups, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.groups, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, is_causal=True, enable_gqa=True
        )
        return self.proj(y.transpose(1, 2).reshape(batch, seq, width))


class GatedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.width, 1e-5) for _ in range(2))
        self.attention, self.mlp = GroupedAttention(config), GatedMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Called as `examples.gpt.GPT` is."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, 1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, ids: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# Sizes of gpt2-xl, its vocabulary padded to a multiple of 64, and of Llama 3.2 1B.
SIZES: dict[str, Config | LlamaConfig] = {
    "gpt2-xl": Config(48, 1600, 25, 1024, 50304),
    "llama-1b": LlamaConfig(16, 2048, 32, 8, 8192, 2048, 128256),
}
TINY: dict[str, Config | LlamaConfig] = {
    "gpt2-xl": Config(2, 32, 4, 32, 64),
    "llama-1b": LlamaConfig(2, 32, 4, 2, 64, 32, 64),
}


def make(config: Config | LlamaConfig) -> GPT | Llama:
    torch.manual_seed(0)
    return GPT(config) if isinstance(config, Config) else Llama(config)


def batch_of(
    config: Config | LlamaConfig, samples: int, seed: int = 0
) -> dict[str, Tensor]:
    """Random tokens, and as labels those after them: int64 [samples, context]."""
    chance = torch.Generator().manual_seed(seed)
    size = (samples, config.context + 1)
    text = torch.randint(config.vocab, size, generator=chance)
    return {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
