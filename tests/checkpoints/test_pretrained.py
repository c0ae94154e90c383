"""Weights from and to folders of safetensors, beside `from_pretrained` of the model."""

from __future__ import annotations

import ctypes
import json
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import RankFailed, run_ranks
from torch import Tensor, nn

import autopar
from autopar import held_state
from autopar.checkpoints.safetensors_file import (
    TensorKind,
    append,
    begin_file,
    in_file_order,
    split_files,
)

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101},
    "llama": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "tie_word_embeddings": False,
    },
}
OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def make(kind: str, base: bool = False) -> nn.Module:
    more = OFF if kind == "gpt2" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES[kind], **more)
    auto = transformers.AutoModel if base else transformers.AutoModelForCausalLM
    return auto.from_config(config)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def other(kind: str, folder: Path, shard: str = "5GB", base: bool = False) -> nn.Module:
    """A model with weights of its own, written by Hugging Face."""
    torch.manual_seed(7)
    model = make(kind, base)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def train(kind: str, mesh: str, folder: str, out: str, options: Any) -> list[float]:
    """A step with weights that are read, then written."""
    with autopar.on_meta():
        model = make(kind)
    step = autopar.compile(
        model, mesh, example_inputs=batch(), pretrained=folder, **options
    )
    update = torch.optim.SGD(step.parameters(), lr=0.1)
    losses = [step(**batch()).item()]
    update.step()
    losses.append(step.evaluate(**batch()).item())
    step.save_pretrained(out, shard_bytes=20_000)
    assert (step.state_dict(rank0_only=True) == {}) == (step.comm.rank > 0)
    return losses


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize(
    ("kind", "mesh", "options"),
    [
        ("gpt2", "tp=2", {}),
        ("llama", "pp=2,tp=2", {"microbatches": 2}),
        ("llama", "dp=2,tp=2", {"zero": 3}),
    ],
)
def test_a_folder_goes_in_and_comes_out(kind, mesh, options, tmp_path):
    model = other(kind, tmp_path / "in", shard="30KB")
    assert len([*(tmp_path / "in").glob("*.safetensors")]) > 2
    folders = str(tmp_path / "in"), str(tmp_path / "out")
    found = run_ranks(
        train, autopar.Mesh.parse(mesh).size, kind, mesh, *folders, options
    )
    losses = [model(**batch()).loss]
    losses[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    losses.append(model(**batch()).loss)
    for own in found:
        assert own == pytest.approx([x.item() for x in losses], rel=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model) and again.config.vocab_size == 101
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def one_rank(kind: str = "gpt2") -> autopar.Step:
    torch.manual_seed(0)
    return autopar.compile(make(kind), "tp=1", example_inputs=batch())


@pytest.mark.slow
def test_a_base_model_s_weights_have_a_prefix_less(tmp_path: Path) -> None:
    base = other("gpt2", tmp_path, base=True)  # without its prefix, head and ties
    step = one_rank()
    step.load_pretrained(tmp_path)
    state = step.state_dict()
    for name, p in base.named_parameters():
        assert torch.equal(state[f"transformer.{name}"], p), name
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])


