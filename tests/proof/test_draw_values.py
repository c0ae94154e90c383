"""Weights and batches that proofs draw: nothing in them is degenerate, and models run
on them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import gpt2, llama, opt, plain_gpt, switch_gpt
from torch import Tensor, nn

from autopar.passes.capture.rows.input_ranges import InputRange, find_input_ranges
from autopar.passes.capture.trace import trace
from autopar.passes.graph import Value
from autopar.proof.draw_batches import draw_batch, draw_mask
from autopar.proof.draw_values import draw_parameters
from autopar.proof.values import values_of_buffers


def drawn_weights(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    like = {name: p.detach() for name, p in model.named_parameters()}
    specs = {name: (tuple(p.shape), p.dtype) for name, p in like.items()}
    return draw_parameters(specs, seed, like)


@pytest.mark.parametrize("known", [True, False])
def test_no_weight_is_0_or_1_or_equal_to_another(known):
    model = plain_gpt(layers=1).model
    for layer in model.modules():  # as most models begin
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
    like = dict(model.named_parameters()) if known else {}
    specs = {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    for name, p in draw_parameters(specs, 0, like).items():
        assert not bool(((p == 0) | (p == 1)).any()), name
        if p.ndim == 1:
            assert len(p.unique()) == p.numel(), name
            center = float("norm" in name and name.endswith("weight"))
            distance = (p - center).abs()
            assert distance.min() > 0.09, name
            assert distance.max() < 0.51, name


def test_a_draw_depends_on_the_seed_and_on_the_name_alone():
    specs = {name: ((3, 4), torch.float32) for name in ("a", "b")}
    one, other = draw_parameters(specs, 1), draw_parameters({"b": specs["b"]}, 1)
    assert torch.equal(one["b"], other["b"])
    assert not torch.equal(one["a"], one["b"])
    assert not torch.equal(one["b"], draw_parameters(specs, 2)["b"])


def test_what_initial_values_tell_is_kept():
    like = {
        "A_log": torch.arange(1.0, 17).repeat(8, 1).log(),
        "rate": torch.full((5,), -3.0),
        "gate": torch.zeros(()),
        "temperature": torch.tensor(0.07),
        "ids": torch.arange(3),
    }
    specs = {name: (tuple(x.shape), x.dtype) for name, x in like.items()}
    drawn = draw_parameters(specs, 0, like)
    assert drawn["A_log"].mean() > 1.0
    assert bool((drawn["rate"] < -1.5).all())
    assert len(drawn["rate"].unique()) == 5
    assert drawn["gate"] != 0
    assert 0.04 < drawn["temperature"] < 0.1
    assert torch.equal(drawn["ids"], like["ids"])


@pytest.mark.parametrize("known", [True, False])
def test_activations_of_a_deep_net_stay_of_order_one(known):
    case = plain_gpt(layers=12)
    specs = {n: (tuple(p.shape), p.dtype) for n, p in case.model.named_parameters()}
    like = dict(case.model.named_parameters()) if known else {}
    drawn = draw_parameters(specs, 0, like)
    logits, loss = torch.func.functional_call(case.model, drawn, (), case.batch)
    assert 0.1 < logits.std() < 10.0
    assert loss < 20.0


# --- what integers may be -----------------------------------------------------------


def ranges(model: nn.Module, **batch: Tensor) -> dict[str, InputRange]:
    return find_input_ranges(trace(model, batch).graph)


@pytest.mark.slow
def test_tokens_labels_and_masks_are_told_apart():
    for case in (gpt2(layers=1, padded=True), llama(layers=1, padded=True)):
        found = find_input_ranges(case.trace().graph)
        assert found["input_ids"] == InputRange("index", 0, 101)
        assert found["labels"] == InputRange("label", 0, 101, (-100,))
        assert found["attention_mask"].role == "mask"
    found = find_input_ranges(plain_gpt(layers=1).trace().graph)
    assert found["ids"] == InputRange("index", 0, 101)
    assert found["labels"] == InputRange("label", 0, 101, (-100,))
    assert find_input_ranges(opt(layers=1, padded=True).trace().graph)[
        "attention_mask"
    ].role in ("mask", "value")


class Lookups(nn.Module):
    """Tables of many kinds, and a loss by hand that leaves out what is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.register_buffer("table", torch.arange(12.0).view(2, 6))

    def forward(self, ids, places, kinds, targets, scale):
        x = self.tokens(ids) + self.places(places + 2)
        x = x * scale[..., None] + self.table[kinds]
        logits = x @ self.tokens.weight.T
        held = targets >= 0
        wanted = targets.masked_fill(~held, 0)[..., None]
        nll = -logits.log_softmax(-1).gather(-1, wanted)[..., 0]
        return (nll * held).sum() / held.sum()


