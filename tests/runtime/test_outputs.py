"""What a model returns beside its loss comes back whole, as the untouched model has it,
whatever the plan; and dicts of losses are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, on_rank
from models import VOCAB, Stack, randomize, token_batch
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.compiler import compile_offline
from autopar.options import make_plan
from autopar.passes.errors import AutoparError, CaptureError, LossNotSeparable
from autopar.passes.program import Program
from autopar.passes.read_program import read_program
from autopar.proof.errors import VerificationFailed
from autopar.proof.prove_program import prove_program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual

WANTED = ("logits", "hidden.0", "guess", "seen")


class Returns(nn.Module):
    """Returns a dict of losses, and what people look at beside them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.inner = Stack(layers=layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x, hidden = self.inner.embed(input_ids), []
        for block in self.inner.blocks:
            x = block(x)
            hidden.append(x)
        logits = self.inner.head(x)
        return {
            "ce": F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "z": 0.1 * logits.logsumexp(-1).square().mean(),
            "logits": logits,
            "hidden": tuple(hidden),
            "guess": logits.argmax(-1),
            "seen": labels != -100,
        }


class Named(Returns):
    """One of the losses is the one that is trained."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = super().forward(input_ids, labels)
        return {**found, "loss": found["ce"] + 0.5 * found["z"]}


class Detached(Returns):
    """What is looked at beside the loss is cut off, as people log it, and so is what a
    layer sees of the one before."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.inner.embed(input_ids)
        for block in self.inner.blocks:
            x = block(x.detach()) if block is self.inner.blocks[-1] else block(x)
        ce = F.cross_entropy(self.inner.head(x).flatten(0, 1), labels.flatten())
        return {"loss": 2 * ce, "ce": ce.detach(), "same": (2 * ce).detach()}


class Loads(Returns):
    """Of a vector, as experts' loads, the numbers are looked at one by one, and it as
    a whole where it is asked for."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = super().forward(input_ids, labels)
        chosen = found["hidden"][0][..., :4].argmax(-1)
        load = F.one_hot(chosen, 4).to(found["logits"].dtype).mean((0, 1))
        each = {f"load.{e}": x for e, x in enumerate(load)}
        return {"loss": found["ce"], "load": load, **each}


def case(make: type[Returns] = Returns, layers: int = 2) -> Case:
    torch.manual_seed(0)
    return Case(randomize(make(layers=layers)), token_batch()).double()


def run(of: Case, program: Program, *wanted: str) -> list[Mapping[str, Tensor]]:
    """The step's metrics, and outputs of an evaluation, on each rank."""

    def body(comm: Comm) -> Mapping[str, Tensor]:
        executor = on_rank(program, comm, of.model)
        trained = {"loss": executor.step(of.batch), **executor.metrics}
        loss = executor.evaluate(of.batch)
        assert {"loss": loss, **executor.metrics} == trained
        return {**trained, **executor.outputs.wholes(wanted)}

    return run_virtual(program.mesh, program.plan.microbatches, body)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ("dp=2,tp=2", 2, {}),
        ("pp=2,tp=2", 2, {}),
        ("cp=2,tp=2", 1, {"context_parallel": "ring"}),
        ("pp=2,cp=2", 4, {"context_parallel": "gather", "schedule": "zb-h1"}),
        ("dp=3", 2, {"zero": 3}),
    ],
)
def test_they_come_back_whole(mesh: str, microbatches: int, options: Any) -> None:
    of = case(layers=4 if "pp" in mesh else 2)
    batch = {k: v.repeat(3, 1)[:12] for k, v in of.batch.items()}
    of = of._replace(batch=batch)
    plan = make_plan(mesh, microbatches=microbatches, **options)
    program = compile_offline(of.model, of.batch, plan, outputs=WANTED, prove=True)
    with torch.no_grad():
        want = of.model(**of.batch)
    want["hidden.0"], want["loss"] = want["hidden"][0], want["ce"] + want["z"]
    for found in run(of, program, *WANTED):
        assert found.keys() == {"loss", "ce", "z", *WANTED}
        for name, x in found.items():
            assert x.dtype == want[name].dtype, name
            torch.testing.assert_close(x, want[name])
    of.verify(mesh, microbatches)


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 2), ("pp=2", 2), ("", 1)])
def test_what_is_cut_off_comes_back(mesh: str, microbatches: int) -> None:
    of = case(Detached)
    program = of.proved(mesh, microbatches)
    want = {name: x.item() for name, x in of.model(**of.batch).items()}
    for found in run(of, program):
        assert {k: x.item() for k, x in found.items()} == pytest.approx(want)


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 2), ("pp=2,tp=2", 2)])
def test_numbers_of_a_vector_are_metrics(mesh: str, microbatches: int) -> None:
    of = case(Loads)
    plan = make_plan(mesh, microbatches=microbatches)
    program = compile_offline(of.model, of.batch, plan, outputs=("load",))
    want = of.model(**of.batch)
    for found in run(of, program, "load"):
        assert found.keys() == want.keys()
        for name, x in found.items():
            torch.testing.assert_close(x, want[name].detach())


