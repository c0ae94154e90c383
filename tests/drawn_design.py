"""What a drawn model is: its sizes, and a word for each thing that models differ in."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Design:
    """A small GPT. The defaults are the plainest; `draw_models.DESIGN` has all others.

    mixer: what mixes positions, in every layer; hybrid: in every other, the rest are
    attention. kv_heads, head_dim: of attention, whose width need not be that of the
    model. attention: how it is spelled. repeat: how keys are shared by queries. window:
    positions that a query sees, 0 for all. padding: rows of the vocabulary that no
    token has; cropped: how the head leaves them out. residual: what is added to, and
    how. memory: learned tokens in front of the sequence. shared: all layers are one.
    head: how logits are written where it is tied. returns: what comes out of the
    model; "logits" leaves the loss to a function.
    """

    layers: int = 1
    width: int = 16
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 24
    batch: int = 4
    seq: int = 6
    vocab: int = 11
    place: str = "pre"
    norm: str = "layer"
    positions: str = "learned"
    tables: str = "made"
    mixer: str = "attention"
    hybrid: bool = False
    qkv: str = "separate"
    qk_norm: str = "none"
    attention: str = "sdpa"
    repeat: str = "interleave"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    mlp: str = "gelu"
    biases: str = "all"
    tied: bool = False
    padding: int = 0
    cropped: str = "slice"
    embed_scale: bool = False
    residual: str = "plain"
    memory: int = 0
    shared: bool = False
    head: str = "linear"
    logits_softcap: bool = False
    dropout: float = 0.0
    padded: bool = False
    ignored: str = "uneven"
    loss: str = "cross_entropy"
    returns: str = "loss"
    noise: str = "none"

    def __str__(self) -> str:
        """What differs from the plainest."""
        words = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Design({', '.join(words)})"

    def has_bias(self, part: str) -> bool:
        """Whether the products of a part ("qkv", "out", "mlp", "head") have biases."""
        return self.biases == "all" or part in self.biases.split()

    @property
    def has_fused_attention(self) -> bool:
        """Whether every mixer is attention in one op, so that keys can go round."""
        spelled = self.attention != "sdpa" or self.softcap or self.sinks
        return self.mixer in ("attention", "torchs", "latent") and not spelled
