"""ZeRO: what data parallel ranks share out, and that the result stays the same."""

from __future__ import annotations

from math import prod

import pytest
import torch
from cases import Case, on_rank
from models import gpt2, llama, plain_gpt, switch_gpt, token_batch
from test_context_parallel import Positions, next_token
from torch import nn
from trajectories import check_trajectory

from autopar.compiler import compile_offline
from autopar.passes.dims.name_dims import Dim
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import Program
from autopar.passes.shard.parameter_sharding import split_parameter
from autopar.passes.shard.sharding import Sharding
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.verify import verify

MODELS = {"plain": plain_gpt, "gpt2": gpt2, "llama": llama}
MESHES = [
    ("dp=2", 1),
    ("dp=4", 2),
    ("dp=2,tp=2", 2),
    ("tp=2,dp=2", 1),
    ("pp=2,dp=2", 2),
    ("pp=2,dp=2,tp=2", 2),
]


@pytest.mark.matrix(quick=3, daily=18)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("mesh", "microbatches"), MESHES)
def test_loss_and_gradients_are_those_of_the_model(model, mesh, microbatches, zero):
    case = MODELS[model](layers=2, padded=model != "plain").double()
    case.verify(mesh, microbatches, zero=zero)


HYBRID = [
    ("plain", "dp=2,fsdp=2", 1),
    ("gpt2", "dp=2,fsdp=2", 2),
    ("llama", "fsdp=2,dp=2,tp=2", 1),
    ("plain", "pp=2,dp=2,fsdp=2", 2),
    ("gpt2", "dp=2,fsdp=2,cp=2", 1),
    ("llama", "dp=2,cp=2", 2),
    ("plain", "fsdp=2,cp=2,tp=2", 1),
]


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("model", "mesh", "microbatches"), HYBRID)
def test_with_ranks_that_replicate_the_shares(model, mesh, microbatches, zero):
    case = MODELS[model](layers=2, padded=model != "plain").double()
    case.verify(mesh, microbatches, zero=zero)


@pytest.mark.parametrize(
    ("mesh", "split", "pending"),
    [
        ("dp=2,fsdp=2", "ffn/fsdp", ("dp",)),
        ("fsdp=2,dp=2", "ffn/fsdp", ("dp",)),
        ("dp=2,cp=2", "ffn/dp/cp", ()),
        ("dp=2,fsdp=2,cp=2,tp=2", "ffn/tp/fsdp/cp", ("dp",)),
    ],
)
def test_who_shares_and_who_replicates(mesh, split, pending):
    program = plain_gpt(layers=1).compile(mesh, zero=3)
    spec = program.parameters["blocks.0.mlp.up.weight"]
    assert (spec.pattern, spec.pending) == (f"{split} embed", pending)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_whose_rows_lie_in_zigzag_share_parameters_in_one_piece(zero):
    plan = {"zero": zero, "zigzag": ("cp",)}
    gpt2(layers=2).double().verify("cp=2,dp=2", 2, **plan)
    case = Case(Positions(), token_batch(seq=12), next_token).double()
    case.verify("dp=2,cp=2", 1, **plan)
    found = case.compile("dp=2,cp=2", 1, **plan).parameters
    over = {
        n: {a for dim in p.slots for axes in dim for a in axes}
        for n, p in found.items()
    }
    assert over.pop("table") == {"dp"}  # its rows are moved as those of samples are
    assert {"dp", "cp"} in over.values()


@pytest.mark.matrix(quick=2, daily=10)
@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("zigzag", [("cp",), ()])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("cp=2", 2), ("cp=2,tp=2", 1), ("dp=2,cp=2", 1), ("cp=2,dp=2", 2)],
)
def test_weights_that_all_ranks_of_cp_use_alike_are_shared_out(
    mesh, microbatches, zero, zigzag, precision
):
    """Experts of a limited capacity go over whole sequences on each of them."""
    case, how = switch_gpt(), {"zero": zero, "zigzag": zigzag}
    case = case if precision == "bf16" else case.double()
    case.verify(mesh, microbatches, precision=precision, **how)
    ranks = Mesh.parse(mesh).size
    elements = rank_elements(case.compile(mesh, microbatches, **how))
    assert elements < 1.1 / ranks * rank_elements(case.compile(""))


def test_what_two_axes_share_comes_by_one_message():
    """And leaves by one: of a block, over all ranks that share it."""
    program = plain_gpt(layers=2).compile("dp=2,cp=2", zero=3, zigzag=("cp",))
    moved = {
        c.axes
        for c in program.communication
        if c.kind in ("all_gather", "reduce_scatter")
    }
    assert moved == {("dp", "cp"), ("cp",)}  # those of keys and values are on cp
    assert rank_elements(program) == rank_elements(plain_gpt(layers=2).compile("")) / 4


