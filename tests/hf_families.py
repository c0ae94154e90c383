"""Every family of causal language models that `transformers` builds small enough.

`python tests/hf_families.py` proves all and prints the table that is kept in
`golden/hf_families.txt`; with names, these alone.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from autopar.options import make_plan
from autopar.passes.capture.trace import trace
from autopar.passes.errors import AutoparError
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.proof.ranks import VerificationFailed
from autopar.verify import verify

VOCAB, ROWS, SEQ = 61, 6, 12
MOST = 4_000_000  # parameters of what is small

# Each family takes those of these that its configuration has.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    # One thing has many names.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_inner"), 56),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 56),
    **dict.fromkeys(("n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 24),
    "shared_expert_intermediate_size": 24,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "num_experts_per_tok"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "expansion_ratio": 2,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}

# What some need beside, or must not have (None).
KIMI = {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4}
THETA = {"rope_theta": 10000.0}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    **{"d_rel": 4, "rel_extent": 8, "sliding_window_size": 8},
    **{"unpadded_vocab_size": VOCAB, "n_layers_per_attn_res_block": 1},
}
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**KIMI, "layer_group_size": 2, "num_expert_group": 2},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default"} | THETA},
    },
    "cpmant": {"dim_head": 8, "prompt_types": 2, "segment_types": 2},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        **{"mlp_layer_types": ["dense", "sparse"], "per_layer_config": {}},
        **{"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2},
        **{"shared_experts_intermediate_size": 24, "head_dim": 12, "n_group": 1},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "activation_sparsity_pattern": [0.95, 0.0],
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling2_text": INKLING,
    "inkling2_loop_text": {
        **INKLING,
        **{"layer_types": ["hybrid_sliding", "hybrid"] * 2, "num_hidden_layers": 4},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3},
        **{"loop_num_passes": 2, "loop_gate_rank": 4},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {**KIMI, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "longcat_flash": {
        **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 24),
        **{"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "prophetnet": {
        "num_hidden_layers": None,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        **{"hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32},
        **{"heads_per_ngram": 2, "ngram_vocab_size_base": 50},
        **{"make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 1},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "xlnet": {"max_position_embeddings": None},
    "zamba": {
        "layer_types": ["mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layer_types": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# What some compute in float32 whatever their parameters are.
IN_FLOAT32 = ("inkling2_loop_text", "inkling2_text", "xglm")

MESHES: dict[str, dict[str, Any]] = {
    "pp=2,tp=2": {"microbatches": 3},
    "tp=3": {"sequence_parallel": False},
    "cp=2,ep=3": {"microbatches": 2, "cp_layout": "zigzag"},
    "fsdp=2,tp=2": {"microbatches": 3, "zero": 3, "recompute": "full"},
}


def names() -> list[str]:
    """Names all families that have a causal language model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as families,
    )

    return sorted(families)


class NotBuilt(Exception):
    """A family whose model is not made, or not small, by what is known of its sizes."""


def build(name: str) -> nn.Module:
    """The family's model in float64, as it evaluates. Raises NotBuilt."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        known = CONFIG_MAPPING[name]()
        if {"vision_config", "audio_config", "text_config"} & set(vars(known)):
            raise NotBuilt("one of several parts, not all of text")
        fields = {*known.to_dict(), *known.attribute_map}
        sizes = {k: v for k, v in SMALL.items() if k in fields}
        if "kv_lora_rank" in fields:  # the rotated channels of keys are one head's
            sizes |= {"num_key_value_heads": 4, "head_dim": SMALL["qk_rope_head_dim"]}
        kinds = list(dict.fromkeys(known.to_dict().get("layer_types") or ()))
        if len(kinds) > 1:
            sizes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
        sizes |= CHANGES.get(name, {})
        config = AutoConfig.for_model(
            name, **{k: v for k, v in sizes.items() if v is not None}
        )
        config._experts_implementation = "batched_mm"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        count = sum(p.numel() for p in model.parameters())
        if count > MOST:
            raise NotBuilt(f"{count:,} parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        return model.float() if name in IN_FLOAT32 else model.double()
    except NotBuilt:
        raise
    except Exception as error:  # the library's own, of any kind
        raise NotBuilt(
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None


def outcomes(name: str) -> list[str]:
    """What comes of a family: "right" for each mesh, or why not; one for all, where
    the model is not even captured."""
    from hf import precise_loss
    from models import randomize, token_batch

    try:
        model = randomize(build(name))
    except NotBuilt as error:
        return [f"not built: {error}"]
    batch = token_batch(ROWS, SEQ, VOCAB)
    try:
        precise_loss(model(**batch), batch).backward()
        model.zero_grad()
    except Exception as error:  # the library's own, of any kind
        return [f"not run: {type(error).__name__}: {first_line(error)}"]
    try:
        traced = trace(model, batch, precise_loss)
    except AutoparError as error:
        return [f"refused: {first_line(error)}"]
    except Exception as error:
        return [f"FAILED: {type(error).__name__}: {first_line(error)}"]
    found = []
    for mesh, options in MESHES.items():
        try:
            program = compile_program(traced, make_plan(mesh, **options), PLAIN)
            verify(program, model, batch, precise_loss).check()
            found.append("right")
        except VerificationFailed as error:
            found.append(f"WRONG: {first_line(error)}")
        except AutoparError as error:
            found.append(f"refused: {first_line(error)}")
        except Exception as error:
            found.append(f"FAILED: {type(error).__name__}: {first_line(error)}")
    return found if len(set(found)) > 1 else found[:1]


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


def row(name: str) -> str:
    """A line of the table, or one for each mesh where these differ."""
    found = outcomes(name)
    if len(found) == 1:
        return f"{name}: {found[0]}"
    return "\n".join(
        f"{name} on {mesh}: {result}"
        for mesh, result in zip(MESHES, found, strict=True)
    )


if __name__ == "__main__":
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for family in sys.argv[1:] or names():
        print(row(family), flush=True)
