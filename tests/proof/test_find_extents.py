"""Extents of captured graphs, and the small graphs that follow from them."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from test_small_sizes import fixed, of
from torch import Tensor, nn

import autopar.proof.small as proof_small
from autopar.passes.capture.trace import trace
from autopar.passes.proof.choose_sizes import (
    WHERE_POSSIBLE,
    Order,
    choose_sizes,
)
from autopar.passes.proof.extents import Bound
from autopar.passes.proof.find_extents import find_extents
from autopar.passes.proof.shrink import Shrinker
from autopar.passes.proof_record import SMALL
from autopar.proof.prove_program import prove_program
from autopar.proof.small import make_small


class Pieces(nn.Module):
    """Uneven pieces, one of nothing, a shift, a table that is larger than the sequence,
    a window."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(701, 240), nn.Embedding(642, 240)
        self.cut, self.out = nn.Linear(240, 400 + 80), nn.Linear(200, 701)
        self.register_buffer("seen", torch.ones(640, 640).tril().bool())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        seq = ids.shape[1]
        positions = torch.arange(seq) + 2
        x = self.cut(self.table(ids) + self.places(positions))
        q, k, v = x.split([200, 200, 80], -1)
        rest = x.flatten(0, 1)[:, 480:]
        v = torch.cat([v.flatten(0, 1), rest], -1).view_as(v)
        near = (positions[:, None] - positions) < 160
        scores = (q @ k.transpose(1, 2)).masked_fill(
            ~(self.seen[:seq, :seq] & near), -1e9
        )
        mixed = scores.softmax(-1) @ torch.cat([v, q[..., 120:], x[..., 80:120]], -1)
        logits = self.out(mixed)[:, :-1]
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten()
        )


def test_a_captured_graph_shrinks_as_a_whole() -> None:
    ids = torch.randint(701, (4, 470))
    traced = trace(Pieces(), {"ids": ids, "labels": ids})
    extents = find_extents(traced)
    sizes = choose_sizes(extents.sizes, extents.sums, {}, {})
    small = Shrinker(extents, sizes).graph(traced).graph
    shapes = {v.name: v.shape for v in small.sources}
    assert sum(v.numel for v in small.params) < 4000
    rows, seq = shapes["places.weight"][0], shapes["ids"][1]
    assert rows >= seq + 2, "positions are rows of their table"
    (q, k, v) = next(n for n in small.nodes if "split" in n.op).outs
    assert q.shape == k.shape and v.shape[-1] != q.shape[-1]
    window = next(n for n in small.nodes if n.op == "aten.lt.Scalar").args[1]
    assert window <= seq, "the window hides what it hid"


class Windowed(nn.Module):
    """A window as wide as a head is, of a sequence of twice as many; heads are longer
    than these when they are small, by what they are a sum of."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(64, 4 * 512)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(x).unflatten(-1, (4, 512)).transpose(1, 2)
        mixed = torch.cat([heads[..., :200] * 2, heads[..., 200:]], -1)
        at = torch.arange(x.shape[1])
        near = (at[:, None] - at).abs() < 512
        scores = (mixed @ heads.mT).masked_fill(~near, -1e9).softmax(-1)
        return (scores @ heads).square().sum()


def test_a_window_hides_some_of_a_small_sequence_too() -> None:
    traced = trace(Windowed(), {"x": torch.randn(2, 1024, 64)})
    extents = find_extents(traced)
    assert extents.windows == {Bound(of(512), of(1024), 1)}
    known = extents.sizes, extents.sums, {}, {}, {}, extents.most | extents.windows
    for orders in (WHERE_POSSIBLE, [Order.DIFFERENT], [Order.NONE]):
        sizes = choose_sizes(*known, orders)
        small = Shrinker(extents, sizes).graph(traced).graph
        (compared,) = (n for n in small.nodes if n.op == "aten.lt.Scalar")
        assert compared.args[1] < compared.out.shape[0]


class Turns(nn.Module):
    """Two layers, of which one takes its width for pairs; a token chooses of groups of
    experts, and looks one up among all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(2))
        self.router = nn.Linear(640, 8 * 24)
        self.experts = nn.Embedding(8 * 24, 640)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.layers[0](x).unflatten(-1, (320, 2))
        y = (pairs * pairs.flip(-1)).flatten(-2).relu()
        y = y.sum(-1, keepdim=True) + self.layers[1](x).relu()
        scores = self.router(x).unflatten(-1, (8, 24))
        best = (scores * scores.amax(-1, keepdim=True)).flatten(-2).topk(4).indices
        return (y + self.experts(best).sum(-2)).sum()


