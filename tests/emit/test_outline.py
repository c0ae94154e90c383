"""What repeats is written once, and computes what it does node by node, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import Case, run_all_ranks
from models import gpt2, llama, mixture, plain_gpt
from torch import Tensor, nn

from autopar.models.load import example_batch, load_model
from autopar.passes.emit.emit import emit
from autopar.passes.program import Program


def lines(program: Program) -> int:
    """Counts those of the longest text."""
    return max(len(text.splitlines()) for text in program.modules.values())


def longest(program: Program) -> int:
    """Characters of the longest line, but for numbers of more digits."""
    texts = "\n".join(program.modules.values())
    return max(map(len, re.sub(r"\d+", "#", texts).splitlines()))


PLANS = {
    "tp": ("tp=2", {}),
    "halves": ("pp=2", {"schedule": "zb-h1"}),
    "zero 1": ("dp=2", {"zero": 1}),
    "zero 3": ("dp=2", {"zero": 3, "recompute": "full"}),
    "zero 3, tp": ("dp=2,tp=2", {"zero": 3}),
    "bf16": ("dp=2", {"zero": 2, "precision": "bf16"}),
}


@pytest.mark.matrix(quick=0, daily=4)
@pytest.mark.parametrize("plan", PLANS)
def test_a_text_is_as_long_for_any_number_of_layers(plan: str) -> None:
    mesh, options = PLANS[plan]
    low, high = (
        plain_gpt(layers=n, dropout=0.1).compile(mesh, 2, **options) for n in (8, 14)
    )
    assert lines(low) >= lines(high) < 400
    assert longest(low) >= longest(high), "no line lists the layers"


@pytest.mark.slow
def test_a_stage_whose_first_layer_is_gathered_ahead_lists_no_layers() -> None:
    pytest.importorskip("transformers")

    def program(layers: int) -> Program:
        spec = f"hf:meta-llama/Llama-3.2-1B?num_hidden_layers={layers}"
        loaded = load_model(spec, device="meta")
        batch = example_batch(loaded.vocab or 0, 32, 64)
        return Case(loaded.model, batch).compile("dp=2,pp=2,tp=4", 8, zero=1)

    assert longest(program(8)) >= longest(program(14))


RECOMPUTED = {"precision": "bf16", "recompute": "full"}


@pytest.mark.matrix(quick=0, daily=2)
@pytest.mark.parametrize(
    ("mesh", "zero", "options"),
    [
        ("cp=2,tp=2", 0, {}),
        ("dp=4", 3, {}),
        ("dp=2,tp=2", 3, {}),
        ("cp=2,dp=2", 3, {}),
        ("dp=2,tp=2", 3, RECOMPUTED),
    ],
)
def test_a_rank_of_gpt2_is_a_text_that_a_person_reads(mesh, zero, options) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    case = Case(model, {"input_ids": ids, "labels": ids})
    assert lines(case.compile(mesh, zero=zero, **options)) < 400
    half = case.compile("dp=2,tp=2", zero=3, precision="bf16")
    assert lines(half) < 400
    for text in half.modules.values():  # casts, made once, are read by all layers
        assert len(re.findall(r"for i in (?:reversed\()?range\(12\)", text)) == 4


@pytest.mark.slow
def test_a_mixture_is_a_text_that_a_person_reads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(num_hidden_layers=6, use_cache=False)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    ids = torch.zeros(8, 128, dtype=torch.int64)
    case = Case(model, {"input_ids": ids, "labels": ids})
    for mesh, again in ("dp=2,tp=2", "none"), ("ep=2,tp=2", "full"):
        program = case.compile(mesh, zero=3, precision="bf16", recompute=again)
        assert lines(program) < 600, mesh


def test_what_is_computed_again_is_the_same_function() -> None:
    """Of each layer the backward calls what its forward does, if that is worth it."""
    program = plain_gpt(layers=4).compile("tp=2", 2, recompute="full")
    text = next(iter(program.modules.values()))
    forward, _, backward = text.partition("def forward(")[2].partition("def backward(")
    calls = [set(re.findall(r"= (\w+)\(", half)) for half in (forward, backward)]
    assert calls[0] & calls[1] == {"attention", "attention_norm2"}


class Shadows(nn.Module):
    """Modules that are called as what every emitted module has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.torch = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.b = nn.ModuleList(nn.ModuleDict({"c": mlp(), "k": mlp()}) for _ in "12")
        self.prologue = mlp()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.b:
            x = x + block["c"](x)
            x = x + block["k"](x).tanh()
        return nn.functional.cross_entropy(
            self.torch(self.prologue(x)).flatten(0, 1), ids.flatten()
        )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8))


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_a_function_has_no_name_that_means_something_else(mesh: str) -> None:
    case = Case(Shadows(), {"ids": torch.arange(32).view(4, 8) % 16}, None)
    program = case.double().compile(mesh, 2)
    text = "".join(program.modules.values())
    assert re.search(r"^def c_2\(", text, re.M) and "def torch(" not in text
    case.double().verify(mesh, 2)


