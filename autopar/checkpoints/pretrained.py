"""Reading folders as Hugging Face's `from_pretrained` does: weights in safetensors.

Each rank reads its own boxes of the files, and no rank ever has a whole weight.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.held import model_targets, read_targets
from autopar.checkpoints.memory import Reader, done
from autopar.checkpoints.safetensors_file import DTYPES
from autopar.runtime.agreement.fail_together import on_all
from autopar.runtime.agreement.validate import MOST, ModelMismatch

if TYPE_CHECKING:
    from autopar.held_state import HeldState

LOG = logging.getLogger("autopar")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(Reader):
    """The weights in the safetensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The model's name of a weight -> that in the files; once they are matched.
        self.names: Mapping[str, str] = {}

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, tuple[int, ...], torch.dtype]]:
        """Name in the files -> file, shape and dtype. Raises: CheckpointError."""
        return {
            name: (file, *kind)
            for file in self._files()
            for name, kind in self._kinds(file).items()
        }

    def _kinds(self, file: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor in a file, which is closed when it returns."""
        kinds = {}
        with self._open(file) as held:
            for name in held.keys():  # noqa: SIM118 (it is no dict)
                row = held.get_slice(name)
                shape, dtype = tuple(row.get_shape()), DTYPES.get(row.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"'{name}' in '{file}' is of type {row.get_dtype()}",
                        fix="convert it: torch has no such numbers to train",
                    )
                kinds[name] = shape, dtype
        return kinds

    def _files(self) -> list[Path]:
        """The files that the index names; without one, the one file, or all there
        are."""
        index = self.folder / INDEX
        if index.is_file():
            try:
                table = json.loads(index.read_text())["weight_map"]
                names = sorted(set(table.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"'{index}' is no index of safetensors: {error!r}",
                    fix="download the folder again",
                ) from error
            missing = [name for name in names if not (self.folder / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"'{self.folder}' lacks {', '.join(missing[:MOST])} "
                    f"({len(missing)} of the {len(names)} files of its index)",
                    fix="download the folder again",
                )
            return [self.folder / name for name in names]
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        there = "is no folder" if not self.folder.is_dir() else "has no safetensors"
        raise CheckpointError(
            f"'{self.folder}' {there}",
            fix=f"give a folder with {WEIGHTS}, or {INDEX} and its files, as "
            "model.save_pretrained(folder) writes them",
        )

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"'{file}' cannot be read: {error}",
                fix="download it again: it was cut short, or is no safetensors file",
            ) from error

    # As a reader of `torch.distributed.checkpoint`, which names tensors as ours do.

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors = {}
        for own, name in self.names.items():
            shape, dtype = self.tensors[name][1:]
            size = torch.Size(shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
            properties = TensorProperties(dtype=dtype)
            tensors[f"model.{own}"] = TensorStorageMetadata(properties, size, [whole])
        index = {MetadataIndex(name): None for name in tensors}
        return Metadata(tensors, storage_data=index)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[Path, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            name = self.names[item.storage_index.fqn.removeprefix("model.")]
            by_file.setdefault(self.tensors[name][0], []).append((name, item))
        for file, items in by_file.items():
            self._read_file(file, items, planner)
        return done(None)

    def _read_file(
        self, file: Path, items: list[tuple[str, ReadItem]], planner: LoadPlanner
    ) -> None:
        with self._open(file) as held:
            for name, item in items:
                ends = zip(item.storage_offsets, item.lengths, strict=True)
                box = tuple(slice(at, at + n) for at, n in ends)
                value = held.get_slice(name)[box] if box else held.get_tensor(name)
                target = planner.resolve_tensor(item)
                target.copy_(value)
                planner.commit_tensor(item, target)


def load_pretrained(
    step: HeldState, folder: Path, strict: bool = True, *, empty: bool = False
) -> None:
    """Take weights from a folder of safetensors; see `HeldState.load_pretrained`.

    empty: parameters have no values to keep, so none are held twice.
    """
    need_safetensors()
    sources = Pretrained(folder)
    targets = model_targets(step, in_place=empty)
    matched: list[tuple[dict[str, str], list[str]]] = []

    def match() -> None:
        matched.append(_matched(step, sources, strict))

    on_all(step.comm, match)
    sources.names, missing = matched[0]
    wanted = {
        key: piece
        for key, piece in targets.items()
        if _source(step, str(key[1])) in sources.names
    }
    read = read_targets(step, sources, wanted)
    values = {str(key[1]): value for key, value in read.items()}
    with torch.no_grad():
        step.set_whole({n: values[n] for n in step.unused if n in values})
        for name, p in step.named_parameters():
            if name in values:
                p.copy_(values[name])
    if missing and step.comm.rank == 0:
        LOG.warning(
            "'%s' has no %s: %s as before", folder, ", ".join(missing[:MOST]),
            "it stays" if len(missing) == 1 else f"these {len(missing)} stay",
        )  # fmt: skip


def _source(step: HeldState, name: str) -> str:
    spec = step.program.parameters.get(name)
    return name if spec is None else spec.part.source


def _matched(
    step: HeldState, files: Pretrained, strict: bool
) -> tuple[dict[str, str], list[str]]:
    """The model's names -> names in the files; and names that these lack.

    A folder may have been saved from the model within ours, or from one around it: then
    all names have a prefix more or less. Tied weights are stored under any one name.
    Raises: ModelMismatch.
    """
    shapes = step.program.shapes
    tied: dict[str, list[str]] = {}
    for alias, name in step.program.aliases.items():
        tied.setdefault(name, []).append(alias)
    best: tuple[dict[str, str], list[str]] | None = None
    for renamed in _renamings(list(shapes), list(files.tensors)):
        names, missing = {}, []
        for name in shapes:
            same = (renamed(n) for n in (name, *tied.get(name, ())))
            stored = next((n for n in same if n in files.tensors), None)
            if stored is None:
                missing.append(name)
            else:
                names[name] = stored
        if best is None or len(missing) < len(best[1]):
            best = names, missing
            for name in step.unused:
                if (stored := renamed(name)) in files.tensors:
                    names[name] = stored
    assert best is not None, "names as they are come first"
    names, missing = best
    problems = []
    if missing and (strict or not names):
        problems.append(f"  missing: {_some(missing)}")
        extra = sorted(files.tensors.keys() - set(names.values()))
        if extra:
            problems.append(f"  not of the model: {_some(extra)}")
            if near := _nearest(missing[:MOST], extra, shapes, files):
                problems.append(f"  nearest of their shape: {_some(near)}")
    wrong = [
        f"{name}: {list(files.tensors[stored][1])} instead of {list(shapes[name])}"
        for name, stored in names.items()
        if name in shapes and files.tensors[stored][1] != tuple(shapes[name])
    ]
    if wrong:
        problems.append(f"  shape: {_some(wrong)}")
    if problems:
        raise ModelMismatch(
            "\n".join([f"'{files.folder}' does not fit the model", *problems]),
            fix="make the model from the folder's configuration; weights that are to "
            "stay as they are: load_pretrained(folder, strict=False)",
        )
    return names, missing


def _nearest(
    missing: list[str],
    extra: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    files: Pretrained,
) -> list[str]:
    """The tensors of the files most like the missing ones, by shape and name."""
    near = []
    for name in missing:
        same = [n for n in extra if files.tensors[n][1] == tuple(shapes[name])]
        for stored in difflib.get_close_matches(name, same, n=1, cutoff=0.7):
            near.append(f"{name} may be {stored}")
    return near


def _renamings(own: list[str], stored: list[str]) -> Iterator[Callable[[str], str]]:
    """Ways in which all names may differ, the simplest first."""
    yield str
    for prefix in sorted({name.partition(".")[0] + "." for name in own}):
        yield partial(_without, prefix)
    for prefix in sorted({name.partition(".")[0] + "." for name in stored}):
        yield prefix.__add__


def _without(prefix: str, name: str) -> str:
    return name.removeprefix(prefix)


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST]) + f" ... ({len(names)} in all)" * (len(names) > MOST)


def need_safetensors() -> None:
    """Raises CheckpointError if safetensors is not installed."""
    if find_spec("safetensors") is None:
        raise CheckpointError(
            "safetensors is not installed", fix="pip install 'autopar[hf]'"
        )
