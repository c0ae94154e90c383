"""The plans of `predicted.py`: varied in all that a planner decides, on two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from examples.gpt import GPT, Config, build

SEQ = 128  # tokens of a sample
BATCH = 8  # samples of a step

# In a step operations must dominate what starting them takes.
GPT_CONFIG = Config(layers=6, width=256, heads=8, context=SEQ, vocab=2048)
WORKLOADS = {
    "gpt": "examples.benchmarks.predicted_plans:gpt",
    "llama": "hf:llama?num_hidden_layers=6,hidden_size=256,intermediate_size=704,"
    "num_attention_heads=8,num_key_value_heads=4,vocab_size=2048,"
    "max_position_embeddings=128",
}


def gpt() -> tuple[GPT, dict[str, Tensor]]:
    return build(GPT_CONFIG, BATCH)


@dataclass(frozen=True)
class Choice:
    """What is decided of a plan; the layers of its stages are balanced by prices."""

    mesh: str
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 0
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).size

    def candidate(self, batch: int) -> Candidate:
        """The candidate for steps of `batch` samples, without layers."""
        mesh = Mesh.parse(self.mesh)
        return Candidate(
            mesh,
            batch // mesh.axis_size("dp") // self.microbatches,
            self.microbatches,
            self.schedule,
            self.stages_per_rank,
            self.zero,
            self.recompute,
            (),
        )


CHOICES = (
    Choice("dp=2"),
    Choice("tp=2"),
    Choice("pp=2", 4),
    Choice("dp=2", 2, zero=1),
    Choice("dp=2", zero=3),
    Choice("tp=2", 2, recompute="full"),
    Choice("pp=2", 8, "gpipe"),
    Choice("pp=2", 4, "interleaved", 3),
    Choice("pp=2", 8, "zb-h1"),
    Choice("pp=2", 2, recompute="full"),
    Choice("dp=4"),
    Choice("pp=4", 8),
    Choice("pp=2,dp=2", 4),
    Choice("pp=2,tp=2", 4),
    Choice("dp=2,tp=2", zero=1),
    Choice("dp=4", 2, zero=3, recompute="full"),
    Choice("pp=2,dp=2", 2, "interleaved", 3, zero=1),
    Choice("pp=4", 8, "zb-h1"),
)


def spread(choices: Sequence[Choice], count: int | None) -> list[Choice]:
    """Picks `count` choices, evenly over the list; None: all."""
    if count is None or count >= len(choices):
        return list(choices)
    step = (len(choices) - 1) / max(1, count - 1)
    return [choices[round(i * step)] for i in range(count)]
