"""Random models: each is computed as it should be, or refused with a line and a fix."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any, NoReturn

import pytest
import torch
from draw_models import (
    DESIGN,
    MLPS,
    RESIDUALS,
    SHARING,
    DrawnModel,
    draw,
    draw_model,
    main,
)
from draw_options import Draw, DrawFailed, mended, outcome, spanning
from drawn_design import Design
from drawn_gpt import NOISES, build
from drawn_layers import NORMS
from drawn_losses import LOSSES
from drawn_mixers import MIXERS

from autopar.passes.mesh import Mesh
from autopar.passes.plan import PlanError

MORE = 1000
# Those that take longest of the first ones are left to the night.
LONG = """
    0 9 17 19 28 29 45 56 57 58 64 72 80 90 96 100 101 102 103 104 105 107 108 109
    111 112 114 115 120 124 126 128 132 135 160 161 162 163 169 175 180 181 183 188
    192 200 203 204 208 210 224 225 229 232 237 240 241 244 247 248 252 256 258 261
"""
DRAWS = [seed for seed in range(264) if str(seed) not in LONG.split()]


SIZES = {"width", "heads", "kv_heads", "head_dim", "ffn"}
SIZES |= {"batch", "seq", "vocab", "padding"}


def meetings(one: Draw) -> set[Any]:
    """The options that a draw has; and what its design has, on which axes."""
    axes = [axis for axis, n in Mesh.parse(one.mesh).axes if n > 1]
    design = one.model.design
    has = [(name, str(getattr(design, name))) for name in DESIGN if name not in SIZES]
    return {*map(str, one.options), *has, *itertools.product(axes, has)}


DAILY = [DRAWS[i] for i in spanning([meetings(draw(seed)) for seed in DRAWS])]


@pytest.mark.matrix(quick=1, daily=17)
@pytest.mark.parametrize("seed", DAILY)
def test_draw(seed: int) -> None:
    outcome(draw(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted({*range(MORE)} - {*DAILY}))
def test_more_draws(seed: int) -> None:
    outcome(draw(seed))


# --- what is drawn ------------------------------------------------------------------

DESIGNS = [draw_model(seed).design for seed in range(MORE // SHARING)]


def test_every_field_of_a_design_is_drawn() -> None:
    assert set(DESIGN) == {f.name for f in fields(Design)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mixer", MIXERS),
        ("hybrid", [True, False]),
        ("norm", NORMS),
        ("loss", LOSSES),
        ("place", ["pre", "post", "parallel", "sandwich"]),
        (
            "positions",
            ["none", "learned", "alibi", "relative", "halves", "interleaved"],
        ),
        ("positions", ["partial", "complex"]),
        ("qkv", ["separate", "split", "groups", "einsum", "chunk"]),
        ("qk_norm", ["none", "head", "whole"]),
        ("attention", ["sdpa", "matmul", "einsum", "baddbmm"]),
        ("mlp", MLPS),
        ("residual", ["plain", *RESIDUALS]),
        ("memory", [0, 2]),
        ("shared", [True, False]),
        ("head", ["linear", "matmul", "einsum"]),
        ("window", [0, 3]),
        ("softcap", [0.0, 5.0]),
        ("sinks", [True, False]),
        ("tied", [True, False]),
        ("cropped", ["slice", "mask"]),
        ("padded", [True, False]),
        ("returns", ["loss", "pair", "dict", "logits"]),
        ("noise", NOISES),
    ],
)
def test_every_value_is_drawn(name, values) -> None:
    assert set(values) <= {getattr(design, name) for design in DESIGNS}


def test_sizes_coincide_and_divide_nothing() -> None:
    assert any(d.kv_heads == 1 < d.heads for d in DESIGNS)
    assert any(1 < d.kv_heads < d.heads for d in DESIGNS)
    assert any(d.width != d.heads * d.head_dim for d in DESIGNS)
    for coincides in ("width", "seq", "ffn"):
        assert any(d.vocab == getattr(d, coincides) for d in DESIGNS)
    assert any(d.seq == d.head_dim for d in DESIGNS)


def test_meshes_have_threes_and_fives() -> None:
    sizes = {n for i in range(200) for _, n in Mesh.parse(draw(i).mesh).axes}
    assert {2, 3, 4, 5} <= sizes


def test_a_seed_gives_the_same_draw_each_time() -> None:
    assert [str(draw(i)) for i in range(20)] == [str(draw(i)) for i in range(20)]


@pytest.mark.parametrize("mixer", MIXERS)
def test_no_weight_is_degenerate(mixer: str) -> None:
    """What begins at 0 or 1 would hide that it is forgotten, or taken twice."""
    model = build(Design(mixer=mixer, biases="all", sinks=True), torch.float64).model
    for name, p in model.named_parameters():
        assert not {0.0, 1.0} & set(p.flatten().tolist()), name
        assert p.numel() == 1 or len(p.unique()) > 1, name


# --- what comes of a draw -----------------------------------------------------------

SMALL = DrawnModel(Design(), frozen=0.0)


@pytest.mark.slow
def test_an_outcome_is_right_or_says_why_it_is_refused() -> None:
    assert outcome(Draw(7, SMALL, "tp=2", ())) == "right"
    refused = outcome(Draw(7, SMALL, "dp=3", ()))
    assert refused.startswith("refused, what to do is right: the batch of 4 ")


def test_what_a_refusal_says_to_do_is_done_and_must_be_right() -> None:
    one = Draw(7, SMALL, "dp=2", (("microbatches", 4),))
    assert outcome(one).startswith("refused, what to do is right: the batch of 4 ")
    assert mended(one, "use pp=2, or zero=1") == replace(one, mesh="dp=2,pp=2")
    assert mended(one, "leave microbatches out") == replace(one, options=())
    other = replace(SMALL, design=replace(SMALL.design, batch=12))
    assert mended(one, "use a batch that 12 divides") == replace(one, model=other)
    assert mended(one, "write it with other operations") is None


class NeverRight(Draw):
    def prove(self) -> NoReturn:
        fix = f"use zero={dict(self.options)['zero'] % 2 + 1}"
        raise DrawFailed("so it is") from PlanError("it never is", fix=fix)


def test_a_refusal_whose_fix_is_wrong_fails() -> None:
    with pytest.raises(DrawFailed, match="no fix of these: use zero=2; use zero=1"):
        outcome(NeverRight(7, SMALL, "dp=2", (("zero", 1),)))


def test_what_is_neither_fails_and_says_how_to_repeat_it(monkeypatch, capsys) -> None:
    broken = replace(SMALL, design=replace(SMALL.design, mixer="none"))
    seen = {7: Draw(7, broken, "tp=2", (), "draw_models.py")}
    with pytest.raises(DrawFailed, match=r"alone: python tests/draw_models\.py 7$"):
        outcome(seen[7])
    monkeypatch.setattr("draw_models.draw", seen.__getitem__)
    assert main(7, 7) == 1
    assert capsys.readouterr().out.endswith("1 failed\n")
