"""What ranks must have alike, and what is said where they have not.

Every rank passes the whole batch and the same weights, and updates them in the same
way. Ranks with others of their own would train a plausible curve that is wrong; so what
they hold goes, as digests, with their roll calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.runtime.comm import Comm
from autopar.runtime.digest import digest, digest_of_text
from autopar.runtime.match import ModelMismatch
from autopar.runtime.roll_call import Facts, RollCall, others, ranks_text
from passes.errors import AutoparError, BatchError
from passes.program import Program

# Batches are compared in the first calls, where a loader of its own on each rank shows,
# and in every so many later ones, which costs nothing that could be measured.
FIRST, EVERY = 4, 32

WHOLE_BATCH = (
    "pass the whole batch on every rank, each takes its own part of it: draw it from "
    "one seed, without the rank in it and without a DistributedSampler. Where each has "
    "loaded a part, join them first: parts = [torch.empty_like(x) for _ in "
    "range(dist.get_world_size())]; dist.all_gather(parts, x); x = torch.cat(parts)"
)


class Agreement(RollCall):
    """The roll calls of a step, with what it has to tell in them."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm, JUDGES)
        self._calls: Counter[str] = Counter()

    def on_build(
        self, seed: int, program: Program | None, fixed: Mapping[str, Any]
    ) -> None:
        """Begin with what `compile` was given. Raises: ModelMismatch, BatchError."""
        text = "" if program is None else program.to_json() + str(program.modules)
        facts = {("seed", ""): seed, ("program", ""): digest_of_text(text)}
        self("build", {**facts, **{("field", k): repr(v) for k, v in fixed.items()}})

    def on_batch(self, operation: str, batch: Mapping[str, Tensor]) -> None:
        """Begin an operation with a batch. Raises: BatchError, RanksDisagree."""
        count = self._calls[operation]
        self._calls[operation] += 1
        due = count < FIRST or count % EVERY == 0
        if self.comm.mesh.size == 1 or not due:
            self(operation)
        else:
            self(operation, digests("batch", batch))


def digests(kind: str, tensors: Mapping[str, Tensor]) -> Facts:
    """Facts of tensors by name: shape, dtype and values."""
    return {
        (kind, name): (tuple(x.shape), str(x.dtype), digest(x))
        for name, x in tensors.items()
    }


# --- what is said ------------------------------------------------------------------


def _batch(name: str, values: Mapping[int, Any]) -> AutoparError:
    return BatchError(f"{_differs(name, values)} of the batch", fix=WHOLE_BATCH)


def _field(name: str, values: Mapping[int, Any]) -> AutoparError:
    return BatchError(
        f"'{name}' of the batch is {_unlike(values)}",
        fix="compile with the same value on all ranks",
    )


def _state(name: str, values: Mapping[int, Any]) -> AutoparError:
    return ModelMismatch(
        f"{_differs(name, values)} of the state dict",
        fix="read the same file on all ranks, or broadcast what one rank has read",
    )


def _seed(name: str, values: Mapping[int, Any]) -> AutoparError:
    return ModelMismatch(
        f"the seed is {_unlike(values)}",
        fix="give compile the same seed= on all ranks: masks of dropout follow from it "
        "and the position, and differ where they must",
    )


def _program(name: str, values: Mapping[int, Any]) -> AutoparError:
    return ModelMismatch(
        f"{ranks_text(others(values))} was given another program than rank 0",
        fix="give compile the same program= on all ranks, or on none",
    )


def _argument(name: str, values: Mapping[int, Any]) -> AutoparError:
    return AutoparError(
        f"{name} is {_unlike(values)}", fix=f"pass {name} on all ranks, or on none"
    )


JUDGES = {
    "batch": _batch,
    "field": _field,
    "state": _state,
    "seed": _seed,
    "program": _program,
    "argument": _argument,
}


def _differs(name: str, values: Mapping[int, Any]) -> str:
    return f"'{name}' is not the same on {ranks_text(others(values))} as on rank 0"


def _unlike(values: Mapping[int, Any]) -> str:
    """`1 on rank 0, but 2 on rank 1`."""
    first, rank = values[0], others(values)[0]
    return f"{first} on rank 0, but {values[rank]} on rank {rank}"
