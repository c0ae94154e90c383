"""Stages: what crosses between them, what lives on several, and where cuts can be."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Block, Stack, gpt2, llama, plain_gpt, randomize
from models import token_batch as tokens
from torch import Tensor, nn

from autopar.passes.errors import StageError
from autopar.passes.program import Program


def cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def texts(program: Program) -> list[str]:
    """The module texts of each stage (of unlike ranks), joined."""
    keys = [sorted(set(stage.modules.values())) for stage in program.stages]
    return ["\n".join(program.modules[key] for key in stage) for stage in keys]


def table(text: str, name: str) -> str:
    (line,) = {x for x in text.splitlines() if x.startswith(f"{name} = ")}
    return line.partition(" = ")[2]


@pytest.mark.slow
def test_exactly_the_hidden_state_crosses_each_way():
    program = gpt2(layers=4, padded=True).compile("pp=4", 2)
    crosses = "[((4, 16, 32), torch.float32)]"
    for stage, text in enumerate(texts(program)):
        assert table(text, "RECEIVES") == (crosses if stage > 0 else "[]")
        assert table(text, "D_RECEIVES") == (crosses if stage > 0 else "[]")
        assert table(text, "SENDS") == (crosses if stage < 3 else "[]")
        assert table(text, "D_SENDS") == (crosses if stage < 3 else "[]")


def test_with_sequence_parallel_each_rank_sends_its_part_of_the_sequence():
    for program, seq in (
        (plain_gpt().compile("pp=2,tp=2", 2), 8),
        (plain_gpt().compile("pp=2,tp=2", 2, sequence_parallel=False), 16),
    ):
        first, _ = texts(program)
        assert table(first, "SENDS") == f"[((4, {seq}, 32), torch.float32)]"


@pytest.mark.slow
def test_equal_stages_share_one_text():
    program = plain_gpt(layers=8).compile("pp=8,tp=2", 2)
    assert len(program.modules) < 8


def test_a_tied_weight_lives_on_each_stage_that_uses_it():
    program = plain_gpt().compile("pp=4")
    assert program.parameters["tokens.weight"].stages == (0, 3)
    assert program.parameters["positions.weight"].stages == (0,)


class Skips(Stack):
    """Values that several stages read: the embedding's output, and each half's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        x = half = self.blocks[1](self.blocks[0](x) + first)
        x = self.blocks[3](self.blocks[2](x) + half) + half
        return self.head(x)


