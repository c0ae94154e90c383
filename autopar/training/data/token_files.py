"""Files of tokens: `.bin`, `.npy`, and text of which each byte is a token.

A `.bin` is raw integers, as nanoGPT writes them, or begins with the header of llm.c and
modded-nanogpt (`dev/data/data_common.py` in llm.c): 256 int32, of which the first are a
magic number, a version and the count of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from autopar.training.data.tokens import DataError

HEADER = 1024  # bytes
# magic number -> (version, type of a token)
HEADERS: Mapping[int, tuple[int, str]] = MappingProxyType(
    {20240520: (1, "uint16"), 20240801: (7, "uint32")}
)
BIN_DTYPES = ("uint16", "uint32")
LOOKED_AT = 4096  # tokens, for signs of another width
TOKEN_FILES = (".bin", ".npy", ".txt")


def read_token_file(path: Path, bin_dtype: str = "uint16") -> np.ndarray:
    """The tokens of a file, mapped and not loaded, integers [length].

    bin_dtype: of a `.bin` that has no header. Raises: DataError.
    """
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", fix="write some tokens to it")
    if path.suffix == ".txt":
        return np.memmap(path, np.uint8, mode="r")
    return _read_bin(path, bin_dtype) if path.suffix == ".bin" else _read_npy(path)


def _read_bin(path: Path, dtype: str) -> np.ndarray:
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 3)
    if len(header) == 3 and int(header[0]) in HEADERS:
        return _read_headed(path, *(int(x) for x in header))
    width = np.dtype(dtype).itemsize
    if size % width:
        raise DataError(
            f"{path} has {size} bytes, but a token of {dtype} is {width}: it is cut "
            "off, or of another type",
            fix=f"write it again, as numpy.asarray(tokens, numpy.{dtype}).tofile(path)",
        )
    tokens = np.memmap(path, f"<{np.dtype(dtype).str[1:]}", mode="r")
    _check_width(path, tokens[:LOOKED_AT], dtype)
    return tokens


def _read_headed(path: Path, magic: int, version: int, count: int) -> np.ndarray:
    expected, dtype = HEADERS[magic]
    if version != expected:
        raise DataError(
            f"{path} has a header of version {version}; with magic number {magic} that "
            f"of llm.c is {expected}",
            fix="write it again by llm.c's write_datafile, or without a header",
        )
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if count < 0 or size != HEADER + count * width:
        held = max(0, size - HEADER) / width
        raise DataError(
            f"{path} has {held:g} tokens ({size} bytes), but its header tells {count}: "
            "it is cut off, or was changed",
            fix="copy or download it again",
        )
    if count == 0:
        raise DataError(f"{path} has no tokens", fix="write some tokens to it")
    return np.memmap(path, f"<{np.dtype(dtype).str[1:]}", mode="r", offset=HEADER)


def _check_width(path: Path, first: np.ndarray, dtype: str) -> None:
    """Raises DataError for what looks like integers of the other width: read as 16
    bits, every other one of 32 bits is 0; read as 32 bits, two of 16 are huge."""
    low, high = first[0::2], first[1::2]
    pairs = dtype == "uint16" and np.count_nonzero(low) > max(32, len(low) / 2)
    if (pairs and not high.any()) or (
        dtype == "uint32" and np.median(first) >= 1 << 24
    ):
        other = BIN_DTYPES[dtype == "uint16"]
        raise DataError(
            f"{path} is read as {dtype}, and looks like {other}",
            fix=f"add --bin-dtype {other}",
        )


def _read_npy(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{path} is not a NumPy array file, or is cut off: {error}",
            fix="write it with numpy.save",
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}, not integers in one row",
            fix="save tokens.astype(numpy.uint16).ravel()",
        )
    if not len(tokens):
        raise DataError(f"{path} has no tokens", fix="write some tokens to it")
    return tokens