LOOP = re.compile(r"^    for i in .*:$", re.MULTILINE)


def both(
    case: Case, mesh: str, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[Program, Program]:
    """As it is, and with a statement a node."""
    program = case.compile(mesh, 2, **options)
    with monkeypatch.context() as patch:
        patch.setattr("autopar.passes.emit_modules.emit", partial(emit, outlined=False))
        return program, case.compile(mesh, 2, **options)


CASES: dict[str, tuple[Callable[[], Case], str, dict[str, object]]] = {
    "some layers again": (
        partial(plain_gpt, layers=6, dropout=0.1),
        "dp=2",
        {"zero": 3, "recompute_layers": {f"blocks.{i}": "full" for i in range(3)}},
    ),
    "halves": (partial(gpt2, layers=5), "pp=2", {"schedule": "zb-h1"}),
    "experts": (partial(mixture, "mixtral", num_hidden_layers=4), "ep=2", {}),
    "once a step": (partial(llama, layers=4), "dp=2", {"zero": 1, "precision": "bf16"}),
    "alternate": (lambda: alternating(8), "tp=2", {"recompute": "full"}),
}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, mesh, options = CASES[name]
    case = build()
    ours, flat = both(case, mesh, monkeypatch, **options)
    repeats = [LOOP.search(next(iter(p.modules.values()))) for p in (ours, flat)]
    assert repeats[0] and not repeats[1]
    loss, grads = run_all_ranks(ours, case.model, case.batch)
    loss_too, grads_too = run_all_ranks(flat, case.model, case.batch)
    assert torch.equal(loss, loss_too) and grads.keys() == grads_too.keys()
    assert all(torch.equal(grads[name], grads_too[name]) for name in grads)


class Layer(nn.Module):
    def __init__(self, scale: float, wide: bool) -> None:
        super().__init__()
        width = 16 if wide else 12
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, 8), nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def alternating(count: int) -> Case:
    torch.manual_seed(0)
    layers = [Layer(0.5, wide=i % 2 == 0) for i in range(count)]
    return Case(Layers(layers), {"ids": torch.randint(12, (4, 6))})


@pytest.mark.slow
def test_layers_that_differ_in_a_number_are_one_function() -> None:
    layers = [Layer(0.1 * (i + 1), wide=True) for i in range(8)]
    case = Case(Layers(layers), {"ids": torch.randint(12, (4, 6))})
    program = case.compile("tp=2")
    (text, *_) = program.modules.values()
    assert "for i in range(1, 8):" in text  # the first one is given shares of no rank
    assert "7: 0.8}[i]" in text and text.count("def down(") == 1
    case.verify("tp=2")


def test_layers_in_turn_repeat_in_pairs() -> None:
    (text, *_) = alternating(8).compile("tp=2").modules.values()
    assert "for i in range(1, 6, 2):" in text