class Blended(Stack):
    """Each block reads what the first one does, so that two values cross."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = block(0.9 * x + 0.2 * first)
        return self.head(x)


@pytest.mark.slow
def test_layers_that_read_the_first_input_too_are_cut_between() -> None:
    case = Case(randomize(Blended()), tokens(), cross_entropy).double()
    balanced = case.compile("pp=2,dp=2", 2)
    for cuts in ((), ("blocks.2",), balanced.plan.cuts):
        first, last = case.compile("pp=2,dp=2", 2, cuts=cuts).stages
        assert first.layers == ("", "blocks.0", "blocks.1")
        assert last.layers == ("blocks.2", "", "blocks.3")
    case.verify("pp=4", 2)


class PerLayer(Stack):
    """Each block is handed its part of what is looked up for all of them at first,
    which is larger than what crosses from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Embedding(VOCAB, 4 * WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, parts = self.embed(input_ids), self.parts(input_ids).tanh()
        for i, block in enumerate(self.blocks):
            x = block(x + parts.unflatten(-1, (4, WIDTH))[:, :, i])
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", "pp=4"])
def test_a_cut_has_a_name_though_the_same_value_is_the_largest_everywhere(mesh) -> None:
    case = Case(randomize(PerLayer()), tokens(), cross_entropy).double()
    program = case.compile(mesh, 2)
    again = case.compile(mesh, 2, cuts=program.plan.cuts)
    assert [s.layers for s in again.stages] == [s.layers for s in program.stages]
    assert again.modules == program.modules
    case.verify(mesh, 2)


class Shared(Stack):
    """The same two blocks, three times over."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i in range(6):
            x = self.blocks[i % 2](x)
        return self.head(x)


class Reaching(Stack):
    """The last stage reads buffers and weights of the first layers by themselves."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * block.scale
        first, second = self.blocks[0], self.blocks[1]
        x = x * first.scale + second.scale
        return self.head(x @ first.up.weight.T @ second.up.weight)


class Colliding(nn.Module):
    """Parameters and batch fields that are named as operations and messages are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.linear, self.add = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mul: Tensor) -> Tensor:
        y = F.embedding(x, self.embedding) * self.linear + self.add * mul[..., None]
        for layer in self.layers:
            y = y + layer(y).relu() * self.linear + self.add * mul[..., None]
        return y @ self.embedding.T


def colliding() -> Case:
    batch = tokens()
    fields = {"x": batch["input_ids"], "labels": batch["labels"]}
    fields["mul"] = torch.rand(batch["labels"].shape)
    return Case(randomize(Colliding()), fields, cross_entropy)


MODELS = {
    "skips": lambda: Case(randomize(Skips()), tokens(), cross_entropy),
    "shared": lambda: Case(randomize(Shared(Block, 2)), tokens(), cross_entropy),
    "reaching": lambda: Case(randomize(Reaching()), tokens(), cross_entropy),
    "colliding": colliding,
}


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,dp=2"])
def test_what_several_stages_use(model, mesh):
    MODELS[model]().double().verify(mesh, 2)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("pp", range(1, 9))
def test_any_number_of_stages(pp):
    """More stages than layers cut inside of layers."""
    case = plain_gpt(layers=2, batch=4).double()
    found = case.compile(f"pp={pp}", 2)
    assert len(found.stages) == pp
    case.verify(f"pp={pp}", 2)


def test_too_many_stages():
    with pytest.raises(StageError, match=r"too few for 64 stages\n  fix  use pp=\d+"):
        plain_gpt(layers=1).compile("pp=64")


@pytest.mark.parametrize("cuts", [("nonsense",), ("ids",)])
def test_an_unknown_cut_lists_the_places(cuts):
    with pytest.raises(StageError, match=f"cuts at {cuts[0]}, .*\n  fix  cut at"):
        plain_gpt(layers=2).compile("pp=2", cuts=cuts)


def test_cuts_out_of_order():
    first, second = plain_gpt().compile("pp=3").plan.cuts
    with pytest.raises(StageError, match=f"cuts at {first}"):
        plain_gpt().compile("pp=3", cuts=(second, first))


def test_a_plan_with_too_few_cuts_is_refused():
    with pytest.raises(StageError, match="has 1 cuts, but 4 stages need 3"):
        plain_gpt().compile("pp=4", cuts=("add",))


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_a_stage_may_be_as_small_as_one_operation(build, ranks) -> None:
    """Cut wherever one value crosses: some stages compute with what they hand on, but
    have no gradient of their own, as that of the largest logit. There is no cut between
    a value and where its gradient is reduced."""
    case = build(layers=1).double()
    with pytest.raises(StageError) as error:
        case.compile(f"pp=99,tp={ranks}", 2, sequence_parallel=False)
    most = int(error.value.fix.split("=")[1].split()[0])
    assert most > 10
    case.verify(f"pp={most},tp={ranks}", 2, sequence_parallel=False)


class Detached(Stack):
    """The second block learns, the first does not."""

    def forward(self, input_ids: Tensor) -> Tensor:
        first, second = self.blocks
        return self.head(second(first(self.embed(input_ids)).detach()))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_that_has_no_gradient_waits_for_none(schedule) -> None:
    """As in the model, where that of its weights is None."""
    case = Case(randomize(Detached(layers=2)), tokens(), cross_entropy).double()
    found = case.verify("pp=2,tp=2", 2, schedule=schedule)
    assert "blocks.0.up.weight" not in found.errors
    assert "blocks.1.up.weight" in found.errors


# --- stages of equal text share a module --------------------------------------------


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("frozen", ["", "up.weight", "embed"])
def test_equal_layers_of_which_one_is_frozen(frozen) -> None:
    """In full, in part, or together with all before it: nothing is sent back then."""
    case = Case(randomize(Stack(layers=4)), tokens(), cross_entropy).double()
    for p in case.model.blocks[1].parameters():
        p.requires_grad_(False)
    for name, p in case.model.named_parameters():
        if frozen and (frozen in name or (frozen == "embed" and "blocks.0" in name)):
            p.requires_grad_(False)
    case.verify("pp=6", 2)
    case.verify("pp=4,dp=2", 2, zero=2, schedule="zb-h1")


@pytest.mark.slow
def test_layers_of_unlike_width() -> None:
    widths = iter([64, 64, 80, 64])

    class Uneven(Block):
        def __init__(self) -> None:
            super().__init__()
            wide = next(widths)
            self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    model = randomize(Stack(Uneven, layers=4))
    case = Case(model, tokens(), cross_entropy).double()
    found = [
        [width for width in (64, 80) if f"({width}, {WIDTH})" in text]
        for text in texts(case.compile("pp=4", 2))
    ]
    assert found == [[64], [64], [80], [64]]
    case.verify("pp=4,dp=2", 2, zero=1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp=2", "pp=2,tp=2"])
def test_what_layers_make_of_the_same_positions_is_made_once(mesh: str) -> None:
    """Each layer of Llama takes its view, and share, of the rotations."""
    few, many = (llama(layers=n).compile(mesh, 2) for n in (4, 8))
    for program in (few, many):
        for text in texts(program):
            setup = text.partition("def setup")[2].partition("def ")[0]
            lines = [line.partition(" = ")[2] for line in setup.splitlines()]
            made = [line.partition("#")[0] for line in lines if line]
            assert len(made) == len(set(made)) > 3
    assert [t.count("\n") for t in texts(few)] == [t.count("\n") for t in texts(many)]
