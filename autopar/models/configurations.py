"""Configurations of Hugging Face models by name: files, what ships, the hub's cache.

    hf:path/config.json or hf:folder       what lies there
    hf:meta-llama/Llama-3.1-70B            one that comes with autopar, as published
    hf:Llama-3.1-70B                       the same: whose it is may be left out
    hf:org/name                            else the local cache of the Hugging Face hub

What ships of models with images is their text part. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from autopar.models.factories import ModelError, near

CONFIGS = Path(__file__).with_name("configs")


@cache
def shipped() -> Mapping[str, Path]:
    """Returns the configurations that come with autopar, by the hub's names."""
    paths = sorted(CONFIGS.rglob("*.json"))
    names = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in paths)
    return MappingProxyType(dict(zip(names, paths, strict=True)))


def find_configuration(name: str, types: Collection[str]) -> Path | None:
    """Returns the file of a configuration; None for one of transformers' model types.

    Raises: ModelError for a name that stands for nothing, with those that are near.
    """
    if name.endswith(".json") or Path(name, "config.json").is_file():
        return Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if (known := shipped().get(name)) is not None:
        return known
    if name in types:
        return None
    folded = name.casefold()
    for full, path in shipped().items():
        if folded in (full.casefold(), full.rpartition("/")[2].casefold()):
            return path
    if "/" in name and (cached := _in_cache(name)) is not None:
        return cached
    if Path(name).is_dir() or Path(name).is_absolute():
        problem = "has no config.json" if Path(name).is_dir() else "is not there"
        raise ModelError(
            f"the folder '{name}' {problem}",
            fix="give one that save_pretrained wrote, or a name as hf:gpt2",
        )
    short = (full.rpartition("/")[2] for full in shipped())
    fix = near(name, sorted({*types, *shipped(), *short}))
    if "/" in name:
        raise ModelError(
            f"no configuration of '{name}' ships with autopar, and none is in the "
            "cache of the hub",
            fix=f"{fix} Or fetch it: hf download {name} config.json",
        )
    raise ModelError(
        f"transformers knows no model type '{name}' ('hf:{name}')", fix=fix
    )


def _in_cache(name: str) -> Path | None:
    """The newest configuration of a repository that was downloaded once."""
    hub = importlib.import_module("huggingface_hub")  # transformers needs it
    try:
        cached = hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that a repository could have
        return None
    return Path(cached) if isinstance(cached, str) else None
