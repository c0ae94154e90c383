"""Text to tokens and back, for what a model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.training.data.tokenizer import BYTES, FILE, need, open_tokenizer


@dataclass(frozen=True)
class Text:
    """encode: without special tokens. size: above the greatest id."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    size: int


def open_text(tokenizer: str) -> Text:
    """Opens a tokenizer's folder or file; bytes for "". Raises: DataError."""
    if not tokenizer:
        return Text(lambda text: BYTES.encode([text])[0], _from_bytes, BYTES.size)
    path = Path(tokenizer)
    made = open_tokenizer(path)
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        tokenizers = need("tokenizers", f"the tokenizer '{file}'")
        decode = tokenizers.Tokenizer.from_file(str(file)).decode
    else:
        transformers = need("transformers", f"the tokenizer '{path}'")
        held = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        decode = held.decode
    return Text(lambda text: made.encode([text])[0], decode, made.size)


def _from_bytes(ids: Sequence[int]) -> str:
    """Decodes bytes; those that are no UTF-8 become U+FFFD."""
    return bytes(ids).decode("utf-8", "replace")
