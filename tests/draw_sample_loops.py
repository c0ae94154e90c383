"""Random losses that go over the samples of a batch one by one, in the words that
people use.

What each sample comes to is computed of all at once, so that any plan may share samples
out; where one depends on which it is, or on others, microbatches are refused.
`python tests/draw_sample_loops.py 137` proves one draw alone, `python
tests/draw_sample_loops.py 0 999` many, and counts what came out.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from cases import Case
from draw_options import Choices, Draw, chance_of, draw_plan, draw_values, prove_all
from models import VOCAB, Block, Stack, randomize
from torch import Tensor

from autopar.passes.program import Program
from autopar.verify import verify

IGNORED = -100
SHARING, MOST_RANKS = 2, 4
# How a loop begins: of logits [batch, seq, vocab], labels [batch, seq], weights of
# samples [batch] and a teacher [batch, seq, vocab], those of a sample: x, y, w, t.
LOOPS = {
    "zip": "for x, y, w, t in zip(logits, labels, weights, teacher):",
    "strict": "for x, y, w, t in zip(logits, labels, weights, teacher, strict=True):",
    "unbind": (
        "for x, y, w, t in zip(logits.unbind(0), labels.unbind(), weights.unbind(), "
        "torch.unbind(teacher, dim=0)):"
    ),
    "range": (
        "for i in range(logits.size(0)):\n"
        "    x, y, w, t = logits[i], labels[i], weights[i], teacher[i]"
    ),
    "backwards": (
        "for i in reversed(range(len(logits))):\n"
        "    x, y, w, t = logits[i], labels[i], weights[i], teacher[i]"
    ),
    "from the end": (
        "for i in range(len(labels)):\n"
        "    x, y, w, t = logits[i - len(labels)], labels[i, :], weights[i], teacher[i]"
    ),
    "select": (
        "for i in range(len(labels)):\n"
        "    x, y = logits.select(0, i), labels.select(0, i)\n"
        "    w, t = weights.narrow(0, i, 1).squeeze(), teacher[i]"
    ),
    "kept": (
        "for i in range(len(labels)):\n"
        "    x, y = logits[i : i + 1].squeeze(0), labels[i : i + 1].view(-1)\n"
        "    w, t = weights[i : i + 1].squeeze(0), teacher[i : i + 1].flatten(0, 1)"
    ),
    "split": (
        "for x, y, w, t in zip(logits.split(1), labels.split(1), weights.split(1), "
        "teacher.split(1)):\n"
        "    x, y, w, t = x[0], y[0], w[0], t.squeeze(0)"
    ),
    "chunk": (
        "for x, y, w, t in zip(logits.chunk(len(logits)), labels.chunk(len(logits)), "
        "weights.chunk(len(logits)), teacher.chunk(len(logits))):\n"
        "    x, y, w, t = x[0], y.flatten(), w.squeeze(), t[0]"
    ),
}
# What may come before: positions that predict the next token, some of them, a cast.
BEFORE = {
    "": "",
    "shifted": "x, y, t = x[:-1], y[1:], t[1:]",
    "head": "x, y, t = x[:4], y[:4], t[:4]",
    "narrow": "x, y, t = x.narrow(0, 1, 3), y.narrow(0, 1, 3), t[1:4]",
    "scaled": "x = x / 1.5",
    "float": "x = x.float().to(logits.dtype)",
    "twice": "x = torch.cat([x, x]); y = torch.cat([y, y]); t = torch.stack([t, t])[0]",
}
# What is made of each of a sample's tokens: v [seq].
TOKENS = {
    "entropies": "F.cross_entropy(x, y, reduction='none')",
    "log_softmax": (
        "-F.log_softmax(x, -1).gather(-1, y.clamp(min=0)[:, None]).squeeze(-1)"
    ),
    "selected": (
        "torch.logsumexp(x, dim=-1) - x.gather(1, y.clamp(min=0).unsqueeze(1))[:, 0]"
    ),
    "softmax": "x.softmax(dim=-1).square().sum(-1)",
    "entropy": "-(x.softmax(-1) * x.log_softmax(-1)).sum(dim=1)",
    "transposed": "x.t().logsumexp(0)",
    "turned": "x[None].mT.logsumexp(1)[0]",
    "largest": "x.amax(-1) - x.mean(dim=1)",
    "normed": "F.layer_norm(x, x.shape[-1:]).pow(3).mean(-1)",
    "running": "x.cumsum(0).tanh().mean(-1)",
    "sorted": "x.sort(dim=-1, descending=True)[0][:, :3].sum(-1)",
    "taught": "F.mse_loss(x[: len(t)], t[: len(x)], reduction='none').mean(-1)",
    "ratios": "torch.exp(x[:, 0] - x[:, 0].detach()).clamp(0.8, 1.2) * w",
    "centered": "(x - x.mean(0, keepdim=True)).square().sum(-1)",
    "by place": "x[:, 0] * torch.arange(len(x), dtype=x.dtype)",
    "by table": "x[:, 1] * torch.linspace(0.5, 1, len(x), dtype=x.dtype)",
    "permuted": "x.unsqueeze(0).permute(2, 0, 1).sum(0).squeeze(0)",
    "where": "torch.where(x > 0, x, 0.1 * x).sum(-1)",
    "by index": "-x.log_softmax(-1)[torch.arange(len(y)), y.clamp(min=0)]",
    "nll": "F.nll_loss(F.log_softmax(x, 1), y, reduction='none')",
    "binary": "F.binary_cross_entropy_with_logits(x[:, 0], kept.to(x.dtype), "
    "reduction='none')",
    "divergence": "F.kl_div(x.log_softmax(-1)[: len(t)], "
    "t[: len(x)].softmax(-1), reduction='none').sum(-1)",
    "one hot": "(x * F.one_hot(y.clamp(min=0), x.shape[-1])).sum(-1)",
    "matrix": "(x @ x.T).tanh().mean(-1)",
    "pairs": "torch.einsum('sv,tv->st', x, x).softmax(-1).amax(-1)",
    "steps": "torch.diff(x, dim=0, prepend=x[:1]).abs().sum(-1)",
    "flipped": "x.flip(0).cumsum(0)[:, 2]",
    "outer": "(x[:, None, 0] - x[None, :, 0]).square().mean(1)",
    "filled": "x.masked_fill(y[:, None] < 5, 0.0).sum(-1)",
}
# What it comes to: v [seq] -> of a sample.
SAMPLES = {
    "mean": "v.mean()",
    "sum": "v.sum()",
    "kept": "v[kept].mean()",
    "masked": "(v * kept).sum() / kept.sum().clamp(min=1)",
    "weighed": "w * v.mean()",
    "norm": "v.norm()",
    "std": "v.std() + v[0]",
    "largest": "v.max()",
    "gated": "torch.sigmoid(v.sum() * w)",
    "positive": "v.mean() * (w > 0)",
    "last": "v[-1]",
    "tokens": "v",
    "row": "v[None]",
    "where": "torch.where(w > 0, v.mean(), v.sum())",
}
# How a loop begins what it adds to, adds, and ends.
TOTALS = {
    "list": ("parts = []", "parts.append({})", "torch.stack(parts).mean()"),
    "list sum": ("parts = []", "parts.append({})", "(sum(parts) / len(parts)).mean()"),
    "columns": (
        "parts = []",
        "parts.append({}.sum().reshape(1))",
        "torch.cat(parts).square().mean()",
    ),
    "joined": (
        "parts = []",
        "parts.append({}.reshape(-1))",
        "torch.cat(parts, dim=0).mean()",
    ),
    "last dim": (
        "parts = []",
        "parts.append({}.reshape(-1))",
        "torch.stack(parts, dim=-1).tanh().mean()",
    ),
    "number": ("total = 0", "total += {}.sum()", "total / len(logits)"),
    "float": ("total = 0.0", "total = total + {}.mean()", "total / logits.shape[0]"),
    "tensor": (
        "total = torch.zeros((), dtype=logits.dtype)",
        "total = total + {}.mean()",
        "total",
    ),
    "in place": ("total = logits.new_zeros(())", "total += {}.sum()", "total"),
    "shares": ("total = 0", "total += {}.mean() / len(logits)", "total"),
    "two": (
        "total, size = 0, 0",
        "total += {}.sum(); size += kept.sum()",
        "total / size",
    ),
    "two lists": (
        "parts, sizes = [], []",
        "parts.append({}.sum()); sizes.append(kept.sum())",
        "torch.stack(parts).sum() / torch.stack(sizes).sum()",
    ),
    "written": (
        "out = torch.zeros(len(logits), dtype=logits.dtype)",
        "out[{i}] = {}.mean()",
        "out.square().mean()",
    ),
    "empty": (
        "out = logits.new_empty(len(logits))",
        "out[{i}] = {}.sum()",
        "out.mean()",
    ),
}
# What cannot be done to all at once: of a loop, the line that is more.
MIXED = {
    "": "",
    "by number": "part = part * (1 + len(parts))",
    "after another": "part = part + (parts[-1] if parts else 0)",
    "the first alone": "part = part * (0 if parts else 1)",
    "another": "part = part * logits[0].mean()",
}
WITH_NUMBERS = [name for name, text in LOOPS.items() if "range" in text]

DESIGN: Choices = {
    "mixed": lambda v: [""] * 25 + [*MIXED],
    "total": lambda v: ["list"] if v["mixed"] else [*TOTALS],
    "loop": lambda v: (
        WITH_NUMBERS if "{i}" in TOTALS[v["total"]][1] else _loops(v["total"])
    ),
    "before": lambda v: [*BEFORE],
    "tokens": lambda v: [*TOKENS],
    "sample": lambda v: ["mean"] if v["mixed"] else [*SAMPLES],
    "batch": lambda v: [2, 4, 4, 6, 8],
    "seq": lambda v: [6, 8],
}


def _loops(total: str) -> list[str]:
    """Lists are in order of samples."""
    lists = "parts" in TOTALS[total][0] and total != "list sum"
    return [name for name in LOOPS if not lists or name != "backwards"]


def body(v: Mapping[str, Any]) -> str:
    """The source of a drawn loss."""
    begin, add, end = TOTALS[v["total"]]
    lines = ["def loss(logits, labels, weights, teacher):", f"    {begin}"]
    lines += [f"    {line}" for line in LOOPS[v["loop"]].split("\n")]
    inner = [
        BEFORE[v["before"]],
        f"kept = y != {IGNORED}",
        f"v = {TOKENS[v['tokens']]}",
    ]
    if "kept" in SAMPLES[v["sample"]] and v["tokens"] in ("taught", "divergence"):
        inner.append("kept = kept[: len(v)]")
    inner += [f"part = {SAMPLES[v['sample']]}", MIXED[v["mixed"]]]
    inner.append(add.format("part", i="i"))
    lines += [f"        {line}" for line in inner if line]
    return "\n".join([*lines, f"    return {end}"])


@dataclass(frozen=True)
class DrawnLoop:
    design: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        words = ", ".join(f"{name}={word}" for name, word in self.design)
        return f"{words}\n{body(dict(self.design))}\n"

    def build(self, dtype: torch.dtype) -> Case:
        torch.manual_seed(0)
        model = randomize(Stack(Block, 1)).to(dtype)
        [first, *_] = batches(self, dtype)
        return Case(model, first, _loss(body(dict(self.design))))

    def with_batch(self, samples: int) -> DrawnLoop:
        return replace(self, design=(*{**dict(self.design), "batch": samples}.items(),))


@lru_cache(maxsize=2)
def _loss(text: str) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    name = f"drawn_{crc32(text.encode())}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(text, name, "exec"), names)

    def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        fields = (batch[name] for name in ("labels", "weights", "teacher"))
        result: Tensor = names["loss"](logits, *fields)
        return result

    return loss


def batches(model: DrawnLoop, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Each sample has labels; of the last batch one alone."""
    v = dict(model.design)
    shape = v["batch"], v["seq"]
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        labels = torch.randint(VOCAB, shape)
        labels[torch.rand(shape) < 0.3 * seed] = IGNORED
        labels[:, 2] = 1
        teacher = torch.randn(*shape, VOCAB, dtype=dtype)
        weights = torch.randn(shape[0], dtype=dtype)
        ids = torch.randint(VOCAB, shape)
        made.append(
            {"input_ids": ids, "labels": labels, "weights": weights, "teacher": teacher}
        )
    return made