@pytest.mark.slow
def test_values_are_converted_to_the_model_s_dtype(tmp_path: Path) -> None:
    other("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    step = one_rank("llama")
    step.load_pretrained(tmp_path)
    state = step.state_dict()
    assert state["lm_head.weight"].dtype is torch.float32
    assert torch.equal(
        state["lm_head.weight"], state["lm_head.weight"].bfloat16().float()
    )


@pytest.mark.slow
def test_what_a_folder_lacks_stays_if_asked(tmp_path: Path, caplog: Any) -> None:
    base = other("llama", tmp_path, base=True)  # no head, which is not tied
    step = one_rank("llama")
    before = step.state_dict()["lm_head.weight"]
    with pytest.raises(autopar.AutoparError, match=r"missing: lm_head\.weight"):
        step.load_pretrained(tmp_path)
    step.load_pretrained(tmp_path, strict=False)
    state = step.state_dict()
    assert torch.equal(state["lm_head.weight"], before)
    assert torch.equal(state["model.norm.weight"], base.norm.weight)
    assert "has no lm_head.weight: it stays as before" in caplog.text


def lose_a_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_a_file(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def spoil_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def rename_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        save_file({n.replace("ln_f", "norm_f"): x for n, x in held.items()}, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("ln_f", "norm_f"))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lose_a_file, r"lacks model-00002-of-\d+.safetensors \(1 of the \d+ files"),
        (cut_a_file, "cannot be read.*\n  fix  download it again"),
        (spoil_the_index, "is no index of safetensors"),
        (
            rename_a_weight,
            "missing: transformer.ln_f.*\n.*not of the model: .*norm_f.*\n"
            r".* transformer.ln_f.bias may be transformer.norm_f.bias",
        ),
        (empty, "has no safetensors\n  fix  give a folder with model.safetensors"),
    ],
)
def test_a_damaged_folder_changes_nothing(
    spoil: Any, says: str, tmp_path: Path
) -> None:
    other("gpt2", tmp_path, shard="30KB")
    spoil(tmp_path)
    step = one_rank()
    before = step.state_dict()
    with pytest.raises(autopar.AutoparError, match=says):
        step.load_pretrained(tmp_path)
    for name, value in step.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_a_model_of_other_sizes_is_named(tmp_path: Path) -> None:
    other("gpt2", tmp_path)
    config = transformers.AutoConfig.for_model(
        "gpt2", **{**SIZES["gpt2"], "n_embd": 32}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    step = autopar.compile(model, "tp=1", example_inputs=batch())
    with pytest.raises(
        autopar.AutoparError, match=r"shape: .*wte.weight: \[101, 48\] instead of"
    ):
        step.load_pretrained(tmp_path)


@pytest.mark.slow
def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    step = one_rank()
    step.save_pretrained(tmp_path / "new")
    with pytest.raises(autopar.AutoparError, match="is there already"):
        step.save_pretrained(tmp_path / "new")
    held = json.loads((tmp_path / "new" / "config.json").read_text())
    assert held["architectures"] == ["GPT2LMHeadModel"]


def test_tensors_of_all_kinds_are_read_again_as_they_were(tmp_path: Path) -> None:
    """Also where wider numbers come after narrower ones, and none at all."""
    tensors = {
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16().T,
        "none": torch.zeros(0, 4),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "ids": torch.arange(7, dtype=torch.int16),
        "weight": torch.randn(4, 3),
    }
    kinds = {name: TensorKind.of(x) for name, x in tensors.items()}
    files = split_files(kinds, 50)
    parts = [list(own) for own in files]
    assert parts == [["scale", "none"], ["weight"], ["half", "ids", "mask"]]
    for own in (in_file_order(kinds), *files):
        begin_file(tmp_path / "x", own)
        for name in own:
            append(tmp_path / "x", tensors[name])
        found = safetensors.load_file(tmp_path / "x")
        assert found.keys() == own.keys()
        for name, x in found.items():
            assert x.dtype is tensors[name].dtype and torch.equal(x, tensors[name])
    with pytest.raises(
        autopar.AutoparError, match=r"'z' is of torch\.complex64, which"
    ):
        begin_file(tmp_path / "x", {"z": TensorKind((1,), torch.complex64)})


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """So many bytes may be added. What is freed is given back at once: of what glibc
    keeps for later each thread of gloo may have several tensors."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    status = Path("/proc/self/status").read_text()
    (data,) = re.findall(r"VmData:\s+(\d+) kB", status)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(data) * 1024 + room
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def read_in_little_memory(folder: str, out: str) -> int:
    """Bytes that a rank holds of parameters; it reads into them, and writes them."""
    config = transformers.AutoConfig.for_model("llama", **WIDE)
    with autopar.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = {name: x[:, :4] for name, x in batch().items()}
    read = held_state.load_pretrained

    def with_little(*args: Any, **options: Any) -> None:
        with little_memory(TENSOR + FILE):  # which is mapped
            read(*args, **options)

    with patch.object(held_state, "load_pretrained", with_little):
        step = autopar.compile(
            model, "tp=4", example_inputs=tokens, prove=False, pretrained=folder
        )
    with little_memory(2 * TENSOR):  # one of them, and what gloo and others need
        step.save_pretrained(out)
    return sum(p.nbytes for p in step.parameters())


FILE, TENSOR = 40_000_000, 16_777_216
M_MMAP_THRESHOLD = -3  # of malloc.h
WIDE = {**SIZES["llama"], "hidden_size": 1024, "intermediate_size": 4096}
WIDE |= {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.slow
def test_no_rank_ever_has_the_model(tmp_path: Path) -> None:
    """Of 380 MB each of four ranks reads its share, holds it once, and all of them
    write one file."""
    config = transformers.AutoConfig.for_model("llama", **WIDE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "in", max_shard_size=FILE)
    folders = str(tmp_path / "in"), str(tmp_path / "out")
    for held in run_ranks(read_in_little_memory, 4, *folders):
        assert held < 0.27 * total
    (file,) = (tmp_path / "out").glob("*.safetensors")
    for name, x in safetensors.load_file(file).items():
        assert torch.equal(x, model.get_parameter(name)), name


def seeds_of_their_own(folder: str) -> Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    step = autopar.compile(
        make("gpt2"), "tp=2", example_inputs=batch(), pretrained=folder
    )
    return step.state_dict()["transformer.h.0.mlp.c_fc.weight"]


@pytest.mark.slow
def test_what_ranks_held_before_does_not_matter(tmp_path: Path) -> None:
    model = other("gpt2", tmp_path)
    for found in run_ranks(seeds_of_their_own, 2, str(tmp_path)):
        assert torch.equal(found, model.transformer.h[0].mlp.c_fc.weight)


def load_on_one_rank(folder: str) -> None:
    step = autopar.compile(make("gpt2"), "tp=2", example_inputs=batch())
    if step.comm.rank == 0:
        step.load_pretrained(folder)
    else:
        step(**batch())


@pytest.mark.slow
def test_all_ranks_must_load(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 loads weights, but rank 1 steps"):
        run_ranks(load_on_one_rank, 2, str(tmp_path))


class Unsaved:
    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("no vocabulary")


def save_without_room(folder: str) -> list[str]:
    """A disk that is full for rank 0, and a tokenizer that raises."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    step = autopar.compile(make("gpt2"), "tp=2", example_inputs=batch())
    said = []
    for room, tokenizer in ((20_000, None), (resource.RLIM_INFINITY, Unsaved())):
        if step.comm.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with pytest.raises(autopar.AutoparError) as error:
            step.save_pretrained(folder, tokenizer)
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_what_another_library_raises_all_ranks_raise(tmp_path: Path) -> None:
    for full, tokenizer in run_ranks(save_without_room, 2, str(tmp_path / "out")):
        assert "too large" in full and "on a disk with room" in full
        assert tokenizer == "ValueError: no vocabulary"
    assert [*tmp_path.iterdir()] == []