class EveryThird(nn.Module):
    """Of three layers two do the same, and each kind reads a table of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.tables = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        near, far = (torch.cos(table) for table in self.tables)
        for i, layer in enumerate(self.layers):
            y = torch.erf(layer(x) * far) if i % 3 == 2 else torch.tanh(layer(x * near))
            x = x + y
        return x.square().mean()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_layers_of_which_every_third_differs_repeat_in_threes(mesh: str) -> None:
    low, high = (
        Case(EveryThird(n), {"ids": torch.randint(12, (4, 6))}).compile(
            mesh, 2, zero=1, cuts=(f"layers.{n // 2 + 1}",) if "pp" in mesh else ()
        )
        for n in (30, 48)
    )
    assert lines(low) >= lines(high) and longest(low) >= longest(high)


@pytest.mark.slow
def test_layers_that_repeat_in_threes_compute_what_the_model_does() -> None:
    case = Case(EveryThird(14), {"ids": torch.randint(12, (4, 6))})
    case.verify("dp=2,pp=2", 2, zero=1)


class Uneven(nn.Module):
    """The first layers stand apart, every fourth has a parameter more, and the turns do
    not come out even. keeps: these read what the last one of them has made."""

    def __init__(self, count: int, keeps: bool) -> None:
        super().__init__()
        self.embed, self.keeps = nn.Embedding(12, 8), keeps
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, width) for width in self.widths(i))
            for i in range(count)
        )

    @staticmethod
    def widths(i: int) -> list[int]:
        return [8, 24] if i < 2 else [8, 8] if i % 4 == 3 else [8]

    def forward(self, ids: Tensor) -> Tensor:
        x = kept = self.embed(ids)
        for first, *more in self.layers:
            y = torch.tanh(first(x))
            for wide in more:
                if wide.out_features == 24:
                    y = wide(y).sin().unflatten(-1, (3, 8)).sum(-2)
                else:
                    y = wide(torch.erf(y) * kept.cos())
                    kept = y if self.keeps else kept
            x = x + torch.sigmoid(y)
        return x.square().mean()


UNEVEN = [
    ("tp=2", True, {}),
    ("dp=2,pp=2", True, {"zero": 1, "cuts": ("layers.7",)}),
    ("dp=2", False, {"zero": 1, "recompute": "full"}),
]


@pytest.mark.parametrize(("mesh", "keeps", "options"), UNEVEN)
def test_layers_that_are_not_all_alike_are_one_loop(mesh, keeps, options) -> None:
    def case(count: int) -> Case:
        return Case(Uneven(count, keeps), {"ids": torch.randint(12, (4, 6))})

    few, some, many = (case(n).compile(mesh, 2, **options) for n in (18, 22, 30))
    assert lines(few) == lines(some) == lines(many)
    assert longest(few) == longest(many), "no line lists the layers"
    case(14).double().verify(mesh, 2, **options)


def test_the_first_layer_of_a_later_stage_is_of_the_loop() -> None:
    """What it receives stays, so that its sum is written over the other operand."""
    program = plain_gpt(layers=8).compile("pp=2", 2)
    text = program.modules[program.module_of(1, 1)]
    assert "for i in range(4):" in text.partition("def forward")[2]


def test_what_is_made_of_a_parameter_has_its_name_for_a_key() -> None:
    pytest.importorskip("transformers")
    program = gpt2(layers=6).compile("dp=2,tp=2", 2, zero=1)
    for text in program.modules.values():
        forward = text.partition("def forward")[2]
        keys = set(re.findall(r'\bb\[f?"([^"]+)"\]', forward))
        own = {
            "c_attn.{i}",
            "attn_c_proj.{i}",
            "mlp_c_proj.{i}",
            "ln_2_bias.{i}",
            "ln_f",
        }
        assert own <= keys
        assert all(re.fullmatch(r"\w+(\.(\d+|{i}))?", key) for key in keys), keys


class ReadByAll(nn.Module):
    """Each layer reads what is made before the first, as decoders read an encoder."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        memory = torch.tanh(self.memory(x))
        for layer in self.layers:
            x = x + layer(memory).sigmoid() * x
        return x.square().mean()


@pytest.mark.slow
def test_cotangents_of_what_all_layers_read_are_added_as_they_come() -> None:
    few, many = (Case(ReadByAll(n), {"ids": torch.randint(12, (4, 6))}) for n in (5, 9))
    assert lines(few.compile("tp=2")) >= lines(many.compile("tp=2"))
    few.verify("tp=2")


class ReadInTurn(nn.Module):
    """Layers read one of three masks in turn."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        masks = [(ids % n == 0).unsqueeze(-1) for n in (2, 3, 4)]
        for i, layer in enumerate(self.layers):
            x = x + layer(x).tanh().masked_fill(masks[i % 3], 0.0)
        return x.square().mean()


def test_what_layers_read_in_turn_is_no_list_of_layers() -> None:
    case = Case(ReadInTurn(16), {"ids": torch.randint(12, (4, 6))})
    for mesh in ("dp=2", "dp=2,pp=2"):
        for text in case.compile(mesh, 2).modules.values():
            assert "{0: " not in text
            assert text.count("[i % 3]") == 2, "in the forward, and in the backward"
    case.verify("dp=2,pp=2", 2)


# --- loops --------------------------------------------------------------------------
