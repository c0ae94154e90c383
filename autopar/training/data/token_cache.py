"""Text is tokenized once, to a file beside it that later runs map.

The file's name has a digest of what its tokens follow from, so that another tokenizer,
or a changed text, has another file. One process of a machine writes it, under a name of
its own until it is whole; others wait for a lock that the system takes from a process
that is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.training.data.token_files import read_token_file
from autopar.training.data.tokenizer import Tokenizer
from autopar.training.data.tokens import DataError

VERSION = 1  # of what is written
PAUSE = 5.0  # seconds between lines of progress


@dataclass(frozen=True)
class Part:
    """Texts of documents. share: of all documents, that came before. whole: whether
    each text is a document's end."""

    share: float
    texts: Sequence[str]
    whole: bool = True


def digest_of_files(files: Iterable[Path], *how: object) -> str:
    """Names one state of files, by their sizes and times, and how they are read."""
    told = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr((VERSION, told, how)).encode()).hexdigest()[:16]


def tokenized(
    source: Path,
    digest: str,
    documents: Callable[[], Iterable[Part]],
    tokenizer: Tokenizer,
    ends: bool,
    folder: Path | None,
) -> np.ndarray:
    """The tokens of documents, mapped, integers [length]; made unless they are there.

    source: that they are of. documents: gives them in order, some at a time. ends:
    whether a token ends each. folder: where to keep tokens, instead of beside the
    source. Raises: DataError.
    """
    if ends and tokenizer.end is None:
        raise DataError(
            f"the tokenizer {tokenizer.name} does not tell which token ends a document",
            fix="name it: --document-end '<|endoftext|>'; or give the folder with its "
            "tokenizer_config.json, which has an eos_token",
        )
    how = hashlib.sha256(
        repr((digest, tokenizer.digest, tokenizer.end if ends else None)).encode()
    ).hexdigest()[:16]
    where = source.parent if folder is None else folder
    path = where / f"{source.name}.tokens-{how}.npy"
    if not path.is_file():
        try:
            where.mkdir(parents=True, exist_ok=True)
            with _alone(path):
                if not path.is_file():
                    _write(path, source, documents(), tokenizer, ends)
        except OSError as error:
            raise DataError(
                f"cannot keep the tokens of {source} in '{where}': {error.strerror}",
                fix="name a folder on a disk with room: --token-cache FOLDER",
            ) from None
    return read_token_file(path)


def _write(
    path: Path,
    source: Path,
    documents: Iterable[Part],
    tokenizer: Tokenizer,
    ends: bool,
) -> None:
    """Write an .npy whose length is known at its end only: a header has room for it."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    end = np.array([tokenizer.end] if ends else [], tokenizer.dtype)
    tokens, read, begun, told = 0, 0, time.monotonic(), time.monotonic()
    try:
        with scratch.open("wb") as file:
            _header(file, tokenizer.dtype, 0)
            for part in documents:
                last = end if part.whole else end[:0]
                for ids in tokenizer.encode(part.texts):
                    file.write(np.asarray(ids, tokenizer.dtype).tobytes())
                    file.write(last.tobytes())
                    tokens += len(ids) + len(last)
                read += len(part.texts) if part.whole else 0
                if time.monotonic() - told > PAUSE:
                    told = time.monotonic()
                    _tell(f"tokenizing {source}: {part.share:.0%}, {tokens:,} tokens")
            file.seek(0)
            _header(file, tokenizer.dtype, tokens)
        if not tokens:
            raise DataError(f"{source} has no tokens", fix="give it some text")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    _tell(
        f"tokenized {source}: {tokens:,} tokens of {read:,} documents in "
        f"{time.monotonic() - begun:.1f} s, kept in {path}"
    )


def _header(file: Any, dtype: str, length: int) -> None:
    described = {
        "descr": f"<{np.dtype(dtype).str[1:]}",
        "fortran_order": False,
        "shape": (length,),
    }
    np.lib.format.write_array_header_1_0(file, described)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this machine at a time, and where the disk can, of all."""
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        # A file system without locks: all write, and the last one stays.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
