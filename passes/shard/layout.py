"""Which rows of a dim each rank of an axis holds, and which of them may see each other.

A share is a few pieces (start, length) of the dim, ascending; it is held with its
pieces one after the other. How many rows a share has is what `balanced` says, however
it lies, so that shapes do not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from ..mesh import balanced, start

Pieces = tuple[tuple[int, int], ...]
LEAST_ROWS = 128  # of a tile in a sliding window, or of several documents
CALLS = 1 << 14  # that are remembered: with documents, each batch has its own


@cache
def layout(n: int, parts: int, zigzag: bool = False) -> tuple[Pieces, ...]:
    """The pieces of n rows that each of `parts` ranks holds: one piece, as even as can
    be; or, in zigzag, one from the front and its mirror image from the back.

    Under a causal mask row i sees i + 1 keys, so that a share in zigzag has as much to
    compute as any other (Llama 3, Grattafiori 2024, section 3.3.2).
    """
    lengths = balanced(n, parts)
    if not zigzag:
        return tuple(
            _joined([(start(n, parts, i), own)]) for i, own in enumerate(lengths)
        )
    layouts = []
    front, back = 0, n
    for own in lengths:
        first, last = own - own // 2, own // 2
        layouts.append(_joined([(front, first), (back - last, last)]))
        front, back = front + first, back - last
    return tuple(layouts)


def within(pieces: Pieces, share: Pieces) -> Pieces:
    """A share of what `pieces` hold, counted in the whole dim."""
    ranges = []
    for begin, length in share:
        passed = 0
        for start_, size in pieces:
            low, high = max(begin, passed), min(begin + length, passed + size)
            if low < high:
                ranges.append((start_ + low - passed, high - low))
            passed += size
    return _joined(ranges)


def _joined(pieces: list[tuple[int, int]]) -> Pieces:
    """Drops empty pieces, and joins adjacent ones."""
    joined: list[tuple[int, int]] = []
    for begin, length in pieces:
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        elif length:
            joined.append((begin, length))
    return tuple(joined)


def extent(pieces: Pieces) -> int:
    """Returns the elements in all pieces together."""
    return sum(length for _, length in pieces)


@dataclass(frozen=True)
class Tile:
    """Rows [row, row + rows) of a share of queries see keys [key, key + keys) of a
    share of keys: all of them; or, if `causal`, each those up to its own position.
    ahead: the first row's position less the first key's, where a window shows some.
    at: the first row's position, where documents do, of which it has several."""

    row: int
    rows: int
    key: int
    keys: int
    causal: bool = False
    ahead: int | None = None
    at: int | None = None


@lru_cache(CALLS)
def causal_tiles(rows: Pieces, keys: Pieces) -> tuple[Tile, ...]:
    """What of a causal mask lies in these rows and these keys, in few rectangles.

    A causal tile is square, and its rows and keys have the same positions.
    """
    total = extent(rows)
    if rows == keys:
        return (Tile(0, total, 0, total, causal=True),) if total else ()
    tiles: list[Tile] = []
    passed = 0
    for begin, length in _cut(keys, rows):
        after = _index_of(rows, begin + length)
        if _index_of(rows, begin) < after:  # these keys are also my rows
            tiles.append(Tile(after - length, length, passed, length, causal=True))
        _append_full(tiles, Tile(after, total - after, passed, length))
        passed += length
    return tuple(tiles)


@lru_cache(CALLS)
def window_tiles(rows: Pieces, keys: Pieces, window: int) -> tuple[Tile, ...]:
    """What of a sliding window lies in these rows and these keys: few rows at a time,
    so that what is computed in vain is a quarter of the window."""
    height = max(window // 4, LEAST_ROWS)
    tiles: list[Tile] = []
    row = 0
    for begin, length in rows:
        for first in range(begin, begin + length, height):
            count = min(height, begin + length - first)
            passed = 0
            for start_, size in keys:
                low = max(start_, first - window + 1)
                high = min(start_ + size, first + count)
                if low < high:
                    full = high <= first + 1 and low > first + count - 1 - window
                    ahead = None if full else first - low
                    at = passed + low - start_
                    tiles.append(Tile(row, count, at, high - low, ahead=ahead))
                passed += size
            row += count
    return tuple(tiles)


def _cut(keys: Pieces, rows: Pieces) -> list[tuple[int, int]]:
    """The keys in pieces of which each lies in one piece of the rows, or in none."""
    bounds = sorted({edge for begin, n in rows for edge in (begin, begin + n)})
    cut = []
    for begin, length in keys:
        inner = [edge for edge in bounds if begin < edge < begin + length]
        edges = [begin, *inner, begin + length]
        cut += [(a, b - a) for a, b in pairwise(edges)]
    return cut


def _index_of(pieces: Pieces, position: int) -> int:
    """How many rows of a share come before a position of the dim."""
    return sum(min(max(position - begin, 0), length) for begin, length in pieces)


def _append_full(tiles: list[Tile], tile: Tile) -> None:
    """Add a full tile, as one with the neighbour that the same rows see."""
    if not tile.rows:
        return
    for i, other in enumerate(tiles):
        same = (other.row, other.rows, other.causal) == (tile.row, tile.rows, False)
        if same and other.key + other.keys == tile.key:
            tiles[i] = Tile(tile.row, tile.rows, other.key, other.keys + tile.keys)
            return
    tiles.append(tile)
