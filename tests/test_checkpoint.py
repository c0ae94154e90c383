"""What one mesh saved goes on under another, in the plain model, and bitwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Case, gpt2, llama, plain_gpt, switch_gpt
from processes import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import autopar
from autopar.checkpoint_files import latest
from autopar.shards import boxes, owns, take_shard
from examples.gpt import GPT
from passes.errors import AutoparError
from passes.program import Program

HALF, STEPS = 3, 6
Trained = tuple[list[float], dict[str, Tensor]]


def build(
    dtype: torch.dtype = torch.float64, make: Any = plain_gpt, **options: Any
) -> Case:
    """With a parameter that is not trained; plain_gpt has tied embeddings."""
    case = make(layers=2, **options)
    case.model.positions.weight.requires_grad_(False)
    return Case(case.model.to(dtype), case.batch)


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """As people write it: weights decay, biases and norms do not."""
    trained = [p for _, p in named if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def rates(update: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(update, T_max=2 * STEPS)


def batch_of(case: Case, i: int) -> dict[str, Tensor]:
    return {k: v.roll(i, 0) for k, v in case.batch.items()}


def train(
    folder: Path | None,
    program: Program,
    first: int,
    last: int,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Steps first..last on this rank; loads before them, unless first is 0, and saves
    after them. Returns losses and the final weights."""
    case = build(**model)
    step = autopar.compile(
        case.model, program.mesh, program=program, example_inputs=case.batch
    )
    update = optimizer(step.named_parameters())
    schedule = rates(update)
    if first:
        assert folder is not None
        schedule.load_state_dict(step.load(folder, update))
        assert step.executor.steps == first
    losses = []
    for i in range(first, last):
        update.zero_grad()
        losses.append(step(**batch_of(case, i)).item())
        step.clip_grad_norm_(1.0)
        update.step()
        schedule.step()
    if folder is not None and last < STEPS:
        step.save(folder, update, extra=schedule.state_dict())
    return losses, step.state_dict()


def go_on(model: nn.Module, case: Case, update: Any, schedule: Any, first: int) -> list:
    """The same steps on one device, up to the last."""
    losses = []
    for i in range(first, STEPS):
        update.zero_grad()
        loss = model(**batch_of(case, i))[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def train_plainly(**model: Any) -> Trained:
    case = build(**model)
    update = optimizer(case.model.named_parameters())
    losses = go_on(case.model, case, update, rates(update), 0)
    return losses, case.model.state_dict()


def compiled(mesh: str, model: Any = MappingProxyType({}), **options: Any) -> Program:
    return build(**model).compile(mesh, **options)


def run(folder: Path | None, program: Program, *arguments: Any) -> list[Trained]:
    return run_ranks(train, program.mesh.size, folder, program, *arguments)


@pytest.fixture(scope="module")
def expected() -> Trained:
    return train_plainly()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: Trained) -> Path:
    """The first half of the steps, on pp=2,tp=2."""
    folder = tmp_path_factory.mktemp("runs")
    for losses, _ in run(folder, compiled("pp=2,tp=2", microbatches=2), 0, HALF):
        assert losses == pytest.approx(expected[0][:HALF], rel=1e-9)
    return folder


def check_end(found: Trained, expected: Trained) -> None:
    losses, weights = found
    assert losses == pytest.approx(expected[0][-len(losses) :], rel=1e-9)
    assert list(weights) == list(expected[1])
    for name, want in expected[1].items():
        torch.testing.assert_close(weights[name], want, rtol=1e-9, atol=1e-9, msg=name)


# --- another mesh ------------------------------------------------------------------

