"""A model is captured as it runs eagerly, whatever it asks of torch meanwhile."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpret import loss_of
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from autopar.passes.capture.forward.compiling import Compiling
from autopar.passes.capture.trace import trace

# What torch says of itself to whoever asks.
MODULES = (
    torch, torch.amp, torch.autograd, torch.compiler, torch.cuda, torch.distributed,
    torch.export, torch.fx, torch.jit, torch.onnx, torch.overrides, torch._C,
    torch._dynamo, torch._guards, torch._utils,
)  # fmt: skip
QUESTIONS: dict[str, Callable[[], object]] = {
    f"{module.__name__}.{name}": ask
    for module in MODULES
    for name, ask in vars(module).items()
    if name.lstrip("_").startswith(("is_", "are_", "in_", "has_"))
    if callable(ask) and not inspect.isclass(ask)
}
# What a capture needs, and no model computes by.
OF_CAPTURES = {
    "torch._C._is_torch_function_mode_enabled",
    "torch.overrides._is_torch_function_mode_enabled",
    "torch.is_autocast_cache_enabled",
    "torch._C.is_autocast_cache_enabled",
}


class AsksAll(nn.Module):
    """Asks what takes no arguments, and hands on the answers."""

    def __init__(self, hand_on: Callable[[dict[str, bool]], None]) -> None:
        super().__init__()
        self.up, self.hand_on = nn.Linear(6, 6), hand_on

    def forward(self, x: Tensor) -> Tensor:
        answers: dict[str, bool] = {}
        for name, ask in QUESTIONS.items():
            with warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")
                if isinstance(answer := ask(), bool):
                    answers[name] = answer
        self.hand_on(answers)
        return self.up(x).square().mean()


def answers_otherwise() -> set[str]:
    """The questions that are answered otherwise within a capture than eagerly."""
    forwards: list[dict[str, bool]] = []
    model, x = AsksAll(forwards.append), {"x": torch.ones(4, 6)}
    model(**x)
    trace(model, x)
    eager, *captured = forwards
    assert len(eager) > 50 and captured
    return {n for c in captured for n in eager if c.get(n) is not eager[n]}


def test_whatever_a_model_asks_of_torch_it_is_told_as_eagerly() -> None:
    assert answers_otherwise() <= OF_CAPTURES


def test_an_export_by_itself_tells_otherwise(monkeypatch) -> None:
    monkeypatch.setattr(Compiling, "answers", contextlib.nullcontext)
    both = {"torch.compiler.is_compiling", "torch.compiler.is_exporting"}
    older = {"torch._dynamo.is_compiling", "torch._utils.is_compiling"}
    assert both | older <= answers_otherwise()


class Asks(nn.Module):
    """Does something else where it is compiled; looks into values where it is not."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.up, self.looks = nn.Linear(6, 6), looks

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.up(x).square().mean()
        factor = 2 if self.looks and x.sum().item() > 0 else 3
        return factor * self.up(x).square().mean()


def test_a_model_that_asks_whether_it_is_compiled_is_captured_as_it_runs() -> None:
    model, x = Asks(looks=False), {"x": torch.ones(4, 6)}
    torch.testing.assert_close(loss_of(trace(model, x), model, x), model(**x))
    assert not torch.compiler.is_compiling()


class AsksBefore(nn.Module):
    """Asks by functions that were imported before, and computes with the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        told = is_compiling()
        told |= is_exporting()
        return (3 + told) * self.up(x).square().mean()


def test_answers_are_bools_to_compute_with() -> None:
    model, x = AsksBefore(), {"x": torch.ones(4, 6)}
    torch.testing.assert_close(loss_of(trace(model, x), model, x), model(**x))
    assert is_compiling() is False and is_exporting() is False


def test_where_no_graph_has_what_runs_a_form_for_compilers_is_captured() -> None:
    model, x = Asks(looks=True), {"x": torch.ones(4, 6)}
    wanted = model.up(x["x"]).square().mean()
    traced = trace(model, x)
    torch.testing.assert_close(loss_of(traced, model, x), wanted)
    assert traced.remarks[0].startswith("forward is captured as it runs within torch.")


class Grouped(nn.Module):
    """The rows of each expert times its weight, as libraries of mixtures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([3, 4], dtype=torch.int32)
        return F.grouped_mm(x, self.up, offs=ends).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grouped_products_are_captured_in_what_they_run_in(dtype, caplog) -> None:
    model, x = Grouped().to(dtype), {"x": torch.randn(4, 8, dtype=dtype)}
    torch.testing.assert_close(loss_of(trace(model, x), model, x), model(**x))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
