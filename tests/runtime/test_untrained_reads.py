"""Who reads a model, after its step has trained a copy of it, is told that these are
other weights; nobody else is."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.checkpoints.own_form import own_state
from autopar.runtime.execute.untrained_reads import largest_parts
from autopar.step import Step

X = {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        return self._sample(x)

    def _sample(self, x: Tensor) -> Tensor:
        return self(x)


class Adapted(nn.Module):
    """Goes around a model, which is what samples."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = Net(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x * self.scale)


def trained(kind: type[nn.Module] = Net, mesh: str = "") -> tuple[Any, Step]:
    """A model, and its step after an update."""
    torch.manual_seed(0)
    model = kind()
    step = autopar.compile(model, mesh, example_inputs=X)
    update(step)
    return model, step


def update(step: Step) -> None:
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    step(**X)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    def texts() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return [text for text in messages if "reads older weights" in text]

    yield texts
    assert not texts()


READS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(**X),
    "generate": lambda model: model.generate(X["x"]),
    "state_dict": lambda model: model.state_dict(),
    "a copy": copy.deepcopy,
    "a copy ": lambda model: torch.save(model, io.BytesIO()),
    "forward ": lambda model: model.double().float()(**X),
}


@pytest.mark.parametrize(("called", "read"), READS.items())
def test_a_read_of_weights_that_nobody_trained_is_told_of_once(called, read, told):
    model, step = trained()
    read(model)
    [text] = told()
    assert text.startswith(f"{called.strip()} of a Net reads older weights than its")
    assert "as 'first.weight'" in text
    assert "at   test_untrained_reads.py:" in text
    assert "fix  before it, on all ranks: model.load_state_dict(step.state" in text
    update(step)
    for read in READS.values():
        read(model)


def test_before_an_update_and_after_a_copy_nothing_is_told(told) -> None:
    torch.manual_seed(0)
    model = Net()
    step = autopar.compile(model, "", example_inputs=X)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for _ in range(3):
        for read in list(READS.values())[:5]:
            read(model)
        step(**X)
        for read in list(READS.values())[:5]:
            read(model)
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(step.state_dict())
    for read in READS.values():
        read(model)
    assert not told()
    update(step)  # it was not told yet
    update(step)
    model(**X)
    assert len(told()) == 1


def test_a_model_that_is_trained_beside_has_weights_of_its_own(told) -> None:
    model, step = trained()
    model(**X).backward()
    assert told()
    model, step = trained()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1)
    update(step)
    model(**X)


def test_own_uses_of_a_model_are_no_reads(told) -> None:
    model, step = trained()
    step(x=torch.randn(8, 4))
    step.evaluate(x=torch.randn(6, 4))
    step.state_dict()
    step.start_ema(0.9).update()
    autopar.compile(model, "", example_inputs=X)
    autopar.compile_offline(model, X, step.plan)


def test_weights_of_the_last_of_several_steps_are_no_older_ones(told) -> None:
    model, _first = trained()
    second = autopar.compile(model, "", example_inputs=X)
    update(second)
    update(second)
    model.load_state_dict(second.state_dict())
    model(**X)


def test_what_a_model_goes_around_is_watched_too(told) -> None:
    model, _ = trained(Adapted)
    model.base.generate(X["x"])
    assert told()[0].startswith("generate of a Net reads")
    model(**X)


def test_a_step_that_is_gone_has_left_its_model_behind(told) -> None:
    model, step = trained()
    here = weakref.ref(step)
    del step
    assert here() is None
    model(**X)
    assert "fix  keep the step, and before it goes" in told()[0]
    model, step = trained()
    model.load_state_dict(step.state_dict())
    step.evaluate(**X)  # both are seen to be alike
    del step
    model(**X)
    model = Net()
    autopar.compile(model, "", example_inputs=X)(**X)
    model(**X)


def test_a_model_is_as_it_was_and_kept_by_nobody(told) -> None:
    model, step = trained()
    model(**X)
    assert told()
    plain = Net()
    assert vars(model).keys() == vars(plain).keys()
    assert model._forward_pre_hooks == plain._forward_pre_hooks
    assert len(pickle.dumps(model)) == len(pickle.dumps(plain))
    here = weakref.ref(model)
    del model
    assert here() is None
    update(step)


def test_others_of_its_class_are_compiled_as_before(told) -> None:
    trained()
    other = Net()
    state = own_state(other)
    assert state["first.weight"] is other.first.weight
    exported = torch.export.export(other, (X["x"],), strict=True).module()
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    for one in (exported, compiled, copy.deepcopy(other)):
        torch.testing.assert_close(one(X["x"]), other(**X))
    traced = torch.fx.symbolic_trace(Adapted())
    assert "base_first" in {node.name for node in traced.graph.nodes}


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_ranks_that_have_parts_of_the_weights_know_them(mesh) -> None:
    for texts in run_ranks(read_on_ranks, 2, mesh):
        assert [text is not None for text in texts] == [False, True]


def read_on_ranks(mesh: str) -> list[str | None]:
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore
    logging.getLogger("autopar").addHandler(handler)
    results: list[str | None] = []
    for synced in (True, False):
        model, step = trained(mesh=mesh)
        if synced:
            model.load_state_dict(step.state_dict())
        model(**X)
        results.append(next((x for x in kept if "reads older weights" in x), None))
    return results


def test_classes_of_torch_within_a_model_are_left_alone() -> None:
    """Though an embedding may have most of the weights."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(1000, 4), nn.Linear(4, 1)

    model = Wide()
    assert list(largest_parts(model)) == [model]
    around = nn.ModuleDict({"base": model})
    assert list(largest_parts(around)) == [around, model]
