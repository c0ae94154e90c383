"""Published facts, and the models that they are about, captured without weights."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from autopar.models.load import load_model
from autopar.models.meta import parameters_on_meta
from autopar.passes.cost import Exchange
from autopar.passes.price.account import Account, PartCost
from autopar.planner.planner import ShortModel, capture_short
from examples.gpt import GPT, Config

FACTS = Path(__file__).parent / "published"
SAMPLES = 4  # that a model is traced with

Row = dict[str, str]


def read(name: str) -> Iterator[Row]:
    """The rows of a table of facts."""
    with (FACTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


@cache
def gpt(
    hidden: int,
    heads: int,
    layers: int = 6,
    vocab: int = 51200,
    seq: int = 2048,
    attention: str = "spelled",
    precision: str = "model",
) -> ShortModel:
    """A GPT in 16 bits, if that is its own precision. attention: "spelled" out, as in
    Megatron's, with dropout on its weights and after every product; or "fused", without
    any dropout.

    precision: others than "model" keep parameters, gradients and moments in 32 bits.
    """
    dropout = 0.1 if attention == "spelled" else 0.0
    with parameters_on_meta() as finish:
        model = GPT(Config(layers, hidden, heads, seq, vocab, dropout))
    finish(model)
    model = model.bfloat16() if precision == "model" else model
    ids = torch.zeros(SAMPLES, seq, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids.clone()}
    return capture_short(model, batch, _loss, precision=precision)


def _loss(out: tuple[Tensor, None], batch: Mapping[str, Tensor]) -> Tensor:
    """Takes the loss of logits in 32 bits, as Megatron does."""
    logits = out[0].float().flatten(0, 1)
    return functional.cross_entropy(logits, batch["labels"].flatten())


@cache
def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    tied: bool,
) -> ShortModel:
    """nanotron's Llama: 16 bits, sequences of 4096, fused attention."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    spec = "hf:llama?" + ",".join(f"{name}={value}" for name, value in sizes.items())
    model = load_model(spec, device="meta").model.bfloat16()
    ids = torch.zeros(SAMPLES, 4096, dtype=torch.int64)
    return capture_short(model, {"input_ids": ids, "labels": ids.clone()})


def in_turn(accounts: Sequence[Account], tp: int) -> list[Account]:
    """Stages that wait for each message to the next or the one before, as Megatron-LM
    and nanotron have them.

    tp: how many ranks hold the same of a message: each sends a share, and they gather
    it where it arrives (Narayanan 2021, section 4.1).
    """
    whole, last = accounts[0].sent, len(accounts) - 1
    if not whole:
        return list(accounts)
    moved = [Exchange("send", ("pp",), 1.0, whole / tp)]
    if tp > 1:
        moved.append(Exchange("all_gather", ("tp",), 1.0, whole))
    more = PartCost(exchanges=tuple(moved))
    return [
        account + Account(more * (i < last), more * (i > 0), sent=-account.sent)
        for i, account in enumerate(accounts)
    ]