@pytest.mark.slow
def test_the_loss_of_a_dict_is_the_one_that_is_called_so() -> None:
    of = case(Named)
    step = of.step()
    loss = step(**of.batch)
    want = of.model(**of.batch)
    torch.testing.assert_close(loss, want["loss"].detach())
    assert step.metrics.keys() == {"ce", "z"}
    torch.testing.assert_close(step.metrics["z"], want["z"].detach())
    found = step.evaluate(outputs=("logits", "z", "loss"), **of.batch)
    assert set(found) == {"logits", "z", "loss"}
    assert found["logits"].shape == (*of.batch["input_ids"].shape, VOCAB)
    torch.testing.assert_close(found["logits"], want["logits"].detach())
    assert step(**of.batch) == loss  # of the first program, and the same weights
    with pytest.raises(CaptureError, match=r"no tensor named 'logit'[\s\S]*'logits'"):
        step.evaluate(outputs=("logit",), **of.batch)
    with pytest.raises(AutoparError, match=r"in a list[\s\S]*outputs=\(\"logits\",\)"):
        step.evaluate(outputs="logits", **of.batch)


def test_a_field_of_the_batch_is_no_output() -> None:
    of, plan = case(), make_plan("tp=1")

    def losses(out: Any, batch: Mapping[str, Any]) -> Any:
        return {"loss": out["ce"], "given": batch["labels"]}

    with pytest.raises(CaptureError, match="'labels', which the model returns as it"):
        compile_offline(of.model, of.batch, plan, losses, outputs=("given",))


def evaluate_on_rank(mesh: str) -> tuple[dict[str, Tensor], list[float]]:
    of = case(Named, layers=4)
    step = autopar.compile(of.model, mesh, microbatches=2, example_inputs=of.batch)
    before = step(**of.batch).item()
    found = step.evaluate(outputs=("logits", "hidden.1"), **of.batch)
    with pytest.raises(CaptureError, match="no tensor named 'nothing'"):
        step.evaluate(outputs=("nothing",), **of.batch)
    return found, [before, step(**of.batch).item()]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["pp=2,dp=2"])
def test_ranks_evaluate_between_steps(mesh: str) -> None:
    of = case(Named, layers=4)
    with torch.no_grad():
        want = of.model(**of.batch)
    for found, losses in run_ranks(evaluate_on_rank, 4, mesh):
        assert losses == pytest.approx([want["loss"].item()] * 2, rel=1e-9)
        torch.testing.assert_close(found["logits"], want["logits"])
        torch.testing.assert_close(found["hidden.1"], want["hidden"][1])


@pytest.mark.slow
def test_a_wrong_output_is_not_proved() -> None:
    single = Case(randomize(Returns(2)), token_batch())  # rounds, but in the proof
    single.proved("dp=2,tp=2")
    of = case()
    program = of.compile("dp=2")
    outputs = {**program.outputs, "z": replace(program.outputs["z"], pending=())}
    wrong = replace(program, outputs=outputs)
    with pytest.raises(VerificationFailed, match="output 'z'"):
        prove_program(wrong, of.model, of.batch, of.trace())


@pytest.mark.slow
def test_of_what_a_loss_function_returns_too() -> None:
    of = case()

    def losses(out: Any, batch: Mapping[str, Any]) -> Any:
        del batch
        return {"loss": out["ce"], "perplexity": out["ce"].exp(), "z": out["z"]}

    plan = make_plan("dp=2", microbatches=2)
    program = compile_offline(of.model, of.batch, plan, losses)
    assert [*program.outputs] == ["z"]
    (note,) = [note for note in program.remarks if "step.metrics" in note]
    assert "without perplexity: " in note and "exp" in note
    whole = compile_offline(of.model, of.batch, make_plan("dp=2"), losses)
    assert [*whole.outputs] == ["perplexity", "z"]
    want = losses(of.model(**of.batch), of.batch)
    for found in run(of._replace(loss_fn=losses), whole):
        for name, x in found.items():
            torch.testing.assert_close(x, want[name].detach())


@pytest.mark.slow
def test_each_metric_that_cannot_be_shared_out_is_left_out_alone() -> None:
    of = case()

    def losses(out: Any, batch: Mapping[str, Any]) -> Any:
        del batch
        ce, z = out["ce"], out["z"]
        return {"loss": ce, "perplexity": ce.exp(), "z": z, "ratio": z.log() * z}

    program = compile_offline(
        of.model, of.batch, make_plan("dp=2", microbatches=2), losses, prove=True
    )
    assert program.metric_names == ["z"]
    notes = [note for note in program.remarks if "step.metrics" in note]
    assert [note.split()[3] for note in notes] == ["perplexity:", "ratio:"]


@pytest.mark.slow
def test_a_loss_that_cannot_be_shared_out_is_refused_whatever_is_beside_it() -> None:
    of = case()

    def losses(out: Any, batch: Mapping[str, Any]) -> Any:
        del batch
        return {"loss": out["ce"].exp(), "z": out["z"]}

    plan = make_plan("dp=2", microbatches=2)
    with pytest.raises(LossNotSeparable, match="exp"):
        compile_offline(of.model, of.batch, plan, losses)


def test_a_program_is_read_back_with_them() -> None:
    of = case()
    program = of.compile("dp=2")
    again = read_program(program.to_json(), program.plan, program.modules)
    assert again.outputs == program.outputs and again.metrics == 2