UNEVEN = [
    ("plain", "dp=3", 2, {"batch": 6}),
    ("plain", "dp=3,tp=2", 1, {"batch": 6, "heads": 3, "tied": False}),
    ("plain", "dp=5", 1, {"batch": 5, "seq": 17, "dropout": 0.1}),
    ("gpt2", "dp=3,tp=2", 2, {"batch": 6, "heads": 3, "padded": True}),
    ("llama", "dp=3", 1, {"batch": 6, "tied": True, "kv_heads": 1}),
    ("llama", "tp=3,dp=3", 1, {"batch": 6, "heads": 6, "kv_heads": 3}),
]


@pytest.mark.matrix(quick=1, daily=9)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("model", "mesh", "microbatches", "options"), UNEVEN)
def test_extents_need_not_divide(model, mesh, microbatches, options, zero):
    case = MODELS[model](layers=2, **options).double()
    case.verify(mesh, microbatches, zero=zero)


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_it_goes_with_all_other_decisions(zero):
    case = plain_gpt(layers=2).double()
    options = {"sequence_parallel": False, "schedule": "gpipe", "zero": zero}
    case.verify("pp=2,dp=2,tp=2", 4, **options)
    hints = {"blocks.0.mlp.up.weight": "embed/tp"}
    case.verify("dp=2,tp=2", 1, zero=zero, hints=hints)
    case.verify("dp=2,cp=2", 2, zero=zero, recompute="full")
    gpt2(layers=2, dropout=0.1).double().verify("dp=2", 2, zero=zero, recompute="full")


# --- where parameters rest ---------------------------------------------------------


def rank_elements(program: Program, rank: int = 0) -> int:
    """Elements of all parameters that a rank holds, by the emitted tables."""
    found = 0
    for stage in program.stages_of(rank):
        names: dict[str, object] = {}
        exec(program.modules[program.module_of(rank, stage)], names)
        table = names["PARAMETERS"]
        assert isinstance(table, dict)
        found += sum(prod(shape) for shape, _ in table.values())
    return found


@pytest.mark.parametrize("mesh", ["dp=2", "dp=4", "dp=2,tp=2"])
def test_a_rank_holds_its_share_of_the_parameters(mesh):
    case = gpt2(layers=2)
    whole = rank_elements(case.compile(mesh))
    shared = case.compile(mesh, zero=3)
    ranks = shared.mesh.axis_size("dp")
    assert rank_elements(shared) == whole / ranks
    assert all(spec.gathered == ("dp",) for spec in shared.parameters.values())
    assert not any("dp" in spec.pending for spec in shared.parameters.values())


def test_shares_that_do_not_divide_differ_by_a_row():
    program = plain_gpt(layers=1, batch=6).compile("dp=3", zero=3)
    spec = program.parameters["blocks.0.mlp.up.weight"]
    assert spec.pattern == "ffn/dp embed"
    each = [rank_elements(program, rank) for rank in range(3)]
    total = sum(prod(spec.shape) for spec in program.parameters.values())
    assert sum(each) == total
    assert max(each) < 1.05 * total / 3


@pytest.mark.slow
def test_what_is_too_small_to_share_stays_whole():
    case = plain_gpt(layers=1, heads=1, batch=12).double()  # 8 wide, on 12 ranks
    program = case.compile("dp=12", zero=3)
    spec = program.parameters["norm.weight"]
    assert (spec.pattern, spec.pending, spec.gathered) == ("embed", ("dp",), ())
    assert program.parameters["blocks.0.mlp.up.weight"].pattern == "ffn/dp embed"
    verify(program, *case).check()


def dims_of(case: Case, mesh: str, name: str) -> str:
    return case.compile(mesh, zero=3).parameters[name].pattern


def test_data_parallel_splits_inside_of_tensor_parallel():
    case = plain_gpt(layers=1)
    assert dims_of(case, "dp=2,tp=2", "blocks.0.mlp.up.weight") == "ffn/tp/dp embed"
    assert dims_of(case, "dp=2,tp=2", "blocks.0.mlp.down.weight") == "embed/dp ffn/tp"
    assert dims_of(case, "dp=2,tp=2", "tokens.weight") == "vocab/tp embed/dp"


def test_frozen_parameters_are_shared_out_too():
    case = plain_gpt(layers=2).double()
    for p in case.model.get_submodule("blocks.0").parameters():
        p.requires_grad = False
    program = case.compile("dp=2", 2, zero=3)
    spec = program.parameters["blocks.0.mlp.up.weight"]
    assert spec.gathered == ("dp",) and not spec.trainable
    verify(program, *case).check()


@pytest.mark.slow
def test_of_equal_layers_one_in_the_middle_may_be_frozen_in_part():
    case = plain_gpt(layers=3, batch=4).double()
    case.model.get_parameter("blocks.1.mlp.up.bias").requires_grad_(False)
    case.verify("dp=2", 2, zero=1)


