"""What newcomers get wrong is answered with text: what, where, and a way out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import plain_gpt
from plans import model_file, small_program
from torch import Tensor, nn

import autopar
from autopar.capture.capture_model import capture_model
from autopar.capture.unusable_tensors import refuse_shared_memory
from autopar.cli import main
from autopar.models.load import ModelError, load_model
from autopar.passes.errors import AutoparError, CaptureError
from autopar.plans.store import save_plan

HEAD = "import torch\nfrom torch import nn\n"
FACTORIES = {
    "def make(:\n": "SyntaxError: invalid syntax",
    "import no_such_package\n": "fix  pip install no_such_package",
    "import sys\nsys.exit(3)\n": "if __name__ == '__main__'",
    "import argparse\nargparse.ArgumentParser().parse_args(['x'])\n": "ended",
    "def make(): pass\n": "returned <class 'NoneType'>",
    "def make(): yield 1\n": "returned <class 'generator'>",
    "def make(layers): pass\n": "without arguments, but has some",
    "make = nn.Linear(2, 2)\n": "is a model, not a function that makes one",
    "make = 3\n": "has no function 'make'",
    "class make(nn.Module):\n    def __init__(self, x): ...\n": "argument: 'x'",
    "def make(): return nn.Linear(2, 2), [torch.ones(2)]\n": r"\(Linear, list\)",
    "def make(): return nn.Linear(2, 2), {}, 3\n": r"returned \(Linear, dict, int\)",
    "def make(): return nn.Linear(2, 2), {}\n": "holds no tensor",
    "def make(): return nn.Linear(2, 2), {'input': [1]}\n": "holds no tensor",
    "def make(): return nn.Linear(2, 2), {0: torch.ones(2)}\n": "fields without names",
    "\0": "SyntaxError",
}


@pytest.mark.parametrize(("text", "says"), FACTORIES.items())
def test_a_wrong_file_of_a_model(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(HEAD + text)
    with pytest.raises(ModelError, match=says) as error:
        load_model(f"{tmp_path / 'm.py'}:make")
    assert "importlib" not in str(error.value)


MODELS = {
    "class M(nn.Module):\n    def forward(self, x): return x.sum()\n"
    "def make(): return M(), {'x': torch.ones(4, 2)}\n": "computes with no parameters",
    "class M(nn.Linear):\n    def forward(self, x): return super().forward(x).sum()\n"
    "def make(): return M(2, 2), {'x': torch.ones(0, 2)}\n": "field 'x' is empty",
    "def make(): return nn.Linear(2, 2), {'input': torch.ones(4, 2)}": "no scalar loss",
}


@pytest.mark.parametrize(("text", "says"), MODELS.items(), ids=MODELS.values())
def test_a_model_that_nothing_can_train(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.py").write_text(HEAD + text)
    asked = ["--mesh", "dp=2", "-o", str(tmp_path / "plan")]
    assert main(["compile", f"{tmp_path / 'm.py'}:make", *asked]) == 2
    said = capsys.readouterr().err
    assert says in said and "  fix  " in said


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("m.py", "fix  .*: m.py:FACTORY"),
        ("m.py::make", "no module 'm.py:'"),
        (
            "hf:gpt2?n_layer=-1",
            "layers=-1\n  fix  use a whole number from 0",
        ),
        ("hf:gpt2?n_layer=99999999999", "num_hidden_layers=99999999999"),
        ("hf:gpt2?n_layer=nan", "transformers cannot make"),
        ("hf:gpt2?n_head=7", "must be divisible by num_heads"),
        ("hf:gpt2?vocab_size=0", "vocab_size=0"),
        ("hf:gpt2?activation_function=none_such", "KeyError: 'none_such'"),
    ],
)
def test_a_wrong_specification(spec: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        load_model(spec, device="meta")
    assert "Traceback" not in str(error.value) and error.value.fix


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a plan, one of another version, and something else."""
    monkeypatch.chdir(tmp_path)
    spec = model_file(tmp_path)
    for name in ("plan", "old"):
        save_plan(small_program("", 2), tmp_path / name, spec)
    manifest = tmp_path / "old" / "manifest.json"
    manifest.write_text(
        json.dumps({**json.loads(manifest.read_text()), "autopar": "0"})
    )
    (tmp_path / "notes").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inspect plan/plan.json", "fix  give the directory that it is in: plan"),
        ("explain plan/plan.json", "fix  give the directory that it is in: plan"),
        ("inspect old", "was compiled by autopar 0, but this is"),
        ("run old", "fix  compile it again: autopar compile "),
        ("compile model.py:small --plan notes", "at   notes"),
        ("compile model.py:small --mesh tp=2 -o notes/plan", "notes"),
        ("compile model.py:small --mesh tp=2 -o notes", "is not a plan directory"),
        ("plan model.py:small --cluster notes", "give a cluster file: TOML or JSON"),
        ("run plan --unproved --steps 1 --save notes", "see that the path is right"),
        ("run plan --unproved --data notes", "unknown kind of file"),
        ("export plan -o w.pt", "there is no complete checkpoint in 'plan'"),
        ("profile --show -o none.json", "fix  measure it: autopar profile"),
        ("explain plan", "has no estimate.json"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("", "arguments are required: COMMAND"),
        ("inspect plan --frob", "autopar inspect does not take --frob"),
        (
            "plan model.py:small --devices 2xCPU --batch 8",
            "fix  did you mean --global-batch?",
        ),
        (
            "plan model.py:small --devices 2xCPU --global_batch=8",
            "fix  did you mean --global-batch?",
        ),
        ("plan gpt2 --devices 2xCPU", "for a model of Hugging Face write hf:gpt2,"),
    ],
)
def test_a_wrong_line(
    line: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    lines = f"\n{said}"  # a slow machine is told first how far it is
    assert lines.count("\nautopar: ") == 1 and says in said and "  fix  " in said


class Logits(nn.Linear):
    """A model whose loss is computed beside it, of labels that it does not take."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def cross_entropy(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["labels"])


class CrossEntropy(nn.Module):
    def forward(self, out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(out, batch)


CALLED = "fix  loss_fn(output, batch) is called with a tensor of shape (4, 3) and a"
LOSSES: dict[str, tuple[Callable[..., Any], bool, str]] = {
    "no such field": (lambda out, batch: out * batch["label"], True, "KeyError: 'l"),
    "no such attribute": (lambda out, batch: out.logits.sum(), True, "'logits'"),
    "another shape": (lambda out, batch: (out @ out).sum(), True, "RuntimeError: "),
    "an assertion": (lambda out, batch: 1 / 0, True, "ZeroDivisionError"),
    "one argument": (lambda out: out.sum(), False, "takes 1 positional argument"),
    "torch's own": (F.cross_entropy, False, "argument 'target' (position 2) must be"),
    "its module": (nn.CrossEntropyLoss(), False, "argument 'target' (position 2) must"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_function_that_fails_is_told_with_its_line(what: str) -> None:
    loss_fn, has_line, says = LOSSES[what]
    batch = {"input": torch.ones(4, 2), "labels": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(CaptureError) as error:
        capture_model(Logits(2, 3), batch, loss_fn)
    said = str(error.value)
    assert "the loss function could not be captured" in said and says in said
    assert f"{CALLED} dict of input, labels" in said
    assert ("test_first_mistakes.py:" in str(error.value.source)) == has_line


@pytest.mark.parametrize(
    "loss_fn",
    [lambda out, batch: None, lambda out, batch: out.square()],
    ids=["nothing", "no scalar"],
)
def test_a_loss_function_that_returns_no_loss_is_told(loss_fn: Any) -> None:
    batch = {"input": torch.ones(4, 2)}
    with pytest.raises(
        CaptureError, match=r"the loss function returned [\s\S]* let it"
    ):
        capture_model(Logits(2, 3), batch, loss_fn)


@pytest.mark.slow
def test_a_loss_function_may_be_a_module_that_is_compiled() -> None:
    """torch.compile gives it a length, which it has not."""
    batch = {"input": torch.randn(4, 2), "labels": torch.tensor([0, 2, 1, 1])}
    for loss_fn in CrossEntropy(), torch.compile(CrossEntropy(), backend="eager"):
        model = Logits(2, 3)
        step = autopar.compile(model, "", loss_fn=loss_fn, example_inputs=batch)
        wanted = cross_entropy(model(batch["input"]), batch)
        torch.testing.assert_close(step(**batch), wanted)


def test_tensors_that_are_not_there_yet_are_refused() -> None:
    lazy = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(3))
    batch = {"input": torch.ones(4, 2)}
    with pytest.raises(CaptureError, match=r"'1.weight' has no shape yet"):
        capture_model(lazy, batch, lambda out, batch: out.sum())
    with torch.inference_mode():
        inferred = nn.Linear(2, 3)
    with pytest.raises(CaptureError, match=r"under torch\.inference_mode\(\)"):
        capture_model(inferred, batch, lambda out, batch: out.sum())
    lazy(**batch)
    capture_model(lazy, batch, lambda out, batch: out.sum())


def test_weights_that_are_tied_by_their_memory_alone() -> None:
    """An optimizer updates both, and ranks would have two that part."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match=r"model\[1\].weight = model\[0\].weight"):
        capture_model(model, {"input": torch.zeros(2, 3, dtype=torch.int64)})
    flat = torch.zeros(2 * 32)  # as parameters lie side by side in some optimizers
    model[0].weight.data, model[1].weight.data = (
        flat[:32].view(8, 4),
        flat[32:].view(8, 4),
    )
    refuse_shared_memory(model)
    model[1].weight = model[0].weight
    refuse_shared_memory(model)


def scripted() -> nn.Module:
    class Scripted(torch.jit.ScriptModule):
        @torch.jit.script_method
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    return Scripted()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Linear(3, 3)),
        lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3)),
        scripted,
    ],
)
def test_modules_of_torchscript_are_refused_by_name(make: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), make())
    with pytest.raises(CaptureError, match=r"the module '1' is of TorchScript"):
        capture_model(model, {"input": torch.ones(2, 3)}, lambda out, batch: out.sum())


