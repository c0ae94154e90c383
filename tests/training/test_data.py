from pathlib import Path

import numpy as np
import pytest
import torch

from autopar.training.data.sources import standard_library
from autopar.training.data.token_batches import Corpus, open_data
from autopar.training.data.tokens import DataError, Tokens


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    return path


@pytest.mark.parametrize("kind", ["stdlib", "synthetic", "bin"])
def test_labels_are_ids_moved_by_one(kind: str, book: Path) -> None:
    data = open_data(str(book) if kind == "bin" else kind, vocab=1000)
    ids, labels = data.batch(step=3, batch_size=4, seq=16)
    assert ids.shape == labels.shape == (4, 16)
    assert ids.dtype == labels.dtype == torch.int64
    assert ids.is_contiguous() and labels.is_contiguous()
    assert torch.equal(ids[:, 1:], labels[:, :-1])


@pytest.mark.parametrize("kind", ["synthetic", "bin"])
def test_a_batch_depends_on_seed_and_step_alone(kind: str, book: Path) -> None:
    spec = str(book) if kind == "bin" else kind
    one, other = open_data(spec, 1000), open_data(spec, 1000)
    for step in range(3):
        one.batch(step, 4, 16)
    assert same(one.batch(7, 4, 16), other.batch(7, 4, 16))
    assert not same(one.batch(7, 4, 16), one.batch(8, 4, 16))
    assert not same(one.batch(7, 4, 16), open_data(spec, 1000, seed=1).batch(7, 4, 16))


def test_a_corpus_yields_windows_of_itself_to_the_last_token() -> None:
    data = Corpus("three", Tokens.of("three", np.array([5, 6, 7], np.uint16)), 0, 8)
    ids, labels = data.batch(step=0, batch_size=64, seq=1)
    assert {*zip(ids.flatten().tolist(), labels.flatten().tolist(), strict=True)} == {
        (5, 6),
        (6, 7),
    }
    whole, _ = data.batch(step=0, batch_size=1, seq=2)
    assert whole.tolist() == [[5, 6]]


def test_synthetic_text_can_be_predicted_from_two_tokens() -> None:
    ids, labels = open_data("synthetic", vocab=50).batch(0, 8, 12)
    stride = labels - ids
    assert torch.equal((ids[:, 1:] + stride[:, :-1]) % 50, labels[:, 1:])
    assert len(ids[:, 0].unique()) > 1


def test_file_kinds_hold_the_same_tokens(tmp_path: Path) -> None:
    tokens = np.frombuffer(b"to be or not to be", np.uint8)
    tokens.tofile(tmp_path / "a.txt")
    tokens.astype(np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens.astype(np.int32))
    text, binary, array = (
        open_data(str(tmp_path / f"a.{kind}"), 256).batch(1, 4, 8)
        for kind in ("txt", "bin", "npy")
    )
    assert same(text, binary) and same(text, array)


def test_the_standard_library_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"2")
    (tmp_path / "a.py").write_bytes(b"1")
    (tmp_path / "c.txt").write_bytes(b"3")
    assert standard_library(tmp_path).tobytes() == b"12"


def test_a_compiled_standard_library_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.pyc").write_bytes(b"1")
    with pytest.raises(DataError, match=r"no Python sources in [\s\S]*'synthetic'"):
        standard_library(tmp_path)


def test_a_text_that_is_too_short_says_how_long_it_is(book: Path) -> None:
    data = open_data(str(book), 1000)
    data.batch(0, 1, 999)
    with pytest.raises(DataError, match=r"has 1000 tokens, but .* need 1001"):
        data.batch(0, 1, 1000)


def test_a_token_outside_of_the_vocabulary_is_told_with_its_place(book: Path) -> None:
    open_data(str(book), 1000).batch(0, 64, 16)
    data = open_data(str(book), 700).split(0.5)[1]
    with pytest.raises(DataError, match=r"token (\d+) at position \1 of .*0\.\.699"):
        data.batch(0, 64, 16)


def test_a_negative_token_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, -1]))
    with pytest.raises(DataError, match="token -1 at position 2"):
        open_data(str(tmp_path / "a.npy"), 10).batch(0, 1, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", "is empty"),
        ("a.bin", b"123", "has 3 bytes, but a token of uint16 is 2"),
        ("a.csv", b"1,2", "unknown kind of file '.csv'"),
        ("a.npy", b"no array", "not a NumPy array file"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / name), 256)


@pytest.mark.parametrize("tokens", [np.zeros(4), np.zeros((2, 2), np.int64)])
def test_an_array_of_another_form_is_an_error(
    tmp_path: Path, tokens: np.ndarray
) -> None:
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(DataError, match="not integers in one row"):
        open_data(str(tmp_path / "a.npy"), 256)


def test_a_missing_file_names_the_choices() -> None:
    with pytest.raises(DataError, match=r"'stdlibb'[\s\S]*'stdlib', 'synthetic'"):
        open_data("stdlibb", 256)