# --- while ranks run ---------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_is_whole_between_steps(zero):
    case = plain_gpt(layers=1)
    program = case.compile("dp=2", 2, zero=zero)
    wholes = dict(case.model.named_parameters())

    def body(comm: Comm) -> tuple[int, int, int]:
        executor = on_rank(program, comm, case.model)
        held = executor.parameters
        executor.step(case.batch)
        assert all(stage.batch == {} for stage in executor.stages.values())
        assert executor.stages[0].grads.keys() == executor.stages[0].tensors.keys()
        adam = torch.optim.AdamW(held.values())
        adam.step()
        moments = [s["exp_avg"] for s in adam.state.values()]
        grads = [p.grad for p in held.values() if p.grad is not None]
        return (elements(held.values()), elements(grads), elements(moments))

    total = elements(wholes.values())
    for counts in run_virtual(program.mesh, 2, body):
        assert counts == (total / 2,) * 3


@pytest.mark.parametrize("zero", [1, 3])
def test_an_evaluation_gathers_too_and_keeps_nothing(zero):
    case = plain_gpt(layers=1).double()
    program = case.compile("dp=2", 2, zero=zero)

    def body(comm: Comm) -> tuple[float, float]:
        executor = on_rank(program, comm, case.model)
        held = executor.parameters
        loss = executor.evaluate(case.batch)
        assert executor.stages[0].batch == {}
        assert all(p.grad is None for p in held.values())
        return loss.item(), executor.step(case.batch).item()

    for evaluated, trained in run_virtual(program.mesh, 2, body):
        assert evaluated == trained


def elements(tensors) -> int:
    return sum(t.numel() for t in tensors)


# --- real ranks --------------------------------------------------------------------


@pytest.mark.matrix(quick=0, daily=1)
@pytest.mark.parametrize(
    ("model", "mesh", "microbatches"),
    [
        ("plain", "dp=4", 1),
        ("gpt2", "dp=2,fsdp=2", 2),
        ("llama", "dp=2,cp=2", 1),
        ("plain", "pp=2,fsdp=2", 4),
    ],
)
def test_four_ranks_follow_one_device(model, mesh, microbatches):
    check_trajectory(model, mesh, microbatches, {"zero": 3})


# --- the choice of a dim -----------------------------------------------------------


class Odd(nn.Module):
    """Weights of shapes that leave a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, ids):
        x = self.table(ids)
        return (x + self.down(self.up(x).relu())).square().mean()


@pytest.mark.parametrize(
    ("ranks", "name", "split"),
    [
        (2, "up.weight", 0),  # both are even: the outermost
        (5, "down.weight", 1),  # 20 is even, 12 is not
        (4, "table.weight", 1),
        (9, "table.weight", 1),  # none is even: the longest that reaches
        (16, "up.weight", 0),
        (21, "up.weight", None),
    ],
)
def test_which_dim_a_parameter_rests_split_on(ranks, name, split):
    model = Odd()
    ids = torch.zeros(ranks, 3, dtype=torch.int64)
    spec = Case(model, {"ids": ids}).compile(f"dp={ranks}", zero=3).parameters[name]
    places = [d for d, dim in enumerate(spec.slots) if any(dim)]
    assert places == ([] if split is None else [split])


def test_an_outer_split_stays_as_it_is():
    dims = ((Dim(0, "3", 3), Dim(1, "heads", 8)),)
    state, sizes = Sharding((((), ("tp",)),)), {"dp": 4, "tp": 2}
    assert split_parameter(dims, state, "dp", sizes).slots == (((), ("tp", "dp")),)
    assert split_parameter(dims, state, "dp", {**sizes, "dp": 5}) == state


class Masked(nn.Module):
    """A weight of which a part is hidden: its gradient is masked once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("seen", torch.ones(8, 8).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ torch.where(self.seen, self.weight, 0.5).t()
        return y.square().mean()


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.usefixtures("unrolled")
def test_what_is_made_of_a_shared_parameter_is_derived_once_a_step(zero):
    model, batch = Masked().double(), {"x": torch.randn(4, 8).double()}
    plan = Plan(Mesh.parse("dp=2"), 2, zero=zero)
    program = compile_offline(model, batch, plan, cluster=PLAIN)
    verify(program, model, batch).check()


class Delayed(nn.Module):
    """Layers whose first token is none: what a weight makes of zeros is made once a
    step, as soon as the weight is there, while the next layer's is on its way."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(8, 8, bias=False) for _ in range(5))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            first = layer(torch.zeros(x.shape[0], 1, 8, dtype=x.dtype)) + 1
            x = x + torch.cat([first, layer(x)[:, :-1]], 1).tanh()
        return x.square().mean()


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_weight_that_a_step_reads_once_is_there_for_all_of_it(zero):
    model, batch = Delayed().double(), {"x": torch.randn(4, 6, 8).double()}
    plan = Plan(Mesh.parse("dp=2"), 2, zero=zero)
    program = compile_offline(model, batch, plan, cluster=PLAIN)
    verify(program, model, batch).check()
