"""Language models of Hugging Face as they come: split as they should be, and equal."""

from __future__ import annotations

import re

import pytest
import torch
from cases import Case
from hf import MORE, VOCAB, padded_batch, precise_loss, tiny
from models import randomize

from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.program import Program

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Matrices that ranks of tp hold whole, beside tables of positions: routers, the one
# head of keys and of values, what all heads of a mixer share, and what is between
# neither heads nor hidden units.
WHOLE: dict[str, set[str]] = {
    "bert": {"embeddings.token_type_embeddings", "transform.dense"},
    "deepseek_v2": {"self_attn.kv_a_proj_with_mqa[16:20]", "mlp.gate"},
    "deepseek_v3": {"self_attn.kv_a_proj_with_mqa[16:20]", "mlp.gate"},
    "falcon": {f"self_attention.query_key_value[{at}]" for at in ("32:40", "40:48")},
    "gpt_bigcode": {f"attn.c_attn[{at}]" for at in ("32:40", "40:48")},
    "mamba2": {
        *(f"mixer.conv1d[{at}]" for at in ("64:72", "72:80")),
        *(f"mixer.in_proj[{at}]" for at in ("128:136", "136:144")),
    },
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


@pytest.mark.slow
@pytest.mark.parametrize("given", ["nothing", "no cache", "a mask"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert"])
def test_no_mask_of_all_rows_and_columns_is_made(name: str, given: str) -> None:
    """Whatever of their habits people keep: with it, memory is that of seq x seq."""
    changes = {"use_cache": False} if given == "no cache" else {}
    dropout = {"attn_pdrop": 0.0, "attention_dropout": 0.0}
    model = tiny(name, **changes, **dropout, max_position_embeddings=64)
    ids = torch.randint(VOCAB, (2, 48))
    batch = {"input_ids": ids, "labels": ids}
    if given == "a mask":
        batch["attention_mask"] = torch.ones_like(ids)
    graph = normalize(trace(model, batch)).graph
    square = [v for n in graph.nodes for v in n.results if v.shape.count(48) > 1]
    assert not square, [str(v) for v in square]
    attentions = [n for n in graph.nodes if n.op == "autopar.attention"]
    assert len(attentions) == 2
