"""Packed documents: ids of attention, not a mask of all rows and columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Case
from test_windows import Attends, positions
from torch import Tensor, nn

from autopar.cli import main
from autopar.compiler import compile_offline
from autopar.models.load import load_model
from autopar.options import make_plan
from autopar.passes.mesh import Mesh
from autopar.passes.pipeline import compile_program
from autopar.passes.price.cluster import PLAIN
from autopar.passes.shard import layout
from autopar.passes.shard.documents import Run, document_tiles
from autopar.proof import prove_program
from autopar.runtime.comm import ring_attention
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.training.data.token_batches import open_data
from autopar.verify import verify
from examples.benchmarks.live_bytes import LiveBytes

SEQ, WINDOW = 24, 5
FIELDS = ("ids", "documents", "labels")


def runs_of(ids: Sequence[int]) -> tuple[Run, ...]:
    (found,) = ring_attention._runs(torch.tensor([ids]))
    return found


IDS = {
    "one": [7] * 29,
    "each its own": list(range(29)),
    "short and long": [0] * 2 + [1] + [2] * 9 + [3] * 3 + [4] * 14,
    "again": [0] * 6 + [1] * 2 + [0] * 5 + [2] + [1] * 9 + [0] * 6,
}


SHOWN = {
    "all": [True] * 29,
    "padded behind": [True] * 17 + [False] * 12,
    "padded before": [False] * 12 + [True] * 17,
    "here and there": [at % 5 not in (1, 2) for at in range(29)],
    "few": [at in (3, 8, 9, 27) for at in range(29)],
    "none": [False] * 29,
}


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(
    ("kind", "keys_shown"),
    [*((kind, "all") for kind in IDS), *(("one", kind) for kind in SHOWN)]
    + [("again", kind) for kind in SHOWN],
)
def test_tiles_show_each_key_once(
    kind: str,
    keys_shown: str,
    window: int | None,
    parts: int,
    zigzag: bool,
    small_tiles: None,
) -> None:
    ids, there = torch.tensor(IDS[kind]), torch.tensor(SHOWN[keys_shown])
    own = [(at, n) for at, n, seen in runs_of(SHOWN[keys_shown]) if seen]
    for rows, keys in product(layout.layout(29, parts, zigzag), repeat=2):
        r, c = positions(rows), positions(keys)
        seen = torch.zeros(len(r), len(c), dtype=torch.int64)
        for tile in document_tiles(rows, keys, runs_of(IDS[kind]), window, tuple(own)):
            block = seen[tile.row :, tile.key :][: tile.rows, : tile.keys]
            assert block.shape == (tile.rows, tile.keys)
            shown = torch.ones(block.shape, dtype=torch.bool)
            if tile.causal:
                shown = shown.tril()
            if tile.ahead is not None:
                apart = torch.arange(tile.rows)[:, None] - torch.arange(tile.keys)
                apart += tile.ahead
                shown = (apart >= 0) & (apart < (window or 99))
            if tile.at is not None:
                here = ids[tile.at : tile.at + tile.rows]
                theirs = ids[tile.at - (tile.ahead or 0) :][: tile.keys]
                shown = shown & (here[:, None] == theirs)
                shown = shown & there[tile.at - (tile.ahead or 0) :][: tile.keys]
            block += shown
        apart = r[:, None] - c
        want = (apart >= 0) & (apart < (window or 99)) & (ids[r][:, None] == ids[c])
        want &= there[c]
        assert torch.equal(seen, want.long())


class OfDocuments(Attends):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def mask(self, ids: Tensor) -> Tensor:
        """As people write it."""
        at = torch.arange(ids.shape[-1], device=ids.device)
        causal = at[None] <= at[:, None]
        if self.form == "four dims":
            same = ids[:, None, :, None] == ids[:, None, None, :]
            return torch.logical_and(causal, same)
        if self.form == "window":
            near = at[None] > at[:, None] - WINDOW
            return (ids.unsqueeze(1) == ids.unsqueeze(2))[:, None] & causal & near
        if self.form == "shared":
            return torch.ones_like(causal).tril() & (ids[0] == ids[0][:, None])
        return (ids.unsqueeze(2).eq(ids.unsqueeze(1)) & causal).unsqueeze(1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.attend(x, self.mask(ids))


class Packed(nn.Module):
    def __init__(self, form: str, count: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(OfDocuments(form) for _ in range(count))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, documents)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def case(form: str) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(32, (1 if form == "shared" else 4, SEQ))
    documents = (torch.rand(ids.shape) < 0.2).cumsum(1) % 4
    fields = {"ids": ids, "documents": documents, "labels": ids.roll(-1, 1)}
    return Case(Packed(form).double(), fields)


@pytest.mark.matrix(quick=3)
@pytest.mark.parametrize(
    ("form", "mesh", "options"),
    [
        ("three dims", "dp=2", {"zero": 2}),
        ("four dims", "tp=2", {"recompute": "full"}),
        ("four dims", "cp=3", {"context_parallel": "ring"}),
        (
            "three dims",
            "cp=2,dp=2",
            {"context_parallel": "ring", "cp_layout": "zigzag"},
        ),
        ("three dims", "cp=2,tp=2", {"context_parallel": "gather"}),
        ("window", "cp=2", {"context_parallel": "ulysses"}),
        ("window", "cp=2", {"context_parallel": "ring"}),
        ("three dims", "pp=2", {"schedule": "zb-h1", "microbatches": 2}),
        ("shared", "tp=2", {}),
    ],
)
def test_it_is_the_models_mask(
    form: str, mesh: str, options: dict[str, Any], small_tiles: None
) -> None:
    one = case(form)
    program = compile_program(one.trace(), make_plan(mesh, **options), PLAIN)
    text = next(iter(program.modules.values()))
    assert "documents=" in text
    assert not any(op in text for op in ("logical_and", "aten.eq", "arange", "tril"))
    assert ("window=5" in text) == (form == "window")
    verify(program, *one).check()
    verify(program, *one, drawn=False).check()


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "window"), [("dp=2,tp=2", None), ("cp=2", None), ("cp=2", WINDOW)]
)
def test_positions_that_start_anew_keep_documents_apart(
    mesh: str, window: int | None, small_tiles: None
) -> None:
    """As transformers reads them, of models without a cache."""
    ids = torch.randint(64, (4, SEQ))
    places = torch.cat([torch.arange(n) for n in (5, 1, 11, 7)])
    rows = torch.stack([places.roll(5), places, torch.arange(SEQ), places])
    fields = {"input_ids": ids, "labels": ids, "position_ids": rows}
    one = Case(llama("Mistral", use_cache=False, sliding_window=window), fields)
    program = compile_program(one.trace(), make_plan(mesh), PLAIN)
    text = next(iter(program.modules.values()))
    assert "documents=" in text and "aten.eq" not in text
    assert ("window=5" in text) == (window is not None)
    verify(program, *one, drawn=False).check()
    verify(program, *one).check()


def llama(kind: str = "Llama", **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    return model


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,tp=2", {"microbatches": 2}),
        ("cp=3", {"context_parallel": "gather"}),
        ("cp=2", {"context_parallel": "ring"}),
        ("cp=2", {"context_parallel": "ulysses"}),
        ("pp=2", {"schedule": "zb-h1", "microbatches": 2}),
    ],
)
def test_padding_is_left_out_column_by_column(
    mesh: str, options: dict[str, Any], small_tiles: None
) -> None:
    """As collators pad: behind, before, not at all; and as nobody does, in between."""
    ids = torch.randint(64, (4, SEQ))
    at = torch.arange(SEQ)
    mask = torch.stack([at < 17, at >= 9, at >= 0, at % 3 != 1])
    labels = ids.where(mask, -100)
    fields = {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}
    one = Case(llama(), fields)
    program = compile_program(one.trace(), make_plan(mesh, **options), PLAIN)
    text = next(iter(program.modules.values()))
    assert "shown=" in text and "__and__" not in text
    verify(program, *one, drawn=False).check()
    verify(program, *one).check()


TINY = "hidden_size=32,intermediate_size=48,num_hidden_layers=2,vocab_size=64"
LLAMA = f"hf:llama?{TINY},num_attention_heads=4,num_key_value_heads=2,packed=true"


@pytest.mark.slow
def test_a_run_packs_documents_for_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    where, data = str(tmp_path / "plan"), str(tmp_path / "a.bin")
    sizes = ["--mesh", "tp=1", "--global-batch", "4", "--seq", "24"]
    assert main(["compile", LLAMA, *sizes, "-o", where]) == 0
    np.random.default_rng(0).integers(0, 8, 900).astype(np.uint16).tofile(data)
    line = ["run", where, "--json", "--data", data, "--steps", "1", "--lr", "0"]
    capsys.readouterr()
    assert main(line) == 2
    assert "nobody says which token ends a document" in capsys.readouterr().err
    assert main([*line, "--document-end", "3"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    ids, _ = open_data(data, 64).batch(0, 4, 24)
    model = load_model(LLAMA).model
    losses = []
    for sample in ids:  # each document by itself
        ends = [0, *(i + 1 for i in range(23) if sample[i] == 3), 24]
        logits = [
            model(sample[None, a:b]).logits[0] for a, b in pairwise(ends) if b > a
        ]
        losses.append(F.cross_entropy(torch.cat(logits)[:-1], sample[1:]))
    assert row["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert main(["compile", "hf:bloom?packed=true", "--mesh", "tp=1", "-o", where]) == 2
    assert "takes no position_ids" in capsys.readouterr().err


@pytest.mark.slow
def test_a_large_plan_is_proved_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_program, "LITTLE", 0)
    monkeypatch.setattr(prove_program, "MUCH", 0)
    batch = {name: torch.zeros(4, 2048, dtype=torch.int64) for name in FIELDS}
    with torch.device("meta"):
        model = Packed("three dims", count=4)
    plan = make_plan("cp=2", context_parallel="ring")
    compiled = compile_offline(model, batch, plan, cluster=PLAIN, prove=True)
    assert compiled.proof is not None and compiled.proof.size == "small"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "times"), [("documents", 14), ("padding", 14), ("holes", 48)]
)
def test_memory_is_linear_in_the_sequence(kind: str, times: int) -> None:
    """8,192 rows, where a mask of them would have 2^26 elements."""
    seq = 2**13
    q, k, v, dy = torch.randn(4, 1, 1, seq, 8)
    split = ((seq, ()),)
    ids, shown = None, None
    if kind == "documents":
        ids = (torch.rand(1, seq) < 2 / seq**0.5).cumsum(1)
    else:
        shown = torch.arange(seq)[None] < seq // 4
        shown = shown if kind == "padding" else shown & (torch.rand(1, seq) < 0.9)
    scoring = ring_attention.Scoring(None, True, None, None, ids, shown)

    def attend(comm: Comm) -> int:
        with LiveBytes() as live:
            before = live.now
            given = (q, k, v), scoring, split, split, None
            out, lse = ring_attention.forward(comm, *given)
            ring_attention.backward(comm, dy, given[0], (out, lse), *given[1:])
            return live.peak - before

    (most,) = run_virtual(Mesh.parse("dp=1"), 1, attend)
    assert most < times * q.nbytes
