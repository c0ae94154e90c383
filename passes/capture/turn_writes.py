"""Which rows turns of a loop over experts write, and where: `batch_turns`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..capture.choices import Match, Part, Parts, extent
from ..capture.rows import ADDING
from ..capture.turn_values import TurnsDiffer
from ..graph import Node, Value


@dataclass(frozen=True)
class Places:
    """Which index each row has along a dim that goes along these parts of the
    choices."""

    parts: Parts


@dataclass(frozen=True)
class Accumulated:
    """Rows of what turns write to, and what is added to them. whole: what each turn
    reads them of. parts: of the choices, along the dims that rows are chosen of."""

    whole: tuple[Value, ...]
    parts: Parts
    added: Value | None = None


Rowwise: TypeAlias = Value | Places | Accumulated


def places_of(indices: Sequence[Value], table: Mapping[str, Any]) -> tuple[Parts, int]:
    """The parts of the choices along the dims that are indexed, by places or by a
    mask; and how many dims these are."""
    parts: list[Part] = []
    count = 0
    for index in indices:
        own = table[index.name]
        if isinstance(own, Match):
            parts += [part for dim in own.dims for part in dim]
            count += len(own.dims)
        elif isinstance(own, Places):
            parts += own.parts
            count += 1
        else:
            raise TurnsDiffer
    return tuple(parts), count


def read_write(
    node: Node, table: Mapping[str, Any], dims: Mapping[str, int]
) -> tuple[int, Parts, Rowwise, bool]:
    """What a node writes: the dim of the rows, the parts of the choices that it
    goes along, the rows, and whether they are added."""
    whole = node.operands[0]
    if node.name == "aten.index_put":
        first, indices = contiguous(node.arg("indices"))
        rows, adds = node.arg("values"), bool(node.arg("accumulate"))
        if first:
            raise TurnsDiffer
    else:
        source = "source" if node.arg("src") is None else "src"
        first, index, rows = node.named(f"dim index {source}")
        first, indices = int(first) % len(whole.shape), [index]
        adds = node.name in ADDING
        if (
            node.arg("alpha") not in (None, 1)
            or rows.shape[first + 1 :] != (whole.shape[first + 1 :])
        ):
            raise TurnsDiffer
        if len(index.shape) > 1 and index.shape != rows.shape:
            raise TurnsDiffer
    parts, count = places_of(indices, table)
    if dims.get(rows.name) != first or rows.dtype != whole.dtype:
        raise TurnsDiffer
    if math.prod(whole.shape[first : first + count]) != extent(parts):
        raise TurnsDiffer
    if rows.shape[first + 1 :] != whole.shape[first + count :]:
        raise TurnsDiffer
    return first, parts, table[rows.name], adds


def contiguous(indices: Sequence[Value | None]) -> tuple[int, list[Value]]:
    """The dim of the first index, and all of them. Raises: TurnsDiffer, where a dim
    between is not indexed."""
    present = [d for d, index in enumerate(indices) if index is not None]
    if present != [*range(present[0], present[-1] + 1)]:
        raise TurnsDiffer
    return present[0], [i for i in indices if i is not None]
