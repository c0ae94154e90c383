"""What users do with a step's parameters and gradients is right, or refused at once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plans import CONFIG, batch_of, made, small_model, small_program
from processes import run_ranks
from test_by_element import Locked
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.step import Step

# --- on real ranks -------------------------------------------------------------------


def an_update(step: Step, optimizer: torch.optim.Optimizer) -> None:
    step(**batch_of(0))
    optimizer.step()


def muon(step: Step) -> None:
    an_update(step, torch.optim.Muon([p for p in step.parameters() if p.ndim == 2]))


def adafactor(step: Step) -> None:
    an_update(step, torch.optim.Adafactor(step.parameters()))


def lbfgs(step: Step) -> None:
    optimizer = torch.optim.LBFGS(step.parameters())
    optimizer.step(lambda: step(**batch_of(0)))


def one_that_cannot_be_tried(step: Step) -> None:
    an_update(step, Locked(step.parameters()))


def a_rate_of_its_own(step: Step) -> None:
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3 * (1 + dist.get_rank()))
    an_update(step, optimizer)
    step(**batch_of(0))


def state_of_another_rank(step: Step) -> None:
    """As where rank 0 alone saves it, and all load that."""
    first = torch.optim.AdamW(step.parameters(), lr=1e-3)
    an_update(step, first)
    states = step.comm.gather_object(first.state_dict())
    own, other = states[step.comm.rank], states[1 - step.comm.rank]
    first.load_state_dict(own)
    an_update(step, first)
    second = torch.optim.AdamW(step.parameters(), lr=1e-3)
    second.load_state_dict(other)
    an_update(step, second)


def a_schedule_of_its_own(step: Step) -> None:
    optimizer = torch.optim.SGD(step.parameters(), lr=1e-3)
    an_update(step, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    an_update(step, optimizer)
    step(**batch_of(0))


def an_update_on_one_rank(step: Step) -> None:
    optimizer = torch.optim.SGD(step.parameters(), lr=1e-3)
    step(**batch_of(0))
    if dist.get_rank() == 1:
        optimizer.step()
    step(**batch_of(0))


def frozen_on_one_rank(step: Step) -> None:
    step(**batch_of(0))
    for p in step.parameters():
        p.requires_grad_(dist.get_rank() == 0)
    step(**batch_of(0))


def clipped_by_torch(step: Step) -> None:
    step(**batch_of(0))
    nn.utils.clip_grad_norm_(list(step.parameters())[:2], 1.0)


def clipped_by_torch_one_by_one(step: Step) -> None:
    step(**batch_of(0))
    nn.utils.clip_grad_norm_(step.parameters(), 1.0, float("inf"), foreach=False)


def a_norm_by_hand(step: Step) -> None:
    step(**batch_of(0))
    sum(p.grad.norm() ** 2 for p in step.parameters() if p.grad is not None)


def a_norm_after_an_update(step: Step) -> None:
    an_update(step, torch.optim.SGD(step.parameters(), lr=1e-3))
    nn.utils.get_total_norm([p.grad for p in step.parameters()][1:])


def a_norm_of_all_elements_by_hand(step: Step) -> None:
    step(**batch_of(0))
    for p in step.parameters():
        p.grad.detach().float().pow(2).sum()


def data_of_another_shape(step: Step) -> None:
    p = next(p for p in step.parameters() if p.ndim == 2)
    p.data = torch.zeros(3, 5)
    step(**batch_of(0))


REFUSED: Mapping[Callable[[Step], None], str] = {
    muon: "Muon updates a parameter as a whole, but of 'tokens.weight' [64, 32] this",
    adafactor: "Adafactor updates a parameter as a whole, but of",
    lbfgs: "LBFGS updates all parameters together, and no rank has all of them",
    one_that_cannot_be_tried: "autopar.by_element(Locked)",
    a_rate_of_its_own: "'lr' of AdamW is 0.001 on rank 0, but 0.002 on rank 1",
    state_of_another_rank: "the state of AdamW was taken on another rank",
    an_update_on_one_rank: "rank 0 did not call optimizer.step(), but others did",
    clipped_by_torch: "clip by step.clip_grad_norm_(max_norm)",
    clipped_by_torch_one_by_one: "clip by step.clip_grad_norm_(max_norm)",
    a_norm_by_hand: "norm of what this rank holds is not that of the",
    a_norm_after_an_update: "norm of what this rank holds is not that of the",
    a_norm_of_all_elements_by_hand: " of what this rank holds is not",
    data_of_another_shape: "was given float32[3, 5] on cpu as its data",
}
# Of ranks that hold the same parameters: on a pipeline, rates may differ by layer.
REFUSED_BESIDE: Mapping[Callable[[Step], None], str] = {
    a_schedule_of_its_own: "'lr' of SGD's group 0 is 0.001 on rank 0, but 0.002 on",
    frozen_on_one_rank: "other parameters require gradients on rank 1 than on rank 0",
}


def refusals(program: Program, habits: list[Callable[[Step], None]]) -> list[str]:
    said = []
    for habit in habits:
        try:
            habit(made(program))
            said.append("nothing was said")
        except AutoparError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "zero"),
    [
        ("tp=2", 1, 0),
        pytest.param("pp=2", 2, 0, marks=pytest.mark.nightly),
        ("dp=2", 1, 2),
    ],
)
def test_what_a_part_cannot_do_is_refused(mesh, microbatches, zero) -> None:
    expected = {**REFUSED, **({} if mesh == "pp=2" else REFUSED_BESIDE)}
    if mesh == "pp=2":  # all matrices are whole
        del expected[muon], expected[adafactor]
        del expected[state_of_another_rank]  # torch counts other parameters
    program = small_program(mesh, microbatches, zero=zero)
    for said in run_ranks(refusals, 2, program, list(expected), seconds=200):
        for habit, text in zip(expected, said, strict=True):
            assert expected[habit] in text, habit.__name__
            assert "  fix  " in text


# --- what is right -------------------------------------------------------------------


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return small_model()


def habits_on_one_device() -> dict[str, Tensor]:
    """Clipping, freezing, swapping data and closures, on the plain model."""
    model = plain_model()
    named = dict(model.named_parameters())

    def gradients(i: int) -> Tensor:
        loss = model(**batch_of(i))[1]
        loss.backward()
        return loss

    def clip() -> None:
        nn.utils.clip_grad_norm_(named.values(), 0.1)

    train(named, gradients, clip)
    return model.state_dict()


def habits_on_ranks(program: Program) -> dict[str, Tensor]:
    step = made(program)

    def clip() -> None:
        step.clip_grad_norm_(0.1)

    train(dict(step.named_parameters()), lambda i: step(**batch_of(i)), clip)
    return step.state_dict()


def train(
    named: Mapping[str, nn.Parameter],
    gradients: Callable[[int], Tensor],
    clip: Callable[[], None],
) -> None:
    """The same of the model and of a rank's shards of it, where gradients add up."""
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    average = {n: p.detach().clone() for n, p in named.items()}
    frozen = [n for n in named if n.startswith("tokens") or n.endswith("bias")]
    for i in range(8):
        optimizer.zero_grad()
        gradients(i)
        if i == 2:  # what follows adds nothing to their gradients
            for n in frozen:
                if n in named:
                    named[n].requires_grad_(False)
            gradients(i + 1)
        if i == 4:
            for n in frozen:
                named[n].requires_grad_(True)
            for p in named.values():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            nn.utils.clip_grad_value_(list(named.values()), 1e-3)
        if i == 5:
            for p in named.values():
                p.grad = None if p.grad is None else p.grad * 2
        clip()
        if i == 6:
            optimizer.zero_grad()
            optimizer.step(lambda: gradients(i))  # noqa: B023  called at once
        else:
            optimizer.step()
        for n, p in named.items():
            average[n].lerp_(p.detach(), 0.5)
        if i == 3:  # evaluate with averaged weights, and go on with them
            for n, p in named.items():
                p.data = average[n].clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "microbatches", "zero", "offload"),
    [
        ("", 1, 0, False),
        ("tp=2", 1, 0, False),
        ("pp=2", 2, 0, False),
        ("dp=2", 1, 3, False),
        ("dp=2", 1, 0, False),
        ("tp=2", 1, 0, True),
    ],
)
def test_habits_give_what_they_give_on_one_device(
    mesh, microbatches, zero, offload
) -> None:
    want = habits_on_one_device()
    program = small_program(mesh, microbatches, zero=zero, offload=offload)
    alone = program.mesh.size == 1
    by_rank = [habits_on_ranks(program)] if alone else None
    for found in by_rank or run_ranks(habits_on_ranks, 2, program):
        for name, value in want.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-3, atol=2e-4, msg=name
            )


