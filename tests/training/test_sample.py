"""`autopar sample` goes on as the plain model does with a checkpoint's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans import tiny_file
from torch import Tensor

from autopar.cli import main
from autopar.models.load import load_model
from autopar.training.data.detokenize import open_text
from autopar.training.sample import (
    Origin,
    SampleError,
    Sampling,
    logits_of,
    sample_text,
)

PROMPT = "import os, sys"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, whose vocabulary is larger than that of bytes, and a
    checkpoint of it."""
    folder = tmp_path_factory.mktemp("trained")
    spec, plan = tiny_file(folder, 1, 16, 2, 8, 300), str(folder / "plan")
    assert main(["compile", spec, "--mesh", "tp=1", "-o", plan]) == 0
    run = ["run", plan, "--data", "stdlib", "--steps", "20", "--lr", "0.02"]
    said = ["--sample-prompt", PROMPT]
    assert main([*run, "--save", str(folder / "runs"), *said]) == 0
    return folder


def written(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *options: str,
    prompt: str = PROMPT,
) -> str:
    capsys.readouterr()
    assert main(["sample", str(folder / "runs"), "--prompt", prompt, *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def greedy(folder: Path, number: int) -> str:
    """What the plain model is likeliest to go on with, by hand."""
    assert main(["export", str(folder / "runs"), "-o", str(folder / "w.pt")]) == 0
    model = load_model(f"{folder / 'model.py'}:tiny").model.eval()
    model.load_state_dict(torch.load(folder / "w.pt"))
    ids = list(PROMPT.encode())
    for _ in range(number):
        logits = model(torch.tensor([ids[-8:]]))[0][0, -1]
        ids.append(int(logits[:256].argmax()))
    return bytes(ids).decode("utf-8", "replace")


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_plain_model(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = greedy(trained, 30)
    assert expected.startswith(PROMPT)
    for how in (["--temperature", "0"], ["--top-k", "1"]):
        assert written(capsys, trained, "--tokens", "30", *how) == expected


def test_a_seed_decides_what_is_drawn(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [written(capsys, trained, "--seed", s) for s in ("0", "0", "1")]
    assert texts[0] == texts[1] != texts[2]


def test_a_run_ends_with_a_sample(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(trained / "runs")
    line = ["run", str(trained / "plan"), "--data", "stdlib", "--steps", "20"]
    line += ["--lr", "0.02", "--save", folder, "--resume", "--sample-prompt", PROMPT]
    assert main(line) == 0
    assert capsys.readouterr().out == f"{written(capsys, trained)}\n"


def test_what_cannot_be_sampled_is_said(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for folder, prompt, says in (
        (trained / "runs", "", "the prompt is empty"),
        (tmp_path, "a", "no complete checkpoint"),
    ):
        assert main(["sample", str(folder), "--prompt", prompt]) == 2
        assert says in capsys.readouterr().err


def test_files_are_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run found them, unless there are such files here."""
    (tmp_path / "there" / "bpe").mkdir(parents=True)
    (tmp_path / "there" / "my model.py").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    there = str(tmp_path / "there")
    origin = Origin("my model.py:tiny", 0, {}, 64, "bpe", there)
    found = origin.from_here()
    assert found.model == f"{there}/my model.py:tiny"
    assert found.tokenizer == f"{there}/bpe"
    folder = replace(origin, model="hf:bpe", tokenizer="").from_here()
    assert (folder.model, folder.tokenizer) == (f"hf:{there}/bpe", "")
    Path("my model.py").touch()
    assert origin.from_here().model == "my model.py:tiny"
    for name in ("package.module:tiny", "hf:gpt2", "hf:gpt2?n_layer=2"):
        assert replace(origin, model=name).from_here().model == name


def test_a_prompt_has_tokens_of_the_model(trained: Path) -> None:
    loaded = load_model(f"{trained / 'model.py'}:tiny")
    few = Origin(loaded.spec, 0, {"ids": ((4, 8), "int64")}, 64, "")
    with pytest.raises(SampleError, match=r"token 97, but .* 0\.\.63"):
        sample_text(loaded, {}, few, "a", Sampling())


def test_positions_and_documents_are_those_of_one() -> None:
    class Seen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(
            self, tokens: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor
        ) -> tuple[Tensor, Tensor]:
            assert position_ids.tolist() == [[0, 1, 2]] and not doc_ids.any()
            assert torch.equal(labels, tokens)
            return torch.zeros(1, 3, 300), self.weight.sum()

    names = ("tokens", "position_ids", "doc_ids", "labels")
    origin = Origin("", 0, {name: ((4, 8), "int64") for name in names}, 300, "")
    assert logits_of(Seen(), origin, torch.tensor([[5, 0, 7]])).shape == (1, 3, 300)


def test_a_tokenizer_writes_text_again(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    text = open_text(str(tmp_path))
    assert (text.size, list(text.encode("to be"))) == (5, [1, 2])
    assert text.decode([1, 2, 3, 4]) == "to be or not"
