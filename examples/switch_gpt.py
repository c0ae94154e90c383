"""A GPT with Switch layers in plain PyTorch: each token is worked on by one or two of
many experts (Fedus 2021, arXiv 2101.03961; top-2 as in GShard, Lepikhin 2020, arXiv
2006.16668). Nothing here knows that experts may lie on different devices.

Every sample is a group of its own, as in GShard: its tokens compete for the places that
an expert has for it, and what finds no place passes through the residual alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.examples import gpt


@dataclass(frozen=True)
class Config(gpt.Config):
    """experts: in each layer. top_k: that a token is sent to. capacity_factor: places
    of all experts over what top_k choices of all tokens need. balance: weight of the
    loss that evens out the experts' work."""

    experts: int = 8
    top_k: int = 1
    capacity_factor: float = 1.25
    balance: float = 0.01


class SwitchMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, hidden = config.width, 4 * config.width
        self.router = nn.Linear(width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, width, hidden))
        self.down = nn.Parameter(torch.empty(config.experts, hidden, width))

    def reset(self, std: float) -> None:
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, seq, width] -> the same shape, and the balance loss."""
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.config.top_k, dim=-1)
        if self.config.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        choices = F.one_hot(chosen, self.config.experts)  # [batch, seq, top_k, experts]
        places = self._places(choices).to(x.dtype)  # [batch, seq, top_k, capacity]
        choices = choices.to(x.dtype)

        dispatch = torch.einsum("bske,bskc->bsec", choices, places)
        combine = torch.einsum("bske,bskc->bsec", choices * weights[..., None], places)
        tokens = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = F.gelu(torch.einsum("ebcm,emh->ebch", tokens, self.up))
        made = torch.einsum("ebch,ehm->ebcm", hidden, self.down)
        y = torch.einsum("bsec,ebcm->bsm", combine, made)

        share = choices[:, :, 0].mean(1)  # of the tokens, by first choice
        balance = (share * probabilities.mean(1)).sum(-1).mean() * self.config.experts
        return y, balance

    def _places(self, choices: Tensor) -> Tensor:
        """The place of each choice in its expert's queue, one-hot [batch, seq, top_k,
        capacity]; zeros if the queue is full. All first choices come before second."""
        batch, seq, top_k, experts = choices.shape
        capacity = math.ceil(seq * top_k / experts * self.config.capacity_factor)
        queue = choices.transpose(1, 2).reshape(batch, top_k * seq, experts)
        ahead = (queue.cumsum(1) - queue).view(batch, top_k, seq, experts)
        place = (ahead.transpose(1, 2) * choices).sum(-1)
        slots = torch.arange(capacity, device=choices.device)
        return place[..., None] == slots


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = gpt.Attention(config)
        self.experts = SwitchMLP(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


class SwitchGPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, SwitchMLP):
            module.reset(std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, seq, vocab], and the loss: cross entropy and balance.

        ids, labels: int64 [batch, seq]; labels[b, i] is the token after ids[b, i].
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        balance = x.new_zeros(())
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss + self.config.balance * balance / len(self.blocks)


def build(config: Config, batch: int) -> tuple[SwitchGPT, dict[str, Tensor]]:
    """A model and a random batch of it, the same in every process."""
    torch.manual_seed(0)
    text = torch.randint(config.vocab, (batch, config.context + 1))
    model = SwitchGPT(config)
    return model, {"ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}


def tiny() -> tuple[SwitchGPT, dict[str, Tensor]]:
    """Top-1, as Switch."""
    sizes = Config(layers=4, width=64, heads=4, context=64, vocab=256, experts=8)
    return build(sizes, batch=8)
