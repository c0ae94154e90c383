"""Shards in `torch.distributed.checkpoint`: plans of what each rank writes and reads.

A shard is saved as its boxes, which need not be one block: DTensor knows no split of an
inner factor. What comes out is a plain checkpoint, so that torch's own tools read it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from autopar.checkpoints.memory import Memory
from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.fail_together import joined_on_first, on_all
from autopar.runtime.comm.comm import Comm
from autopar.runtime.parameters.shards import Box

P = ParamSpec("P")
T = TypeVar("T")

Key = tuple[str | int, ...]
"""The place of a value in nested dicts and lists; a checkpoint joins it by dots."""


Store = Path | Memory
"""Where a checkpoint is: the folder of its files, or memory."""
Source: TypeAlias = Path | StorageReader
"""Where tensors are read from: the same, or any reader that knows our keys."""


class CheckpointError(AutoparError):
    """A checkpoint that cannot be written, found or read, or that does not fit."""


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's boxes of a tensor of `shape`, in `values`.

    written: this rank writes it. Of ranks that hold the same, one does.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    values: Tensor
    written: bool = True

    @classmethod
    def whole(cls, values: Tensor, written: bool = True) -> Piece:
        """A tensor that one rank holds whole; written: whether this rank writes it."""
        shape = tuple(values.shape)
        return cls(shape, (Box.all_of(shape),), values, written)


State = dict[Key, list[Piece] | bytes]
"""What this rank writes, or reads into: pieces of tensors, and pickled plain values.
The pieces of one tensor have no box in common."""


class Write:
    """What this rank writes of all ranks' state to a new folder. Files and their data
    are on disk when each rank has called `write_own`, and then rank 0 `finish`.

    aliases: other keys of tensors that are stored once. All ranks must make one.
    Follows `torch.distributed.checkpoint.save`, which knows of process groups alone.
    Raises: CheckpointError on all ranks.
    """

    def __init__(
        self, store: Store, state: State, aliases: Mapping[Key, Key], comm: Comm
    ) -> None:
        self._planner = _SavePlanner(state, aliases)
        self._writer = store if isinstance(store, Memory) else _Writer(store, aliases)
        self._told = partial(_told, f"cannot write '{store}'", comm.rank)
        self._rank = comm.rank
        self._own: SavePlan | None = None
        self._known: Metadata | None = None  # on rank 0
        joined_on_first(comm, self._told(self._plan_own), self._told(self._plan_all))

    def _plan_own(self) -> SavePlan:
        self._writer.set_up_storage_writer(self._rank == 0)
        self._own = self._writer.prepare_local_plan(self._planner.create_local_plan())
        return self._own

    def _plan_all(self, plans: list[SavePlan]) -> None:
        self._known = self._planner.create_global_plan(plans)[1]

    def write_own(self) -> list[WriteResult]:
        """Returns what rank 0 needs to finish; talks to no rank."""
        # Files are named by the place of a plan: a rank's own is the last of so many.
        plans = [self._own] * (self._rank + 1)

        def write() -> list[WriteResult]:
            own = self._writer.prepare_global_plan(plans)[-1]
            return self._writer.write_data(own, self._planner).wait()

        return self._told(write)()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Writes, on rank 0, the metadata of all values. results: by rank."""
        self._told(self._writer.finish)(self._known, results)


def write(store: Store, state: State, aliases: Mapping[Key, Key], comm: Comm) -> None:
    """Write all ranks' state, see `Write`. All ranks must call it."""
    made = Write(store, state, aliases, comm)
    joined_on_first(comm, made.write_own, made.finish)


def read(store: Source, state: State, comm: Comm) -> dict[Key, Any]:
    """Fill the pieces of `state`; returns the plain values of its other keys.

    All ranks must call it. Raises: CheckpointError on all ranks.
    """
    plain: dict[Key, Any] = {}
    on_all(comm, lambda: plain.update(read_alone(store, state, comm.rank)))
    return plain


def read_alone(store: Source, state: State, rank: int = 0) -> dict[Key, Any]:
    """Does the same for one rank, whatever others do. Raises: CheckpointError."""
    planner, reader = _LoadPlanner(state), _reader(store)

    def fill() -> None:
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata)
        reader.set_up_storage_reader(metadata, rank == 0)
        reader.read_data(planner.create_local_plan(), planner).wait()

    _told(f"cannot read '{store}'", rank, fill)()
    return planner.plain


def read_metadata(store: Source) -> Metadata:
    """Reads the checkpoint's metadata: planner_data has the key of each name."""
    return _reader(store).read_metadata()


