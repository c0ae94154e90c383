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

SIZED: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
# Others, each with something that those above do not have.
MORE: dict[str, dict[str, Any]] = {
    "bart": {
        **SEQ2SEQ,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 56),
        "max_position_embeddings": 32,
    },
    "bert": COMMON,
    "codegen": {**SIZED, "rotary_dim": 4, "n_positions": 32},
    "cohere2": {**GROUPED, "sliding_window": 8},
    "deepseek_v2": {**LATENT, "head_dim": 4},
    "deepseek_v3": LATENT,
    "diffllama": {**COMMON, "num_key_value_heads": 4},
    "exaone4": {**GROUPED, "sliding_window": 8, "sliding_window_pattern": 2},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 32},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "glm4": {**GROUPED, "head_dim": 8},
    "gpt_bigcode": {**SIZED, "n_inner": 56, "n_positions": 32, "multi_query": True},
    "gptj": {**SIZED, "rotary_dim": 4, "n_positions": 32},
    "granite": GROUPED,
    "lfm2": GROUPED,
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
    "mamba2": {
        **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        **{"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
        **{"chunk_size": 4},
    },
    "mpt": {
        **SEQ2SEQ,
        **{"n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32},
    },
    "nemotron": {**GROUPED, "head_dim": 8},
    "phi3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "t5": {**SEQ2SEQ, "d_kv": 8, "d_ff": 56, "num_layers": 2, "num_heads": 4},
    "xlnet": {**SEQ2SEQ, "n_layer": 2, "n_head": 4, "d_inner": 56},
}


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    """The language model `name`, of two layers, as it evaluates."""
    import transformers

    torch.manual_seed(0)
    known = CONFIGS.get(name) or MORE[name]
    config = transformers.AutoConfig.for_model(name, **{**known, **changes})
    config._experts_implementation = "batched_mm"
    kind = {"bart": "Seq2Seq", "t5": "Seq2Seq", "bert": "Masked"}.get(name, "Causal")
    made = getattr(transformers, f"AutoModelFor{kind}LM").from_config(config)
    return made.double().eval()


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
    """The causal models' own loss, without its cast of the logits to float32."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
