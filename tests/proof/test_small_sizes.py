"""Small sizes, ranks and layers that keep what may matter of the large ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case
from torch import nn

from autopar.capture.shorten import find_facts, without_index
from autopar.passes.capture.trace import trace
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.proof.choose_sizes import (
    Divides,
    NotShrunk,
    Order,
    choose_sizes,
)
from autopar.passes.proof.extents import Bound, Extent, Product, Split, Sum
from autopar.passes.proof.find_extents import find_extents
from autopar.passes.proof.shrink_plan import choose_layers, small_sizes, thin
from autopar.proof.chosen_layers import find_chosen_layers


def split(size: int, *splits: Split) -> Extent:
    return Extent(size, splits=splits)


def fixed(size: int, *splits: Split) -> Extent:
    return Extent(size, stays=True, splits=splits)


def of(*sizes: int) -> Product:
    return tuple(map(Extent, sizes))


def test_small_sizes_divide_as_the_large_ones_do() -> None:
    sizes = [split(n, ("tp",)) for n in (8, 12, 768, 1021, 4096)]
    found = choose_sizes(sizes, (), {"tp": 8}, {"tp": 2})
    assert list(found.values()) == sorted(set(found.values())), "which are the larger"
    for large, small in found.items():
        assert small <= large.size and small < 40
        assert Divides.of(large.size, 8) == Divides.of(small, 2)


def test_small_sizes_keep_sums() -> None:
    pieces = Sum(of(96), (of(8, 4), of(64)))
    shifted = Sum(of(1025), (of(1024),), 1)
    sizes = of(4, 8, 64, 96, 1024, 1025)
    small = choose_sizes(sizes, (pieces, shifted), {}, {})
    found = {extent.size: n for extent, n in small.items()}
    assert found[96] == found[8] * found[4] + found[64]
    assert found[1025] == found[1024] + 1
    assert found[4] == 4, "what is small stays"


def test_sizes_that_contradict_each_other_are_refused() -> None:
    twice = Sum(of(10), (of(10), of(7)))
    with pytest.raises(NotShrunk, match="no small sizes stand for 7, 10"):
        choose_sizes(of(7, 10), (twice,), {}, {})


def test_a_sum_that_holds_for_any_size_decides_none() -> None:
    """Halves of a head that are as many as the heads, of which there are two each."""
    few, many = fixed(2), Extent(64)
    twice = Sum((many, few), ((many,), (many,)))
    assert choose_sizes([few, many], (twice,), {}, {})[many] < 64


def test_few_sizes_become_equal_where_some_must() -> None:
    """Of 6 heads on 4 ranks, as on 2: these are 3, which is another extent."""
    sizes = [fixed(3), split(6, ("tp",)), *of(8, 12, 20)]
    found = choose_sizes(sizes, (), {"tp": 4}, {"tp": 2})
    assert [found[n] for n in sizes[:2]] == [3, 3]
    assert len(set(found.values())) == 4, "all others differ"


def test_there_are_ranks_for_all_that_splits_an_extent() -> None:
    """8 is a share of 1 on 8 ranks, of 2 on 4: so on some there must be more."""
    size = split(8, ("dp",), ("tp",), ("tp", "dp"))
    plan = Plan(Mesh.parse("dp=8,tp=4"), 1)
    few = next(small_sizes(plan, None, [size]))
    large = {axis: plan.size(axis) for axis in few}
    assert choose_sizes([size], (), large, few) == {size: few["dp"]}
    assert few["tp"] < few["dp"] < 8


def test_extents_that_follow_from_each_other_may_need_more_ranks() -> None:
    """Twice 32 is no odd number, but none that 3 divides."""
    two, *split_ones = sizes = [
        Extent(2),
        *(split(n, ("dp",)) for n in (16, 18, 32, 64)),
    ]
    a, b, c, d = split_ones
    sums = Sum((d,), ((c,), (c,))), Sum((b,), ((a,), (two,)))
    products = {(b, d): split(18 * 64, ("dp",))}
    plan = Plan(Mesh.parse("dp=5"), 1)
    meshes = list(small_sizes(plan, None, [*sizes, *products.values()]))
    assert [few["dp"] for few in meshes] == [2, 3, 4, 5]
    with pytest.raises(NotShrunk):
        choose_sizes(sizes, sums, {"dp": 5}, meshes[0], products)
    found = choose_sizes(sizes, sums, {"dp": 5}, meshes[1], products)
    assert all(found[n] % 3 for n in split_ones)
    assert found[b] * found[d] % 3, "what is split as one extent"


def test_a_size_that_stays_divides_over_the_small_ranks_as_it_did() -> None:
    """12 experts of a routing that tells them apart on 8 ranks: one each and a rest."""
    plan, own = Plan(Mesh.parse("ep=8"), 1), ("ep",)
    assert next(small_sizes(plan, None, [split(12, own)]))["ep"] == 2
    assert next(small_sizes(plan, None, [fixed(12, own)]))["ep"] == 7
    few = next(small_sizes(Plan(Mesh.parse("ep=16"), 1), None, [fixed(24, own)]))
    assert few["ep"] == 2, "not if that takes too many ranks"


def test_stages_of_each_kind_are_kept() -> None:
    plan = Plan(Mesh.parse("pp=4"), 8)
    by_stage = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], []]
    few = choose_layers("h", "a" * 12, by_stage, plan, 3)
    assert few.stages == (0, 1, 3) and few.numbers == ((0, 1, 2), (4, 5, 6), ())
    assert few.starts == ("h.3", "")
    by_stage = [[0, 1], [2, 3, 4], [5], [6]]
    few = choose_layers("h", "a" * 7, by_stage, plan, 3)
    assert few.stages == (0, 1, 2, 3), "one with fewer layers is of another kind"


def test_a_pattern_of_layers_is_kept_with_its_ends() -> None:
    assert thin("aaaaaaa", 3) == [0, 1, 2]
    assert thin("abababababx", 2) == [0, 1, 2, 3, 10]
    assert thin("abc", 2) == [0, 1, 2]
    turns = thin("aaaabaaaabaaaabaa", 2)
    assert turns == [*range(10), 15, 16], "five in turn stay five"


class Told(nn.Module):
    """Layers that are alike, and numbers for them that the model looks up."""

    def __init__(self, scales: list[Any]) -> None:
        super().__init__()
        self.embed, self.scales = nn.Embedding(12, 8), scales
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in scales)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = x + self.scales[i] * layer(x).sigmoid()
        return x.square().mean()


@pytest.mark.parametrize(
    ("odd", "few"), [(1.0, True), (2.0, False), (torch.ones(8), False)]
)
def test_layers_stay_where_they_are_looked_up_by_number(odd: Any, few: bool) -> None:
    scales: list[Any] = [1.0 if isinstance(odd, float) else torch.ones(8)] * 10
    scales[6] = odd
    case = Case(Told(scales), {"ids": torch.zeros(4, 6, dtype=torch.int64)})
    found = find_chosen_layers(case.model, case.compile("pp=2", 2))
    assert bool(found.path) == few


def test_no_more_are_chosen_than_there_are() -> None:
    """Of 64 experts on as many ranks there are 2 on 2, of which nobody chooses 6."""
    few, many = sizes = [split(6, ("tp",)), split(64, ("ep",))]
    known = sizes, (), {"tp": 3, "ep": 64}, {"tp": 3, "ep": 2}
    assert choose_sizes(*known) == {few: 6, many: 2}
    with pytest.raises(NotShrunk):
        choose_sizes(*known, most=[Bound((few,), (many,))])
    extents = find_extents(trace(Chosen(), {"x": torch.randn(4, 64)}))
    assert extents.most == {Bound(of(6), of(64))}


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).topk(6).values.sum()


def test_the_longest_is_looked_for_from_its_parts_on() -> None:
    """Where an order cannot be kept, and a part of it stays larger than most."""
    sizes = [Extent(32), fixed(64), split(4096, ("dp",))]
    _, part, whole = sizes
    most = [Bound((part,), (whole,))]
    few = choose_sizes(sizes, (), {"dp": 8}, {"dp": 2}, {}, most, [Order.DIFFERENT])
    assert few[part] == 64 <= few[whole] < 100


class Numbered(nn.Module):
    """A layer in which every second has a part that knows its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.is_later = number > 0
        if number % 2:
            self.mixer = nn.Linear(4, 4)
            self.mixer.number = number


