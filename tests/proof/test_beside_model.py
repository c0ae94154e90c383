"""The captured graph beside the untouched model: a forward that is not what was
captured is refused by its line, and one that is passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    Stack,
    mixture,
    plain_gpt,
    switch_gpt,
    token_batch,
)
from torch import Tensor, nn

import autopar
from autopar.capture.capture_model import capture_model
from autopar.options import make_plan
from autopar.passes.proof_record import CALLS, NUMBERS, Beside
from autopar.proof.beside_model import LITTLE, Untouched, run_beside_model
from autopar.proof.ranks import VerificationFailed
from autopar.verify import verify

WIDTH, CLASSES, ROWS = 8, 5, 6
BOTH = pytest.mark.parametrize("flops", [1, 2 * LITTLE], ids=["numbers", "calls"])
Batch = dict[str, Tensor]


def batch() -> Batch:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    return {"x": x, "y": torch.randint(CLASSES, (ROWS,))}


class Net(nn.Module):
    """A classifier whose hidden layer is any function of a tensor."""

    def __init__(self, hidden: Callable[[Tensor], Tensor], dtype: Any = None) -> None:
        super().__init__()
        self.hidden = hidden
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, CLASSES, dtype=dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(self.up(x.to(self.up.weight.dtype)))
        return F.cross_entropy(self.down(h).float(), y)


def beside(model: nn.Module, inputs: Batch, flops: float, **options: Any) -> Beside:
    loss_fn, precision = options.get("loss_fn"), options.get("precision")
    traced = capture_model(model, inputs, loss_fn, precision)
    return run_beside_model(Untouched(model, inputs, loss_fn, precision), traced, flops)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is one of numbers, as it is eagerly."""
    return type(x) is Tensor


# --- what is another thing ------------------------------------------------------------

LIARS: dict[str, Callable[[Tensor], Tensor]] = {
    "another function": lambda x: F.gelu(x) if is_plain(x) else F.relu(x),
    "another number": lambda x: x * (2.0 if is_plain(x) else 3.0),
    "a call more": lambda x: x.tanh() if is_plain(x) else x,
    "no gradient": lambda x: x + x.square().detach() if is_plain(x) else x + x**2,
}


@BOTH
@pytest.mark.parametrize("kind", LIARS)
def test_what_is_captured_otherwise_is_refused(kind: str, flops: float) -> None:
    hidden = LIARS[kind]
    with pytest.raises(VerificationFailed, match="than eagerly") as refused:
        beside(Net(hidden), batch(), flops)
    line = inspect.getsourcelines(hidden)[1]
    assert str(refused.value.source) == f"{__file__.rpartition('/')[2]}:{line}"


def test_a_program_of_it_is_not_proved() -> None:
    model, inputs = Net(LIARS["another function"]), batch()
    with pytest.raises(VerificationFailed, match="it calls gelu there, relu while"):
        autopar.compile_offline(model, inputs, make_plan("dp=2"), prove=True)


def test_a_loss_function_of_another_kind_is_refused() -> None:
    def loss_fn(loss: Tensor, fields: Any) -> Tensor:
        return loss * (1.0 if is_plain(loss) else 0.5)

    with pytest.raises(VerificationFailed, match="the loss is 5e-01 off"):
        beside(Net(torch.tanh), batch(), 1, loss_fn=loss_fn)


# --- what is the same ----------------------------------------------------------------


def spelled_otherwise(x: Tensor) -> Tensor:
    return torch.mul(x, 2) if is_plain(x) else x + x


def of_its_dtype(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min / 2).tanh()


def asks_whether_compiled(x: Tensor) -> Tensor:
    return x.tanh() if torch.compiler.is_compiling() else F.silu(x)


def writes_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1] += 1.0
    return x.mul_(2.0)


@BOTH
@pytest.mark.parametrize(
    "hidden", [spelled_otherwise, of_its_dtype, asks_whether_compiled, writes_in_place]
)
def test_what_computes_the_same_passes(hidden: Any, flops: float) -> None:
    made = beside(Net(hidden), batch(), flops)
    assert made.by == NUMBERS or (flops > LITTLE and made.by == CALLS)
    assert made.compared > 4 and made.error < 1e-12
    assert hidden is not spelled_otherwise or made.by == NUMBERS  # which decide


