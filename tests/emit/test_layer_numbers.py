"""Numbers of layers in emitted text are these, however they are said."""

from __future__ import annotations

import ast
import random
from itertools import compress, product

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import WIDTH, Block, randomize
from torch import nn

from autopar.passes.emit.layer_numbers import (
    condition_text,
    in_turn,
    loop_text,
    range_text,
)
from autopar.passes.emit.loop import Loop, line
from autopar.passes.emit.loop_index import Index
from autopar.passes.proof.layer_uses import _value, find_uses


def of_text(text: str) -> list[int]:
    return list(eval(f"[i for {text}]"))


@pytest.mark.parametrize("seed", range(200))
def test_any_numbers_are_said(seed: int) -> None:
    draw = random.Random(seed)
    turns = sorted(draw.sample(range(6), draw.randint(1, 5)))
    last = draw.randint(1, 30)
    numbers = [n for n in range(draw.randint(0, 3), last + 4) if n % 6 in turns]
    if draw.random() < 0.3:
        numbers = sorted({*numbers, *draw.sample(range(40), 3)})
    numbers = numbers or [last]
    text = loop_text(numbers)
    assert of_text(text) == numbers
    # The proof reads from the text which layers have a parameter.
    head = f"""
PARAMETERS = {{
    **{{
        f"layers.+{{i}}.{{name}}": row
        for {text}
        for name, row in {{
            "weight": ((2, 3), torch.float32),
        }}.items()
    }},
}}
"""
    assert find_uses(head, "layers").layers["weight"] == numbers


def test_layers_that_take_turns_are_said_as_shortly_however_many_there_are() -> None:
    texts = [
        loop_text([i for i in range(count) if i % 4 != 3]) for count in (12, 18, 96)
    ]
    assert texts == [f"i in range({last}) if i % 4 != 3" for last in (11, 18, 95)]
    assert loop_text([0, 1, 2, 7, 9, 11]) == "i in (*range(3), *range(7, 12, 2))"
    assert loop_text(range(3, 16, 4)) == "i in range(3, 16, 4)"


@pytest.mark.parametrize(
    ("first", "last", "step", "text"),
    [
        (0, 3, 1, "range(4)"),
        (3, 1, -1, "reversed(range(1, 4))"),
        (9, 1, -4, "range(9, 0, -4)"),
        (2, 2, 4, "range(2, 3)"),
    ],
)
def test_a_range_is_up_to_its_last(first: int, last: int, step: int, text: str) -> None:
    assert range_text(first, last, step) == text
    assert [*eval(text)] == [*range(first, last + step // abs(step), step)]


def test_turns_are_told_by_the_number() -> None:
    assert in_turn([1, 3, 5], range(1, 7)) == "i % 2 == 1"
    assert in_turn([0, 4], range(0, 8)) == "i % 4 == 0"
    assert in_turn([0, 1, 5], range(0, 8)) == ""


@pytest.mark.parametrize("count", [12, 24, 96])
def test_ends_that_take_no_turns_are_told_apart(count: int) -> None:
    among, last = range(count), count - 1
    told = {
        f"i < {last} and i % 4 != 2": [i for i in among if i < last and i % 4 != 2],
        "i < 1 or i % 4 == 3": [i for i in among if i == 0 or i % 4 == 3],
        "i >= 2 and i % 3 == 1": [i for i in among if i >= 2 and i % 3 == 1],
    }
    assert [condition_text(own, among) for own in told.values()] == [*told]


@pytest.mark.parametrize("among", [range(9), range(3, 12), range(1, 18, 2)], ids=str)
def test_a_condition_is_true_of_its_numbers_alone(among: range) -> None:
    for bits in product((False, True), repeat=len(among)):
        own = [*compress(among, bits)]
        text = condition_text(own, among)
        if len(own) in (0, len(among)):
            assert not text
        else:
            assert [i for i in among if eval(text, {"i": i})] == own
            node = ast.parse(text, mode="eval").body
            assert [i for i in among if _value(node, {"i": i})] == own


def test_conditions_on_numbers_are_read() -> None:
    text = """
PARAMETERS = {
    **{
        f"layers.+{i}.{name}": row
        for i in range(4)
        for name, row in {
            "weight": ((2, 3), torch.float32),
        }.items()
    },
}

def forward(c, p, g, k, b):
    for i in range(4):
        if i >= 2:
            x = p[f"layers.+{i}.weight"]
        if i < 1:
            y = b[f"row.{i}"]
        if i % 2 == 1:
            y = b[f"other.{i}"]
        if i in {0, 3}:
            y = b[f"ends.{i}"]
"""
    assert find_uses(text, "layers").functions["forward"] == {
        ("p", "weight"): [2, 3],
        ("b", "row"): [0],
        ("b", "other"): [1, 3],
        ("b", "ends"): [0, 3],
    }


@pytest.mark.parametrize("loop", [(0, 1), (3, 2), (9, -1), (20, -4)], ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_numbers_on_a_line_are_said_by_the_variable(
    loop: tuple[int, int], seed: int
) -> None:
    draw = random.Random(seed)
    times = range(draw.randint(0, 3), 12, draw.choice([1, 2, 3]))
    first, step = draw.randint(-9, 9), draw.choice([-4, -2, -1, 0, 1, 2, 3])
    values = [first + step * n for n, _ in enumerate(times)]
    on_line = line(values, times)
    assert on_line is not None
    text = Index(Loop(((),) * 12, (), (), (), loop)).of(*on_line)
    assert [eval(text, {"i": loop[0] + loop[1] * t}) for t in times] == values


def test_what_is_said_of_every_second_iteration_is_short() -> None:
    index = Index(Loop(((),) * 8, (), (), (), (0, 1)))
    assert index.text(["r.0", "r.1", "r.2"], [1, 3, 5]) == "r.{i // 2}"
    assert index.text(["r.4", "r.5", "r.6"], [0, 2, 4]) == "r.{i // 2 + 4}"


def test_one_entry_of_a_prologue_is_asked_for_and_can_be_made() -> None:
    index = Index(Loop(((),) * 8, (), (), (), (0, 1)))
    text = index.text(['b["x.0"]', 'b["x.1"]', 'b["x.2"]'], [1, 2, 4])
    assert text == 'b[{1: "x.0", 2: "x.1", 4: "x.2"}[i]]'
    made: dict[str, int] = {}
    exec(f"{text} = 3", {"b": made, "i": 4})
    assert made == {"x.2": 3}


@pytest.mark.parametrize("mesh", ["tp=1", "dp=2", "pp=2"])
def test_layers_may_be_the_model_itself(mesh: str) -> None:
    """Nothing stands before their numbers, as `0.weight`."""
    torch.manual_seed(0)
    blocks = (Block() for _ in range(3))
    model = nn.Sequential(nn.Embedding(17, WIDTH), *blocks, nn.Linear(WIDTH, 17))
    batch = {"input": torch.randint(17, (4, 6))}
    case = Case(
        randomize(model),
        batch,
        lambda x, b: F.cross_entropy(x.flatten(0, 1), b["input"].flatten()),
    )
    case.double().verify(mesh, 2)
