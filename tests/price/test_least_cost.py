"""least_cost: the least cost, as by trying everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest
import torch

from autopar.passes.search.least_cost import (
    Block,
    Chosen,
    Table,
    TooEntangled,
    least_cost,
)


def table(draw: random.Random, sizes: Sequence[int], scope: Sequence[int]) -> Table:
    shape = [sizes[v] for v in scope]
    costs = [
        math.inf if draw.random() < 0.1 else float(draw.randint(0, 20))
        for _ in range(math.prod(shape))
    ]
    return Table(tuple(scope), torch.tensor(costs).double().reshape(shape))


def cost(tables: Sequence[Table], choices: Mapping[int, int]) -> float:
    return sum(float(t.costs[tuple(choices[v] for v in t.variables)]) for t in tables)


def by_trying(tables: Sequence[Table], sizes: Sequence[int]) -> float:
    entries = [
        dict(zip(itertools.product(*map(range, t.costs.shape)), flat, strict=True))
        for t in tables
        for flat in [t.costs.flatten().tolist()]
    ]
    return min(
        sum(
            own[tuple(choices[v] for v in t.variables)]
            for t, own in zip(tables, entries, strict=True)
        )
        for choices in itertools.product(*map(range, sizes))
    )


def test_random_graphs_as_by_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(100):
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 6))]
        scopes = [
            draw.sample(range(len(sizes)), draw.randint(1, min(3, len(sizes))))
            for _ in range(draw.randint(len(sizes), 9))
        ]
        scopes += [[v] for v in range(len(sizes))]
        tables = [table(draw, sizes, scope) for scope in scopes]
        found = least_cost(tables, sizes)
        assert found.cost == by_trying(tables, sizes)
        if found.cost < math.inf:
            assert cost(tables, found.choices) == found.cost


# What tables of a row of blocks are over: each block has variables 0, 1, 2, of which
# the last two meet the next block (there they are b1, b2); `out` meets them all.
FIRST, LAST = ("out", "0", "2"), ("b1", "b2", "out")
SCOPES = (("out", "b1", "0"), ("b2", "0", "1"), ("1", "2"), ("0", "2", "out"))


def spot(block: int, name: str) -> int:
    if name == "out":
        return 0
    return 1 + 3 * (block - name.startswith("b")) + int(name[-1])


def row_of(kinds: Sequence[torch.Tensor], blocks: int) -> list[Table]:
    """The tables of so many blocks. kinds: of the first block, of each other, at the
    end."""
    found = [Table(tuple(spot(0, n) for n in FIRST), kinds[0])]
    for block in range(1, blocks):
        for scope, costs in zip(SCOPES, kinds[1:-1], strict=True):
            found.append(Table(tuple(spot(block, n) for n in scope), costs))
    return [*found, Table(tuple(spot(blocks, n) for n in LAST), kinds[-1])]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_row_of_blocks_as_all_of_them_written_out(times: int) -> None:
    draw = random.Random(times)
    for _ in range(8):
        own = [draw.randint(1, 3) for _ in range(3)]
        sizes = [3, *own * (times + 2)]
        kinds = [
            table(draw, sizes, [spot(1, n) for n in scope]).costs
            for scope in (FIRST, *SCOPES, LAST)
        ]
        block = Block(frozenset({4, 5, 6}), (2, 3), (5, 6), times)
        found = least_cost(row_of(kinds, 3), sizes, block)
        whole = row_of(kinds, times + 2)
        assert found.cost == least_cost(whole, sizes).cost
        if found.cost < math.inf:
            assert cost(whole, written_out(found, times)) == found.cost


def written_out(found: Chosen, times: int) -> dict[int, int]:
    choices = {v: found.choices[v] for v in (0, 1, 2, 3)}
    for i, copy in enumerate(found.copies):
        choices |= {3 * i + v: copy[v] for v in (4, 5, 6)}
    return choices | {3 * times + v - 3: found.choices[v] for v in (7, 8, 9)}


def test_what_is_too_entangled_is_refused() -> None:
    pairs = itertools.combinations(range(9), 2)
    tables = [Table(pair, torch.zeros(8, 8).double()) for pair in pairs]
    with pytest.raises(TooEntangled, match="9 choices depend on each other"):
        least_cost(tables, [8] * 9)
