"""A program runs only the model that it was compiled from, the same on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plans import BATCH, CONFIG, small_model, small_program
from torch import nn

import autopar
from autopar.passes.errors import AutoparError, BatchError
from autopar.passes.mesh import Mesh
from autopar.runtime.agreement.validate import ModelMismatch, check_model, check_same
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import RankError, run_virtual
from autopar.verify import verify
from examples.gpt import build

NAME = "blocks.1.mlp.up.bias"


def changed(name: str, value: torch.Tensor) -> nn.Module:
    model = small_model()
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, nn.Parameter(value))
    return model


def test_the_model_that_was_compiled_fits() -> None:
    check_model(small_program(), small_model())


def test_a_model_that_lost_a_layer_is_refused_before_it_runs() -> None:
    model, batch = build(CONFIG, BATCH)
    model.blocks = model.blocks[:1]
    with pytest.raises(ModelMismatch, match=r"'blocks\.1\..*', which the model lacks"):
        verify(small_program(), model, batch)


@pytest.mark.parametrize(
    ("value", "says"),
    (
        (torch.zeros(3), rf"'{NAME}' is float32\[3\], but .* float32\[128\]"),
        (torch.zeros(128).double(), rf"'{NAME}' is float64\[128\]"),
    ),
)
def test_another_shape_or_type_is_refused(value: torch.Tensor, says: str) -> None:
    with pytest.raises(ModelMismatch, match=says):
        check_model(small_program(), changed(NAME, value))


def compare(models: list[nn.Module]) -> list[Any]:
    program = small_program()

    def body(comm: Comm) -> None:
        check_same(models[comm.rank], comm, program)

    return run_virtual(Mesh.parse(f"dp={len(models)}"), 1, body)


def test_ranks_with_equal_weights_pass() -> None:
    model = small_model()
    compare([model, copy.deepcopy(model), model])


def test_a_rank_with_weights_of_its_own_is_found() -> None:
    models = [small_model() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[2].get_parameter(NAME)[5] += 1e-3
    with pytest.raises(RankError, match=f"'{NAME}' has other values on rank 2"):
        compare(models)


@pytest.mark.slow
def test_a_field_that_is_no_tensor_keeps_the_value_it_was_compiled_for() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return (x * self.weight).sum() * times

    x = torch.ones(2, 3)
    step = autopar.compile(Scaled(), "", example_inputs={"x": x, "times": 2})
    assert step(x=x, times=2).item() == 12.0
    assert step(x=x).item() == 12.0
    wrong = r"'times' is 3, but the step was compiled for 2\n  fix  pass .*tensor\(3\)"
    with pytest.raises(BatchError, match=wrong):
        step(x=x, times=3)
    with pytest.raises(BatchError, match="the step was compiled without 'twice'"):
        step(x=x, twice=True)


class Weighted(nn.Module):
    """Its loss has a factor out of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        return (x * self.weight).sum() * options["times"]


@pytest.mark.slow
def test_a_dict_in_the_batch_that_is_written_into_is_another_one() -> None:
    x, options = torch.ones(2, 3), {"times": 2}
    step = autopar.compile(Weighted(), "")
    assert step(x=x, options=options).item() == 12.0
    options["times"] = 3
    with pytest.raises(BatchError, match=r"'options' is \{'times': 3\}, but the step"):
        step(x=x, options=options)


def test_numbers_of_a_batch_that_are_not_in_a_tensor_are_refused() -> None:
    x = torch.ones(2, 3)
    told = "'options' is a dict with tensors in it\n  fix  pass each of them as a field"
    with pytest.raises(BatchError, match=told):
        autopar.compile(Weighted(), "")(x=x, options={"times": torch.tensor(2.0)})


class InOne(nn.Module):
    """As the error says that it is done where forward takes fields in one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Weighted()

    def forward(self, x: torch.Tensor, **fields: torch.Tensor) -> torch.Tensor:
        return self.model(x, options=fields)


def test_a_module_around_a_model_gives_it_fields_in_one() -> None:
    step = autopar.compile(InOne(), "")
    assert step(x=torch.ones(2, 3), times=torch.tensor(2.0)).item() == 12.0


@pytest.mark.slow
def test_texts_of_samples_are_left_out_of_the_batch() -> None:
    x = torch.ones(2, 3)
    step = autopar.compile(Weighted(), "")
    options = {"times": 2}
    step(x=x, options=options)
    told = r"'options' is \['a', 'b'\], but [\s\S]*fix  leave 'options' out where"
    with pytest.raises(BatchError, match=told):
        step(x=x, options=["a", "b"])
    told = r"'options' is a ndarray\n  fix  pass it as a tensor: options=torch.as_tens"
    with pytest.raises(BatchError, match=told):
        autopar.compile(Weighted(), "")(x=x, options=x.numpy())


@pytest.mark.slow
def test_a_step_where_no_gradient_is_wanted_is_refused() -> None:
    batch = {"x": torch.ones(2, 3), "options": {"times": 2}}
    step = autopar.compile(Weighted(), "", example_inputs=batch)
    step(**batch)
    with (
        torch.no_grad(),
        pytest.raises(AutoparError, match=r"under torch\.no_grad\(\)"),
    ):
        step(**batch)
    with torch.no_grad():
        assert step.evaluate(**batch).item() == 12.0
    (p,) = step.parameters()
    assert p.grad is not None and torch.equal(p.grad, torch.full((3,), 4.0))
