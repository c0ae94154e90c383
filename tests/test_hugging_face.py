"""Language models of Hugging Face as they come: split as they should be, and equal."""

from __future__ import annotations

import re

import pytest
from hf import MORE, padded_batch, precise_loss, tiny
from models import Case, randomize

from passes.program import Program

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Matrices that ranks of tp hold whole, beside tables of positions: routers, what is cut
# unevenly, and what is between neither heads nor hidden units.
WHOLE: dict[str, set[str]] = {
    "bert": {"embeddings.token_type_embeddings", "transform.dense"},
    "deepseek_v2": {"self_attn.kv_a_proj_with_mqa", "mlp.gate"},
    "deepseek_v3": {"self_attn.kv_a_proj_with_mqa", "mlp.gate"},
    "falcon": {"self_attention.query_key_value"},
    "gpt_bigcode": {"attn.c_attn"},
    "phi3": {"self_attn.qkv_proj"},
}


def unsplit(program: Program) -> set[str]:
    """Matrices that are used and of which no rank of tp has a share, by the last names
    of their modules."""
    return {
        ".".join(NUMBER.sub("*", name).split(".")[-3:-1])
        for name, spec in program.parameters.items()
        if spec.stages
        and sum(n > 1 for n in spec.shape) > 1
        and "tp" not in spec.split_axes
        and not re.search("wpe|position", name)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", *MORE])
def test_a_model_is_split_and_equal_to_itself(name: str) -> None:
    one = Case(randomize(tiny(name)), padded_batch(), precise_loss)
    assert unsplit(one.compile("pp=2,tp=2", 3)) == WHOLE.get(name, set())
    # Where a model has norms or a router in float32, so precise is it.
    one.verify("pp=2,tp=2", 3, tolerance=1e-6)
