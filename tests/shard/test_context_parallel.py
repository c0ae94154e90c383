"""cp: the sequence is split everywhere, and attention is the only op that notices."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import (
    WIDTH,
    Block,
    Stack,
    gpt2,
    llama,
    plain_gpt,
    randomize,
    token_batch,
)
from torch import Tensor, nn

from autopar.passes.mesh import usual_split
from autopar.passes.plan import CONTEXT_PARALLEL
from autopar.passes.program import Program

MESHES = [("cp=2", 1), ("cp=4", 2), ("cp=2,tp=2", 2), ("dp=2,cp=2", 2)]
# Those in which rows lie as they come, and those in zigzag.
METHODS = [*CONTEXT_PARALLEL, "gather zigzag", "ring zigzag"]


def options(method: str) -> dict[str, Any]:
    """Fields of a plan."""
    name, _, layout = method.partition(" ")
    split = {**usual_split(), "cp": CONTEXT_PARALLEL[name]}
    return {"split": split, "zigzag": ("cp",) if layout else ()}


@pytest.mark.matrix(quick=2, daily=18)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mesh, microbatches", MESHES)
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_loss_and_gradients_are_the_model_s(build, mesh, microbatches, method) -> None:
    verify(build().double(), mesh, microbatches, method)


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_with_a_padding_mask_and_stages(build, method) -> None:
    verify(build(padded=True).double(), "pp=2,cp=2,tp=2", 2, method)


@pytest.mark.matrix(quick=4)
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_does_not_divide(method) -> None:
    verify(plain_gpt(seq=17).double(), "cp=4", 1, method)


def test_rows_of_which_only_a_weight_s_gradient_is_made() -> None:
    """Nothing before it is trained; attention is spelled out for its dropout."""
    case = plain_gpt(layers=1, dropout=0.2).double()
    for name, p in case.model.named_parameters():
        p.requires_grad_(name.endswith("qkv.weight"))
    case.verify("cp=2", zigzag=("cp",))


class Chunked(Block):
    """Linear attention by chunks of 4 positions, as of Mamba-2 and gated delta rules:
    within a chunk by its scores, and by a sum over all chunks before."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, 4)) for y in self.heads(x))
        states = k.mT @ v
        before = states.cumsum(2) - states
        return self.join((q @ before + (q @ k.mT).tril() @ v).flatten(2, 3))


def chunked(seq: int) -> Case:
    case = Case(randomize(Stack(Chunked, 2)), token_batch(seq=seq), next_token)
    return case.double()


@pytest.mark.parametrize("seq", [16, 12])
def test_positions_that_a_model_takes_apart_are_split_by_whole_chunks(seq) -> None:
    case = chunked(seq)
    case.verify("cp=2,tp=2", 2, zigzag=("cp",))
    assert case.compile("cp=2").remarks == ()


def test_fewer_chunks_than_ranks_are_said() -> None:
    assert chunked(8).compile("cp=4").remarks == (
        "cp splits no matrix product, with 2 seq on 4 ranks: its ranks all compute the "
        "same; cp=2 would split them",
    )


@pytest.mark.slow
def test_dropout_masks_do_not_depend_on_the_split() -> None:
    verify(plain_gpt(dropout=0.2).double(), "cp=2,tp=2", 2, "gather")


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize("method", METHODS)
def test_a_position_table_as_long_as_the_sequence(method) -> None:
    """A parameter along the sequence, which zigzag leaves whole."""
    torch.manual_seed(0)
    case = Case(Positions(), token_batch(seq=12), next_token).double()
    program = case.compile("cp=4", **options(method))
    rests = program.parameters["table"].slots[1]
    assert rests == ((() if "zigzag" in method else ("cp",)),)
    verify(case, "cp=4", 2, method)


class Positions(Stack):
    """A learned table of positions, which is added as it is."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.table = nn.Parameter(torch.randn(1, 12, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def verify(case: Case, mesh: str, microbatches: int, method: str, **more: Any) -> None:
    case.verify(mesh, microbatches, **options(method), **more)


def per_layer(method: str) -> Counter[tuple[str, str]]:
    """Collectives that a layer adds, forward and backward."""
    four, three = (
        count(plain_gpt(layers=layers).compile("cp=2", **options(method)))
        for layers in (4, 3)
    )
    return four - three


def count(program: Program) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for c in program.communication:
        found[c.part, c.kind] += c.calls
    return found


def test_a_layer_gathers_keys_and_values() -> None:
    assert per_layer("gather") == {
        ("forward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 2,
    }


def test_a_ring_shifts_keys_and_values_and_their_gradients() -> None:
    """One shift of keys and values, forward and again backward; and two of gradients,
    the second of which brings them home."""
    assert per_layer("ring zigzag") == {
        ("forward", "shift"): 1,
        ("backward", "shift"): 3,
    }


def test_ulysses_exchanges_queries_keys_values_and_the_result() -> None:
    assert per_layer("ulysses") == {
        ("forward", "all_to_all"): 4,
        ("backward", "all_to_all"): 4,
    }


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("method", METHODS)
def test_activations_of_a_layer_fall_with_the_ranks(method) -> None:
    def layer(ranks: int) -> int:
        four, three = (
            plain_gpt(layers=n, seq=64).compile(f"cp={ranks}", **options(method))
            for n in (4, 3)
        )
        saved = (p.stages[0].footprint.residuals for p in (four, three))
        return next(saved) - next(saved)

    whole, gathers = layer(1), method.startswith("gather")
    keys_and_values = 2 * 8 * 64 * 32 * 4
    for ranks in (2, 4):
        expected = whole / ranks + (keys_and_values if gathers else 0)
        # Ulysses copies what it exchanges.
        close = 0.1 if method == "ulysses" else 0.01
        assert layer(ranks) == pytest.approx(expected, rel=close)
