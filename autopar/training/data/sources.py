"""Files and folders that data may be, and how each becomes tokens."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from autopar.training.data.documents import BUILDERS, Reading, rows_of, text_of
from autopar.training.data.token_files import TOKEN_FILES, read_token_file
from autopar.training.data.tokens import DataError, Piece, Tokens

KINDS = (*TOKEN_FILES, *BUILDERS)
IN_FOLDERS = (*TOKEN_FILES, ".parquet", ".jsonl")
KNOWN = (
    ".bin (uint16 or uint32), .npy (integers), .txt, .jsonl or .parquet files, a "
    "folder of one kind of them, or what Dataset.save_to_disk wrote"
)
MADE = ("stdlib", "synthetic")
USUAL = Reading()


def open_tokens(name: str, how: Reading = USUAL, bin_dtype: str = "uint16") -> Tokens:
    """The tokens of `stdlib`, or of a file or folder; those on disk are mapped.

    bin_dtype: of a .bin without a header. Raises: DataError.
    """
    if name == "stdlib":
        return Tokens.of(name, standard_library())
    path = Path(name)
    if _is_saved(path):
        return Tokens(rows_of(path, (), how))
    files = _files_of(path)
    if files[0].suffix in BUILDERS:
        return Tokens(rows_of(path, files, how))
    if files[0].suffix == ".txt" and how.tokenizer is not None:
        return Tokens(text_of(path, files, how))
    return Tokens([Piece(str(f), read_token_file(f, bin_dtype)) for f in files])


def check_named(names: Iterable[str]) -> None:
    """Raises DataError for names that can be no data, without reading anything."""
    for name in names:
        if name not in MADE and not _is_saved(Path(name)):
            _files_of(Path(name))


def _is_saved(path: Path) -> bool:
    """Whether `datasets` wrote the folder, of one split or of several."""
    return any((path / f).is_file() for f in ("state.json", "dataset_dict.json"))


def _files_of(path: Path) -> Sequence[Path]:
    """The file, or those of a folder that data may be, in order. Raises: DataError."""
    if path.is_file():
        if path.suffix not in KINDS:
            raise DataError(
                f"{path}: unknown kind of file '{path.suffix}'", fix=f"give {KNOWN}"
            )
        return [path]
    if not path.is_dir():
        raise DataError(
            f"no data named {str(path)!r}",
            fix=f"give 'stdlib', 'synthetic', or a path that exists, of {KNOWN}",
        )
    inside = sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
    # What was tokenized of files in it lies there too.
    inside = [f for f in inside if ".tokens-" not in f.name]
    kinds = Counter(f.suffix for f in inside if f.suffix in IN_FOLDERS)
    if len(kinds) != 1:
        held = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        told = ", ".join(f.name for f in inside[:5]) or "no files"
        raise DataError(
            f"folder {path} is of no kind that is known: it has {held or told}",
            fix=f"give {KNOWN}; mix several: --data A:0.5 --data B:0.5",
        )
    return [f for f in inside if f.suffix in kinds]


def standard_library(folder: Path | None = None) -> np.ndarray:
    """The bytes of the top-level sources in sorted order, uint8 [length]."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if not text:
        raise DataError(
            f"no Python sources in {folder}: this Python has its library compiled only",
            fix="use another text file, or 'synthetic'",
        )
    return np.frombuffer(text, np.uint8)
