"""Hints split parameters where the user says, or say why they cannot."""

from __future__ import annotations

import pytest
from models import gpt2, llama, plain_gpt

from autopar.passes.errors import HintError, ShardingConflict

UP = "blocks.*.mlp.up.weight"


def test_a_hint_splits_a_parameter_and_the_result_stays():
    """The plan by itself would split the ffn dim."""
    case = plain_gpt().double()
    hints = {"blocks.1.mlp.up.weight": "embed/tp"}
    program = case.compile("tp=2", hints=hints)
    assert program.parameters["blocks.0.mlp.up.weight"].pattern == "ffn/tp embed"
    assert program.parameters["blocks.1.mlp.up.weight"].pattern == "ffn embed/tp"
    case.verify("pp=2,tp=2", 2, hints=hints)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("make", "hints"),
    [
        (plain_gpt, {UP: "ffn/dp"}),
        (plain_gpt, {"blocks.*.attention.proj.weight": "embed/tp"}),
        (plain_gpt, {"tokens.weight": "embed/tp"}),
        (plain_gpt, {"*.attention.qkv.weight": "head_dim/tp"}),
        (gpt2, {"*.attn.c_attn.weight": "embed/tp", "*.c_fc.weight": "embed/tp"}),
        (llama, {"*.q_proj.weight": "kv_heads/tp"}),
        (llama, {"*.o_proj.weight": "q_per_kv/tp"}),
    ],
)
def test_any_split_that_is_allowed_is_right(make, hints):
    case = make(layers=2).double()
    program = case.compile("dp=2,tp=2", 2, hints=hints)
    for pattern, split in hints.items():
        name = pattern.replace("*", "0")
        matching = [n for n in program.parameters if n.endswith(name.split("0")[-1])]
        assert all(split in program.parameters[n].pattern for n in matching)
    case.verify("dp=2,tp=2", 2, hints=hints)


WRONG = {
    "ffn": (UP, HintError, "not of the form 'dim/axis'"),
    "ffn/ep": (UP, HintError, "names axis 'ep', which mesh 'tp=2' lacks"),
    "wings/tp": (UP, HintError, "blocks.0.mlp.up.weight has no dim 'wings'"),
    "vocab/tp": ("*.nothing", HintError, "matches no parameter"),
    "embed/tp": ("norm.weight", ShardingConflict, "layer_norm needs dim 'embed'"),
}


@pytest.mark.parametrize(("split", "expected"), WRONG.items(), ids=WRONG)
def test_a_hint_that_cannot_be_followed(split, expected):
    pattern, error, says = expected
    with pytest.raises(error, match=says) as found:
        plain_gpt(layers=2).compile("tp=2", hints={pattern: split})
    assert f"{pattern!r}: {split!r}" in str(found.value)
    assert "\n  fix  " in str(found.value)


def test_a_conflict_shows_the_line_of_the_users_source():
    with pytest.raises(ShardingConflict, match=r"\n  at   gpt\.py:\d+  norm\n"):
        plain_gpt(layers=1).compile("tp=2", hints={"norm.weight": "embed/tp"})


def test_a_dim_with_too_few_elements():
    with pytest.raises(HintError, match="'heads' has 4 elements, fewer than the 8"):
        plain_gpt(layers=1).compile("tp=8", hints={"*.qkv.weight": "heads/tp"})
