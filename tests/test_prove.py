"""Plans of any size are proved by small ones: what is kept, what carries over."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import SEQ, VOCAB, tiny
from models import Case
from plans import model_file, small_program
from torch import Tensor, nn

import autopar
import autopar.proof.prove_program as prover
from autopar import held_state
from autopar.checkpoints import checkpoint
from autopar.cli import main
from autopar.models.load import example_batch, load_model
from autopar.passes.capture.trace import trace
from autopar.passes.cost import Costs
from autopar.passes.decode import decode
from autopar.passes.errors import AutoparError
from autopar.passes.graph import Node
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.program import ParameterSpec, Program
from autopar.passes.proof.proof import SMALL, WHOLE, Proof
from autopar.passes.proof.same_specs import find_other_spec
from autopar.passes.proof.shrink_plan import Layers
from autopar.passes.proof.transfer import Sizes, differs
from autopar.passes.stage.emit import emit
from autopar.passes.stage.local_stage import LocalStage
from autopar.plans.store import load_plan, save_plan
from autopar.proof.full_size import check_full_size
from autopar.proof.prove_program import NotProved, check_transfer, prove_program
from autopar.proof.ranks import VerificationFailed
from autopar.proof.small import make_small
from autopar.rank_step import RankStep
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.parameters import gradient_norm, shards
from examples.gpt import Config, build

# Nothing is small enough to be run as it is, and nothing is too large to be refused.
BIG = Config(layers=6, width=48, heads=6, context=40, vocab=64)


@pytest.fixture
def only_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of any size are proved small or not at all."""
    monkeypatch.setattr(prover, "LITTLE", 0)
    monkeypatch.setattr(prover, "MUCH", 0)


def compiled(
    mesh: str, microbatches: int = 2, config: Config = BIG, **options
) -> tuple[nn.Module, dict[str, Tensor], Program]:
    model, batch = build(config, batch=12)
    plan = Plan(Mesh.parse(mesh), microbatches, **options)
    return model, batch, autopar.compile_offline(model, batch, plan, costs=Costs())


def prove(model: nn.Module, batch: dict[str, Tensor], program: Program):
    return prove_program(program, model, batch, trace(model, batch))


# --- the whole way -------------------------------------------------------------------