def updates(program: Program, compiles: bool) -> list[float]:
    step, losses = made(program), []
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    update = optimizer.step
    if compiles:
        update = torch.compile(update, backend="aot_eager")
    for i in range(3):
        losses.append(step(**batch_of(i)).item())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its own compiler
            update()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_an_update_may_be_compiled() -> None:
    """Where gradients are of parts, of which torch's compiler knows nothing."""
    program = small_program("tp=2", 1)
    plain, compiled = (run_ranks(updates, 2, program, c)[0] for c in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
def test_an_optimizer_of_the_models_own_parameters_is_refused() -> None:
    model = plain_model()
    step = autopar.compile(model, "", example_inputs=batch_of(0))
    optimizer = torch.optim.AdamW(model.parameters())
    step(**batch_of(0))
    with pytest.raises(AutoparError, match=r"fix  step\.prepare\(optimizer\)"):
        optimizer.step()
    # The model may be trained beside.
    model(**batch_of(0))[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(AutoparError, match=r"fix  step\.prepare\(optimizer\)"):
        optimizer.step()


def test_an_average_of_what_nobody_trains_is_refused() -> None:
    model = plain_model()
    plain, averaged = copy.deepcopy(model), AveragedModel(model)
    step = autopar.compile(model, "", example_inputs=batch_of(0))
    averaged.update_parameters(model)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    step(**batch_of(0))
    optimizer.step()
    with pytest.raises(AutoparError, match=r"has trained its '[\s\S]*plain\."):
        averaged.update_parameters(model)
    for trained in (plain, model):
        trained.load_state_dict(step.state_dict())
        averaged.update_parameters(trained)
    assert averaged.n_averaged == 3


@pytest.mark.slow
def test_what_was_frozen_when_compiled_cannot_be_unfrozen() -> None:
    model = plain_model()
    model.get_parameter("norm.weight").requires_grad_(False)
    step = autopar.compile(model, "", example_inputs=batch_of(0))
    model.get_parameter("norm.weight").requires_grad_(True)
    with pytest.raises(AutoparError, match="until it shall be trained"):
        step(**batch_of(0))
    model.get_parameter("norm.weight").requires_grad_(False)
    dict(step.named_parameters())["norm.weight"].requires_grad_(True)
    with pytest.raises(AutoparError, match="requires gradients now"):
        step(**batch_of(0))


@pytest.mark.slow
def test_on_one_rank_all_is_as_torch_has_it() -> None:
    assert CONFIG.layers > 1
    step = made(small_program("", 1))
    step(**batch_of(0))
    norm = nn.utils.clip_grad_norm_(step.parameters(), 0.1)
    assert norm > 0.1
    torch.optim.Adafactor(step.parameters()).step()


def test_a_batch_that_wants_gradients_is_refused_by_a_step_alone() -> None:
    """What computes it, as an encoder outside of the model, would not be trained."""
    outside, model = nn.Linear(6, 6), Read()
    step = autopar.compile(model, "", example_inputs={"x": torch.ones(4, 6)})
    x = outside(torch.randn(4, 6))
    with pytest.raises(AutoparError, match=r"'x' of the batch wants .*\n  fix  put wh"):
        step(x=x)
    step(x=x.detach())
    step.evaluate(x=x)


@pytest.mark.parametrize("several", [list, dict])
def test_what_is_no_optimizer_is_not_saved(several: type, tmp_path: Path) -> None:
    step = autopar.compile(Read(), "", example_inputs={"x": torch.ones(4, 6)})
    for operation in (step.save, step.load):
        with pytest.raises(AutoparError, match=rf"is a {several.__name__}\n  fix"):
            operation(tmp_path, several())


class Read(nn.Module):
    """One of its parameters is read, but has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.mean = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x)) * self.mean.detach()).pow(3).sum()


@pytest.mark.slow
def test_what_has_no_gradient_does_not_decay() -> None:
    torch.manual_seed(0)
    model, batch = Read(), {"x": torch.randn(4, 6)}
    step = autopar.compile(model, "", example_inputs=batch)
    step(**batch)
    assert {n for n, p in step.named_parameters() if p.grad is None} == {"mean"}
    torch.optim.AdamW(step.parameters(), weight_decay=0.5).step()
    assert torch.equal(step.state_dict()["mean"], model.mean)
    assert not torch.equal(step.state_dict()["linear.bias"], model.linear.bias)