@dataclass(frozen=True)
class DrawOfLoop(Draw):
    """Proved on several batches."""

    model: DrawnLoop

    @property
    def mixed(self) -> bool:
        """Whether samples are not computed alike."""
        return bool(dict(self.model.design)["mixed"])

    def check(self, program: Program, case: Case) -> Any:
        dtype = next(case.model.parameters()).dtype
        return [
            verify(program, case.model, batch, case.loss_fn, drawn=False).check()
            for batch in batches(self.model, dtype)
        ]


def draw(seed: int) -> DrawOfLoop:
    """The draw of a number."""
    design = draw_values(DESIGN, {}, chance_of(f"sample loops {seed // SHARING}"))
    sizes = {"batch": design["batch"], "seq": design["seq"], "fused": False}
    chance = chance_of(f"of sample loops {seed}")
    mesh, options = draw_plan("sample_loops", sizes, chance, MOST_RANKS)
    model = DrawnLoop(tuple(design.items()))
    options["loss_chunks"] = 1  # some losses mix positions
    values = tuple(options.items())
    return DrawOfLoop(seed, model, mesh, values, "draw_sample_loops.py")


def main(first: int, last: int) -> int:
    """Prove draws first to last, all of them; the number of those that failed."""
    return prove_all(map(draw, range(first, last + 1)))


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0], numbers[-1]) > 0)
