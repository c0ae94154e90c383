"""Rounding is told from faults: beyond a tolerance, a fault is what stays in float64,
or is more than what rounding does to the model itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn

from autopar.passes.ops.op import OPS, selects
from autopar.proof.differences import differences, update_errors
from autopar.proof.expected import TOLERANCE
from autopar.proof.prove_program import prove_program
from autopar.proof.ranks import StepResult, VerificationFailed
from autopar.proof.reference_runs import Arithmetic, default_dtype
from autopar.proof.update import Update, Updated
from autopar.proof.verification import Verification
from autopar.reports.proof import verification_data, verification_table
from autopar.verify import verify


class Cancelling(nn.Module):
    """A sum over samples far from 0, of which little is left: in float32 the fourth
    digit is rounded away, in bfloat16 the first."""

    def __init__(self, far: float) -> None:
        super().__init__()
        self.linear, self.far = nn.Linear(8, 8), far

    def forward(self, x: Tensor) -> Tensor:
        total = (self.linear(x) + self.far).sum(0)
        return (total - len(x) * self.far).square().sum()


class Unit(nn.Module):
    """Columns of length 1: nothing can change their length, and all gradients are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.linear(x), dim=0).square().sum()


class Advantages(nn.Module):
    """GRPO: the advantages' mean is 0, and so is the loss, but not its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, rewards: Tensor) -> Tensor:
        said = self.head(self.embed(ids)).log_softmax(-1).gather(-1, ids[..., None])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        ratios = (said - said.detach()).exp().squeeze(-1)
        return -(ratios * advantages[:, None]).mean()


class Kinked(nn.Module):
    """A unit that is on, but for the rounding of two equal sums."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.on = nn.Linear(8, 8), nn.Parameter(torch.tensor(4e-6))

    def forward(self, x: Tensor) -> Tensor:
        unit = F.relu(self.on + (x.square().sum() - (x * x).sum()))
        return unit + self.linear(x).square().mean()


def unit() -> Case:
    torch.manual_seed(0)
    return Case(Unit(), {"x": torch.randn(8, 8)})