def _reader(store: Source) -> Any:
    return dcp.FileSystemReader(store) if isinstance(store, Path) else store


def pack(key: Key, value: Any) -> bytes:
    """A plain value as bytes. Raises CheckpointError if reading it would run code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"'{text(key)}' holds what no checkpoint can hold: {str(error)[:200]}",
            fix="give tensors, numbers, text, and lists and dicts of them, as "
            "state_dict() of a learning rate scheduler does",
        ) from error
    return buffer.getvalue()


def text(key: Key) -> str:
    """Joins a key's parts by dots, as DCP names entries."""
    return ".".join(map(str, key))


def _told(failed: str, rank: int, work: Callable[P, T]) -> Callable[P, T]:
    """The same work, whose errors are ours."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except AutoparError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{failed}: {type(error).__name__} on rank {rank}: {error}",
                fix="see that the disk is there, shared by all ranks, and not full",
            ) from error

    return call


# --- planners ----------------------------------------------------------------------


class _SavePlanner(SavePlanner):
    """Plans that each rank writes the boxes of its pieces, one item a box."""

    def __init__(self, state: State, aliases: Mapping[Key, Key]) -> None:
        self.state, self.aliases = {text(k): v for k, v in state.items()}, aliases
        self.keys = {text(k): k for k in state}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, value in self.state.items():
            if isinstance(value, bytes):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for piece in value:
                boxes = piece.boxes if piece.written else ()
                items += [_write_item(name, piece, box) for box in boxes]
        written = {item.index.fqn for item in items}
        return SavePlan(items, planner_data={n: self.keys[n] for n in written})

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        tensors = metadata.state_dict_metadata
        for name, value in tensors.items():
            chunks = getattr(value, "chunks", None)
            if chunks is not None:
                held = sum(prod(chunk.sizes) for chunk in chunks)
                if held != prod(value.size):
                    raise CheckpointError(
                        f"ranks hold {held} elements of '{name}', which has "
                        f"{prod(value.size)}",
                        fix="let all ranks call optimizer.step() alike",
                    )
        keys = {name: key for plan in plans for name, key in plan.planner_data.items()}
        for alias, key in self.aliases.items():
            tensors[text(alias)] = tensors[text(key)]
            keys[text(alias)] = alias
        return plans, replace(metadata, planner_data=keys)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value = self.state[write_item.index.fqn]
        if isinstance(value, bytes):
            return io.BytesIO(value)
        return _box_at(value, write_item.index).contiguous()


class _Writer(dcp.FileSystemWriter):
    """Writes files; an alias names the same place in them."""

    def __init__(self, folder: Path, aliases: Mapping[Key, Key]) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self.aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_name: dict[str, list[WriteResult]] = {}
        for result in (r for rank in results for r in rank):
            by_name.setdefault(result.index.fqn, []).append(result)
        again = [
            replace(result, index=replace(result.index, fqn=text(alias)))
            for alias, key in self.aliases.items()
            for result in by_name[text(key)]
        ]
        super().finish(metadata, [*results, again])


class _LoadPlanner(LoadPlanner):
    """Plans that each rank reads its boxes, out of whichever boxes were written."""

    def __init__(self, state: State) -> None:
        self.state = {text(k): v for k, v in state.items()}
        self.keys = {text(k): k for k in state}
        self.plain: dict[Key, Any] = {}
        self.metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner comes first"
        items: list[ReadItem] = []
        for name, value in self.state.items():
            if isinstance(value, bytes):
                items.append(_read_bytes(name))
                continue
            chunks = [
                ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
                for piece in value
                for box in piece.boxes
            ]
            saved = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = self.keys[read_item.dest_index.fqn]
        self.plain[key] = torch.load(value, "cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        pieces = self.state[read_item.dest_index.fqn]
        assert isinstance(pieces, list), f"{read_item} is of a tensor"
        view = _box_at(pieces, read_item.dest_index)
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (begin, length) in enumerate(ranges):
            view = view.narrow(dim, begin, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _write_item(name: str, piece: Piece, box: Box) -> WriteItem:
    return WriteItem(
        MetadataIndex(name, box.start),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)),
            TensorProperties(dtype=piece.values.dtype),
            torch.Size(piece.shape),
        ),
    )


def _read_bytes(name: str) -> ReadItem:
    nowhere = torch.Size((0,))
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)


def _box_at(pieces: list[Piece], index: MetadataIndex) -> Tensor:
    """A view of the box that begins at a place of the whole tensor."""
    start = tuple(index.offset or ())
    here = ((p, box) for p in pieces for box in p.boxes if box.start == start)
    piece, box = next(here)
    return box.of(piece.values)
