"""What each rank writes of a model and an optimizer, and what does not fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import cut_gpt, gpt2, llama, plain_gpt
from processes import run_ranks
from torch import Tensor, nn
from trained import HALF, build, compiled, optimizer, train

import autopar
from autopar.checkpoints.checkpoint_files import latest
from autopar.passes.errors import AutoparError
from autopar.runtime.parameters.shards import boxes, is_owner, take_shard
from examples.gpt import GPT


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, compiled("tp=1"), 0, HALF)
    return folder


# --- boxes -------------------------------------------------------------------------

SPLITS = [
    (plain_gpt, "pp=2,tp=2", {}, 3),
    (plain_gpt, "dp=2,tp=2", {"zero": 3}, 9),
    (gpt2, "tp=3,dp=2", {"zero": 1}, 6),
    (llama, "tp=2,dp=3", {"zero": 3}, 1),
    (cut_gpt, "tp=2,dp=2", {"zero": 3}, 3),
]


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(("make", "mesh", "options", "most"), SPLITS)
def test_boxes_of_owners_are_the_whole_and_no_more(make, mesh, options, most):
    """most: boxes of one shard; those of a fused weight are split inside of the 3."""
    case = make(layers=2, batch=6, heads=6)
    program = case.compile(mesh, **options)
    counts = []
    held = {name: torch.zeros(shape) for name, shape in program.shapes.items()}
    for name, spec in program.parameters.items():
        count = held[spec.part.source]
        whole = torch.arange(float(count.numel())).view(count.shape)
        for rank in range(program.mesh.size):
            coords = program.mesh.coords(rank)
            shard = take_shard(whole, spec, program.mesh, coords)
            found = boxes(spec, program.mesh, coords)
            counts.append(len(found))
            for box in found:
                ends = [at + n for at, n in zip(box.start, box.size, strict=True)]
                place = tuple(map(slice, box.start, ends))
                assert torch.equal(box.of(shard), whole[place]), name
                count[place] += is_owner(program, coords, name)
            assert sum(box.of(shard).numel() for box in found) == shard.numel()
    for name, count in held.items():
        assert bool((count == 1).all()), name
    assert max(counts) == most


def save_sizes(folder: Path) -> tuple[int, int]:
    """Bytes of parameters that this rank owns, and of the files it wrote."""
    case = build()
    step = autopar.compile(case.model, "dp=2", zero=3, example_inputs=case.batch)
    update = optimizer(step.named_parameters())
    step(**case.batch)
    update.step()
    path = step.save(folder, update)
    owned = 0
    for name, p in step.named_parameters():
        kept = 3 if p.requires_grad else 1  # with both of AdamW's moments
        owned += step.owns(name) * kept * p.nbytes
    rank = dist.get_rank()
    return owned, sum(f.stat().st_size for f in path.glob(f"__{rank}_*"))


@pytest.mark.slow
def test_each_rank_writes_its_own_shards(tmp_path):
    whole = sum(p.nbytes for p in build().model.parameters())
    for owned, written in run_ranks(save_sizes, 2, tmp_path):
        assert owned < 0.6 * 3 * whole
        boxes_at_most = 2 * 4 * 30 * 2000  # what torch.save puts around each tensor
        assert owned < written < owned + boxes_at_most


# --- what does not fit -------------------------------------------------------------


def one(make: Any = build, **options: Any) -> autopar.Step:
    return make(**options).step()


def momentum(step: autopar.Step) -> torch.optim.Optimizer:
    return torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)


def test_any_optimizer_with_state_by_element(tmp_path):
    case = build()
    step = case.step()
    update = momentum(step)
    step(**case.batch)
    update.step()
    step.save(tmp_path, update)
    other = one()
    again = momentum(other)
    assert other.load(tmp_path, again) is None
    states = zip(update.state.values(), again.state.values(), strict=True)
    for a, b in states:
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


class Around(torch.optim.Optimizer):
    """Has another optimizer, as those that look ahead or perturb weights have."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None) -> None:
        self.base.step()


