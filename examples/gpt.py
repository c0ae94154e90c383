"""A GPT in plain PyTorch: nothing here knows that it will run on many devices."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT; `width` is the embedding, `context` the longest sequence."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        y = self.proj(y.transpose(1, 2).reshape(batch, seq, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate="tanh"))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.mlp = nn.LayerNorm(config.width), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's initialisation: residual branches start small in deep models."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for out in (module.attention.proj, module.mlp.down):
                nn.init.normal_(out.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(
        self, ids: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [batch, seq, vocab] and the mean loss over labels other than -100.

        ids, labels: int64 [batch, seq]; labels[b, i] is the token after ids[b, i].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits, None
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        return logits, loss


def build(config: Config, batch: int) -> tuple[GPT, dict[str, Tensor]]:
    """A model and a random batch of it, the same in every process."""
    torch.manual_seed(0)
    text = torch.randint(config.vocab, (batch, config.context + 1))
    return GPT(config), {"ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}


def tiny() -> tuple[GPT, dict[str, Tensor]]:
    return build(Config(layers=4, width=128, heads=4, context=128, vocab=256), batch=16)


def demo() -> tuple[GPT, dict[str, Tensor]]:
    return build(Config(layers=8, width=256, heads=8, context=128, vocab=256), batch=16)


def long() -> tuple[GPT, dict[str, Tensor]]:
    """Long sequences, which an axis cp splits."""
    sizes = Config(layers=2, width=128, heads=4, context=2048, vocab=256)
    return build(sizes, batch=2)
