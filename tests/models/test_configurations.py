"""Configurations that ship: found by name, with as many parameters as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.models.configurations import CONFIGS, find_configuration, shipped
from autopar.models.factories import ModelError
from autopar.models.load import load_model

# Parameters in billions, and the dtype, as model cards and files of weights have them
# (the 8 files of gemma-2-9b have 34.4 GiB, 4 bytes a parameter; its -it has 2); of
# models with images, those of the text part.
PUBLISHED = {
    "Qwen/Qwen2.5-72B": (72.7, "bfloat16"),
    "Qwen/Qwen2.5-7B": (7.62, "bfloat16"),
    "Qwen/Qwen3-235B-A22B": (235.1, "bfloat16"),
    "Qwen/Qwen3-30B-A3B": (30.5, "bfloat16"),
    "Qwen/Qwen3-32B": (32.8, "bfloat16"),
    "Qwen/Qwen3-8B": (8.19, "bfloat16"),
    "allenai/OLMo-2-1124-7B": (7.30, "float32"),
    "deepseek-ai/DeepSeek-V3": (671.0, "bfloat16"),
    "google/gemma-2-9b": (9.24, "float32"),
    "google/gemma-3-27b-pt": (27.0, "bfloat16"),
    "google/gemma-3-4b-pt": (3.88, "bfloat16"),
    "gpt3-175b-like": (175.0, "float32"),
    "meta-llama/Llama-2-13b-hf": (13.02, "float16"),
    "meta-llama/Llama-2-70b-hf": (68.98, "float16"),
    "meta-llama/Llama-2-7b-hf": (6.74, "float16"),
    "meta-llama/Llama-3.1-405B": (405.9, "bfloat16"),
    "meta-llama/Llama-3.1-70B": (70.6, "bfloat16"),
    "meta-llama/Llama-3.1-8B": (8.03, "bfloat16"),
    "meta-llama/Llama-3.2-1B": (1.236, "bfloat16"),
    "meta-llama/Llama-3.2-3B": (3.213, "bfloat16"),
    "meta-llama/Llama-4-Scout-17B-16E": (107.8, "bfloat16"),
    "microsoft/Phi-3-mini-4k-instruct": (3.82, "bfloat16"),
    "microsoft/phi-4": (14.7, "bfloat16"),
    "mistralai/Mistral-7B-v0.1": (7.24, "bfloat16"),
    "mistralai/Mixtral-8x22B-v0.1": (140.6, "bfloat16"),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, "bfloat16"),
    "openai-community/gpt2": (0.1244, "float32"),
    "openai-community/gpt2-large": (0.774, "float32"),
    "openai-community/gpt2-medium": (0.355, "float32"),
    "openai-community/gpt2-xl": (1.558, "float32"),
    "openai/gpt-oss-120b": (116.8, "bfloat16"),
    "openai/gpt-oss-20b": (20.9, "bfloat16"),
}


def test_all_that_ship_are_known() -> None:
    assert set(shipped()) == set(PUBLISHED)


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_many_as_published(name: str) -> None:
    billions, dtype = PUBLISHED[name]
    model = load_model(f"hf:{name}", device="meta").model
    number = sum(p.numel() for p in model.parameters())
    assert abs(number / (billions * 1e9) - 1) < 0.01
    assert {p.dtype for p in model.parameters()} <= {
        getattr(torch, dtype),
        torch.float32,
    }
    assert next(model.parameters()).dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
    ],
)
def test_a_name_may_be_short(name: str, found: str) -> None:
    assert find_configuration(name, ["gpt2", "llama"]) == CONFIGS / f"{found}.json"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("Llama-3-70b", "Llama-3.1-70B"),
        ("gpt-oss-21b", "gpt-oss-20b"),
    ],
)
def test_a_near_miss_is_told_the_name(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as raised:
        load_model(f"hf:{name}", device="meta")
    assert near in raised.value.fix


def test_the_cache_of_the_hub_is_looked_into(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 16, "n_head": 2}
    config |= {"torch_dtype": "bfloat16", "vocab_size": 10}
    (snapshot / "config.json").write_text(json.dumps(config))
    model = load_model("hf:someone/tiny?n_layer=1", device="meta").model
    assert len(model.transformer.h) == 1
    assert next(model.parameters()).dtype == torch.bfloat16
