"""ZeRO: what data parallel ranks share out, and that the result stays the same."""

from __future__ import annotations

import itertools
import re
from math import prod

import pytest
import torch
from models import Case, gpt2, llama, plain_gpt
from test_step import check_trajectory
from torch import nn

from autopar.comm import Comm
from autopar.executor import Executor
from autopar.verify import local_parameters, verify
from autopar.virtual import run_virtual
from passes.name_dims import Dim
from passes.program import Program
from passes.rest import rest_split
from passes.sharding import Sharding

MODELS = {"plain": plain_gpt, "gpt2": gpt2, "llama": llama}
MESHES = [
    ("dp=2", 1),
    ("dp=4", 2),
    ("dp=2,tp=2", 2),
    ("tp=2,dp=2", 1),
    ("pp=2,dp=2", 2),
    ("pp=2,dp=2,tp=2", 2),
]


@pytest.mark.matrix(quick=12)
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


@pytest.mark.matrix(quick=6)
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


UNEVEN = [
    ("plain", "dp=3", 2, {"batch": 6}),
    ("plain", "dp=3,tp=2", 1, {"batch": 6, "heads": 3, "tied": False}),
    ("plain", "dp=5", 1, {"batch": 5, "seq": 17, "dropout": 0.1}),
    ("gpt2", "dp=3,tp=2", 2, {"batch": 6, "heads": 3, "padded": True}),
    ("llama", "dp=3", 1, {"batch": 6, "tied": True, "kv_heads": 1}),
    ("llama", "tp=3,dp=3", 1, {"batch": 6, "heads": 6, "kv_heads": 3}),
]


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("model", "mesh", "microbatches", "options"), UNEVEN)
def test_extents_need_not_divide(model, mesh, microbatches, options, zero):
    case = MODELS[model](layers=2, **options).double()
    case.verify(mesh, microbatches, zero=zero)


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


# --- when they are gathered --------------------------------------------------------


def functions(program: Program) -> dict[str, str]:
    """The functions of the first rank's module, by name."""
    text = program.modules[program.module_of(0, 0)]
    return {part.partition("(")[0]: part for part in text.split("\ndef ")[1:]}


def messages(text: str, kind: str) -> dict[str, tuple[list[str], list[str]]]:
    """Messages that a function starts: name -> what it gives, and what it gets."""
    found = {}
    for name, given in re.findall(rf"(\w+) = c\.start_{kind}\(\[(.*?)\], '", text):
        got = re.search(rf"\[(.*)\] = c\.wait\({name}\)", text)
        assert got, f"{name} is never waited for"
        found[name] = (given.split(", "), got[1].split(", "))
    return found


def gathers(text: str) -> list[str]:
    """Names of what a function gathers of parameters."""
    return [name for _, wholes in messages(text, "gather").values() for name in wholes]


def deleted(text: str) -> list[str]:
    return re.findall(r"\w+", " ".join(re.findall(r"^    del (.*)$", text, re.M)))


def blocks_at_once(text: str, kind: str) -> int:
    """Of how many messages, at most, something is there at the same time: what a
    scatter sends, what is under way, or what a gather brought."""
    block_of = {}
    for name, (given, got) in messages(text, kind).items():
        parts = got if kind == "gather" else given
        block_of.update(dict.fromkeys([name, *parts], name))
    alive: set[str] = set()
    most = 0
    for line in text.splitlines():
        if line.strip().startswith("del "):
            alive -= set(re.findall(r"\w+", line))
        elif " = " in line:
            names = set(re.findall(r"\w+", line.partition(" = ")[0]))
            alive |= names & set(block_of)
        most = max(most, len({block_of[name] for name in alive}))
    return most


def test_a_weight_is_whole_only_while_it_is_used():
    parts = functions(plain_gpt(layers=1, tied=False).compile("dp=2", 2, zero=3))
    for name in ("forward", "backward"):
        made = gathers(parts[name])
        assert len(made) > 8 and len(set(made)) == len(made)
        assert set(made) <= set(deleted(parts[name]))
    saved = parts["forward"].rpartition("return")[2]
    assert not re.search(r"\ball_gather", saved)
    # Lookups need no table backwards, sums no bias.
    assert set(gathers(parts["backward"])) < set(gathers(parts["forward"]))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_blocks_at_most_are_whole_at_once(recompute):
    case = plain_gpt(layers=4, tied=False)
    parts = functions(case.compile("dp=2", 2, zero=3, recompute=recompute))
    blocks = 1 + 4 + 1  # the tables, the layers, norm and head
    assert len(messages(parts["forward"], "gather")) == blocks
    assert blocks_at_once(parts["forward"], "gather") == 2
    assert len(messages(parts["backward"], "gather")) == blocks - 1
    assert blocks_at_once(parts["backward"], "gather") == 2
    assert len(messages(parts["backward"], "scatter")) == blocks
    assert blocks_at_once(parts["backward"], "scatter") == 2
    assert "c.all_gather(p[" not in parts["forward"] + parts["backward"]
    assert "c.reduce_scatter(" not in parts["backward"]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_block_is_gathered_while_the_one_before_computes(name):
    text = functions(plain_gpt(layers=3, tied=False).compile("dp=2", zero=3))[name]
    handles = list(messages(text, "gather"))
    for handle in handles[1:]:
        before, _, after = text.partition(f"    {handle} = c.start_gather")
        lines = before.splitlines()
        views = (" del ", ".reshape(")  # of what rests, for the message
        last = [x for x in lines if not any(word in x for word in views)][-1]
        assert "c.wait(" in last  # starts when the block before is there
        meanwhile = after.partition(f"c.wait({handle})")[0]
        assert re.search(r"F\.linear|torch\.matmul|aten\.embedding", meanwhile)


