"""Which rows turns of a loop over experts write, and where: `batch_turns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...graph import Node, Value
from ..rows.choices import Match, Parts, extent
from ..rows.rows import ADDING
from ..rows.turn_values import TurnsDiffer


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


def places_of(indices: Sequence[Value], table: Mapping[str, Any]) -> tuple[Parts, ...]:
    """The parts of the choices along each of the dims that are indexed, by places or by
    a mask."""
    dims: list[Parts] = []
    for index in indices:
        own = table[index.name]
        if isinstance(own, Match):
            dims += own.dims
        elif isinstance(own, Places) and len(index.shape) == 1:
            dims.append(own.parts)
        else:
            raise TurnsDiffer
    return tuple(dims)


def read_write(
    node: Node, table: Mapping[str, Any], dims: Mapping[str, int]
) -> tuple[int, Parts, Rowwise, bool]:
    """What a node writes: the dim of the rows, the parts of the choices that it
    goes along, the rows, and whether they are added."""
    whole = node.operands[0]
    if node.name == "aten.index_put":
        first, indices = contiguous(node.arg("indices"))
        rows, adds = node.arg("values"), bool(node.arg("accumulate"))
        places = places_of(indices, table)
        if first:
            raise TurnsDiffer
    else:
        source = "source" if node.arg("src") is None else "src"
        first, index, rows = node.named(f"dim index {source}")
        first, adds = int(first) % len(whole.shape), node.name in ADDING
        own = table[index.name]
        if not isinstance(own, Places) or node.arg("alpha") not in (None, 1):
            raise TurnsDiffer
        if len(index.shape) > 1 and index.shape != rows.shape:
            raise TurnsDiffer
        places = (own.parts,)
    last = first + len(places)
    if dims.get(rows.name) != first or rows.dtype != whole.dtype:
        raise TurnsDiffer
    if whole.shape[first:last] != tuple(map(extent, places)):
        raise TurnsDiffer
    if rows.shape[first + 1 :] != whole.shape[last:]:
        raise TurnsDiffer
    return first, flat(places), table[rows.name], adds


def flat(dims: Sequence[Parts]) -> Parts:
    """The parts along dims, one behind the other."""
    return tuple(part for own in dims for part in own)


def contiguous(indices: Sequence[Value | None]) -> tuple[int, list[Value]]:
    """The dim of the first index, and all of them. Raises: TurnsDiffer, where a dim
    between is not indexed."""
    present = [d for d, index in enumerate(indices) if index is not None]
    if present != [*range(present[0], present[-1] + 1)]:
        raise TurnsDiffer
    return present[0], [i for i in indices if i is not None]