class Aside(torch.optim.SGD):
    """Keeps momenta in a table of its own."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)
        self.momenta = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}


class Averaging(torch.optim.SGD):
    """Keeps an average, which its state dict has."""

    def state_dict(self):
        return {**super().state_dict(), "average": [0.5]}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            Around,
            r"keeps base .*\n.*fix  give that one: step\.save\(folder, optimizer\.b",
        ),
        (Aside, r"keeps momenta beside .*\n.* in optimizer\.state\[p\]"),
        (Averaging, r"keeps average beside"),
    ],
)
def test_what_an_optimizer_keeps_elsewhere_is_not_left_out(make, text, tmp_path):
    step = one()
    update = make(step.parameters())
    step(**build().batch)
    update.step()
    with pytest.raises(AutoparError, match=text):
        step.save(tmp_path, update)
    assert not list(tmp_path.glob("step-*"))
    if make is Around:
        step.save(tmp_path, update.base)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_changes_nothing(saved):
    step = one(plain_gpt, layers=2, vocab=90)
    before = step.state_dict()
    with pytest.raises(AutoparError) as error:
        step.load(saved)
    said = "shape: tokens.weight: [101, 32] instead of [90, 32]"
    assert said in str(error.value)
    deeper = autopar.compile(
        plain_gpt(layers=3).model, "tp=1", example_inputs=build().batch
    )
    with pytest.raises(AutoparError, match=r"missing: blocks\.2\.norm1\.weight"):
        deeper.load(saved)
    after = step.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert step.executor.steps == 0


def test_other_groups_are_refused(saved):
    step = one()
    with pytest.raises(AutoparError, match=r"has 1 groups .* the checkpoint has 2"):
        step.load(saved, momentum(step))
    trained = [p for p in step.parameters() if p.requires_grad]
    swapped = torch.optim.AdamW([{"params": trained[1:]}, {"params": trained[:1]}])
    with pytest.raises(AutoparError, match=r"'tokens\.weight' is in the checkpoint's"):
        step.load(saved, swapped)
    foreign = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(AutoparError, match=r"\[3\] that is not the step's"):
        step.load(saved, foreign)


def test_another_optimizer_is_refused(tmp_path):
    step = one()
    update = torch.optim.AdamW(step.parameters(), lr=1e-3)
    step(**build().batch)
    update.step()
    step.save(tmp_path, update)
    other = one()
    before = other.state_dict()
    refused = {
        "has the state of AdamW, but the optimizer is SGD": momentum(other),
        "has the state of AdamW, but the optimizer is Adam\n": torch.optim.Adam(
            other.parameters(), lr=1e-3
        ),
        r"AdamW\(weight_decay=0.01\), but is made with weight_decay=0.5": (
            torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.5)
        ),
        r"AdamW\(betas=\[0.9, 0.999\]\), but": torch.optim.AdamW(
            other.parameters(), lr=1e-3, betas=(0.9, 0.95)
        ),
    }
    for says, wrong in refused.items():
        with pytest.raises(AutoparError, match=says):
            other.load(tmp_path, wrong)
        assert not wrong.state
    after = other.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    # What changes rates after it was made, and how it is computed, makes no difference.
    update = torch.optim.AdamW(other.parameters(), lr=1e-3, foreach=True)
    torch.optim.lr_scheduler.LambdaLR(update, lambda i: 0.5)
    other.load(tmp_path, update)
    assert len(update.state) == sum(p.requires_grad for p in other.parameters())


def test_state_of_whole_parameters_is_kept_but_for_code(tmp_path):
    step, other = one(), one()
    step(**build().batch)
    update, fresh = (torch.optim.Adafactor(s.parameters()) for s in (step, other))
    update.step()
    for state in update.state.values():
        state.update(old=[1.0], none=None)
    step.save(tmp_path, update)
    other.load(tmp_path, fresh)
    for p, q in zip(step.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(fresh.state[q], update.state[p], rtol=0, atol=0)
    assert any("row_var" in state for state in fresh.state.values())
    for state in update.state.values():
        state["old"] = [lambda x: x]
    with pytest.raises(AutoparError, match="holds what no checkpoint can hold"):
        step.save(tmp_path / "none", update)
    assert latest(tmp_path / "none") is None


def test_extra_must_be_plain(tmp_path):
    step = one()
    with pytest.raises(AutoparError, match="'extra' holds what no checkpoint can"):
        step.save(tmp_path, extra={"rates": lambda i: i})
    with pytest.raises(AutoparError, match="'extra' holds what no checkpoint can"):
        step.save(tmp_path, extra=Path("here"))
    assert latest(tmp_path) is None


def test_without_an_optimizer(tmp_path):
    step = one()
    step.save(tmp_path)
    with pytest.raises(AutoparError, match="saved without an optimizer"):
        step.load(tmp_path, momentum(step))


def test_values_that_no_stage_computes_with_are_loaded_too(tmp_path):
    case = llama(layers=1)
    step = case.step()
    state = {name: t + 1 for name, t in step.state_dict().items()}
    step.load_state_dict(state)
    step.save(tmp_path)
    other = llama(layers=1).step()
    other.load(tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_model_on_meta_loads(saved):
    case = build()
    with torch.device("meta"):
        model = GPT(case.model.config).double()
    model.positions.weight.requires_grad_(False)
    step = autopar.compile(model, "tp=1", example_inputs=case.batch)
    step.load(saved)
    ours = case.step()
    ours.load(saved)
    want = ours.state_dict()
    assert all(torch.equal(v, want[n]) for n, v in step.state_dict().items())


class Unused(nn.Module):
    """A model with a buffer, and a parameter that its loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.spare = nn.Parameter(torch.zeros(5))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("passing", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale * self.passing).square().mean()


class Scaled(nn.Module):
    """A module that gives its buffer a value, as one on meta must."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class WithScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scaled = nn.Linear(8, 8), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.layer(x)).square().mean()


def test_a_buffer_that_began_on_meta(tmp_path):
    batch = {"x": torch.arange(32.0).view(4, 8) / 32}
    with torch.device("meta"):
        model = WithScale()
    step = autopar.compile(model, "tp=1", example_inputs=batch)
    state = step.state_dict()
    assert torch.equal(state["scaled.scale"], torch.full((8,), 2.0))
    plain = WithScale()
    plain.load_state_dict(state)
    step.save(tmp_path)
    other = autopar.compile(plain, "tp=1", example_inputs=batch)
    other.load(tmp_path)
    torch.testing.assert_close(other(**batch), step(**batch))


def test_buffers_and_unused_parameters(tmp_path):
    batch = {"x": torch.arange(32.0).view(4, 8) / 32}
    torch.manual_seed(0)
    model = Unused()
    step = autopar.compile(model, "tp=1", example_inputs=batch)
    with torch.no_grad():
        model.spare.add_(3)
        model.scale.mul_(2)
    state = model.state_dict()
    step.load_state_dict(state)
    loss = step(**batch)
    torch.testing.assert_close(loss, model(**batch).detach())
    step.save(tmp_path)
    other = autopar.compile(Unused(), "tp=1", example_inputs=batch)
    other.load(tmp_path)
    assert all(torch.equal(v, state[n]) for n, v in other.state_dict().items())
    assert set(other.state_dict()) == {"layer.weight", "layer.bias", "spare", "scale"}
    torch.testing.assert_close(other(**batch), loss)
