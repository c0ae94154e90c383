"""Numbers that a model's code reads are part of what is compiled: a step is refused
once one has changed, wherever it is kept; what nobody reads may change."""

from __future__ import annotations

import gc
import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import Stack, randomize, token_batch
from torch import Tensor, nn

import autopar
from autopar.capture.entries import is_users_file
from autopar.capture.frozen_values import FrozenValues
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program

BETA = 0.5
UNREAD = 1
SCALES = {"global": 1.0, "other": 1.0}


@dataclass
class Settings:
    penalty: float = 0.1
    printed_every: int = 100
    betas: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Warmup:
    """An object that computes a number when it is asked."""

    def __init__(self) -> None:
        self.step = 0

    def value(self) -> float:
        return min(1.0, self.step / 10)


class Meter:
    """What a script counts beside, with names that tensors have too."""

    def __init__(self) -> None:
        self.sum = self.loss = self.mean = 0.0


ARGS = Namespace(z_loss=0.1, unread=0)
METER = Meter()
FILE = ModuleType("file_of_the_user")
exec("SHARE = 1.0\nUNREAD = 1\ndef shared(x): return x * SHARE", vars(FILE))
LOG = {"loss": 0.0}


class Annealed(Stack):
    """Its loss has numbers of all places where models keep some."""

    weight = 1.0
    unread_of_class = 1.0

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.settings = Settings()
        self.table = {"z": 0.1, "unread": 0.2}
        self.temperature = 1.0
        self.global_step = 0
        self.drop = nn.Dropout(0.0)
        self.cap: float | None = None
        self.pair = (1.0, 0.0)
        self.cut = np.float32(1.0)
        self.tensor = torch.tensor(1.0, dtype=torch.float64)
        self.warmup = Warmup()

    @property
    def sharpness(self) -> float:
        return 1 / self.temperature

    def penalty(self, x: Tensor) -> Tensor:
        return self.settings.penalty * x.square().mean() * self.settings.betas[0]

    def log(self) -> str:
        METER.loss += 1
        return f"step {self.global_step} {self.table['unread']} {UNREAD}"

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.drop(super().forward(input_ids)) * self.sharpness
        z = self.table["z"] * logits.logsumexp(-1).square().mean()
        z = z * (1 if self.cap is None else self.cap) * self.pair[0] * self.tensor
        z = z * float(self.cut)
        z = z * (1 + self.warmup.value()) + ARGS.z_loss * logits.mean()
        return BETA * z + self.weight * self.penalty(logits) + of_file(logits)


def of_file(x: Tensor) -> Tensor:
    return FILE.shared(x.mean()) * SCALES["global"]


class Run:
    """A compiled step, and what a script has around it. program: compiled before."""

    def __init__(self, program: Program | None = None) -> None:
        torch.manual_seed(0)
        self.model = randomize(Annealed()).double()
        self.beta, self.seen = 0.1, 0
        self.config = {"beta": 0.1, "seen": 0}
        batch = token_batch()
        self.batch = {k: v for k, v in batch.items() if k in ("input_ids", "labels")}
        beta, seen = 0.1, 0

        def loss_fn(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return out * (1 + beta) + self.config["beta"] * self.beta

        def set_beta(value: float) -> None:
            nonlocal beta, seen
            beta, seen = value, seen + 1

        self.set_beta = set_beta
        self.step = autopar.compile(
            self.model,
            "",
            loss_fn=loss_fn,
            example_inputs=self.batch,
            program=program,
        )


def global_of_file(name: str, value: Any) -> Callable[[Run], None]:
    return lambda run: globals().__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "a module's": (lambda run: setattr(run.model, "temperature", 0.5), "temperature"),
    "torch's": (lambda run: setattr(run.model.drop, "p", 0.1), "drop.p"),
    "config": (
        lambda run: setattr(run.model.settings, "penalty", 0.2),
        "settings.penalty",
    ),
    "list": (
        lambda run: run.model.settings.betas.__setitem__(0, 3.0),
        "settings.betas.0",
    ),
    "another list": (
        lambda run: setattr(run.model.settings, "betas", [3.0]),
        "settings.betas.0",
    ),
    "longer list": (lambda run: run.model.settings.betas.append(3.0), "betas.2"),
    "another config": (
        lambda run: setattr(run.model, "settings", Settings(penalty=0.3)),
        "settings.penalty",
    ),
    "from None": (lambda run: setattr(run.model, "cap", 2.0), "cap"),
    "tuple": (lambda run: setattr(run.model, "pair", (2.0, 0.0)), "pair.0"),
    "another tensor": (
        lambda run: setattr(run.model, "tensor", run.model.tensor * 2),
        "tensor",
    ),
    "over the class's": (lambda run: setattr(run.model, "weight", 2.0), "weight"),
    "an object's": (lambda run: setattr(run.model.warmup, "step", 5), "warmup.step"),
    "arguments": (lambda run: setattr(ARGS, "z_loss", 0.2), "ARGS.z_loss"),
    "dict": (lambda run: run.model.table.update(z=0.2), "table.z"),
    "class": (lambda run: setattr(Annealed, "weight", 2.0), "weight"),
    "global": (global_of_file("BETA", 0.7), "BETA"),
    "global dict": (lambda run: SCALES.update({"global": 2.0}), "SCALES.global"),
    "global of a file": (lambda run: setattr(FILE, "SHARE", 2.0), "SHARE"),
    "of NumPy": (lambda run: setattr(run.model, "cut", np.float32(2.0)), "cut"),
    "closure": (lambda run: run.set_beta(0.2), "beta"),
    "dict in a closure": (lambda run: run.config.update(beta=0.2), "config.beta"),
    "object in a closure": (lambda run: setattr(run, "beta", 0.2), "self.beta"),
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Annealed, "weight", 1.0)
    monkeypatch.setitem(SCALES, "global", 1.0)
    monkeypatch.setattr(ARGS, "z_loss", 0.1)
    monkeypatch.setattr(FILE, "SHARE", 1.0)
    monkeypatch.setitem(globals(), "BETA", 0.5)
    monkeypatch.setitem(globals(), "UNREAD", 1)


