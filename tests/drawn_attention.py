"""The attention of drawn models: how positions, masks and shared keys are written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from drawn_design import Design
from torch import Tensor, nn

BUCKETS = 4  # of relative positions; what is further away shares the last


class Rotary(nn.Module):
    """Turns pairs of channels by their position; x is [batch, heads, seq, head_dim]."""

    def __init__(self, d: Design) -> None:
        super().__init__()
        self.kind = d.positions
        self.turned = d.head_dim
        if self.kind == "partial":
            self.turned = max(2, d.head_dim // 4 * 2)
        self.made = d.tables == "made"
        if not self.made:
            self.register_buffer("angles", self.table(d.seq + 2))

    def table(self, seq: int) -> Tensor:
        """float [seq, turned / 2]."""
        pace = 0.5 ** torch.arange(self.turned // 2)
        return torch.outer(torch.arange(seq).float(), pace)

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[-2]
        angles = self.table(seq) if self.made else self.angles[:seq]
        angles = angles.to(x.dtype)
        if self.kind == "complex":
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            turn = torch.polar(torch.ones_like(angles), angles)
            return torch.view_as_real(pairs * turn).flatten(-2)
        cos, sin = angles.cos(), angles.sin()
        if self.kind == "interleaved":
            a, b = x[..., ::2], x[..., 1::2]
            pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
            return pairs.flatten(-2)
        some, rest = x[..., : self.turned], x[..., self.turned :]
        a, b = some.chunk(2, -1)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        some = some * cos + torch.cat((-b, a), -1) * sin
        return torch.cat((some, rest), -1) if self.kind == "partial" else some


class HeadNorm(nn.Module):
    """RMSNorm of the last dim, by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, d: Design) -> None:
        super().__init__()
        self.d = d
        q, kv, bias = d.heads * d.head_dim, d.kv_heads * d.head_dim, d.has_bias("qkv")
        if d.qkv == "separate":
            self.q = nn.Linear(d.width, q, bias=bias)
            self.k, self.v = (nn.Linear(d.width, kv, bias=bias) for _ in range(2))
        elif d.qkv == "einsum":
            self.wq = nn.Parameter(torch.zeros(d.width, d.heads, d.head_dim))
            self.wk, self.wv = (
                nn.Parameter(torch.zeros(d.width, d.kv_heads, d.head_dim))
                for _ in range(2)
            )
        else:
            self.qkv = nn.Linear(d.width, q + 2 * kv, bias=bias)
        self.out = nn.Linear(q, d.width, bias=d.has_bias("out"))
        if d.qk_norm == "head":
            self.q_norm, self.k_norm = HeadNorm(d.head_dim), HeadNorm(d.head_dim)
        if d.qk_norm == "whole":
            self.q_norm, self.k_norm = nn.RMSNorm(q), nn.RMSNorm(kv)
        if d.positions in ("halves", "interleaved", "partial", "complex"):
            self.rotary = Rotary(d)
        if d.positions == "relative":
            self.near = nn.Embedding(BUCKETS, d.heads)
        if d.sinks:
            self.sinks = nn.Parameter(torch.zeros(d.heads))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x -> q [b, s, heads head_dim], k and v [b, s, kv_heads head_dim]."""
        d = self.d
        if d.qkv == "separate":
            return self.q(x), self.k(x), self.v(x)
        if d.qkv == "einsum":
            q, k, v = (
                torch.einsum("bsw,whd->bshd", x, w).flatten(2)
                for w in (self.wq, self.wk, self.wv)
            )
            return q, k, v
        if d.qkv == "groups":
            shared = d.heads // d.kv_heads
            y = self.qkv(x).unflatten(-1, (d.kv_heads, shared + 2, d.head_dim))
            q, k, v = y.split([shared, 1, 1], 3)
            return q.flatten(2), k.flatten(2), v.flatten(2)
        if d.qkv == "chunk":
            q, k, v = self.qkv(x).chunk(3, -1)
            return q, k, v
        kv = d.kv_heads * d.head_dim
        q, k, v = self.qkv(x).split([d.heads * d.head_dim, kv, kv], -1)
        return q, k, v

    def visible(self, seq: int, mask: Tensor | None) -> Tensor:
        """bool [seq, seq], or [batch, 1, seq, seq] with a mask of padding. What is
        padding sees itself, so that no row sees nothing."""
        place = torch.arange(seq)
        far = place[:, None] - place
        seen = far >= 0
        if self.d.window:
            seen = seen & (far < self.d.window)
        if mask is None:
            return seen
        return seen & mask[:, None, None, :].bool() | (far == 0)

    def bias(self, seq: int, like: Tensor) -> Tensor | None:
        """float [heads, seq, seq] that is added to the scores."""
        place = torch.arange(seq)
        far = place[:, None] - place
        if self.d.positions == "alibi":
            slopes = 0.7 ** torch.arange(1, self.d.heads + 1)
            return (-slopes[:, None, None] * far).to(like.dtype)
        if self.d.positions == "relative":
            return self.near(far.clamp(0, BUCKETS - 1)).permute(2, 0, 1)
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [b, heads, s, d], k and v [b, kv_heads or heads, s, d] -> as q."""
        d, seq = self.d, q.shape[2]
        bias = self.bias(seq, q)
        dropout = d.dropout if self.training else 0.0
        if d.attention == "sdpa" and not d.softcap and not d.sinks:
            gqa = k.shape[1] != q.shape[1]
            if bias is None and mask is None and not d.window:
                return F.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=gqa
                )
            seen = self.visible(seq, mask)
            if bias is not None:
                seen = bias.masked_fill(~seen, torch.finfo(q.dtype).min)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, dropout_p=dropout, enable_gqa=gqa
            )
        if d.attention == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * d.head_dim**-0.5
        elif d.attention == "baddbmm":
            fold = [x.reshape(-1, seq, d.head_dim) for x in (q, k)]
            start = q.new_zeros(fold[0].shape[0], seq, seq)
            scores = torch.baddbmm(
                start, fold[0], fold[1].mT, beta=0.0, alpha=d.head_dim**-0.5
            )
            scores = scores.view(-1, d.heads, seq, seq)
        else:
            scores = (q / d.head_dim**0.5) @ k.transpose(-2, -1)
        if d.softcap:
            scores = torch.tanh(scores / d.softcap) * d.softcap
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~self.visible(seq, mask), float("-inf"))
        if d.sinks:
            sink = self.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, seq, -1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = F.softmax(scores, -1)
        weights = F.dropout(weights, d.dropout, self.training)
        if d.attention == "einsum":
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        return weights @ v

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        d = self.d
        b, s, _ = x.shape
        q, k, v = self.project(x)
        if d.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.view(b, s, d.heads, d.head_dim).transpose(1, 2)
        k, v = (y.view(b, s, d.kv_heads, d.head_dim).transpose(1, 2) for y in (k, v))
        if d.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if hasattr(self, "rotary"):
            q, k = self.rotary(q), self.rotary(k)
        shared = d.heads // d.kv_heads
        spelled = d.attention != "sdpa" or d.softcap or d.sinks
        if shared > 1 and (spelled or d.repeat != "kernel"):
            k, v = (self.share(y, shared) for y in (k, v))
        y = self.attend(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))

    def share(self, x: Tensor, times: int) -> Tensor:
        """[b, kv_heads, s, d] -> [b, heads, s, d]."""
        if self.d.repeat == "expand":
            b, h, s, e = x.shape
            return x[:, :, None].expand(b, h, times, s, e).reshape(b, h * times, s, e)
        return x.repeat_interleave(times, 1)
