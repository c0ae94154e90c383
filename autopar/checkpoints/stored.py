"""The state of an optimizer by parameter, also where it stores a whole group with the
first parameter, a row for each, as forms of Muon that work on stacked matrices do.

Of another group, as on a stage of a pipeline, other rows are stacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.optimizer_state import Group
from autopar.runtime.agreement.updates import FOR_ONE_DEVICE

if TYPE_CHECKING:
    from autopar.held_state import HeldState

Place = tuple[str, tuple[int, ...]]
"""A parameter, and which part of it: where that lies on the axes that split it."""


@dataclass(frozen=True)
class Row:
    """A parameter's value in an entry of its group: a tensor, or a value other than a
    tensor of rows, which all of its parameters share."""

    value: Any


def stored_by_name(
    step: HeldState, optimizer: Optimizer
) -> dict[str, Mapping[str, Any]]:
    """Entries of each of this rank's parameters, with the rows of stacked ones."""
    specs = step.program.parameters
    by_id = {id(p): name for name, p in step.named_parameters()}
    stored: dict[str, Mapping[str, Any]] = {
        name: optimizer.state.get(p, {}) for name, p in step.named_parameters()
    }
    for group in optimizer.param_groups:
        names = [by_id[id(p)] for p in group["params"]]
        names = [n for n in names if not any(specs[n].part.start)]
        if names and _is_stacked(names, stored, specs[names[0]].part.shape):
            entries = stored[names[0]].items()
            for i, name in enumerate(names):
                stored[name] = {e: Row(x[i] if _rows(x) else x) for e, x in entries}
    return stored


def _rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _is_stacked(
    names: Sequence[str], stored: Mapping[str, Mapping[str, Any]], shape: Iterable[int]
) -> bool:
    """Whether the first of a group's parameters [*shape] has an entry of all of them,
    and none another."""
    first, *others = (stored[name] for name in names)
    shapes = [tuple(x.shape) for x in first.values() if _rows(x)]
    alone = not any(others) and all(len(names) == size for size, *_ in shapes)
    return alone and (len(names), *shape) in shapes


def stack_rows(
    groups: Iterable[Group], rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The entries of each group's first parameter, of what was saved as rows.

    groups: with the names of this rank's parameters. Raises: CheckpointError for a
    group of which some have rows.
    """
    stacked = {}
    for group in groups:
        have = [name for name in group.names if name in rows]
        if lacking := [name for name in group.names if have and name not in rows]:
            raise CheckpointError(
                f"the optimizer stores '{have[0]}' and '{lacking[0]}' together, but "
                "the checkpoint has nothing of the latter",
                fix="make the optimizer with the groups that were saved",
            )
        if have:
            entries = {entry: [rows[n][entry] for n in have] for entry in rows[have[0]]}
            stacked[have[0]] = {
                entry: torch.stack(row) if isinstance(row[0], Tensor) else row[0]
                for entry, row in entries.items()
            }
    return stacked


def facts(step: HeldState, optimizer: Optimizer) -> dict[Place, dict[str, Any]]:
    """The shapes of an optimizer's state for each of this rank's parameters."""
    told = {}
    for name, entries in stored_by_name(step, optimizer).items():
        axes = step.program.parameters[name].split_axes
        place = name, tuple(step.comm.coords[axis] for axis in axes)
        told[place] = {e: tuple(getattr(x, "shape", ())) for e, x in entries.items()}
    return told


def check_alike(by_rank: Sequence[Mapping[Place, Mapping[str, Any]]]) -> None:
    """Checks that ranks which hold the same parameters store the same of them. Raises:
    CheckpointError; one of them is saved."""
    first: dict[Place, tuple[int, Mapping[str, Any]]] = {}
    for rank, told in enumerate(by_rank):
        for place, entries in told.items():
            other, known = first.setdefault(place, (rank, entries))
            for entry in {**known, **entries}:
                if known.get(entry) != entries.get(entry):
                    has, lacks = (other, rank) if entry in known else (rank, other)
                    raise CheckpointError(
                        f"the optimizer's '{entry}' of '{place[0]}' on rank {has} is "
                        f"not that on rank {lacks}, which holds the same parameter: a "
                        "checkpoint has one for both",
                        fix=FOR_ONE_DEVICE.partition(";")[0],
                    )