def test_the_peak_is_that_of_two_blocks():
    """Above what activations take: in the forward weights, in the backward gradients
    too."""
    case = plain_gpt(layers=4, heads=12, seq=4, batch=2, tied=False)
    sizes: dict[str, int] = {}  # of blocks
    for name, p in case.model.named_parameters():
        found = re.match(r"blocks\.\d+", name)
        end = "end" if name.startswith(("norm", "head")) else "begin"
        block = found[0] if found else end
        sizes[block] = sizes.get(block, 0) + p.numel() * 4
    order = [sizes[b] for b in ("begin", *(f"blocks.{i}" for i in range(4)), "end")]
    two = max(a + b for a, b in itertools.pairwise(order))
    plain, shared = (
        case.compile("dp=2", zero=zero).stages[0].footprint for zero in (0, 3)
    )
    assert sizes["blocks.0"] < shared.forward_peak - plain.forward_peak <= two
    above = shared.backward_peak - plain.backward_peak
    assert 2 * sizes["blocks.0"] < above <= 2 * two


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_no_more_is_kept_for_the_backward_than_without(mesh):
    case = plain_gpt(layers=2)
    plain, *shared = (case.compile(mesh, zero=zero) for zero in (0, 1, 2, 3))
    for program in shared:
        assert program.stages[0].footprint.saved == plain.stages[0].footprint.saved


def test_once_a_step_or_in_each_microbatch():
    case = plain_gpt(layers=1, tied=False)
    parts = {z: functions(case.compile("dp=2", 2, zero=z)) for z in (1, 2)}
    for zero in (1, 2):
        assert len(gathers(parts[zero]["prologue"])) > 8
        assert not gathers(parts[zero]["forward"] + parts[zero]["backward"])
    assert "epilogue" not in parts[2]
    assert len(messages(parts[2]["backward"], "scatter")) == 3
    assert "scatter(" not in parts[1]["backward"]
    assert len(messages(parts[1]["epilogue"], "scatter")) == 1


def traffic(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """(part, kind) -> calls and bytes, of one rank."""
    return {(c.part, c.kind): (c.calls, c.bytes) for c in program.communication}


def test_what_is_sent_is_what_the_formulas_say():
    """Rajbhandari 2020, section 7: shares out of wholes, and wholes of shares."""
    case = plain_gpt(layers=2, tied=False)
    whole = sum(p.numel() * 4 for p in case.model.parameters())
    share, each = whole // 2, 4  # each: blocks of the model
    sent = {z: traffic(case.compile("dp=2", 2, zero=z)) for z in (1, 2, 3)}
    assert sent[1] == {
        ("step", "all_gather"): (1, share),
        ("step", "reduce_scatter"): (1, whole),
    }
    assert sent[2] == {
        ("step", "all_gather"): (1, share),
        ("backward", "reduce_scatter"): (each, whole),
    }
    assert sent[3]["forward", "all_gather"] == (each, share)
    assert sent[3]["backward", "reduce_scatter"] == (each, whole)
    calls, again = sent[3]["backward", "all_gather"]
    assert calls == each - 1 and 0.5 * share < again < share  # no tables, no biases


def test_messages_once_a_step_are_of_bounded_size(monkeypatch):
    case = plain_gpt(layers=2, tied=False)
    largest = max(p.numel() * 4 for p in case.model.parameters())
    monkeypatch.setattr("passes.overlap.BUCKET", largest)
    program = case.compile("dp=2", 2, zero=1)
    calls = {kind: n for (_, kind), (n, _) in traffic(program).items()}
    assert calls["all_gather"] > 3 and calls["reduce_scatter"] > 3
    parts = functions(program)
    assert blocks_at_once(parts["epilogue"], "scatter") > 0
    verify(program, *case).check()


def test_what_is_whole_during_a_step_is_counted():
    case = plain_gpt(layers=2)
    whole = sum(p.numel() * 4 for p in case.model.parameters())
    steps = [case.compile("dp=2", zero=z).stages[0].footprint.step for z in range(4)]
    assert steps == [0, 2 * whole, whole, 0]  # parameters and gradients; parameters


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_is_whole_between_steps(zero):
    case = plain_gpt(layers=1)
    program = case.compile("dp=2", 2, zero=zero)
    wholes = dict(case.model.named_parameters())

    def body(comm: Comm) -> tuple[int, int, int]:
        held = local_parameters(program, comm, wholes)
        executor = Executor(program, comm, held, {})
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
    wholes = dict(case.model.named_parameters())

    def body(comm: Comm) -> tuple[float, float]:
        held = local_parameters(program, comm, wholes)
        executor = Executor(program, comm, held, {})
        loss = executor.evaluate(case.batch)
        assert executor.stages[0].batch == {}
        assert all(p.grad is None for p in held.values())
        return loss.item(), executor.step(case.batch).item()

    for evaluated, trained in run_virtual(program.mesh, 2, body):
        assert evaluated == trained


def elements(tensors) -> int:
    return sum(t.numel() for t in tensors)


# --- real ranks --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "mesh", "microbatches"),
    [
        ("plain", "dp=4", 1),
        ("gpt2", "dp=2,fsdp=2", 2),
        pytest.param("llama", "dp=2,cp=2", 1, marks=pytest.mark.slow),
        pytest.param("plain", "pp=2,fsdp=2", 4, marks=pytest.mark.slow),
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
    assert rest_split(dims, state, "dp", sizes).slots == (((), ("tp", "dp")),)
    assert rest_split(dims, state, "dp", {**sizes, "dp": 5}) == state