ELSEWHERE = [
    ("dp=2", {"zero": 3}),
    ("tp=1", {}),
    pytest.param("dp=4", {}, marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", {"zero": 1}, marks=pytest.mark.slow),
    pytest.param("tp=2,dp=2", {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
    pytest.param(
        "pp=2", {"schedule": "zb-v", "stages_per_rank": 2, "microbatches": 4},
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "options"), ELSEWHERE)
def test_another_mesh_goes_on_as_one_device(saved, expected, mesh, options):
    for found in run(saved, compiled(mesh, **options), HALF, STEPS):
        check_end(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_shares_of_zero_go_on_in_a_pipeline(tmp_path, expected, mesh):
    run(tmp_path, compiled(mesh, zero=3), 0, HALF)
    pipeline = compiled("pp=2,tp=2", microbatches=4)
    for found in run(tmp_path, pipeline, HALF, STEPS):
        check_end(found, expected)


@pytest.mark.slow
def test_experts_go_on_on_one_device(tmp_path):
    model = {"make": switch_gpt}
    expected = train_plainly(**model)
    run(tmp_path, compiled("ep=2,dp=2", model, zero=1), 0, HALF, model)
    for found in run(tmp_path, compiled("tp=1", model), HALF, STEPS, model):
        check_end(found, expected)


# --- the same mesh, bitwise --------------------------------------------------------


def train_twice(folder: Path, program: Program, model: Any) -> list[Trained]:
    """In one go; then half of the steps, and from their checkpoint the other half."""
    return [
        train(None, program, 0, STEPS, model),
        train(folder, program, 0, HALF, model),
        train(folder, program, HALF, STEPS, model),
    ]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2", {"microbatches": 2}),
        pytest.param("dp=2", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2", {"zero": 1}, marks=pytest.mark.slow),
    ],
)
def test_resuming_is_bitwise_with_dropout(tmp_path, mesh, options):
    model = {"dropout": 0.2, "dtype": torch.float32}
    program = compiled(mesh, model, **options)
    found = run_ranks(train_twice, program.mesh.size, tmp_path, program, model)
    (losses, weights), (before, _), (after, again) = found[0]
    assert [*before, *after] == losses
    assert len(set(losses)) == STEPS
    assert all(torch.equal(again[name], weights[name]) for name in weights)


# --- the plain model, with torch's own tools ---------------------------------------


def test_the_plain_model_goes_on(saved, expected):
    """`dcp.load` into a model's and optimizer's own state dicts."""
    case = build()
    update = optimizer(case.model.named_parameters())
    schedule = rates(update)
    for p in case.model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    update.step()  # makes the state that is loaded into
    names = {id(p): name for name, p in case.model.named_parameters()}
    trained = [names[id(p)] for g in update.param_groups for p in g["params"]]
    state = update.state_dict()["state"]
    held = {
        "model": case.model.state_dict(),
        "optimizer": {"state": {n: state[i] for i, n in enumerate(trained)}},
        "extra": {},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(held, checkpoint_id=latest(saved))
    case.model.load_state_dict(held["model"])
    by_number = {i: held["optimizer"]["state"][n] for i, n in enumerate(trained)}
    groups = update.state_dict()["param_groups"]
    update.load_state_dict({"state": by_number, "param_groups": groups})
    path = latest(saved)
    assert path is not None
    step = autopar.compile(build().model, "tp=1", example_inputs=case.batch)
    schedule.load_state_dict(step.load(path))
    for group, rate in zip(update.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    losses = go_on(case.model, case, update, schedule, HALF)
    check_end((losses, case.model.state_dict()), expected)


def test_torch_makes_one_file_of_it(saved, tmp_path):
    dcp_to_torch_save(latest(saved), tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    model = build().model
    model.load_state_dict(found["model"])
    assert set(found["model"]) == set(model.state_dict())  # the tied head too
    decay, rest = found["optimizer"]["param_groups"]
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert decay["lr"] == rest["lr"] < 1e-2
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert sorted(decay["params"] + rest["params"]) == sorted(trained)
    assert set(found["optimizer"]["state"]) == set(trained)
    assert found["training"] == {"steps": HALF, "seed": 0}


# --- boxes -------------------------------------------------------------------------

SPLITS = [
    (plain_gpt, "pp=2,tp=2", {}, 3),
    (plain_gpt, "dp=2,tp=2", {"zero": 3}, 9),
    (gpt2, "tp=3,dp=2", {"zero": 1}, 6),
    (llama, "tp=2,dp=3", {"zero": 3}, 1),
]


@pytest.mark.parametrize(("make", "mesh", "options", "most"), SPLITS)
def test_boxes_of_owners_are_the_whole_and_no_more(make, mesh, options, most):
    """most: boxes of one shard; those of a fused weight are split inside of the 3."""
    case = make(layers=2, batch=6, heads=6)
    program = case.compile(mesh, **options)
    counts = []
    for name, spec in program.parameters.items():
        whole = torch.arange(float(torch.Size(spec.shape).numel())).view(spec.shape)
        count = torch.zeros(spec.shape)
        ranks = tuple(program.schedule.stage_to_rank[s] for s in spec.stages)
        for rank in range(program.mesh.size):
            coords = program.mesh.coords(rank)
            shard = take_shard(whole, spec, program.mesh, coords)
            found = boxes(spec, program.mesh, coords)
            counts.append(len(found))
            for box in found:
                ends = [at + n for at, n in zip(box.start, box.size, strict=True)]
                place = tuple(map(slice, box.start, ends))
                assert torch.equal(box.of(shard), whole[place]), name
                count[place] += owns(spec, program.mesh, coords, ranks)
            assert sum(box.of(shard).numel() for box in found) == shard.numel()
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


def test_each_rank_writes_its_own_shards(tmp_path):
    whole = sum(p.nbytes for p in build().model.parameters())
    for owned, written in run_ranks(save_sizes, 2, tmp_path):
        assert owned < 0.6 * 3 * whole
        boxes_at_most = 2 * 4 * 30 * 2000  # what torch.save puts around each tensor
        assert owned < written < owned + boxes_at_most


# --- what does not fit -------------------------------------------------------------


def one(make: Any = build, mesh: str = "tp=1", **options: Any) -> autopar.Step:
    case = make(**options)
    return autopar.compile(case.model, mesh, example_inputs=case.batch)


def momentum(step: autopar.Step) -> torch.optim.Optimizer:
    return torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)


def test_any_optimizer_with_state_by_element(tmp_path):
    case = build()
    step = autopar.compile(case.model, "tp=1", example_inputs=case.batch)
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


def test_state_of_another_shape_is_refused(tmp_path):
    step = one()
    step(**build().batch)
    update = torch.optim.Adafactor(step.parameters())
    update.step()
    with pytest.raises(AutoparError, match="neither of the parameter's shape"):
        step.save(tmp_path, update)
    assert latest(tmp_path) is None


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
    step = autopar.compile(case.model, "tp=1", example_inputs=case.batch)
    state = {name: t + 1 for name, t in step.state_dict().items()}
    step.load_state_dict(state)
    step.save(tmp_path)
    other = autopar.compile(llama(layers=1).model, "tp=1", example_inputs=case.batch)
    other.load(tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_model_on_meta_loads(saved, expected):
    case = build()
    with torch.device("meta"):
        model = GPT(case.model.config).double()
    model.positions.weight.requires_grad_(False)
    step = autopar.compile(model, "tp=1", example_inputs=case.batch)
    step.load(saved)
    ours = autopar.compile(case.model, "tp=1", example_inputs=case.batch)
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