@pytest.mark.matrix(quick=1)
@pytest.mark.usefixtures("only_small")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,pp=2,tp=2", {}),
        ("dp=4", {"zero": 3}),
        pytest.param("pp=6", {"schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param("tp=4", {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("dp=2,cp=4", {"zero": 2}, marks=pytest.mark.slow),
        pytest.param(
            "pp=2,dp=3", {"zero": 1, "precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "pp=3",
            {"schedule": "interleaved", "stages_per_rank": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_plan_is_proved_small(mesh: str, options: dict) -> None:
    parts = {"dp=4": 1, "pp=3": 3}.get(mesh, 2)
    proof = prove(*compiled(mesh, parts, **options))
    assert proof.size == SMALL and proof.passed
    assert proof.error < 1e-13 and proof.compared > 40
    assert proof.ranks <= Mesh.parse(mesh).size


def test_what_is_little_is_run_as_it_is() -> None:
    model, batch = build(Config(2, 16, 2, 8, 19), batch=4)
    plan = Plan(Mesh.parse("tp=2"), 2)
    program = autopar.compile_offline(model, batch, plan, costs=Costs(), prove=True)
    assert program.proof is not None and program.proof.size == WHOLE
    assert program.proof.error < 1e-13


class Normed(nn.Module):
    """torch takes an eps for the norm that follows from the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).pow(3).sum()


@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_norm_without_an_eps_is_proved_in_another_dtype(precision: str) -> None:
    case = Case(Normed(), {"x": torch.randn(4, 8)})
    program = case.compile("dp=2", precision=precision)
    prove_program(program, *case[:2], case.trace(program.plan.dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_wide_deep_models_on_many_ranks_take_little() -> None:
    spec = (
        "hf:llama?num_hidden_layers=8,hidden_size=8192,intermediate_size=28672,"
        "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256"
    )
    loaded = load_model(spec, device="meta")
    assert loaded.vocab is not None
    batch = example_batch(loaded.vocab, 64, 2048)
    plan = Plan(Mesh.parse("dp=16,pp=2,tp=8"), 4, zero=1)
    program = autopar.compile_offline(loaded.model, batch, plan, costs=Costs())
    proof = prove(loaded.model, batch, program)
    assert proof.size == SMALL and proof.passed and proof.ranks <= 12


# --- what does not carry over is noticed ---------------------------------------------


def changed(text: str, old: str, new: str) -> str:
    """With the last place of `old` changed."""
    before, found, after = text.rpartition(old)
    assert found, old
    return before + new + after


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'tp', 1)", "'tp', 0)"),  # another dim
        ("'tp', 1)", "'tp', 2)"),
        (".transpose(1, 2)", ".transpose(1, 3)"),
        ("reduce_scatter(", "all_to_all("),
        ("+{i}.mlp.up.weight", "+{i - 1}.mlp.up.weight"),  # of another layer
        ("(range(6))", "(range(5))"),
        ("range(6))", "range(3))"),
        ("    for i in range(6)", "    for i in range(5)"),
        (".add_(", ".sub_("),
        ("1e-05", "1e-03"),
        ("    kernels.bias_grad_(", "    id("),
        (", True, ", ", False, "),  # not causal
        (", 3, 8])", ", 3, 9])"),  # no size
    ],
)
def test_a_large_program_that_is_not_as_the_small_one_is_noticed(
    old: str, new: str
) -> None:
    model, batch, program = compiled("tp=2")
    small = make_small(program, model, batch)
    (large,), (few,) = program.modules.values(), small.program.modules.values()
    known = Sizes.of(small.sizes, [(2, 2)]), small.few.layers(0, BIG.layers)
    assert differs(large, few, *known) is None
    assert differs(changed(large, old, new), few, *known) is not None


def test_parameters_for_others_and_other_factors_are_noticed() -> None:
    model, batch, program = compiled("tp=2")
    small = make_small(program, model, batch)
    check_transfer(program, small)
    (stage,) = program.stages
    one, other = "blocks.+1.norm1.weight", "blocks.+2.norm1.weight"
    names = {**stage.names, one: stage.names[other], other: stage.names[one]}
    with pytest.raises(NotProved, match=r"'blocks.2.norm1.weight' does not rest"):
        check_transfer(replace(program, stages=(replace(stage, names=names),)), small)
    name = "blocks.0.attention.qkv.weight"
    spec = program.parameters[name]
    turned = replace(spec, factors=tuple(dim[::-1] for dim in spec.factors))
    assert turned != spec
    with pytest.raises(NotProved, match=f"'{name}' does not rest"):
        parameters = {**program.parameters, name: turned}
        check_transfer(replace(program, parameters=parameters), small)


def test_keys_that_count_layers_from_one_end_with_the_last() -> None:
    def text(end: int) -> str:
        keys = f'f"reshape.{{i}}": ((8,), torch.float32) for i in range(1, {end})'
        return f"PARAMETERS = {{}}\nWHOLE_GRADIENTS = {{\n    **{{{keys}}},\n}}\n"

    known = Sizes.of({8: 8}, [(2, 2)]), Layers("blocks", (0, 1, 2), 4)
    assert differs(text(5), text(4), *known) is None
    assert differs(text(6), text(4), *known) is not None


def test_layers_outside_of_loops_have_their_turn() -> None:
    def text(count: int, outside: int = 1) -> str:
        return f"""PARAMETERS = {{
    **{{
        f"blocks.+{{i}}.{{name}}": row
        for i in range({count})
        for name, row in {{
            "weight": ((8,), torch.float32),
        }}.items()
    }},
}}

def backward(c, p, g, k, b, saved):
    for i in reversed(range(2, {count})):
        kernels.add_(g[f"blocks.+{{i}}.weight"], saved[0])
    kernels.add_(g["blocks.+{outside}.weight"], saved[0])
    kernels.add_(g["blocks.+0.weight"], saved[0])
"""

    known = Sizes.of({8: 8}, [(2, 2)]), Layers("blocks", (0, 1, 2, 3), 8)
    assert differs(text(8), text(4), *known) is None
    found = differs(text(8, outside=5), text(4), *known)  # as far from the last
    assert "in backward: 'g[\"weight\"] of layers [7, 6, 5, 4, 3, 2, 5, 0]'" in str(
        found
    )


@pytest.mark.parametrize(
    ("statement", "large", "small", "wrong"),
    [
        # A gradient that is whole for a step, outside of a loop, is told by its layer.
        ('yield [g["gathered.{}"]]', (4,), (3,), (2,)),
        # A piece of a parameter is named by where it lies.
        ('x = p["blocks.+0.qkv[{}:{}].weight"]', (24, 40), (12, 20), (24, 41)),
        # As many as there are heads, from 1 on.
        ("x = aten.arange.start({}, {}, dtype=torch.int32)", (1, 9), (1, 5), (1, 10)),
    ],
)
def test_numbers_in_texts_are_told_for_what_they_are(
    statement: str,
    large: tuple[int, ...],
    small: tuple[int, ...],
    wrong: tuple[int, ...],
) -> None:
    def text(numbers: tuple[int, ...]) -> str:
        wholes = '{**{f"gathered.{i}": ((8,), torch.float32) for i in range(1, 5)}}'
        head = f"PARAMETERS = {{}}\nWHOLE_GRADIENTS = {wholes}\n"
        return f"{head}\ndef epilogue(c, p):\n    {statement.format(*numbers)}\n"

    # Layers 0 to 4, of which 0, 1, 4 are kept; keys count from 1.
    sizes = Sizes.of({8: 4, 16: 8, 24: 12}, [(2, 2)])
    known = sizes, Layers("blocks", (0, 1, 3, 4), 5)
    assert differs(text(large), text(small), *known) is None
    assert differs(text(wrong), text(small), *known) is not None


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
@pytest.mark.parametrize(
    ("family", "mesh", "options"),
    [
        ("llama", "dp=2", {"zero": 3}),
        ("gpt_neox", "dp=2", {"zero": 3}),
        ("falcon", "tp=2", {}),
        ("bloom", "tp=2", {}),
    ],
)
def test_deep_models_of_others_are_proved_small(
    family: str, mesh: str, options: dict
) -> None:
    """Parallel residuals, pieces of fused weights, positions that count from 1."""
    model = tiny(family, num_hidden_layers=8, num_attention_heads=8, hidden_size=64)
    ids = torch.randint(1, VOCAB, (8, SEQ))
    batch = {"input_ids": ids, "labels": ids}
    plan = Plan(Mesh.parse(mesh), 2, **options)
    program = autopar.compile_offline(model, batch, plan, costs=Costs())
    proof = prove(model, batch, program)
    assert proof.size == SMALL and proof.passed


def test_factors_are_told_by_their_extents_where_small_ones_are_equal() -> None:
    *_, program = compiled("tp=2")
    name, sizes = "blocks.0.attention.qkv.bias", {3: 3, 6: 4, 8: 4}
    spec = program.parameters[name]
    assert spec.factors == ((3, 6, 8),)

    def other(large: tuple[int, ...]) -> str | None:
        few, many = (
            replace(program, parameters={name: replace(spec, factors=(own,))})
            for own in ((3, 4, 4), large)
        )
        return find_other_spec(many, few, sizes, {name: ((3, 6, 8),)})

    assert other((3, 6, 8)) is None
    assert other((3, 8, 6)) == name


def test_a_stage_of_no_layers_stands_for_itself() -> None:
    config = Config(layers=8, width=48, heads=6, context=40, vocab=64)
    options = {"cuts": ("blocks.4", "")}
    model, batch, program = compiled("pp=3", 4, config, **options)
    assert program.stages[-1].layers == ("",)
    small = make_small(program, model, batch)
    assert small.few.kept == ((0, 1, 2), (4, 5, 6), ())
    check_transfer(program, small)


def test_a_layer_that_is_left_out_is_noticed() -> None:
    model, batch, program = compiled("")
    small = make_small(program, model, batch)
    (large,), (few,) = program.modules.values(), small.program.modules.values()
    known = Sizes.of(small.sizes, [(2, 2)]), small.few.layers(0, BIG.layers)
    assert differs(large, few, *known) is None
    for fewer in ("range(5)", "range(3)"):
        wrong = large.replace("range(6)", fewer)
        assert wrong != large
        assert differs(wrong, few, *known) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_a_wrong_pass_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong at every size is found at a small one."""
    model, batch = build(BIG, batch=12)
    monkeypatch.setattr(
        "autopar.passes.emit_modules.emit",
        lambda *arguments: emit(*arguments).replace("1e-05", "1e-02"),
    )
    plan = Plan(Mesh.parse("dp=2"), 2)
    program = autopar.compile_offline(model, batch, plan, costs=Costs())
    with pytest.raises(VerificationFailed, match="more than rounding explains"):
        prove(model, batch, program)


@pytest.mark.slow
@pytest.mark.usefixtures("only_small")
def test_an_extent_may_be_larger_in_the_small_program() -> None:
    """8 is the head's extent and the batch's, of which three microbatches need 9."""
    model, batch = build(BIG, batch=8)
    plan = Plan(Mesh.parse("pp=2"), 4)
    program = autopar.compile_offline(model, batch, plan, costs=Costs(), prove=False)
    assert make_small(program, model, batch).sizes[8] == 9
    assert prove(model, batch, program).size == SMALL


@pytest.mark.usefixtures("only_small")
def test_what_cannot_be_proved_says_so() -> None:
    model, batch, program = compiled("tp=2")
    [(key, text)] = program.modules.items()
    wrong = replace(program, modules={key: changed(text, "'tp', 1)", "'tp', 0)")})
    with pytest.raises(NotProved, match="stage 0 is not what it is with small sizes"):
        prove(model, batch, wrong)


@pytest.mark.usefixtures("only_small")
def test_a_dim_found_by_its_extent_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 positions a rank has 32, as many as a head is wide: at full size alone
    shapes fit both ways."""

    def by_extent(node: Node) -> Node:
        if node.op != "aten.transpose.int":
            return node
        x, a, b = node.args
        last = len(x.shape) - 1 - x.shape[::-1].index(x.shape[b])
        return replace(node, args=(x, a, last))

    def wrong(local: LocalStage, stages: int) -> str:
        forward = tuple(map(by_extent, local.forward))
        return emit(replace(local, forward=forward), stages)

    monkeypatch.setattr("autopar.passes.emit_modules.emit", wrong)
    config = Config(layers=1, width=192, heads=6, context=64, vocab=64)
    model, batch, program = compiled("cp=2", 1, config)
    assert check_full_size(program) == ()
    with pytest.raises(NotProved, match=r"is not what it is with small sizes.*transpo"):
        prove(model, batch, program)


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_noticed() -> None:
    """Uneven shares: ranks run different texts, which must make the same calls."""
    *_, program = compiled("tp=4")
    assert len(program.modules) > 1
    assert check_full_size(program) == ()
    key, text = next(iter(program.modules.items()))
    wrong = {
        **program.modules,
        key: changed(text, "c.all_gather(", "c.reduce_scatter("),
    }
    with pytest.raises(VerificationFailed):
        check_full_size(replace(program, modules=wrong))


def test_masks_and_declarations_that_fit_no_model_are_noticed() -> None:
    config = Config(3, 16, 2, 8, 19, 0.2)
    *_, program = compiled("", 1, config, recompute="full")
    assert check_full_size(program) == ()
    [(key, text)] = program.modules.items()
    for old, new, says in (
        ("3 * i + 2", "3 * i + 1", "draws masks"),  # of what is computed again
        ("3 * i + 3", "4 * i + 3", "draws masks"),
        ("keep_0 = c.dropout_mask(0.2, 0", "keep_0 = c.dropout_mask(0.2, 1", "draws"),
        ('"norm.weight": ((16,)', '"norm.weight": ((17,)', "was compiled for"),
    ):
        modules = {key: changed(text, old, new)}
        with pytest.raises(AutoparError, match=says):
            check_full_size(replace(program, modules=modules))


# --- what follows gradients ----------------------------------------------------------


@pytest.fixture(scope="module")
def tied() -> tuple[nn.Module, dict[str, Tensor], Program]:
    """A weight that two stages hold, shares of optimizers, one that is not trained, one
    that nothing computes with."""
    model, batch = build(Config(2, 8, 2, 4, 11), batch=4)
    model.positions.weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3, 3))
    plan = Plan(Mesh.parse("pp=2,dp=2"), 2, zero=1)
    program = autopar.compile_offline(model, batch, plan, costs=Costs())
    assert program.parameters["tokens.weight"].stages == (0, 1)
    return model, batch, program


def test_weights_after_an_update_and_a_checkpoint_are_proved(tied) -> None:
    proof, (_, _, program) = prove(*tied), tied
    assert proof.passed and proof.size == WHOLE
    # Each weight of each rank; of those that are trained two moments and a count.
    held = [
        4 if spec.trainable else 1
        for rank in range(4)
        for spec in program.parameters.values()
        if set(spec.stages) & set(program.stages_of(rank))
    ]
    assert proof.restored == sum(held) + 4  # and the one that is left
    data = json.loads(json.dumps(proof.to_data()))
    assert decode(Proof, data, "the proof", AutoparError) == proof


def update_a_wrong_share(patch: pytest.MonkeyPatch) -> str:
    def wrong(self: Updates, optimizer: torch.optim.Optimizer) -> None:
        before(self, optimizer)
        for name, p in self.parameters.items():
            if name.endswith("up.bias") and p.grad is not None:
                p.grad = p.grad.flip(0)

    before = Updates.before
    patch.setattr(Updates, "before", wrong)
    return "up.bias (after an update|in a checkpoint)'"


def update_twice_what_is_tied(patch: pytest.MonkeyPatch) -> str:
    def wrong(self: Updates, optimizer: torch.optim.Optimizer) -> None:
        before(self, optimizer)
        p = self.parameters["tokens.weight"]
        if optimizer.param_groups[0]["params"][0] is p:  # this rank's own
            p.data.sub_(p.grad)

    before = Updates.before
    patch.setattr(Updates, "before", wrong)
    return "tokens.weight (after an update|in a checkpoint)'"


def count_replicas_twice(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(gradient_norm, "is_owner", lambda *_: True)
    return "norm"


def give_a_stale_copy(patch: pytest.MonkeyPatch) -> str:
    def start(self: RankStep, *given: Any) -> None:
        begin(self, *given)
        first[id(self)] = take(self)

    begin, take, first = RankStep.start, RankStep.state_dict, dict[int, Any]()
    patch.setattr(RankStep, "start", start)
    patch.setattr(RankStep, "state_dict", lambda self: first[id(self)])
    return "after an update'"


def save_no_moments(patch: pytest.MonkeyPatch) -> str:
    def some(*given: Any) -> dict[Any, Any]:
        found = targets(*given).items()
        return {key: x for key, x in found if key[-1] != "exp_avg_sq"}

    targets = checkpoint.optimizer_targets
    patch.setattr(checkpoint, "optimizer_targets", some)
    return "exp_avg_sq' back from a checkpoint"


def save_moments_of_another_rank(patch: pytest.MonkeyPatch) -> str:
    """Written and read where the other rank's belong: each gets its own back."""

    def wrong(of: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
        def found(*given: Any) -> dict[Any, Any]:
            return {key: moved(key, x) for key, x in of(*given).items()}

        return found

    def moved(key: tuple[Any, ...], x: Any) -> Any:
        if "up.bias" not in key[2] or key[3] == "step":
            return x
        if isinstance(x, list):
            return [moved(key, piece) for piece in x]
        (box,) = x.boxes
        start = (x.shape[0] - box.size[0] - box.start[0],)
        return replace(x, boxes=(replace(box, start=start),))

    for name in ("optimizer_pieces", "optimizer_targets"):
        patch.setattr(checkpoint, name, wrong(getattr(checkpoint, name)))
    return "up.bias in a checkpoint'"


def shift_a_share(patch: pytest.MonkeyPatch) -> str:
    def wrong(spec: ParameterSpec, *place: Any) -> list[tuple[int, int]]:
        found = spans(spec, *place)
        if spec.part.source.endswith("up.bias"):
            found = [(max(0, begin - 1), length) for begin, length in found]
        return found

    spans = shards.spans
    patch.setattr(shards, "spans", wrong)
    return "up.bias' back from a checkpoint"


def own_nothing(patch: pytest.MonkeyPatch) -> str:
    def wrong(*given: Any) -> bool:
        return "up.bias" not in given[-1] and is_owner(*given)

    is_owner = held_state.is_owner
    patch.setattr(held_state, "is_owner", wrong)
    return "missing: .*up.bias"


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(
    "mutant",
    [
        update_a_wrong_share,
        update_twice_what_is_tied,
        count_replicas_twice,
        give_a_stale_copy,
        save_no_moments,
        save_moments_of_another_rank,
        shift_a_share,
        own_nothing,
    ],
)
def test_a_wrong_update_fails_the_proof(
    tied, mutant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = mutant(monkeypatch)
    with pytest.raises(VerificationFailed, match=says):
        prove(*tied)


@pytest.mark.slow
def test_a_rank_that_runs_the_module_of_another_is_noticed() -> None:
    *_, program = compiled("dp=2,tp=4")
    (stage,) = program.stages
    first, last = "dp=1,tp=0", "dp=1,tp=3"
    one, other = stage.modules[first], stage.modules[last]
    assert one != other, "shares are uneven"
    modules = {**stage.modules, first: other, last: one}
    wrong = replace(program, stages=(replace(stage, modules=modules),))
    with pytest.raises(VerificationFailed, match="shares of other shapes"):
        check_full_size(wrong)


# --- where users meet it -------------------------------------------------------------


def test_compiling_proves_and_running_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, plan = model_file(tmp_path), str(tmp_path / "plan")
    assert main(["compile", spec, "--mesh", "tp=2", "-o", plan]) == 0
    assert "proved on all 2 ranks" in capsys.readouterr().out
    proof = load_plan(plan).program.proof
    assert proof is not None and proof.passed
    assert main(["inspect", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["size"] == WHOLE
    alone = str(tmp_path / "alone")
    save_plan(small_program("", 2), alone, spec)
    assert main(["run", alone, "--steps", "1"]) == 2
    assert "--unproved" in capsys.readouterr().err
    assert main(["run", alone, "--steps", "1", "--unproved"]) == 0


def test_a_step_proves_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = build(Config(1, 16, 2, 8, 19), batch=4)
    with caplog.at_level(logging.WARNING, "autopar"):
        step = autopar.compile(model, "", example_inputs=batch)
        assert step.program.proof is not None and not caplog.messages
        unproved = autopar.compile(model, "", example_inputs=batch, prove=False)
    assert unproved.program.proof is None
    assert "nobody proved" in caplog.text
    # A program that was compiled elsewhere, without a proof, is proved here.
    given = autopar.compile(model, "", program=unproved.program, example_inputs=batch)
    assert given.program.proof is not None
