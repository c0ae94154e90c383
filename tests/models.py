"""Tiny models and batches that many tests share, each with its own loss.

Weights are random and of order one, biases and norms too, so that a gradient that is
dropped or doubled shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from examples import switch_gpt as switch
from examples.gpt import GPT, Config

VOCAB = 101  # no tp divides it
WIDTH = 32
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter, biases and norms too, a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            std = 0.3 if p.ndim < 2 else p.shape[-1] ** -0.5
            p.add_(torch.randn(p.shape, generator=generator) * std)
    return model


def token_batch(
    batch: int = 8,
    seq: int = 16,
    vocab: int = VOCAB,
    padded: bool = False,
    ignored: str = "uneven",
) -> dict[str, Tensor]:
    """ids and labels int64 [batch, seq]; with a padding mask, int64, if `padded`.

    ignored: "none"; "uneven", another number of labels in each sample and none at all
    in the second; or "half", no label in the first half of the samples.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (batch, seq), generator=generator)
    labels = ids.clone()
    if ignored == "uneven":
        for sample in range(batch):
            labels[sample, : sample * (seq - 2) // batch] = -100
        labels[1] = -100
    if ignored == "half":
        labels[: batch // 2] = -100
    found = {"input_ids": ids, "labels": labels}
    if padded:
        lengths = [seq - 3 * (sample % 4) for sample in range(batch)]
        mask = torch.arange(seq) < torch.tensor(lengths)[:, None]
        found["attention_mask"] = mask.long()
        labels[~mask] = -100
    return found


def next_token_loss(out: Any, batch: Mapping[str, Any]) -> Tensor:
    """As Hugging Face models do it, but in the model's own precision."""
    logits, labels = out.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """The plainest transformer block, of width 32 with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [b, s, 32] -> q, k and v, each [b, 4, s, 8]."""
        pieces = self.qkv(x).chunk(3, -1)
        return tuple(p.unflatten(-1, (4, 8)).transpose(1, 2) for p in pieces)

    def join(self, y: Tensor) -> Tensor:
        """y [b, 4, s, 8] -> [b, s, 32]."""
        return self.out(y.transpose(1, 2).flatten(2))

    def attention(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """An embedding, blocks of any kind, and a head: ids [b, s] -> logits [b, s, v]."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_gpt(
    layers: int = 4,
    heads: int = 4,
    seq: int = 16,
    vocab: int = VOCAB,
    dropout: float = 0.0,
    tied: bool = True,
    **batch: Any,
) -> Case:
    """The example's GPT: fused projection, learned positions, biases, (x, loss)."""
    torch.manual_seed(0)
    model = GPT(Config(layers, 8 * heads, heads, seq, vocab, dropout))
    if not tied:
        model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    found = token_batch(seq=seq, vocab=vocab, **batch)
    fields = {"ids": found["input_ids"], "labels": found["labels"]}
    return Case(randomize(model), fields)


class OneKey(nn.Module):
    """Attention of heads that share one head of keys and values; a weight for all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, width + 2 * self.size)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [x.shape[-1], self.size, self.size]
        q, k, v = (
            p.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for p in self.qkv(x).split(sizes, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


def cut_gpt(layers: int = 2, heads: int = 4, **options: Any) -> Case:
    """The example's GPT, with a weight of each layer that is cut into uneven pieces."""
    case = plain_gpt(layers, heads, **options)
    assert isinstance(case.model, GPT), "it is the example's"
    for block in case.model.blocks:
        block.attention = OneKey(8 * heads, heads)
        randomize(block.attention)
    return case


def gpt2(
    layers: int = 4,
    heads: int = 4,
    seq: int = 16,
    vocab: int = VOCAB,
    dropout: float = 0.0,
    tied: bool = True,
    **batch: Any,
) -> Case:
    """Hugging Face's GPT-2: Conv1D, tied embedding."""
    from transformers import GPT2Config

    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=8 * heads,
        vocab_size=vocab,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face(config, seq=seq, vocab=vocab, **batch)


def llama(
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    seq: int = 16,
    vocab: int = VOCAB,
    tied: bool = False,
    **batch: Any,
) -> Case:
    """Hugging Face's Llama: grouped queries, rotary positions, RMSNorm, gated MLP."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=8 * heads,
        intermediate_size=20 * heads,
        vocab_size=vocab,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face(config, seq=seq, vocab=vocab, **batch)


def switch_gpt(
    layers: int = 2, top_k: int = 1, experts: int = 8, batch: int = 8, seq: int = 16
) -> Case:
    """Switch layers with too little room for all tokens, and a balance loss."""
    config = switch.Config(
        layers=layers,
        width=WIDTH,
        heads=4,
        context=seq,
        vocab=VOCAB,
        experts=experts,
        top_k=top_k,
        capacity_factor=0.75,
        balance=0.5,
    )
    torch.manual_seed(0)
    text = torch.randint(VOCAB, (batch, seq + 1))
    fields = {"ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}
    return Case(randomize(switch.SwitchGPT(config)), fields)


def opt(layers: int = 4, heads: int = 4, **batch: Any) -> Case:
    """Hugging Face's OPT: a bias on keys, learned positions that follow the mask."""
    from transformers import OPTConfig

    config = OPTConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=8 * heads,
        word_embed_proj_dim=8 * heads,
        ffn_dim=16 * heads,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face(config, **batch)


def mixture(name: str, tokens: Mapping[str, Any] = NO_CHANGES, **changes: Any) -> Case:
    """A tiny mixture of experts of Hugging Face, of that configuration.

    tokens: arguments of `token_batch`. changes: of the configuration.
    """
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
    }
    implementation = changes.pop("experts_implementation", "batched_mm")
    config = AutoConfig.for_model(name, **{**sizes, **changes})
    config._experts_implementation = implementation
    return hugging_face(config, **tokens)


def hugging_face(config: Any, **batch: Any) -> Case:
    """A causal model of a configuration, in training mode, with next-token loss."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    return Case(randomize(model), token_batch(**batch), next_token_loss)
