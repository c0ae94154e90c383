"""The model's source files, as far as they are found: emitted lines name them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

LARGEST = 400_000  # bytes of a file that a page takes up


def find_sources(model_spec: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """`gpt.py` -> its path and text; nothing of what is not here, or not alone."""
    sources: dict[str, dict[str, str]] = {}
    folders = [*_folders(model_spec)]
    for name in sorted(set(names)):
        for folder in folders:
            path = folder / name
            if path.is_file() and path.stat().st_size <= LARGEST:
                text = path.read_text(encoding="utf-8", errors="replace")
                sources[name] = {"path": _told(path), "text": text}
                break
    return sources


def _told(path: Path) -> str:
    """A path as it is the same elsewhere: from a package, or from here."""
    text = path.as_posix()
    if "/site-packages/" in text:
        return text.rpartition("/site-packages/")[2]
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else text


def _folders(model_spec: str) -> Iterator[Path]:
    """Yields folders that may hold a model's files, the likeliest first."""
    where, _, _ = model_spec.partition("?")
    if where.startswith("hf:"):
        yield from _transformers(where[3:])
        return
    place = where.rpartition(":")[0]
    if place.endswith(".py"):
        yield Path(place).resolve().parent
        return
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return
    if spec is not None and spec.origin:
        yield Path(spec.origin).parent


def _transformers(name: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent
    own = name.removesuffix(".json").rpartition("/")[2]
    # A configuration of a file, or one that comes with us, has any type.
    models = sorted((root / "models").glob("*"), key=lambda p: p.name != own)
    yield from (p for p in models if p.name == own)
    yield from (root / part for part in ("", "integrations", "loss", "utils"))
    yield from (p for p in models if p.name != own)
