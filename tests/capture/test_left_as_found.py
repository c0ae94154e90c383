"""A model is left as it was found, whatever its first forward keeps for later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, plan
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.capture.capture_model import capture_model
from autopar.passes.errors import CaptureError
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.verify import verify

SEQ = 4
CACHE: dict[int, Tensor] = {}
TABLE: Tensor | None = None


def make(n: int) -> Tensor:
    """Weights of n positions, float64 [n, 1]."""
    return torch.linspace(0.5, 1.5, n, dtype=torch.float64)[:, None]


class Plain:
    """An object that is no module."""

    shared: Tensor | None = None

    def __init__(self) -> None:
        self.kept: Tensor | None = None
        self.calls = 0

    def table(self) -> Tensor:
        return kept_on(self)


class Slim:
    __slots__ = ("kept", "unset")

    def __init__(self) -> None:
        self.kept: Tensor | None = None


class Entries(dict[int, Tensor]):
    """A dict with an attribute."""

    kept: Tensor | None = None


@functools.lru_cache
def cached(n: int) -> Tensor:
    return make(n)


def in_closure() -> Callable[[int], Tensor]:
    kept: list[Tensor] = []

    def table(n: int) -> Tensor:
        if not kept:
            kept.append(make(n))
        return kept[0]

    return table


def in_variable() -> Callable[[int], Tensor]:
    kept: Tensor | None = None

    def table(n: int) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = make(n)
        return kept

    return table


def in_default(n: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(n, make(n)) if n not in kept else kept[n]


def in_buffer(self: Keeping) -> Tensor:
    if self.cache is None:
        self.cache = make(SEQ)
    return self.cache


def in_new_buffer(self: Keeping) -> Tensor:
    """As tables of rotations are made: for a length, and at first whatever it is."""
    if self.most is None or self.most < SEQ:
        self.most = SEQ
        self.register_buffer("turns", self.base[:SEQ, None].cos(), persistent=False)
    return self.turns[:SEQ]


def in_attribute(self: Keeping) -> Tensor:
    if not hasattr(self, "table"):
        self.table = make(SEQ)
    return self.table


def in_dict(self: Keeping) -> Tensor:
    if SEQ not in self.kept:
        self.kept[SEQ] = make(SEQ)
    return self.kept[SEQ]


def in_object(self: Keeping) -> Tensor:
    if self.plain.kept is None:
        self.plain.kept = make(SEQ)
    return self.plain.kept


def kept_on(holder: Any) -> Tensor:
    if getattr(holder, "kept", None) is None:
        holder.kept = make(SEQ)
    return holder.kept


def in_slots(self: Keeping) -> Tensor:
    return kept_on(self.slim)


def in_an_unset_slot(self: Keeping) -> Tensor:
    if not hasattr(self.slim, "unset"):
        self.slim.unset = make(SEQ)
    return self.slim.unset


def in_namespace(self: Keeping) -> Tensor:
    return kept_on(self.space)


def on_a_dict(self: Keeping) -> Tensor:
    return kept_on(self.entries)


def out_of_reach(self: Keeping) -> Tensor:
    return kept_on(self.far.get())


def on_class(self: Keeping) -> Tensor:
    if Plain.shared is None:
        Plain.shared = make(SEQ)
    return Plain.shared


def on_own_class(self: Keeping) -> Tensor:
    if Keeping.shared is None:
        Keeping.shared = make(SEQ)
    return Keeping.shared


def in_global(self: Keeping) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = make(SEQ)
    return TABLE


def in_global_dict(self: Keeping) -> Tensor:
    if SEQ not in CACHE:
        CACHE[SEQ] = make(SEQ)
    return CACHE[SEQ]


def on_function(self: Keeping) -> Tensor:
    if not hasattr(make, "kept"):
        make.kept = make(SEQ)  # type: ignore[attr-defined]
    return make.kept  # type: ignore[attr-defined]


def in_list(self: Keeping) -> Tensor:
    self.seen.append(make(SEQ))
    return self.seen[0]


def counting(self: Keeping) -> Tensor:
    self.plain.calls += 1
    return make(SEQ)


def frozen(self: Keeping) -> Tensor:
    self.embed.weight.requires_grad_(False)
    return make(SEQ)


WAYS: dict[str, Callable[[Any], Tensor]] = {
    f.__name__: f
    for f in (
        in_buffer,
        in_new_buffer,
        in_attribute,
        in_dict,
        in_object,
        in_slots,
        in_an_unset_slot,
        in_namespace,
        on_a_dict,
        out_of_reach,
        on_class,
        on_own_class,
        in_global,
        in_global_dict,
        on_function,
        in_list,
        counting,
        frozen,
    )
}
WAYS["cached"] = lambda self: cached(SEQ)
WAYS["in_closure"] = lambda self: self.table_of(SEQ)
WAYS["in_variable"] = lambda self: self.variable(SEQ)
WAYS["by_method"] = lambda self: self.method()
WAYS["in_argument"] = lambda self: self.partial()
WAYS["in_default"] = lambda self: in_default(SEQ)


class Keeping(nn.Module):
    shared: Tensor | None = None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("cache", None)
        self.register_buffer("base", torch.linspace(0, 2, 3 * SEQ))
        self.register_buffer("turns", torch.zeros(3 * SEQ, 1), persistent=False)
        self.most: int | None = None
        self.way, self.kept, self.seen = way, {}, []
        self.plain, self.slim, self.table_of = Plain(), Slim(), in_closure()
        self.space, self.entries = SimpleNamespace(kept=None), Entries()
        self.far = ContextVar("far", default=Plain())  # noqa: B039
        self.variable, self.method = in_variable(), Plain().table
        self.partial = functools.partial(kept_on, Plain())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) * WAYS[self.way](self)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def keeping(way: str) -> Case:
    torch.manual_seed(0)
    return Case(randomize(Keeping(way)), token_batch(seq=SEQ, ignored="none")).double()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What tests of this file left among globals and on classes is gone."""
    global TABLE
    TABLE = Plain.shared = Keeping.shared = None
    CACHE.clear()
    cached.cache_clear()
    vars(make).clear()
    yield