@BOTH
@pytest.mark.parametrize("precision", [torch.bfloat16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_no_difference(dtype: Any, precision: Any, flops: float) -> None:
    made = beside(Net(F.gelu, dtype), batch(), flops, precision=precision)
    assert made.by == (NUMBERS if flops == 1 else CALLS)


@BOTH
@pytest.mark.parametrize("case", [plain_gpt, switch_gpt])
def test_gpts_pass(case: Any, flops: float) -> None:
    of = case()
    made = beside(of.model, of.batch, flops)
    assert made.by, str(made)


@pytest.mark.matrix(quick=2)
@BOTH
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_mixtures_pass(implementation: str, flops: float) -> None:
    of = mixture("mixtral", experts_implementation=implementation)
    made = beside(of.model, of.batch, flops, loss_fn=of.loss_fn)
    assert made.by, str(made)


def test_random_numbers_are_the_same() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x + torch.rand_like(x), 0.4)

    assert beside(Net(noisy), batch(), 1).by == NUMBERS


# --- what is left alone, and said -----------------------------------------------------


def test_the_model_is_as_it_was() -> None:
    model, inputs = Net(torch.tanh), batch()
    own = dict(model.named_parameters())
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in own.items()}
    for flops in (1, 2 * LITTLE):
        beside(model, inputs, flops)
    for name, p in own.items():
        same, place, value = before[name]
        assert p is same and p.data_ptr() == place and torch.equal(p, value)
        assert p.grad is None


def test_no_weights_no_comparison() -> None:
    with torch.device("meta"):
        model = Net(torch.tanh)
    made = beside(model, batch(), 1)
    assert not made.by and "no weights" in str(made)


def test_a_forward_that_takes_one_dtype_says_so() -> None:
    def strict(x: Tensor) -> Tensor:
        assert x.dtype is torch.float32, "only float32"
        return x.tanh()

    made = beside(Net(strict), batch(), 1)
    assert not made.by and "only float32" in str(made)


class Doubled(torch.autograd.Function):
    """tanh, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2.0 * g


def test_a_derivative_of_its_own_is_compared_by_numbers() -> None:
    made = beside(Net(Doubled.apply), batch(), 2 * LITTLE)
    assert made.by == NUMBERS and made.error < 1e-12


def test_of_what_has_no_calls_to_compare_the_difference_is_told() -> None:
    def liar(x: Tensor) -> Tensor:
        return Doubled.apply(x) * (1.0 if is_plain(x) else 3.0)

    with pytest.raises(VerificationFailed, match="than eagerly"):
        beside(Net(liar), batch(), 1)


def test_few_layers_stand_for_all() -> None:
    of = plain_gpt(layers=8)
    made = beside(of.model, of.batch, 2 * LITTLE)
    assert made.layers == (3, 8) and "3 of 8 layers" in str(made)


def test_layers_that_are_looked_for_by_number_are_all_called() -> None:
    class Numbered(Stack):
        def forward(self, input_ids: Tensor) -> Any:
            x = self.embed(input_ids)
            for i in range(8):
                x = self.blocks[i](x)
            return self.head(x)

    def loss_fn(logits: Tensor, fields: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), fields["labels"].flatten())

    inputs = token_batch()
    inputs = {name: inputs[name] for name in ("input_ids", "labels")}
    made = beside(Numbered(layers=8), inputs, 2 * LITTLE, loss_fn=loss_fn)
    assert made.by == CALLS and made.layers == (0, 0)


def test_a_proof_says_how(tmp_path: Any) -> None:
    model, inputs = Net(torch.tanh), batch()
    program = autopar.compile_offline(model, inputs, make_plan("dp=2"), prove=True)
    assert program.proof is not None and program.proof.model.by == NUMBERS
    assert "captured as the model computes" in str(program.proof)
    assert replace(program.proof).to_data()["model"]["by"] == NUMBERS


class Tabled(Net):
    """Asks what is in a buffer, and keeps what its first forward makes of it, in a
    precision of its own."""

    def __init__(self) -> None:
        super().__init__(self.turned)
        self.register_buffer("angles", torch.linspace(0.1, 1, 2 * WIDTH))
        self.table: Tensor | None = None

    def turned(self, x: Tensor) -> Tensor:
        if self.angles[0] == 0 or self.table is None:
            self.table = self.angles.cos().bfloat16()
        return x * self.table.type_as(x)


def test_tables_that_forward_keeps_are_those_of_each_precision() -> None:
    made = beside(Tabled(), batch(), 1)
    assert made.by == NUMBERS and made.error < 1e-12


class MadeAnew(Net):
    """Makes its table again, where what it turns is of another dtype."""

    def __init__(self) -> None:
        super().__init__(self.turned)
        self.table = torch.linspace(0.1, 1, 2 * WIDTH).cos()

    def turned(self, x: Tensor) -> Tensor:
        if self.table.dtype != x.dtype:
            self.table = torch.linspace(0.1, 1, 2 * WIDTH, dtype=x.dtype).cos()
        return x * self.table


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_table_is_of_the_dtype_that_the_model_runs_in(precision: str) -> None:
    model = MadeAnew()
    assert beside(model, batch(), 1).error < 1e-12
    program = autopar.compile_offline(
        model, batch(), make_plan("dp=2", precision=precision)
    )
    verify(program, model, batch()).check()
    assert model.table.dtype == torch.float32


def test_what_was_asked_of_a_buffer_is_not_asked_of_one_in_double() -> None:
    assert autopar.compile(Tabled(), "tp=1", example_inputs=batch()).program.known
