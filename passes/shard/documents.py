"""Which rows and keys see each other, where documents are packed or rows are padded.

Rows of a long document go by themselves, under a causal flag; short ones that are
neighbours go together, under a mask of that many rows. So there are about as many tiles
as documents, or as `LEAST_ROWS` go into the sequence, and no mask has more rows. Keys
that no row may see are left out, where they are in few places, as padding is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..shard import layout
from ..shard.layout import Pieces, Tile, causal_tiles, window_tiles

Run = tuple[int, int, int]  # where rows of one document begin, how many, and its id


FEW = 16  # runs of keys that rows may see, in a sequence


def document_tiles(
    rows: Pieces,
    keys: Pieces,
    runs: tuple[Run, ...],
    window: int | None = None,
    shown: Pieces | None = None,
) -> list[Tile]:
    """What rows see of keys, in few rectangles: of their own document, which may lie in
    several runs, the keys up to their own position, and the last `window` of these.
    shown: keys that rows may see at all, in order; None: every one."""
    tiles: list[Tile] = []
    own, blocks = list(_cut(keys, runs)), list(_blocks(_cut(rows, runs)))
    masked = shown is not None and len(shown) > FEW
    if shown is not None and not masked:
        own = [part for key in own for part in _within(key, shown)]
    if masked:
        blocks = [[part] for block in blocks for one in block for part in _pieces(one)]
    for block in blocks:
        row, at, count, _ = block[0]
        count = sum(length for _, _, length, _ in block)
        if len(block) > 1 or masked:
            ids = {document for *_, document in block}
            tiles += _mixed((row, at, count), [k for k in own if k[3] in ids], window)
            continue
        for key, begin, length, document in own:
            if document == block[0][3] and begin < at + count:
                pair = ((at, count),), ((begin, length),)
                inner = window_tiles(*pair, window) if window else causal_tiles(*pair)
                tiles += [replace(t, row=row + t.row, key=key + t.key) for t in inner]
    return tiles


# Where a part of a run begins in a share, and in the sequence, its length, and its id.
Part = tuple[int, int, int, int]


def _cut(pieces: Pieces, runs: tuple[Run, ...]) -> Iterator[Part]:
    """The runs that a share has rows of, in order."""
    passed = 0
    for begin, length in pieces:
        for start, size, document in runs:
            low, high = max(begin, start), min(begin + length, start + size)
            if low < high:
                yield passed + low - begin, low, high - low, document
        passed += length


def _within(part: Part, shown: Pieces) -> Iterator[Part]:
    key, begin, length, document = part
    for start, size in shown:
        low, high = max(begin, start), min(begin + length, start + size)
        if low < high:
            yield key + low - begin, low, high - low, document


def _pieces(part: Part) -> Iterator[Part]:
    """Few rows at a time."""
    row, at, count, document = part
    for skip in range(0, count, layout.LEAST_ROWS):
        length = min(layout.LEAST_ROWS, count - skip)
        yield row + skip, at + skip, length, document


def _blocks(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Neighbours that go together, of no more than LEAST_ROWS rows in all."""
    block: list[Part] = []
    for part in parts:
        if block:
            _, begin, length, _ = block[-1]
            together = part[1] + part[2] - block[0][1] <= layout.LEAST_ROWS
            if not together or begin + length != part[1]:
                yield block
                block = []
        block.append(part)
    if block:
        yield block


def _mixed(
    rows: tuple[int, int, int], keys: list[Part], window: int | None
) -> Iterator[Tile]:
    """Rows of several documents, and the keys from the first of theirs to the last, as
    they lie next to each other. rows: in the share, in the sequence, and how many."""
    row, at, count = rows
    low = 0 if window is None else at - window + 1
    tile: Tile | None = None
    for key, begin, length, _ in keys:
        skip = max(0, low - begin)
        key, begin, length = key + skip, begin + skip, length - skip
        length = min(length, at + count - begin)
        if length <= 0:
            continue
        if tile is not None and tile.ahead == at - begin + key - tile.key:
            tile = replace(tile, keys=key + length - tile.key)
            continue
        if tile is not None:
            yield tile
        tile = Tile(row, count, key, length, ahead=at - begin, at=at)
    if tile is not None:
        yield tile
