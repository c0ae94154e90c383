"""Models by name: what a specification builds, and what it says when it cannot."""

from __future__ import annotations

import importlib
import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from plans import BATCH, CONFIG, model_file
from torch import nn

from autopar.models.load import (
    IGNORED,
    ModelError,
    example_batch,
    load_model,
    random_batch,
)
from autopar.models.meta import parameters_on_meta

GPT2 = "hf:gpt2?n_layer=1,n_embd=16,n_head=2,vocab_size=32"
LLAMA = (
    "hf:llama?num_hidden_layers=1,hidden_size=16,intermediate_size=32,"
    "num_attention_heads=2,vocab_size=32"
)


def test_a_file_gives_model_and_batch(tmp_path: Path) -> None:
    loaded = load_model(model_file(tmp_path))
    assert loaded.batch is not None and not loaded.on_meta
    assert loaded.batch["ids"].shape == (BATCH, CONFIG.context)


def test_a_module_may_be_named(tmp_path: Path) -> None:
    loaded = load_model("plans:small_model")
    assert loaded.batch is None
    assert sum(p.numel() for p in loaded.model.parameters()) > 0


@pytest.mark.parametrize("spec", ["ours/gpt.py:f", "ours.gpt:f"])
def test_what_lies_where_we_are_can_be_imported(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command `autopar` does not have that folder on its path by itself."""
    package = tmp_path / "ours"
    package.mkdir()
    model_file(package)
    (package / "gpt.py").write_text("from ours.model import small as f")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("ours", "ours.gpt", "ours.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_model(spec).batch is not None


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "autopar_test_width.py").write_text("WIDTH = 3\n")
    (tmp_path / "m.py").write_text(
        "from autopar_test_width import WIDTH\nimport torch\n"
        "def f():\n    return torch.nn.Linear(WIDTH, WIDTH)\n"
    )
    loaded = load_model(f"{tmp_path / 'm.py'}:f")
    assert isinstance(loaded.model, nn.Linear) and loaded.model.in_features == 3


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (load_model(GPT2, seed=s).model for s in (1, 1, 2))
    pairs = zip(first.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gpt.py", "does not name a model"),
        ("nothing.py:f", "no file 'nothing.py'"),
        ("examples/gpt.py:tinyy", "did you mean tiny"),
        ("no_such_package.x:f", "no module 'no_such_package.x'"),
        ("hf:gpt22", "no model type 'gpt22'.*\n.*did you mean gpt2"),
        ("hf:gpt2?n_layers=2", "no 'n_layers'\n.*did you mean n_layer "),
        ("hf:gpt2?n_layer", "is not key=value"),
        ("hf:nothing/config.json", "no configuration 'nothing/config.json'"),
        ("hf:examples", "the folder 'examples' has no config.json\n  fix  give one"),
        ("hf:/no/such", "the folder '/no/such' is not there"),
        ("hf:t5", "not a causal language model"),
    ],
)
def test_a_wrong_specification_says_what_is_right(
    spec: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ModelError, match=says):
        load_model(spec)


@pytest.mark.parametrize("made", ["3", "(torch.nn.Linear(1, 1), 3)"])
def test_a_factory_returns_a_model(tmp_path: Path, made: str) -> None:
    (tmp_path / "m.py").write_text(f"import torch\ndef f():\n    return {made}\n")
    with pytest.raises(ModelError, match="return the model, or"):
        load_model(f"{tmp_path / 'm.py'}:f")


def test_an_import_error_of_the_users_file_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ModelError, match="no_such_package_at_all") as found:
        load_model(f"{tmp_path / 'm.py'}:f")
    assert isinstance(found.value.__cause__, ModuleNotFoundError)


def test_an_error_of_the_users_factory_shows_their_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f():\n    return {}['layers']\n")
    with pytest.raises(ModelError) as found:
        load_model(f"{tmp_path / 'm.py'}:f")
    what, head, *frames, error = str(found.value).splitlines()
    assert what == f"'{tmp_path / 'm.py'}:f' raised an error"
    assert head == "Traceback (most recent call last):"
    assert frames[0] == f'  File "{tmp_path / "m.py"}", line 2, in f'
    assert error == "KeyError: 'layers'"


def test_only_functions_are_suggested(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import ast\nlayout = 3\ndef lay(): ...\n")
    with pytest.raises(ModelError, match=r"did you mean lay\?"):
        load_model(f"{tmp_path / 'm.py'}:lays")


def test_without_transformers_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"pip install 'autopar\[hf\]'"):
        load_model("hf:gpt2")


def test_a_configuration_file_and_changes_to_it(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 16, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 32}))
    loaded = load_model(f"hf:{tmp_path / 'config.json'}?num_hidden_layers=1")
    of_folder = load_model(f"hf:{tmp_path}?num_hidden_layers=1")
    assert str(of_folder.model) == str(loaded.model)
    assert loaded.vocab == 32 and loaded.shifts_labels and loaded.model.training
    names = [name for name, _ in loaded.model.named_parameters()]
    assert any(".h.0." in n for n in names) and not any(".h.1." in n for n in names)


ARIA = (
    "hf:aria_text?num_hidden_layers=1,hidden_size=16,intermediate_size=32,"
    "num_attention_heads=2,num_key_value_heads=2,vocab_size=32,moe_num_experts=4"
)


def test_experts_are_captured_whatever_their_configuration_calls_them() -> None:
    """A model has them if its code has; without any, the choice is no matter."""
    found = {spec: load_model(spec).model.config for spec in (GPT2, ARIA)}
    assert {c._experts_implementation for c in found.values()} == {"batched_mm"}
    own = load_model(f"{ARIA},experts_implementation=eager").model.config
    assert own._experts_implementation == "eager"


def test_a_dtype_can_be_chosen() -> None:
    model = load_model(f"{GPT2},dtype=bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("spec", [GPT2, LLAMA])
def test_on_meta_parameters_are_gone_and_buffers_real(spec: str) -> None:
    real, meta = (load_model(spec, device=d).model for d in ("cpu", "meta"))
    assert all(p.is_meta for p in meta.parameters())
    kept = dict(meta.named_buffers())
    for name, buffer in real.named_buffers():
        assert torch.equal(buffer, kept[name]), name
    shapes = [
        {n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()}
        for m in (real, meta)
    ]
    assert shapes[0] == shapes[1]
    assert (real.lm_head.weight is real.get_input_embeddings().weight) == (
        meta.lm_head.weight is meta.get_input_embeddings().weight
    )


def test_a_factory_on_meta_keeps_ties_and_its_batch(tmp_path: Path) -> None:
    loaded = load_model(model_file(tmp_path), device="meta")
    assert all(p.is_meta for p in loaded.model.parameters())
    assert loaded.model.head.weight is loaded.model.tokens.weight
    assert loaded.batch is not None and not loaded.batch["ids"].is_meta


def test_big_tensors_never_exist() -> None:
    with parameters_on_meta() as finish:
        model = nn.Sequential(nn.Embedding(1 << 20, 1 << 16), nn.LayerNorm(8))
        finish(model)
    assert all(p.is_meta for p in model.parameters())  # 256 GiB


@pytest.mark.slow
def test_a_model_of_175_billion_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_model("hf:gpt3-175b-like")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = sum(p.numel() for p in loaded.model.parameters())
    assert loaded.on_meta and 174e9 < number < 176e9
    assert after - before < 500_000  # KiB


def test_a_batch_has_tokens_and_some_labels_to_ignore() -> None:
    batch = example_batch(50, 6, 16, attention_mask=True)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["attention_mask"].all()
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 50
    ignored = batch["labels"] == IGNORED
    assert ignored.any() and not ignored.all(dim=1).any()
    assert torch.equal(batch["labels"], example_batch(50, 6, 16, True)["labels"])


def test_a_batch_to_plan_for_has_shapes_alone() -> None:
    made = [example_batch(50, 6, 16, packed=True, device=d) for d in ("cpu", "meta")]
    real, shapes = ({k: (x.shape, x.dtype) for k, x in b.items()} for b in made)
    assert real == shapes and all(x.is_meta for x in made[1].values())


def test_what_is_not_tokens_is_not_made_up() -> None:
    with pytest.raises(ModelError, match=r"'pixels', float32\[2, 3\]"):
        random_batch({"pixels": ((2, 3), "float32")}, 10)
