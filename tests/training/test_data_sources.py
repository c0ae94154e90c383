"""Files and folders of each kind become the tokens that are in them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from autopar.training.data import documents
from autopar.training.data.documents import Reading
from autopar.training.data.sources import open_tokens
from autopar.training.data.token_batches import Mixture, open_data
from autopar.training.data.tokenizer import open_tokenizer
from autopar.training.data.tokens import DataError, Piece, Tokens

WORDS = ["[END]", "to", "be", "or", "not", "that", "is"]


def read(path: Path, how: Reading | None = None, **more: str) -> list[int]:
    tokens = open_tokens(str(path), how or Reading(), **more)
    return tokens.read(0, len(tokens)).tolist()


def headed(path: Path, tokens: np.ndarray, magic: int, version: int) -> Path:
    """As llm.c's write_datafile lays it out."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


# --- .bin --------------------------------------------------------------------------


def test_a_header_is_no_tokens_and_tells_their_width(tmp_path: Path) -> None:
    ids = np.arange(70_000)
    short = headed(tmp_path / "a.bin", ids[:9].astype(np.uint16), 20240520, 1)
    wide = headed(tmp_path / "b.bin", ids.astype(np.uint32), 20240801, 7)
    assert read(short) == ids[:9].tolist() and read(wide) == ids.tolist()


@pytest.mark.parametrize(
    ("cut", "version", "told"),
    [(1, 1, "has 8.5 tokens .* its header tells 9"), (0, 3, "header of version 3")],
)
def test_a_header_that_is_wrong(
    tmp_path: Path, cut: int, version: int, told: str
) -> None:
    path = headed(tmp_path / "a.bin", np.arange(9, dtype=np.uint16), 20240520, version)
    path.write_bytes(path.read_bytes()[: -cut or None])
    with pytest.raises(DataError, match=told):
        read(path)


def test_raw_integers_of_the_other_width_are_found_out(tmp_path: Path) -> None:
    ids = np.arange(1, 5000)
    ids.astype(np.uint32).tofile(tmp_path / "wide.bin")
    ids.astype(np.uint16)[:-1].tofile(tmp_path / "short.bin")
    with pytest.raises(DataError, match="add --bin-dtype uint32"):
        read(tmp_path / "wide.bin")
    with pytest.raises(DataError, match="add --bin-dtype uint16"):
        read(tmp_path / "short.bin", bin_dtype="uint32")
    assert read(tmp_path / "wide.bin", bin_dtype="uint32") == ids.tolist()


def test_shards_of_a_folder_are_one_sequence_in_order(tmp_path: Path) -> None:
    for i in (1, 0, 2):
        np.arange(i * 4, i * 4 + 4, dtype=np.uint16).tofile(tmp_path / f"{i}.bin")
    assert read(tmp_path) == [*range(12)]
    with pytest.raises(DataError, match=r"token 6 at position 2 of .*1\.bin"):
        open_data(str(tmp_path), vocab=6).batch(0, 8, 11)
    (tmp_path / "a.txt").write_text("b")
    with pytest.raises(DataError, match=r"it has 3 \.bin, 1 \.txt"):
        read(tmp_path)


def test_a_folder_of_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no files"):
        read(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"it has model\.safetensors, plan\.json\n.* give"
    ):
        read(tmp_path)


def test_parts_of_pieces_know_where_they_lie() -> None:
    whole = Tokens([Piece("a", np.arange(5)), Piece("b", np.arange(5, 12))])
    part = whole.part(3, 7).part(1, 6)
    assert part.read(0, 6).tolist() == [4, 5, 6, 7, 8, 9]
    assert part.windows(np.array([0, 2]), 3).tolist() == [[4, 5, 6], [6, 7, 8]]
    assert [part.place(i) for i in (0, 5)] == ["position 4 of a", "position 4 of b"]


def test_a_digest_tells_data_apart_wherever_and_however_it_lies() -> None:
    ids = np.random.default_rng(0).integers(0, 200, 10_000)
    one = Tokens.of("a", ids.astype(np.uint16)).digest()
    assert Tokens([Piece("b", ids[:77]), Piece("c", ids[77:])]).digest() == one
    assert Tokens.of("a", ids[:-1]).digest() != one
    assert Tokens.of("a", ids[::-1]).digest() != one


# --- rows --------------------------------------------------------------------------

ROWS = {"input_ids": [[1, 2, 3], [4], [5, 6]], "text": ["to be", "or", "not to be"]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word is a token; [END] is its eos_token."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs autopar[data]")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[END]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    return folder


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets", reason="needs autopar[data]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets


@pytest.mark.slow
def test_rows_are_the_same_from_all_kinds_of_files(
    datasets, tmp_path: Path, tokenizer: Path
) -> None:
    made = datasets.Dataset.from_dict(ROWS)
    made.save_to_disk(tmp_path / "disk")
    made.to_parquet(tmp_path / "a.parquet")
    made.to_json(tmp_path / "a.jsonl")
    how = Reading(open_tokenizer(tokenizer))
    for name in ("disk", "a.parquet", "a.jsonl"):
        assert read(tmp_path / name) == [1, 2, 3, 4, 5, 6]
        assert read(tmp_path / name, how) == [1, 2, 0, 3, 0, 4, 1, 2, 0]
        as_bytes = bytes(read(tmp_path / name, Reading(column="text")))
        assert as_bytes == b"to be\0or\0not to be\0"
    with pytest.raises(DataError, match="'ids': it has 'input_ids', 'text'"):
        read(tmp_path / "disk", Reading(column="ids"))


