"""cp: the sequence is split everywhere, and attention is the only op that notices."""

from collections import Counter

import pytest
from models import Case, gpt2, llama, plain_gpt

from passes.plan import CONTEXT_PARALLEL, SPLIT
from passes.program import Program

MESHES = [("cp=2", 1), ("cp=4", 2), ("cp=2,tp=2", 2), ("dp=2,cp=2", 2)]
METHODS = list(CONTEXT_PARALLEL)


def split(method: str) -> dict[str, tuple[str, ...]]:
    return {**SPLIT, "cp": CONTEXT_PARALLEL[method]}


@pytest.mark.matrix(quick=8)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mesh, microbatches", MESHES)
@pytest.mark.parametrize("build", [plain_gpt, gpt2, llama])
def test_loss_and_gradients_are_the_model_s(build, mesh, microbatches, method) -> None:
    verify(build().double(), mesh, microbatches, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [gpt2, llama])
def test_with_a_padding_mask_and_stages(build, method) -> None:
    verify(build(padded=True).double(), "pp=2,cp=2,tp=2", 2, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_does_not_divide(method) -> None:
    verify(plain_gpt(seq=17).double(), "cp=4", 1, method)


def test_dropout_masks_do_not_depend_on_the_split() -> None:
    verify(plain_gpt(dropout=0.2).double(), "cp=2,tp=2", 2, "gather")


def verify(case: Case, mesh: str, microbatches: int, method: str) -> None:
    case.verify(mesh, microbatches, split=split(method))


def per_layer(method: str) -> Counter[tuple[str, str]]:
    """Collectives that a layer adds, forward and backward."""
    four, three = (
        count(plain_gpt(layers=layers).compile("cp=2", split=split(method)))
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


def test_ulysses_exchanges_queries_keys_values_and_the_result() -> None:
    assert per_layer("ulysses") == {
        ("forward", "all_to_all"): 4,
        ("backward", "all_to_all"): 4,
    }


@pytest.mark.parametrize("method", METHODS)
def test_activations_of_a_layer_fall_with_the_ranks(method) -> None:
    def layer(ranks: int) -> int:
        four, three = (
            plain_gpt(layers=n, seq=64).compile(f"cp={ranks}", split=split(method))
            for n in (4, 3)
        )
        saved = (p.stages[0].footprint.saved for p in (four, three))
        return next(saved) - next(saved)

    whole, half = layer(1), layer(2)
    gathered = 2 * 8 * 64 * 32 * 4 if method == "gather" else 0  # keys and values
    mask = 32 * 64 if method == "gather" else 0
    assert half == pytest.approx(whole / 2 + gathered + mask, rel=0.1)