def test_a_number_that_only_some_layers_know_makes_no_difference() -> None:
    layers = without_index([find_facts(Numbered(i)) for i in range(6)])
    assert layers[1] == layers[3] == layers[5] and layers[2] == layers[4]
    assert layers[0] != layers[2], "a flag of the first two is no number"
    pair = without_index([find_facts(Numbered(i)) for i in (0, 1)])
    assert ("", "is_later") in pair[1]


@pytest.mark.parametrize(
    ("told", "alike"),
    [
        (lambda i: i + 1, True),
        (lambda i: f"decoder.block.{i}", True),
        (lambda i: f"block_{i + 1}.attn", True),
        (lambda i: i + 2, False),
        (lambda i: f"kind {i % 2}", False),
        (lambda i: 2 * i, False),
    ],
)
def test_numbers_count_from_one_too_and_stand_in_names(
    told: Callable[[int], object], alike: bool
) -> None:
    layers = [nn.Linear(4, 4) for _ in range(12)]
    for i, layer in enumerate(layers):
        layer.told = told(i)
    first, *others = without_index([find_facts(layer) for layer in layers])
    assert all(own == first for own in others) == alike


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 3]),
        ({"scale": 0.5}, {"scale": 2.0}),
        ({1}, {2}),
        (None, 3),
        (torch.float16, torch.float32),
        ([{"wide": True}], [{"wide": False}]),
        (SimpleNamespace(window=8), SimpleNamespace(window=16)),
    ],
)
def test_layers_that_differ_in_what_a_table_of_theirs_says_are_not_alike(
    one: object, other: object
) -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for layer, told in zip(layers, [one, one, one, other, other, one], strict=True):
        layer.told = told
    first, *facts = map(find_facts, layers)
    assert [own == first for own in facts] == [True, True, False, False, True]


def test_a_list_that_holds_itself_is_no_fact() -> None:
    plain, endless = nn.Linear(4, 4), nn.Linear(4, 4)
    endless.kept = []
    endless.kept.append(endless.kept)
    assert find_facts(plain) == find_facts(endless)


def test_hooks_and_tensors_are_no_facts() -> None:
    plain, hooked = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    plain.kept, hooked.kept = [torch.ones(2)], [torch.zeros(2)]
    assert find_facts(plain) == find_facts(hooked)