def cancelling(far: float = 999.7, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    return Case(Cancelling(far), {"x": torch.randn(24, 8)})


def advantages() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(11, (8, 4))
    return Case(Advantages(), {"ids": ids, "rewards": torch.randn(8)})


def checked(
    case: Case, old: str = "", new: str = "", tolerance: float | None = None
) -> Verification:
    """Verifies the case on two ranks, with another text in the program."""
    program = case.compile("dp=2")
    texts = {k: text.replace(old, new) for k, text in program.modules.items()}
    assert not old or texts != program.modules
    changed = replace(program, modules=texts)
    return verify(changed, *case, seed=3, tolerance=tolerance, drawn=False)


@pytest.mark.parametrize("build", [unit, cancelling, advantages])
def test_rounding_is_no_fault(build):
    """Of gradients of 0, of what cancels, and of a loss of 0."""
    found = checked(build()).check()
    assert found.in_double is not None and not found.untold
    assert max(found.errors.values()) > found.tolerance
    assert "all in float64" in str(verification_table(found))
    assert verification_data(found)["in_double"]["passed"]
    assert checked(build().double()).check().tolerance == TOLERANCE[torch.float64]


def test_in_bfloat16_either_may_be_nearer_to_the_exact_result():
    """A tolerance for all models would have to be that of the worst."""
    found = []
    for seed in range(4):
        case = cancelling(far=4.0, seed=seed)
        batch = {name: x.bfloat16() for name, x in case.batch.items()}
        found.append(checked(Case(case.model.bfloat16(), batch)).check())
    assert max(max(f.errors.values()) for f in found) > found[0].tolerance


# In place of relu: of a number that is smaller, in float32 alone.
OFF = "(lambda x: torch.relu(x - 1e-5 * (x.itemsize == 4)))("


@pytest.mark.parametrize(("draws", "passes"), [((3,), False), ((3, 8, 32), True)])
def test_a_unit_may_be_off_if_rounding_turns_it_off(draws, passes, monkeypatch):
    """Which hardly any draw may show."""
    monkeypatch.setattr("autopar.proof.run_beside.DRAWS", draws)
    found = checked(Case(Kinked(), unit().batch), "aten.relu.default(", OFF)
    assert found.errors["on"] == 1.0 and found.passed == passes


# --- faults ---------------------------------------------------------------------------

# Where the program says -> what it says in place of that.
BIAS = 'bias_grad_(g["linear.bias"], '
SCALED = BIAS, f"{BIAS}(1 + 3e-5) * "
UNBALANCED = "d_div.div_(expand)", "d_div.div_(expand).mul_(1 + 1e-9)"
IN_HALF = "(lambda *at: F.linear(*at).to(torch.bfloat16).to(torch.float32))("
ROUNDED = "F.linear(", IN_HALF


def test_a_model_that_lost_a_gradient_to_rounding_is_no_measure_of_size():
    # Of what cancels, autocast left the model a hundredth; the program has it right.
    weight = torch.arange(1.0, 9.0)

    def step(share: float) -> StepResult:
        grads = {"weight": share * weight, "bias": weight}
        return StepResult(torch.tensor(1.0), grads, grads["bias"].norm().item())

    exact, lost, right = step(1.0), step(0.01), step(1.01)
    errors = differences(right, lost, exact)
    away, known = differences(right, exact), differences(lost, exact)
    assert known["weight"] == pytest.approx(0.99)
    assert errors["weight"] == pytest.approx(1.0)
    assert Verification(1.0, 1.0, errors, 0.03, away, known).passed
    wrong = differences(step(5.0), exact), differences(step(5.0), lost, exact)
    assert not Verification(1.0, 1.0, wrong[1], 0.03, wrong[0], known).passed


def test_a_fault_within_the_rounding_of_float32_is_found_in_float64():
    assert checked(cancelling()).check().errors["linear.bias"] > 3e-5
    found = checked(cancelling(), *SCALED)
    assert found.worst == ("linear.bias", pytest.approx(3e-5, rel=1e-3))
    with pytest.raises(VerificationFailed, match="e-05 in float64, more than"):
        found.check()


def test_a_gradient_that_should_be_zero_is_found():
    """A billionth of what cancels."""
    found = checked(unit(), *UNBALANCED)
    assert found.in_double is not None and not found.in_double.passed


def test_rounding_that_is_not_in_the_model_is_found():
    found = checked(cancelling(far=1.0), *ROUNDED)
    assert found.in_double is not None and found.in_double.passed
    with pytest.raises(VerificationFailed, match="not so in float64"):
        found.check()


@pytest.mark.slow
def test_what_takes_no_float64_is_told_by_its_operations():
    """In float64 they are run as captured; forward is not asked."""
    torch.manual_seed(0)
    one = Case(Typed(999.7), cancelling().batch)
    found = checked(one).check()
    assert found.in_double is not None and found.errors["linear.bias"] > 3e-5
    assert checked(one, *SCALED).worst == (
        "linear.bias", pytest.approx(3e-5, rel=1e-3)
    )  # fmt: skip


@pytest.mark.slow
def test_what_does_not_run_in_float64_is_not_excused(monkeypatch):
    def refuse(*_):
        raise RuntimeError("it wants float32")

    monkeypatch.setattr("autopar.proof.expected.run_graph", refuse)
    found = checked(Case(Typed(999.7), cancelling().batch))
    assert not found.passed and found.in_double is None
    with pytest.raises(VerificationFailed, match="from a fault: it wants float32"):
        found.check()


class Fragile(Unit):
    """Without bounds where the same is rounded twice, and not alike."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.square().sum() / (y.exp() == y.exp())).mean()


def test_what_other_rounding_makes_infinite_is_not_excused():
    found = checked(Case(Fragile(), unit().batch), tolerance=0.0)
    assert found.in_double is None
    with pytest.raises(VerificationFailed, match="gives no finite numbers"):
        found.check()


def test_a_rank_without_numbers_is_not_hidden_by_the_next():
    ranks = tuple(Updated({"w": error}, 1.0, 0) for error in (0.1, math.nan, 0.1))
    found = StepResult(torch.ones(()), {}, 1.0, updated=ranks)
    errors = update_errors(found, Update(1.0, 1.0, 1.0, {}))
    assert math.isnan(errors["w after an update"])


class Normed(nn.Module):
    """Of numbers so small that eps counts, of which torch has one for each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(1e-4 * self.linear(x), (8,))
        length = 1e-7 * y.norm(dim=-1, keepdim=True)
        y = y * length / (length + torch.finfo(y.dtype).eps)
        return F.dropout(self.norm(1e-4 * y), 0.2).square().sum()


def test_an_eps_is_that_of_the_models_own_dtype():
    case = Case(Normed(), unit().batch)
    found = checked(case, tolerance=0.0).check()
    assert found.in_double is not None
    assert torch.finfo(torch.float64).eps < 1e-15, "torch tells again what it told"


# --- how ------------------------------------------------------------------------------


def test_proofs_tell_rounding_from_faults_too():
    case = unit()
    program = case.compile("dp=2")
    proof = prove_program(program, case.model, case.batch, case.trace())
    assert proof.passed


class Typed(Cancelling):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32, "it wants float32"
        return super().forward(x)


def test_arithmetic_in_float64_whatever_the_model_says():
    def compute(x: Tensor) -> Tensor:
        steps = torch.arange(3) / 3 + torch.tensor(0.1) + torch.full((), 0.7)
        return (x.to(torch.float32) * steps.float()).to(x.dtype)

    x = torch.randn(3, 3)
    with default_dtype(torch.float64), Arithmetic(double=True):
        found = compute(x.double())
    third = torch.arange(3, dtype=torch.float64) / 3
    want = x.double() * (third + torch.tensor(0.1).double() + 0.7)
    torch.testing.assert_close(found, want, rtol=1e-15, atol=0)
    assert compute(x).dtype is torch.float32, "the default is again what it was"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_moved_by_half_a_unit_but_for_integers(dtype):
    x, eps = torch.linspace(1.0, 2.0, 101, dtype=dtype), torch.finfo(dtype).eps
    with Arithmetic(double=False, draw=0):
        moved, kept = x + 0, x.round() + 0
        inside = x.clone().mul_(1)
        viewed = x.view(101)
    for found in (moved, inside):
        distance = (found.double() / x.double() - 1).abs()
        assert 0 < distance.max() <= 2 * eps and found.dtype is dtype
    assert torch.equal(kept, x.round()) and torch.equal(viewed, x)


def test_what_is_selected_is_not_moved():
    """A maximum's derivative goes to what equals it: if nothing does, it is NaN."""
    x = torch.randn(8, 8, requires_grad=True)
    with Arithmetic(double=False, draw=0):
        most = x.amax(-1)
        (gradient,) = torch.autograd.grad(most.sum(), x)
    assert torch.equal(gradient, (x == most[:, None]).float())


def test_ops_that_select_are_torchs():
    names = [name.removeprefix("aten.") for name in OPS if selects(name)]
    assert {"amax", "cat", "clone", "where", "select_backward"} <= {*names}
    assert not {"add", "index_put", "index_add", "scatter", "to"} & {*names}
    assert all(hasattr(torch.ops.aten, name) for name in names)


class Keeping(Cancelling):
    """Keeps a table that it has computed, for the next time."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(1, 9) / 7
        return super().forward(x * self.table)


def test_a_model_is_left_as_it_was():
    case = cancelling()._replace(model=Keeping(999.7))

    def looks() -> list[tuple[torch.dtype, int]]:
        return [(p.dtype, p.data_ptr()) for p in case.model.parameters()]

    before = looks()
    program = case.compile("dp=2")
    case.model.table = None
    assert verify(program, *case, drawn=False).check().in_double is not None
    assert looks() == before and case.model.table is None