def test_ids_are_read_where_they_lie(datasets, tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "disk")
    (piece,) = open_tokens(str(tmp_path / "disk")).pieces
    assert not piece.tokens.flags.owndata
    assert not list(tmp_path.glob("*tokens*"))


def test_datasets_that_have_no_tokens_to_give(datasets, tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"label": [1, 2], "input_ids": [[], []]})
    made.save_to_disk(tmp_path / "a")
    made.select([]).to_parquet(tmp_path / "b.parquet")
    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "c")
    (tmp_path / "d.jsonl").write_text('{"text": ')
    (tmp_path / "e.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    for name, column, told in (
        ("a", None, "column 'input_ids' of .* has no ids"),
        ("a", "label", "holds int64, neither text nor ids"),
        ("b.parquet", None, r"no data![\s\S]* with rows in it"),
        ("c", None, r"several splits: train\n  fix  give one of them: .*c/train"),
        ("d.jsonl", None, "d.jsonl cannot be read"),
        ("e.jsonl", None, "row 1 of .* has no 'text'"),
    ):
        with pytest.raises(DataError, match=told):
            read(tmp_path / name, Reading(column=column))


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"package datasets\n.*install 'autopar\[data"):
        read(tmp_path / "a.jsonl")


# --- text --------------------------------------------------------------------------


def test_text_is_tokenized_once(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(documents, "PIECE", 16)  # so that it is read in parts
    text = tmp_path / "a.txt"
    text.write_text("to be or not to be\n" * 50 + "that")
    how = Reading(open_tokenizer(tokenizer))
    expected = [1, 2, 3, 4, 1, 2] * 50 + [5]
    assert read(text, how) == expected
    assert "301 tokens of 1 documents" in capsys.readouterr().err
    assert read(text, how) == expected and not capsys.readouterr().err
    text.write_text("that is")
    os.utime(text, ns=(1, 1))
    assert read(text, how) == [5, 6]  # a changed text has others
    assert not list(tmp_path.glob(".*"))  # nothing beside is left


def test_each_file_of_a_folder_of_text_is_a_document(
    tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("to be")
    (folder / "b.txt").write_text("or not")
    how = Reading(open_tokenizer(tokenizer), token_cache=tmp_path / "cache")
    assert read(folder, how) == [1, 2, 0, 3, 4, 0]
    assert [f.suffix for f in (tmp_path / "cache").iterdir()] == [".npy"]
    other = Reading(open_tokenizer(tokenizer, "is"))
    assert read(folder, other) == [1, 2, 6, 3, 4, 6]


def test_a_tokenizer_that_does_not_do(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"a\.txt is not text"):
        read(tmp_path / "a.txt", Reading(open_tokenizer(tokenizer)))
    assert not list(tmp_path.glob(".*"))  # nothing half written, and no lock
    with pytest.raises(DataError, match=r"ids 0\.\.6, but the model's .* 0\.\.4"):
        open_tokenizer(tokenizer).check_fits(5)
    with pytest.raises(DataError, match="no token 'END' to end a document"):
        open_tokenizer(tokenizer, "END")
    with pytest.raises(DataError, match="there is no tokenizer"):
        open_tokenizer(tmp_path / "nowhere")
    (tokenizer / "tokenizer_config.json").unlink()
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "to be"}))
    pytest.importorskip("datasets", reason="needs autopar[data]")
    with pytest.raises(DataError, match="--document-end"):
        read(tmp_path / "b.jsonl", Reading(open_tokenizer(tokenizer)))
    (tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is no tokenizer"):
        open_tokenizer(tokenizer)


def test_a_folder_of_earlier_days_is_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs autopar[data]")
    words = [
        *"beot",
        "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}",
        "<|endoftext|>",
        "to",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt o\n")
    told = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    made = open_tokenizer(tmp_path)
    assert (made.size, made.end) == (7, 5)
    assert [*made.encode(["to", "beto"])] == [[6], [0, 1, 6]]


# --- mixtures ----------------------------------------------------------------------


@pytest.fixture
def halves(tmp_path: Path) -> tuple[str, str]:
    """Ids below 500, and above."""
    names = str(tmp_path / "low.bin"), str(tmp_path / "high.bin")
    for name, first in zip(names, (0, 500), strict=True):
        np.arange(first, first + 500, dtype=np.uint16).tofile(name)
    return names


def test_a_mixture_has_its_shares_and_depends_on_the_step_alone(
    halves: tuple[str, str],
) -> None:
    low, high = halves
    data = open_data([f"{low}:3", f"{high}:1"], vocab=1000)
    assert isinstance(data, Mixture) and list(data.weights) == [0.75, 0.25]
    ids, labels = data.batch(5, 4000, 8)
    assert (ids[:, 0] >= 500).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert (labels == ids + 1).all()
    again = open_data([f"{low}:3", f"{high}:1"], vocab=1000)
    again.batch(0, 16, 8)
    assert (again.batch(5, 4000, 8)[0] == ids).all()
    for held_out in data.split(0.1)[1].batch(0, 200, 8)[0]:
        assert held_out[0] % 500 >= 450


def test_weights_are_of_all_or_of_none(halves: tuple[str, str]) -> None:
    low, high = halves
    by_size = open_data([low, high], vocab=1000)
    assert isinstance(by_size, Mixture) and list(by_size.weights) == [0.5, 0.5]
    with pytest.raises(DataError, match="no weight, among 2"):
        open_data([f"{low}:0.5", high], vocab=1000)
    with pytest.raises(DataError, match="no weight, among 2"):
        open_data([low, "synthetic"], vocab=1000)
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(DataError, match=f"has weight {bad}"):
            open_data([f"{low}:{bad}", high], vocab=1000)
