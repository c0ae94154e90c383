"""Optimizers that look at whole parameters update shards as they do the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from losses_of_rows import of_all
from models import VOCAB, cut_gpt, plain_gpt, token_batch
from models_of_rows import case as experts
from models_of_rows import in_place
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.step import Step


class Narrow(nn.Module):
    """Its weight [2, 32] is [1, 32] on each of two ranks, as what Adafactor stores of
    its columns is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(2, VOCAB)
        self.narrow = nn.Linear(32, 2, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.narrow(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def narrow() -> Case:
    torch.manual_seed(0)
    return Case(Narrow(), token_batch(4, 8, ignored="none"))


MODELS: dict[str, Callable[[], Case]] = {
    "plain": partial(plain_gpt, layers=2),
    "cut": partial(cut_gpt, layers=2),
    "experts": partial(experts, of_all, in_place),
    "narrow": narrow,
}
STEPS, HALF = 4, 2


class Lamb(torch.optim.Optimizer):
    """Steps in proportion to the length of a parameter, with momentum (You 2020), and
    less where rows had large gradients, which it stores by row, in a list."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                mean.lerp_(p.grad, 1 / state["step"])
                rows = p.grad.flatten(1).norm(dim=1) if p.ndim > 1 else p.grad.abs()
                kept = state.setdefault("kept", [torch.zeros_like(rows), None])
                rows = kept[0].add_(rows)
                rate = group["lr"] / float(1 + rows.max())
                p.sub_(mean, alpha=rate * float(p.norm() / mean.norm()))


def lamb(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Lamb(params)


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def build(model: str) -> Case:
    case = MODELS[model]().double()
    if model in ("plain", "cut"):
        case.model.get_parameter("norm.weight").requires_grad_(False)
    return case


def batch_of(case: Case, i: int) -> dict[str, Tensor]:
    return {k: v.roll(i, 0) for k, v in case.batch.items()}


def train_plainly(model: str, make: Callable[..., Any]) -> dict[str, Tensor]:
    case = build(model)
    optimizer = make(list(case.model.parameters()))
    for i in range(STEPS):
        optimizer.zero_grad()
        returned = case.model(**batch_of(case, i))
        (returned if isinstance(returned, Tensor) else returned[1]).backward()
        optimizer.step()
    return case.model.state_dict()


def train(
    model: str,
    program: Program,
    make: Callable[..., Any],
    first: int,
    last: int,
    folder: Path,
) -> dict[str, Tensor]:
    """Steps first..last on this rank, from a checkpoint and to one."""
    case = build(model)
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    optimizer = step.gather_for(make(list(step.parameters())))
    shapes = [p.shape for p in step.parameters()]
    if first:
        step.load(folder, optimizer)
    for i in range(first, last):
        optimizer.zero_grad()
        step(**batch_of(case, i))
        optimizer.step()
    assert shapes == [p.shape for p in step.parameters()]
    if last < STEPS:
        step.save(folder, optimizer)
    return step.state_dict()


PLANS = [
    ("experts", "ep=2,tp=2", {}),
    ("plain", "tp=2", {}),
    ("cut", "tp=2", {}),
    ("plain", "dp=2", {"zero": 3}),
    ("plain", "pp=2,tp=2", {"microbatches": 2}),
    ("plain", "dp=2,tp=2", {"zero": 1}),
]


@pytest.mark.matrix(quick=0, daily=3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "options"), PLANS)
def test_they_update_as_on_one_device(
    model: str, mesh: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """With a checkpoint on the way, which goes on on one rank."""
    want = train_plainly(model, lamb)
    case = build(model)
    program, alone = case.proved(mesh, **options), case.proved("")
    world = program.mesh.size
    arguments = (model, program, lamb)
    found = [
        *run_ranks(train, world, *arguments, 0, HALF, tmp_path),
        *run_ranks(train, world, *arguments, HALF, STEPS, tmp_path),
    ]
    found.append(train(model, alone, lamb, HALF, STEPS, tmp_path))
    for state in found[world:]:
        for name, value in want.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-8, atol=1e-8, msg=name
            )


class Stacked(Lamb):
    """Looks at the gradients of all that it updates at first, as one that computes
    with them in one tensor, and then does what the class does that it is made of."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            sizes = {p.grad.shape for p in group["params"]}
            assert sizes == {p.shape for p in group["params"]}
        super().step(closure)


def stacked(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    assert Lamb(params)  # from now on torch calls the hooks of updates within as well
    return Stacked([p for p in params if p.requires_grad])


@pytest.mark.slow
def test_an_optimizer_has_whole_parameters_alone(tmp_path: Path) -> None:
    want = train_plainly("cut", lamb)
    program = build("cut").proved("tp=2")
    for state in run_ranks(train, 2, "cut", program, stacked, 0, STEPS, tmp_path):
        torch.testing.assert_close(state, dict(want), rtol=1e-8, atol=1e-8)


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


@pytest.mark.slow
def test_what_is_stored_of_columns_is_taken_for_no_part(tmp_path: Path) -> None:
    want = train_plainly("narrow", adafactor)
    program = build("narrow").proved("dp=2", zero=3)
    for state in run_ranks(train, 2, "narrow", program, adafactor, 0, STEPS, tmp_path):
        torch.testing.assert_close(state, dict(want), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_muon_is_that_of_one_device(tmp_path: Path) -> None:
    """Up to the bfloat16 that it computes in."""
    start, want = build("plain").model.state_dict(), train_plainly("plain", muon)
    program = build("plain").proved("tp=2")
    for state in run_ranks(train, 2, "plain", program, muon, 0, STEPS, tmp_path):
        for name, value in want.items():
            moved = (value - start[name]).norm()
            assert (state[name] - value).norm() <= 0.02 * moved, name


def test_what_looks_like_a_part_is_not_saved_as_one() -> None:
    case = build("plain")
    program = case.compile("")
    step = autopar.compile(case.model, program.mesh, program=program, prove=False)
    optimizer = step.build(**case.batch).gather_for(Lamb(step.parameters()))
    gathers, (name, p) = step.gathers(optimizer), next(step.named_parameters())
    assert gathers is not None
    gathers._entries[name] = {"mean"}
    state = {"mean": p, "rows": p[:, 0], "square": p}
    with pytest.raises(AutoparError, match="would be taken"):
        gathers.made_of_all(name, state)
    del state["square"]
    assert gathers.made_of_all(name, state) == {"rows"}


def parts_apart(program: Program) -> str:
    case = build("cut")
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    named = dict(step.named_parameters())
    part = next(n for n in named if "[" in n)
    with pytest.raises(AutoparError, match="into one group") as error:
        step.gather_for(Lamb([named[part]]))
    optimizer = step.gather_for(Lamb(named.values()))
    with pytest.raises(AutoparError, match="closure"):
        optimizer.step(lambda: step(**case.batch))
    optimizer = Lamb(named.values())
    step(**case.batch)
    with pytest.raises(AutoparError, match="updates a parameter as a whole") as other:
        optimizer.step()
    assert isinstance(step, Step)
    return f"{error.value} {other.value}"


class Sharing(torch.optim.SGD):
    """Averages gradients over all ranks by itself."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step()


def shared_out(program: Program) -> str:
    case = build("cut")
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    optimizer = Sharing(step.parameters(), lr=0.1)
    step(**case.batch)
    with pytest.raises(AutoparError, match="by itself, as if all had the same") as told:
        optimizer.step()
    return str(told.value)


class Unfinished(Sharing):
    """Asks for what gloo has not, after tensors have moved, as nanochat's does."""

    def step(self, closure: Any = None) -> None:
        super().step()
        raise RuntimeError("Work::getFuture not implemented")


def gathered_and_shared(program: Program) -> str:
    case = build("plain")
    step = autopar.compile(case.model, program.mesh, program=program)
    step.build(**case.batch)
    optimizer = step.gather_for(Unfinished(step.parameters(), lr=0.1))
    step(**case.batch)
    with pytest.raises(AutoparError, match="could not be found out") as told:
        optimizer.step()
    return str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "mesh"), [(shared_out, "pp=2"), (gathered_and_shared, "tp=2")]
)
def test_an_optimizer_of_data_parallel_ranks_is_refused_elsewhere(
    body: Callable[[Program], str], mesh: str
) -> None:
    model = "cut" if body is shared_out else "plain"
    for said in run_ranks(body, 2, build(model).proved(mesh)):
        assert "use its form for one device" in said and "by_element" not in said


@pytest.mark.slow
def test_parts_of_a_weight_stay_together() -> None:
    for said in run_ranks(parts_apart, 2, build("cut").proved("tp=2")):
        assert "step.gather_for(optimizer)" in said