def lookups_batch() -> dict[str, Tensor]:
    ones = torch.ones(4, 5, dtype=torch.int64)
    return {
        "ids": ones,
        "places": ones,
        "kinds": ones,
        "targets": ones,
        "scale": torch.rand(4, 5),
    }


def test_ranges_of_any_lookup_are_found():
    found = ranges(Lookups(), **lookups_batch())
    assert found["ids"] == InputRange("index", 0, 11)
    assert found["places"] == InputRange("index", -2, 7)
    assert found["kinds"] == InputRange("index", 0, 2)
    assert found["targets"] == InputRange("label", 0, 11, (-100,))
    assert "scale" not in found


class Both(nn.Module):
    """Its labels are its tokens, so none can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.tokens(ids[:, :-1]) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_labels_that_are_looked_up_have_no_holes():
    found = ranges(Both(), ids=torch.zeros(2, 5, dtype=torch.int64))
    assert found["ids"].holes == ()
    assert (found["ids"].low, found["ids"].high) == (0, 7)


# --- batches ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_token_occurs_and_each_sample_has_other_holes(seed):
    case = gpt2(layers=1, padded=True)
    inputs = {k: (tuple(v.shape), v.dtype) for k, v in case.batch.items()}
    found = find_input_ranges(case.trace().graph)
    batch = draw_batch(inputs, found, seed, case.batch)
    assert set(batch["input_ids"].unique().tolist()) == set(range(101))
    holes = (batch["labels"] == -100).sum(1)
    assert len(holes.unique()) > 2
    assert holes.max() < 16
    assert bool((batch["labels"] >= -100).all())
    mask = batch["attention_mask"]
    assert bool(((mask == 0) | (mask == 1)).all())
    assert bool(mask[:, 0].all())
    assert (mask == 0).any(1).sum() > 5
    assert len(mask.unique(dim=0)) == len(mask)
    out = case.model(**batch)
    assert bool(out.loss.isfinite())


@pytest.mark.parametrize("gentle", [True, False])
def test_a_row_of_a_mask_sees_a_key(gentle):
    generator = torch.Generator().manual_seed(0)
    mask = draw_mask((50, 6), generator, seen=0, gentle=gentle)
    assert bool((mask == 0).any(1).all())
    assert bool((mask == 1).any(0)[1:].all())
    assert bool((mask[:, 0] == 0).all()) == gentle


@pytest.mark.parametrize("gentle", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_leaves_out_another_number_of_labels_than_the_next(seed, gentle):
    """So that a count of one step is not right in the next."""
    ranges = {"labels": InputRange("label", 0, 5, (-100,))}
    inputs = {"labels": ((4, 5), torch.int64)}
    hidden = draw_batch(inputs, ranges, seed, gentle=gentle)["labels"] == -100
    assert int(hidden.sum()) % 2 == seed % 2
    assert int(hidden[:, 1:].sum()) % 2 == seed % 2, "of shifted labels too"


@pytest.mark.parametrize("gentle", [True, False])
def test_a_label_in_any_place_is_left_out(gentle):
    """What is always there is not looked at."""
    ranges = {"labels": InputRange("label", 0, 5, (-100,))}
    inputs = {"labels": ((30, 4), torch.int64)}
    hidden = draw_batch(inputs, ranges, 0, gentle=gentle)["labels"] == -100
    assert bool(hidden.any(0).all()) and not bool(hidden.all(0).any())
    assert bool(hidden.all(1).any()) != gentle


def test_fields_that_the_graph_does_not_tell_are_as_in_the_example():
    like = {
        "scale": torch.rand(4, 5),
        "choice": torch.rand(4, 5).softmax(-1),
        "kept": (torch.rand(4, 5) < 0.5).float(),
        "hidden": torch.zeros(4, 5).masked_fill(torch.rand(4, 5) < 0.5, -torch.inf),
        "positions": torch.arange(5).expand(4, 5),
        "any": torch.randn(4, 5) * 7,
        "flag": torch.ones(4, dtype=torch.bool),
    }
    inputs = {k: (tuple(v.shape), v.dtype) for k, v in like.items()}
    drawn = draw_batch(inputs, {}, 0, like)
    assert {k: (tuple(v.shape), v.dtype) for k, v in drawn.items()} == inputs
    assert 0 < drawn["scale"].min() < drawn["scale"].max() < 1
    assert drawn["choice"].sum(-1).allclose(torch.ones(4))
    assert set(drawn["kept"].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(drawn["hidden"], like["hidden"])
    assert torch.equal(drawn["positions"], like["positions"])
    assert 3 < drawn["any"].std() < 14
    assert bool((drawn["any"] != like["any"]).all())


def test_a_mixture_runs_on_what_is_drawn():
    case = switch_gpt()
    inputs = {k: (tuple(v.shape), v.dtype) for k, v in case.batch.items()}
    batch = draw_batch(inputs, find_input_ranges(case.trace().graph), 0, case.batch)
    drawn = drawn_weights(case.model)
    _, loss = torch.func.functional_call(case.model, drawn, (), batch)
    assert bool(loss.isfinite())


@pytest.mark.parametrize("gentle", [True, False])
def test_shares_of_labels_are_not_left_out_alike(gentle):
    """A rank could take its own share for that of another."""
    ranges = {"labels": InputRange("label", 0, 5, (-100,))}
    inputs = {"labels": ((4, 4), torch.int64)}
    for seed in range(200):
        hidden = draw_batch(inputs, ranges, seed, gentle=gentle)["labels"] == -100
        assert not torch.equal(hidden[:, :2], hidden[:, 2:])


@pytest.mark.parametrize("shape", [(4, 4), (8,), (1, 5)])
def test_consecutive_draws_have_other_counts(shape):
    """A count of an earlier batch would do for this one."""
    ranges = {"labels": InputRange("label", 0, 5, (-100,)), "mask": InputRange("mask")}
    inputs = {name: (shape, torch.int64) for name in ranges}
    for seed in range(6):
        one, other = (draw_batch(inputs, ranges, s) for s in (seed, seed + 1))
        counts = [int((batch["labels"] == -100).sum()) for batch in (one, other)]
        assert counts[0] != counts[1]
        if len(shape) > 1:  # of next tokens
            counts = [int((b["labels"][:, 1:] == -100).sum()) for b in (one, other)]
            assert counts[0] != counts[1]
        if shape[-1] > 2:
            assert one["mask"].sum() != other["mask"].sum()


PADDED = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("example", [PADDED, PADDED.flip(1), 1 - PADDED], ids=str)
def test_most_keys_of_a_mask_are_seen_whatever_marks_them(example):
    """Where padding follows or comes first, and is most of an example."""
    ranges = {"mask": InputRange("mask")}
    inputs = {"mask": ((20, 8), torch.int64)}
    drawn = draw_batch(inputs, ranges, 0, {"mask": example})["mask"]
    seen = 0 if torch.equal(example, 1 - PADDED) else 1
    assert 0.6 < (drawn == seen).float().mean() < 0.9


def test_buffers_that_nobody_knows_decay_rather_than_grow() -> None:
    """A state space's rates, made on the meta device: exp(-256 rate) is finite."""
    specs = Value("rate", (64, 1, 1), torch.float32), Value("count", (4,), torch.int64)
    known = {"table": torch.tensor([-1.0])}
    table = Value("table", (1,), torch.float32)
    buffers = values_of_buffers((*specs, table), known, 0)
    assert buffers["rate"].min() > 0 and buffers["rate"].unique().numel() == 64
    assert buffers["count"].dtype == torch.int64 and buffers["table"] == -1