@pytest.mark.matrix(quick=1, daily=9)
@pytest.mark.parametrize("way", WAYS)
def test_what_forward_keeps_is_put_back(way):
    """Or refused by name, where it is out of reach."""
    case, fresh = keeping(way), keeping(way)
    state = {k: v.clone() for k, v in case.model.state_dict().items()}
    try:
        traced = capture_model(case.model, case.batch)
    except CaptureError as error:
        assert way == "out_of_reach" and "'Plain' has kept a tensor" in error.message
        return
    program = compile_program(traced, plan("dp=2", 2), PLAIN)
    assert state.keys() == case.model.state_dict().keys()
    for name, x in case.model.state_dict().items():
        assert torch.equal(x, state[name])
    assert case.model.most is None and not case.model.turns.any()
    assert case.model.cache is None and not case.model.kept and not case.model.seen
    assert (case.model.plain.kept, case.model.plain.calls) == (None, 0)
    assert all(p.requires_grad for p in case.model.parameters())
    loss = case.model(**case.batch)
    assert not isinstance(loss, FakeTensor)
    assert torch.equal(loss, fresh.model(**case.batch))
    if way != "frozen":
        verify(program, *keeping(way)).check()


def test_a_table_of_a_model_without_values_may_be_made_anew():
    case = keeping("in_new_buffer")
    capture_model(case.model.to("meta"), case.batch)


@pytest.mark.slow
def test_what_was_kept_before_stays():
    case = keeping("in_dict")
    case.model.kept[3] = three = make(3)
    cached(7)
    capture_model(case.model, case.batch)
    assert case.model.kept == {3: three}
    assert cached.cache_info().currsize


def test_a_model_that_cannot_be_captured_is_left_as_it_was():
    case = keeping("in_dict")

    def loss_fn(loss: Tensor, batch: Any) -> Tensor:
        return loss * float(loss)

    with pytest.raises(CaptureError):
        capture_model(case.model, case.batch, loss_fn)
    assert not case.model.kept


def test_a_buffer_out_of_reach_that_layers_share_is_refused_by_name():
    """Of a model that has run once it is there."""

    class Shared(Keeping):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            far = self.far.get()
            if far.kept is None:
                far.kept = torch.empty(2 * VOCAB, dtype=torch.float64)
            x = self.embed(input_ids).mean(1)
            y = torch.addmm(far.kept[:VOCAB], x, self.head.weight.T, beta=0)
            return y.square().mean()

    case = keeping("counting")
    with pytest.raises(CaptureError, match=r"of the class 'Plain' has kept a tensor"):
        capture_model(Shared("counting").double(), case.batch)
    model = Shared("counting").double()
    model(**case.batch)
    capture_model(model, case.batch)


@pytest.mark.slow
def test_what_forward_keeps_out_of_reach_is_refused_by_name():
    class Recording(Keeping):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            self.far.get().kept = self.embed(input_ids)
            return super().forward(input_ids, labels)

    case = keeping("counting")
    with pytest.raises(CaptureError, match=r"of the class 'Plain' has kept a tensor"):
        capture_model(Recording("counting").double(), case.batch)


def test_what_was_kept_by_a_call_before_is_part_of_the_program():
    case = keeping("out_of_reach")
    case.model(**case.batch)
    traced = capture_model(case.model, case.batch)
    verify(compile_program(traced, plan("dp=2", 2), PLAIN), *case).check()
