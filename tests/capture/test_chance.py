"""What forward draws outside of the graph, or counts in Python, becomes no constant."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, WIDTH, token_batch
from torch import Tensor, nn

from autopar.capture.capture_model import capture_model
from autopar.passes.errors import CaptureError

SEQ = 4


def by_python(self: Drawing, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else self.mid(x)


def by_numpy(self: Drawing, x: Tensor) -> Tensor:
    return x * numpy.random.rand()


def by_choice(self: Drawing, x: Tensor) -> Tensor:
    return self.mid(x) * random.choice([1.0, 2.0])


def by_own(self: Drawing, x: Tensor) -> Tensor:
    return x * self.own.random()


def by_own_of_numpy(self: Drawing, x: Tensor) -> Tensor:
    return x * self.numbers["its"].normal()


def by_seed(self: Drawing, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.mid(x)


def by_count(self: Drawing, x: Tensor) -> Tensor:
    self.steps += 1
    return x * min(1.0, self.steps / 100)


def by_late_count(self: Drawing, x: Tensor) -> Tensor:
    self.steps += 1
    return x if self.steps < 1000 else self.mid(x)


def by_count_of_its_class(self: Drawing, x: Tensor) -> Tensor:
    self.calls += 1
    return x if self.calls < 1000 else self.mid(x)


def by_longest(self: Drawing, x: Tensor) -> Tensor:
    """No count: it stays what it is."""
    self.steps = x.shape[1]
    return x if self.steps < 1000 else self.mid(x)


EVERY = by_python, by_numpy, by_own, by_own_of_numpy, by_choice, by_seed
COUNTS = by_count, by_late_count, by_count_of_its_class, by_longest
DRAWS = {f.__name__: f for f in (*EVERY, *COUNTS)}


class Drawing(nn.Module):
    calls = 0

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.mid, self.draw, self.steps = nn.Linear(WIDTH, WIDTH), draw, 0
        self.own, self.numbers = random.Random(1), {"its": numpy.random.default_rng(2)}

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = DRAWS[self.draw](self, self.embed(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


NAMES = {
    "by_python": "Python's",
    "by_choice": "Python's",
    "by_numpy": "NumPy's",
    "by_own": "the model's 'own'",
    "by_own_of_numpy": r"the model's 'numbers\.its'",
    "by_seed": "torch's",
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("draw", [f.__name__ for f in EVERY])
def test_chance_outside_of_the_graph_is_refused_with_its_line(draw):
    model, batch = Drawing(draw), token_batch(seq=SEQ)
    states = random.getstate(), numpy.random.get_state()[2], torch.get_rng_state()
    line = DRAWS[draw].__code__.co_firstlineno + 1
    says = rf"{NAMES[draw]} generator.*\n  at   test_chance\.py:"
    with pytest.raises(CaptureError, match=rf"{says}{line}\n  fix"):
        capture_model(model, batch)
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[2] == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(
    ("count", "name", "when"),
    [
        ("by_count", "steps", "next time"),
        ("by_late_count", "steps", "when it is "),
        ("by_count_of_its_class", "calls", "when it is "),
    ],
)
def test_a_count_that_is_computed_with_is_refused_by_name(count, name, when):
    model, says = Drawing(count), rf"changes '{name}' from 0 to 1.* {when}.*\n  fix"
    with pytest.raises(CaptureError, match=says):
        capture_model(model, token_batch(seq=SEQ))
    assert (model.steps, model.calls) == (0, 0)
    assert "calls" not in vars(model)


def test_a_number_that_forward_keeps_is_no_count():
    capture_model(Drawing("by_longest"), token_batch(seq=SEQ))