def test_layers_stay_alike_and_chosen_rows_are_there() -> None:
    traced = trace(Turns(), {"x": torch.randn(30, 640)})
    extents = find_extents(traced)
    sizes = choose_sizes(extents.sizes, extents.sums, {}, {})
    small = Shrinker(extents, sizes).graph(traced).graph
    shapes = {v.name: v.shape for v in small.sources}
    assert shapes["layers.0.weight"] == shapes["layers.1.weight"]
    assert shapes["experts.weight"][0] == shapes["router.weight"][0] < 8 * 24


class Thirds(nn.Module):
    """Each third element of a part of 32, as positions of several kinds take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.randn(32))
        self.out = nn.Linear(32, 300)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(x, self.angles)
        mixed = angles.sin()
        for first, end in ((1, 33), (2, 30)):
            mixed[:, first:end:3] = angles.cos()[:, first:end:3]
        return self.out(mixed).square().sum()


def test_a_dim_of_which_some_are_left_out_stays_as_it_is() -> None:
    traced = trace(Thirds(), {"x": torch.randn(400)})
    extents = find_extents(traced)
    assert extents.fixed >= {fixed(n) for n in (32, 11, 10)}
    sizes = choose_sizes(extents.sizes, extents.sums, {}, {})
    small = Shrinker(extents, sizes).graph(traced).graph
    shapes = {v.name: v.shape for v in small.sources}
    assert shapes["angles"] == (32,) and shapes["out.weight"][0] < 300 > shapes["x"][0]


class Chunks(nn.Module):
    """A sequence goes chunk by chunk. There are as many samples as a chunk has tokens
    and as a head is wide, and as many heads as there are chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("rows", torch.arange(16))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.mix(x)[self.rows].view(batch, 16, 16, 16, 16).transpose(1, 3)
        state, outs = heads.new_zeros(batch, 16, 16, 16), []
        for i in range(16):
            chunk = heads[:, :, i]
            outs.append(chunk @ state)
            state = state + chunk.transpose(-1, -2) @ chunk / 16
        y = torch.stack(outs, 2).transpose(1, 3).reshape(batch, seq, width)
        return self.out(y).square().mean()


def chunks() -> Case:
    return Case(Chunks(), {"x": torch.randn(16, 256, 256)})


def test_extents_of_one_size_are_apart_if_that_alone_makes_them_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a loop is unrolled over stays; samples, heads and their width do not."""
    case = chunks()
    program = case.compile("dp=2,tp=2")
    together = make_small(program, *case[:2], traced=case.trace())
    assert {n for extent, n in together.sizes.items() if extent.size == 16} == {16}
    held = [v.numel for n in together.traced.graph.nodes for v in n.results]
    monkeypatch.setattr(proof_small, "VALUES", sum(held) // 4)
    apart = make_small(program, *case[:2], traced=case.trace())
    (x,) = apart.traced.graph.inputs
    assert x.shape[0] < 16 > x.shape[1] // 16
    proof = prove_program(program, *case[:2], case.trace())
    assert proof.size == SMALL and proof.passed


def test_an_index_that_counts_goes_along_all_of_a_dim() -> None:
    """Rows that are picked one after the other are as many as there are samples."""
    case = chunks()
    extents = find_extents(case.trace())
    (x,) = case.trace().graph.inputs
    assert extents.factors["rows"] == extents.factors[x.name][:1]


class Distances(nn.Module):
    """A bias for each distance that a table has, as far as it goes; experts of which
    the last does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Linear(640, 512), nn.Linear(640, 96 + 1)
        self.experts = nn.Embedding(96, 640)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        far = (at[:, None] - at).clamp(0, 511)
        near = self.table(x).gather(-1, far.expand(x.shape[0], -1, -1))
        best = self.out(x + near.sum(-1, keepdim=True)).argmax(-1)
        nothing = best == 96
        chosen = self.experts(best.masked_fill(nothing, 0))
        return chosen.masked_fill(nothing[..., None], 0.0).square().sum()


def test_numbers_are_as_far_from_the_last_of_a_table() -> None:
    traced = trace(Distances(), {"x": torch.randn(2, 1024, 640)})
    extents = find_extents(traced)
    known = extents.sizes, extents.sums, {}, {}
    sizes = choose_sizes(*known, most=extents.most | extents.windows)
    small = Shrinker(extents, sizes).graph(traced).graph
    rows = {v.name: v.shape[0] for v in small.params}
    (clamp,) = (n for n in small.nodes if n.name == "aten.clamp")
    (last,) = (n for n in small.nodes if n.name == "aten.eq")
    assert clamp.arg("max") == rows["table.weight"] - 1 < 511
    assert last.arg("other") == rows["experts.weight"] == rows["out.weight"] - 1 < 96
