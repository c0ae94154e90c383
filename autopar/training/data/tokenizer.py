"""Tokenizers of Hugging Face, from a folder or a tokenizer.json; nothing is fetched."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.passes.decode import parse_json
from autopar.read_file import read_text
from autopar.training.data.tokens import DataError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
WRITE = f"give a folder with {FILE}, as tokenizer.save_pretrained(folder) writes it"


@dataclass(frozen=True)
class Tokenizer:
    """encode: texts -> ids, without special tokens. size: above the greatest id.
    end: the id that ends a document, if it is known. digest: of what it does."""

    name: str
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    size: int
    end: int | None
    digest: str

    @property
    def dtype(self) -> str:
        """The integers that hold its ids."""
        return str(np.min_scalar_type(max(self.size - 1, 256)))

    def check_fits(self, vocab: int) -> None:
        """Raises DataError if it has ids that the model has no embedding for. A model
        may have more, as one whose vocabulary was rounded up has."""
        if self.size > vocab:
            raise DataError(
                f"the tokenizer {self.name} has ids 0..{self.size - 1}, but the "
                f"model's vocabulary is 0..{vocab - 1}",
                fix=f"compile a model with a vocabulary of {self.size} or more, or "
                "give the tokenizer that belongs to the model",
            )


# One token a byte. Text has no zeros, so that one can end a document.
BYTES = Tokenizer(
    "bytes", lambda texts: [list(t.encode()) for t in texts], 256, 0, "bytes"
)


def open_tokenizer(path: Path, end: str | None = None) -> Tokenizer:
    """The tokenizer of a folder, or of a tokenizer.json.

    end: the token that ends a document; None: the eos_token, where the folder tells it.
    Raises: DataError.
    """
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return _from_json(file, end)
    if path.is_dir() and any(path.iterdir()):
        return _from_folder(path, end)
    raise DataError(f"there is no tokenizer '{path}'", fix=WRITE)


def need(package: str, whatever: str) -> Any:
    """An optional package. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DataError(
            f"{whatever} needs the package {package}", fix="pip install 'autopar[data]'"
        ) from None


def _from_json(file: Path, end: str | None) -> Tokenizer:
    tokenizers = need("tokenizers", f"the tokenizer '{file}'")
    text = read_text(file, DataError, WRITE)
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # its own kind is a plain Exception
        raise DataError(
            f"'{file}' is no tokenizer: {str(error).splitlines()[0]}", fix=WRITE
        ) from None
    made.no_padding()
    made.no_truncation()
    if end is None:
        end = _eos_token(file.with_name(CONFIG))

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encoded = made.encode_batch(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    vocab = made.get_vocab(with_added_tokens=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _made(str(file), encode, vocab, end, digest)


def _from_folder(folder: Path, end: str | None) -> Tokenizer:
    """What transformers reads, as the vocab.json and merges.txt of earlier days."""
    transformers = need("transformers", f"the tokenizer '{folder}'")
    try:
        made = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, model_max_length=int(1e30)
        )
    except Exception as error:  # of many kinds
        raise DataError(
            f"'{folder}' has no tokenizer that transformers reads: "
            f"{str(error).splitlines()[0]}",
            fix=WRITE,
        ) from None

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        ids: Any = made(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    ids = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.is_file()):
        ids.update(file.name.encode() + file.read_bytes())
    end = made.eos_token if end is None else end
    return _made(str(folder), encode, made.get_vocab(), end, ids.hexdigest()[:16])


def _made(
    name: str, encode: Any, vocab: dict[str, int], end: str | None, digest: str
) -> Tokenizer:
    if end is not None and end not in vocab:
        raise DataError(
            f"the tokenizer {name} has no token {end!r} to end a document",
            fix="give one that it has: --document-end TOKEN",
        )
    size = max(vocab.values(), default=-1) + 1
    return Tokenizer(name, encode, size, None if end is None else vocab[end], digest)


def _eos_token(config: Path) -> str | None:
    if not config.is_file():
        return None
    data = parse_json(read_text(config, DataError), f"'{config}'", DataError)
    told = data.get("eos_token") if isinstance(data, dict) else None
    told = told.get("content") if isinstance(told, dict) else told
    return told if isinstance(told, str) else None
