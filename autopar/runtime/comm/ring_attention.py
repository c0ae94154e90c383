"""Attention of a rank's rows of queries, to all keys or to keys that are passed round.

Of a causal mask a rank computes just the rectangles that its rows see, see
`passes.shard.layout`. On a ring each rank holds its own keys and values, those at work
and those under way, whatever the number of ranks (Liu 2023, arXiv 2310.01889); the
backward passes them round once more, and their gradients with them. Partial results are
joined by their logsumexp (Dao 2022, arXiv 2205.14135, section 3.1).

`rows` and `keys` say how a dim is split: its global extent, and the axes.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.passes.mesh import Split
from autopar.passes.shard.documents import Run, document_tiles
from autopar.passes.shard.layout import Pieces, Tile, causal_tiles, extent, window_tiles
from autopar.runtime.comm.work import Work
from autopar.runtime.kernels.sdpa import (
    Gradients,
    attention_backward,
    attention_over_part,
    in_window,
)

if TYPE_CHECKING:
    from autopar.runtime.comm.collectives import Collectives


@dataclass(frozen=True)
class Scoring:
    """What turns queries and keys into scores. mask: [..., my rows, all keys], either
    of which may be 1, as `attention` takes it; not with is_causal. window: of the keys
    that are causal for a row it sees the last so many. documents: int [B or 1, all
    keys]; it sees those of its own. shown: bool [B or 1, all keys]; keys that any row
    may see."""

    mask: Tensor | None
    is_causal: bool
    scale: float | None
    window: int | None = None
    documents: Tensor | None = None
    shown: Tensor | None = None


@dataclass(frozen=True)
class Visit:
    """Keys and values of one rank, while they are here: k [B,G,T,E], v [B,G,T,V].

    pieces: their positions. next_numel: elements of those that come after them.
    """

    pieces: Pieces
    k: Tensor
    v: Tensor
    next_numel: int


def forward(
    comm: Collectives,
    qkv: tuple[Tensor, Tensor, Tensor],
    scoring: Scoring,
    rows: tuple[Split, ...],
    keys: tuple[Split, ...],
    axis: str | None,
) -> tuple[Tensor, Tensor]:
    """out [B,H,S,V] of q's dtype, and lse [B,H,S] in float32 or wider, 0 where a row
    attends to nothing (its out is 0 too)."""
    q, k, v = qkv
    wide = torch.promote_types(q.dtype, torch.float32)
    out = _zeros(torch.Size((*q.shape[:3], v.shape[3])), wide, q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    mine = _pieces(comm, rows)
    for visit in _visits(comm, k, v, keys, axis):
        for of, tile in _tiles(scoring, mine, visit):
            at, to = slice(tile.row, tile.row + tile.rows), _keys(tile)
            part = attention_over_part(
                q[of, :, at],
                visit.k[of, :, to],
                visit.v[of, :, to],
                _mask(scoring, visit, of, tile),
                tile.causal,
                scoring.scale,
            )
            _join_(out[of, :, at], lse[of, :, at], *part)
        del visit  # or it would live on while the next one comes
    return out.to(q.dtype), lse.masked_fill_(lse == -torch.inf, 0)


def backward(
    comm: Collectives,
    dy: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    scoring: Scoring,
    rows: tuple[Split, ...],
    keys: tuple[Split, ...],
    axis: str | None,
) -> Gradients:
    """dq, dk and dv, shaped as q and as my own k and v. results: out and lse.

    Sums over tiles and ranks are in float32 or wider.
    """
    (q, k, v), (out, lse) = qkv, results
    dq = _zeros(q.shape, lse.dtype, q.device)
    mine = _pieces(comm, rows)
    home: Work | None = None
    for visit in _visits(comm, k, v, keys, axis):
        dkv = dq.new_zeros(visit.k.numel() + visit.v.numel())
        sums = (dq, *_unpacked(dkv, visit.k.shape, visit.v.shape))
        for of, tile in _tiles(scoring, mine, visit):
            _add_gradients(sums, (dy, q, out, lse), visit, scoring, of, tile)
        if home is not None:  # what the ranks before me have found for these keys
            dkv += home.wait()
        if axis is not None:
            home = comm.shift(dkv, axis, visit.next_numel)
        del visit
    _, dk, dv = sums
    if home is not None:
        dk, dv = _unpacked(home.wait(), k.shape, v.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_gradients(
    sums: tuple[Tensor, ...],
    mine: tuple[Tensor, Tensor, Tensor, Tensor],
    visit: Visit,
    scoring: Scoring,
    of: slice,
    tile: Tile,
) -> None:
    """Add what a tile of some samples gives to dq, dk and dv. mine: dy, q, out and lse
    of all rows."""
    at, to = slice(tile.row, tile.row + tile.rows), _keys(tile)
    dy, q, out, lse = (x[of, :, at] for x in mine)
    gradients = attention_backward(
        dy,
        q,
        visit.k[of, :, to],
        visit.v[of, :, to],
        out,
        lse,
        _mask(scoring, visit, of, tile),
        tile.causal,
        scoring.scale,
        partial=True,
    )
    for total, place, part in zip(sums, (at, to, to), gradients, strict=True):
        total[of, :, place] += part


def _visits(
    comm: Collectives, k: Tensor, v: Tensor, keys: tuple[Split, ...], axis: str | None
) -> Iterator[Visit]:
    """My own keys and values, then those of the rank before, and so on round the ring;
    while some are at work the next are under way."""
    if axis is None:
        yield Visit(_pieces(comm, keys), k, v, 0)
        return
    ranks, here = len(comm.ranks((axis,))), comm.coords[axis]
    flat = torch.cat([x.transpose(1, 2).reshape(-1) for x in (k, v)])
    shapes = (k.shape, v.shape)
    for step in range(ranks):
        pieces, following = (
            comm.pieces(*keys[0], {axis: (here - i) % ranks}) for i in (step, step + 1)
        )
        k, v = _unpacked(flat, *(_of_length(shape, extent(pieces)) for shape in shapes))
        size = sum(_of_length(shape, extent(following)).numel() for shape in shapes)
        coming = comm.shift(flat, axis, size) if step + 1 < ranks else None
        yield Visit(pieces, k, v, size)
        if coming is not None:
            flat = coming.wait()


def _of_length(shape: torch.Size, rows: int) -> torch.Size:
    return torch.Size((*shape[:2], rows, shape[3]))


# In memory tokens lie outside of heads, as models make them from a product, and as they
# want them for the next.


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    b, h, s, e = shape
    return torch.zeros(b, s, h, e, dtype=dtype, device=device).transpose(1, 2)


def _unpacked(flat: Tensor, *shapes: torch.Size) -> tuple[Tensor, ...]:
    parts = flat.split([shape.numel() for shape in shapes])
    return tuple(
        part.view(b, s, h, e).transpose(1, 2)
        for part, (b, h, s, e) in zip(parts, shapes, strict=True)
    )


def _pieces(comm: Collectives, split: tuple[Split, ...]) -> Pieces:
    ((n, axes),) = split
    return comm.pieces(n, axes)


ALL = slice(None)
# Ids of documents, or what is shown -> runs in each sample, for all layers.
RUNS: MutableMapping[Tensor, list[tuple[Run, ...]]] = WeakTensorKeyDictionary()


def _tiles(
    scoring: Scoring, rows: Pieces, visit: Visit
) -> Iterator[tuple[slice, Tile]]:
    """Yields the tiles of scores, and their samples, to compute while these keys are
    here."""
    keys = visit.pieces
    if scoring.documents is not None or scoring.shown is not None:
        for of, runs, shown in _samples(scoring):
            for tile in document_tiles(rows, keys, runs, scoring.window, shown):
                yield of, tile
        return
    tiles: Sequence[Tile] = (Tile(0, extent(rows), 0, extent(keys)),)
    if scoring.window is not None:
        tiles = window_tiles(rows, keys, scoring.window)
    elif scoring.is_causal:
        tiles = causal_tiles(rows, keys)
    yield from ((ALL, tile) for tile in tiles)


def _samples(
    scoring: Scoring,
) -> Iterator[tuple[slice, tuple[Run, ...], Pieces | None]]:
    """Samples that are next to each other and alike, their runs of documents, and of
    keys that are shown."""
    documents, shown = scoring.documents, scoring.shown
    known = [x for x in (documents, shown) if x is not None]
    count, keys = max(len(x) for x in known), known[0].shape[1]
    runs = [((0, keys, 0),)] if documents is None else _runs(documents)
    there = (
        [tuple((at, n) for at, n, seen in own if seen) for own in _runs(shown)]
        if (shown is not None)
        else [None]
    )
    each = [x * count if len(x) == 1 else x for x in (runs, there)]
    first = 0
    for (own, pieces), group in groupby(zip(*each, strict=True)):
        after = first + len(list(group))
        yield (slice(first, after) if after - first < count else ALL), own, pieces
        first = after


def _runs(ids: Tensor) -> list[tuple[Run, ...]]:
    """The runs of equal ids in each sample; one for all, where nobody knows them."""
    if ids.is_meta:
        return [((0, ids.shape[1], 1),)]
    if ids not in RUNS:
        runs = []
        for own in ids.cpu():
            values, counts = own.unique_consecutive(return_counts=True)
            ends = counts.cumsum(0)
            rows = zip(ends - counts, counts, values, strict=True)
            runs.append(tuple((int(a), int(n), int(i)) for a, n, i in rows))
        RUNS[ids] = runs
    return RUNS[ids]


def _keys(tile: Tile) -> slice:
    return slice(tile.key, tile.key + tile.keys)


def _mask(scoring: Scoring, visit: Visit, of: slice, tile: Tile) -> Tensor | None:
    """The mask of some of my rows against some of the keys that are here."""
    documents, shown = scoring.documents, scoring.shown
    if scoring.window is not None or documents is not None or shown is not None:
        if tile.ahead is None:
            return None
        positions = torch.arange(max(tile.rows, tile.keys), device=visit.k.device)
        rows, keys = positions[: tile.rows] + tile.ahead, positions[: tile.keys]
        window = scoring.window or tile.rows + tile.ahead  # or all
        seen = in_window(rows, keys, window)
        if tile.at is None:
            return seen
        first = tile.at - tile.ahead
        there = slice(first, first + tile.keys)
        if documents is not None:
            own = _of(documents, of)[:, tile.at :][:, : tile.rows, None]
            seen = (own == _of(documents, of)[:, None, there]) & seen
        if shown is not None:
            seen = _of(shown, of)[:, None, there] & seen
        return seen.unsqueeze(1) if seen.ndim > 2 else seen
    mask = scoring.mask
    rows, keys = slice(tile.row, tile.row + tile.rows), _keys(tile)
    if mask is None:
        return None
    if mask.shape[-1] > 1:
        parts = [mask.narrow(-1, *piece) for piece in visit.pieces]
        mask = (parts[0] if len(parts) == 1 else torch.cat(parts, -1))[..., keys]
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask


def _of(known: Tensor, samples: slice) -> Tensor:
    """The known values of some samples [B or 1, keys]."""
    return known if len(known) == 1 else known[samples]


def _join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take keys that were not yet seen into the attention of some rows, in place.

    out, part [B,H,S,V]; lse, part_lse [B,H,S]: -inf where a row saw nothing.
    """
    most = torch.maximum(lse, part_lse)
    shift = most.masked_fill(most == -torch.inf, 0)
    old, new = (x.sub(shift).exp_() for x in (lse, part_lse))
    total = old + new
    share = (new / total.masked_fill(total == 0, 1)).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), share)
    lse.copy_(total.log_().add_(shift))
