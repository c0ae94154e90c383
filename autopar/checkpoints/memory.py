"""A checkpoint in memory, for ranks that share it: those of a virtual mesh.

What a plan decides of a checkpoint (which boxes of which tensors a rank writes, and
reads again) is the same as in files, which are the same for all plans.
"""

from __future__ import annotations

import io
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future


class Reader(StorageReader):
    """The base of readers for `torch.distributed.checkpoint` from memory: alike on all
    ranks, and without a path. Subclasses provide the metadata."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        pass


class Memory(Reader, StorageWriter):
    """A checkpoint in memory, which all ranks write to."""

    def __init__(self) -> None:
        self.values: dict[MetadataIndex, Tensor | bytes] = {}
        self.metadata: Metadata | None = None

    # --- writing ---------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            is_tensor = isinstance(data, Tensor)
            self.values[item.index] = data.clone() if is_tensor else data.getvalue()
            results.append(WriteResult(item.index, 0, None))
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata

    # --- reading ---------------------------------------------------------------------

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        assert self.metadata is not None, "it is written first"
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            value: Any = self.values[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(value))
                continue
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            for dim, (begin, length) in enumerate(ranges):
                value = value.narrow(dim, begin, length)
            planner.resolve_tensor(item).copy_(value)
        return done(None)


def done(value: Any) -> Any:
    """A future that is done, with this value."""
    future: Any = Future()
    future.set_result(value)
    return future