class Switched(nn.Module):
    """Its first forward takes another way for short sequences, by a flag and a part, as
    BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.part = "sparse", nn.Unflatten(1, (-1, 64))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse" and x.shape[1] < 64:
            self.kind, self.part = "full", nn.Identity()
        return self.part(x).square().mean()


def test_what_the_first_forward_switches_is_to_be_switched_before() -> None:
    model, batch = Switched(), {"x": torch.randn(4, 8)}
    with pytest.raises(CaptureError, match=r"(?s)'kind' from.*run forward once before"):
        capture_model(model, batch)
    model(**batch)
    capture_model(model, batch)


def test_more_than_forward_takes_by_its_place_is_refused() -> None:
    case = plain_gpt(layers=1)
    batch = (*case.batch.values(), torch.zeros(2))
    step = autopar.compile(case.model, "", prove=False, example_inputs=case.batch)
    for use in (
        lambda: autopar.compile(case.model, "", example_inputs=batch),
        lambda: step(*batch),
        lambda: step.evaluate(*batch),
    ):
        with pytest.raises(AutoparError, match="places, but forward takes ids, labels"):
            use()
    with pytest.raises(AutoparError, match="'ids' is given by its place, and by its"):
        step(batch[0], **case.batch)
    with pytest.raises(AutoparError, match=r"a Tensor\n  fix .*\(ids, labels\)"):
        autopar.compile(case.model, "", example_inputs=batch[0])