@pytest.fixture(scope="module")
def program() -> Program:
    return Run().step.program


@pytest.mark.slow
@pytest.mark.parametrize("where", CHANGES)
def test_a_number_that_changes_is_refused(where, program):
    run = Run(program)
    run.step(**run.batch)
    change, name = CHANGES[where]
    change(run)
    with pytest.raises(AutoparError, match=rf"{name}' was .+ when the step was comp"):
        run.step(**run.batch)
    with pytest.raises(AutoparError, match=name):
        run.step.evaluate(**run.batch)


def test_what_nobody_reads_may_change():
    run = Run()
    first = run.step(**run.batch)
    run.model.global_step += 1
    run.model.table["unread"] = 5.0
    run.model.settings.printed_every = 7
    run.config["seen"] += 1
    run.seen += 1
    SCALES["other"] = 3.0
    Annealed.unread_of_class = 2.0
    globals()["UNREAD"] = 2
    METER.sum = METER.loss = METER.mean = LOG["loss"] = 1.0
    ARGS.unread = 1
    FILE.UNREAD = 2
    run.model.eval()
    assert torch.equal(run.step(**run.batch), first)


@pytest.mark.slow
def test_a_model_is_not_kept_alive():
    model = Annealed()
    read, alive = FrozenValues(model), weakref.ref(model.embed)
    assert "temperature" in set(read)
    del model
    gc.collect()
    assert alive() is None
    read.check()


def test_the_numbers_of_a_loss_module_are_read():
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss_fn(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return smoothed(out.flatten(0, -2), batch["labels"].flatten())

    class Labelled(Stack):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return super().forward(input_ids)

    torch.manual_seed(0)
    batch = token_batch()
    batch = {k: v for k, v in batch.items() if k in ("input_ids", "labels")}
    case = Case(randomize(Labelled(layers=1)).double(), batch, loss_fn)
    step = autopar.compile(case.model, "", loss_fn=loss_fn, example_inputs=batch)
    want = F.cross_entropy(
        case.model(**batch).flatten(0, -2),
        batch["labels"].flatten(),
        label_smoothing=0.1,
    )
    assert torch.allclose(step(**batch), want.detach())
    smoothed.label_smoothing = 0.2
    with pytest.raises(AutoparError, match=r"label_smoothing' was 0\.1"):
        step(**batch)


@pytest.mark.slow
def test_a_model_that_was_compiled_in_eval_is_not_trained_without_a_word():
    torch.manual_seed(0)
    model = randomize(Annealed()).double().eval()
    batch = {k: v for k, v in token_batch().items() if k in ("input_ids", "labels")}
    step = autopar.compile(model, "", example_inputs=batch)
    step(**batch)
    model.train()
    with pytest.raises(AutoparError, match=r"in eval\(\) when the step was compiled"):
        step(**batch)


def test_a_package_of_any_name_is_a_users():
    assert is_users_file(ModuleType("passes.model"))
    assert not is_users_file(ModuleType("autopar.passes.graph"))
