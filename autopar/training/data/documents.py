"""Documents: rows of Hugging Face datasets (Arrow, Parquet, JSONL), and text files.

The package `datasets` maps Arrow files, and makes Parquet and JSONL such in its own
cache. A column of ids is then read where it lies; of a column of text tokens are made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopar.training.data.token_cache import Part, digest_of_files, tokenized
from autopar.training.data.tokenizer import BYTES, Tokenizer, need
from autopar.training.data.tokens import DataError, Piece

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
ROWS = 1000  # of text, at a time
PIECE = 1 << 20  # characters of a text file, at a time, then to the end of a line
COLUMNS = ("input_ids", "text")
LISTS = re.compile(
    r"(large_|fixed_size_)?list<[^<>]*: (u?int\d+|null)( not null)?>(\[\d+\])?"
)


@dataclass(frozen=True)
class Reading:
    """How documents become tokens, as the options of their names say."""

    tokenizer: Tokenizer | None = None
    column: str | None = None
    token_cache: Path | None = None


def rows_of(path: Path, files: Sequence[Path], how: Reading) -> list[Piece]:
    """The tokens of rows, in order. path: what the user named. files: Parquet or JSONL;
    none: path is a folder of `Dataset.save_to_disk`. Raises: DataError."""
    dataset = _from_files(path, files) if files else _from_disk(path)
    names = dataset.column_names
    if not len(dataset):
        raise DataError(f"{path} has no rows", fix="give a dataset that has some")
    column = _choose(path, names, how)
    values = dataset.data.column(column)
    chunks, kind = values.chunks, str(values.type)
    if LISTS.fullmatch(kind):
        return _ids(path, column, chunks)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(
            f"column '{column}' of {path} holds {kind}, neither text nor ids",
            fix=f"name one that does: --column NAME, of {', '.join(names)}",
        )
    used = [Path(one["filename"]) for one in dataset.cache_files]
    digest = digest_of_files(files or used, column)
    tokenizer = how.tokenizer or BYTES
    give = partial(_texts, path, dataset, column)
    tokens = tokenized(path, digest, give, tokenizer, True, how.token_cache)
    return [Piece(str(path), tokens)]


def text_of(path: Path, files: Sequence[Path], how: Reading) -> list[Piece]:
    """The tokens of text files, each a document; a single one has no end."""
    assert how.tokenizer is not None, "without one, bytes are mapped"
    digest = digest_of_files(files, "text")
    give, ends = partial(_lines, files), len(files) > 1
    tokens = tokenized(path, digest, give, how.tokenizer, ends, how.token_cache)
    return [Piece(str(path), tokens)]


def _choose(path: Path, names: Sequence[str], how: Reading) -> str:
    usual = reversed(COLUMNS) if how.tokenizer else COLUMNS
    wanted = [how.column] if how.column else list(usual)
    names_there = [name for name in wanted if name in names]
    if not names_there:
        raise DataError(
            f"{path} has no column {' or '.join(map(repr, wanted))}: it has "
            f"{', '.join(map(repr, names))}",
            fix="name one of these: --column NAME",
        )
    return names_there[0]


def _from_disk(path: Path) -> Any:
    datasets = need("datasets", f"the dataset in '{path}'")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(f.name for f in path.iterdir() if (f / "state.json").is_file())
        raise DataError(
            f"{path} holds several splits: {', '.join(splits)}",
            fix=f"give one of them: {path / (splits or ['train'])[0]}",
        )
    with _theirs(path):
        return datasets.load_from_disk(str(path))


def _from_files(path: Path, files: Sequence[Path]) -> Any:
    datasets = need("datasets", f"'{path}'")
    names = [str(file) for file in files]
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{path} is empty", fix="write some rows to it")
    with _theirs(path):
        return datasets.load_dataset(
            BUILDERS[files[0].suffix], data_files=names, split="train"
        )


class _theirs:
    """Reraises errors of `datasets`, in one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if not isinstance(error, Exception):
            return
        told: BaseException = error
        while told.__cause__ is not None:
            told = told.__cause__
        lines = str(told).strip().splitlines() or [""]
        raise DataError(
            f"{self.path} cannot be read: {type(told).__name__}: {lines[0]}",
            fix="write it again with rows in it, as Dataset.save_to_disk, to_parquet "
            "or to_json do",
        ) from error


def _ids(path: Path, column: str, chunks: Sequence[Any]) -> list[Piece]:
    """Lists of ids lie one after another in an Arrow file: they are read there."""
    pieces, at = [], 0
    for chunk in chunks:
        values = chunk.flatten()  # without copying
        if values.null_count:
            raise DataError(
                f"column '{column}' of {path} has ids that are null",
                fix="leave them out, or write ids for them",
            )
        if len(values):
            tokens = np.asarray(values.to_numpy(zero_copy_only=True))
            pieces.append(Piece(f"column '{column}' of {path}", tokens, at))
        at += len(values)
    if not pieces:
        raise DataError(
            f"column '{column}' of {path} has no ids", fix="give rows that have some"
        )
    return pieces


def _texts(path: Path, dataset: Any, column: str) -> Iterator[Part]:
    rows = dataset.select_columns([column])
    for i, batch in enumerate(rows.iter(batch_size=ROWS)):
        texts = batch[column]
        if None in texts:
            raise DataError(
                f"row {i * ROWS + texts.index(None)} of {path} has no '{column}'",
                fix="leave such rows out: dataset.filter",
            )
        yield Part(i * ROWS / len(dataset), texts)


def _lines(files: Sequence[Path]) -> Iterator[Part]:
    """Texts of files, long ones in parts, each up to the end of a line."""
    total = sum(file.stat().st_size for file in files)
    before = 0
    for path in files:
        with path.open(encoding="utf-8", newline="") as file:
            try:
                text = file.read(PIECE) + file.readline(PIECE)
                while text:
                    share = (before + os.lseek(file.fileno(), 0, os.SEEK_CUR)) / total
                    following = file.read(PIECE) + file.readline(PIECE)
                    yield Part(share, [text], whole=not following)
                    text = following
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not text: {error.reason}", fix="write it as UTF-8"
                ) from None
        before += path.stat().st_size
