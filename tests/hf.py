"""Tiny Hugging Face models in double precision, with a padded batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, ROWS, SEQ = 61, 6, 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": COMMON,
    "gpt_neo": {**COMMON, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": COMMON,
    "opt": {**COMMON, "ffn_dim": 56, "word_embed_proj_dim": 32},
    "bloom": COMMON,
    "falcon": COMMON,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 8},
    "phi": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "olmo2": GROUPED,
}


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    """The causal language model `name`, of two layers, as it evaluates."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**CONFIGS[name], **changes})
    return AutoModelForCausalLM.from_config(config).double().eval()


def padded_batch() -> dict[str, Tensor]:
    """Rows [6, 16] of different lengths, with the padding left out of the loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (ROWS, SEQ), generator=generator)
    mask = torch.arange(SEQ) < torch.tensor([16, 12, 16, 5, 9, 16])[:, None]
    return {
        "input_ids": ids.where(mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }


def precise_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, without its cast of the logits to single precision."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
