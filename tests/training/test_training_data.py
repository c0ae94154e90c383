"""Runs on data of one's own: what they are told of it, and how they go on."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plans import rows, tiny_plan
from torch.nn import functional as F
from torch.utils.data import Dataset

from autopar.cli import main
from autopar.models.load import ModelError, load_model
from autopar.rank_step import RankStep
from autopar.training.data.fields import check_fields, fields_of
from autopar.training.data.token_batches import open_data
from autopar.training.data.tokens import DataError


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return tiny_plan(tmp_path)


def write(path: Path, seed: int, below: int = 64) -> str:
    draw = np.random.default_rng(seed)
    draw.integers(0, below, 1000).astype(np.uint16).tofile(path)
    return str(path)


def losses(capsys: pytest.CaptureFixture[str]) -> list[float]:
    return [row["loss"] for row in rows(capsys.readouterr().out)]


@pytest.mark.slow
def test_a_run_goes_on_bitwise_with_the_same_data_and_only_so(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.bin", 0), write(tmp_path / "b.bin", 1)
    mixed = ["--data", f"{a}:0.7", "--data", f"{b}:0.3"]
    line = ["run", plan, "--json", "--lr", "0.01"]
    capsys.readouterr()
    assert main([*line, *mixed, "--steps", "6"]) == 0
    whole = losses(capsys)
    saving = ["--save", str(tmp_path / "runs"), "--resume"]
    assert main([*line, *mixed, *saving, "--steps", "3"]) == 0
    assert losses(capsys) == whole[:3]
    other = ["--data", f"{a}:0.6", "--data", f"{b}:0.4"]
    assert main([*line, *other, *saving, "--steps", "6"]) == 2
    told = capsys.readouterr().err
    assert f"was trained on 0.7 {a} and 0.3 {b}" in told and "--other-data" in told
    (tmp_path / "a.bin").rename(tmp_path / "moved.bin")
    moved = ["--data", f"{tmp_path / 'moved.bin'}:7", "--data", f"{b}:3"]
    assert main([*line, *moved, *saving, "--steps", "6"]) == 0
    assert losses(capsys) == whole[3:]
    assert main([*line, "--data", b, *saving, "--steps", "8", "--other-data"]) == 0
    assert len(losses(capsys)) == 2


def test_bad_data_ends_a_run_with_what_and_where(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = write(tmp_path / "a.bin", 0, below=90)
    (tmp_path / "empty.txt").write_text("")
    for data, told in (
        (beyond, "at position"),
        (str(tmp_path / "empty.txt"), "is empty"),
        (str(tmp_path), "is of no kind that is known"),
        ("a.csv", "no data named 'a.csv'"),
    ):
        capsys.readouterr()
        assert main(["run", plan, "--data", data]) == 2
        said = capsys.readouterr()
        assert told in said.err and "fix" in said.err and not said.out


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        return i


# torchdata 0.11 on torch 2.13
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_of_rank_0s_loader_is_that_of_all(workers: int) -> None:
    """So that `step.save(extra=loader.state_dict())` is enough, though rank 0 alone
    writes it."""
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="needs autopar[data]"
    )

    def made(rank: int) -> Any:
        step: Any = SimpleNamespace(data_ranks=2, data_rank=rank)
        sampler = RankStep.sampler(step, Numbers(), seed=3)
        return stateful.StatefulDataLoader(
            Numbers(), 2, sampler=sampler, num_workers=workers
        )

    first = iter(loader := made(0))
    state = [(next(first), loader.state_dict()) for _ in range(3)][-1][1]
    whole = [batch.tolist() for batch in made(1)]
    again = made(1)
    again.load_state_dict(json.loads(json.dumps(state)) if not workers else state)
    assert [batch.tolist() for batch in again] == whole[3:] and len(whole) == 10


# --- documents ---------------------------------------------------------------------

DOCUMENTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 16), nn.Embedding(16, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, ids, labels, document_ids, position_ids):
        x = self.tokens(ids) + self.places(position_ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = document_ids[:, :, None] == document_ids[:, None]
        mask = mask & torch.ones(16, 16, dtype=torch.bool).tril()
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def tiny():
    ids = torch.zeros(4, 16, dtype=torch.int64)
    names = ("ids", "labels", "document_ids", "position_ids")
    return Model(), {name: ids.clone() for name in names}
"""


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of a run is that of each document by itself."""
    (tmp_path / "model.py").write_text(DOCUMENTS)
    plan, spec = str(tmp_path / "plan"), f"{tmp_path / 'model.py'}:tiny"
    assert main(["compile", spec, "--mesh", "tp=1", "-o", plan]) == 0
    text = np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16)
    text[text >= 56] = 7  # so that documents are of a few tokens
    text.tofile(tmp_path / "a.bin")
    line = ["run", plan, "--json", "--steps", "1", "--data", str(tmp_path / "a.bin")]
    capsys.readouterr()
    assert main(line) == 2
    assert "--document-end" in capsys.readouterr().err
    assert main([*line, "--document-end", "64"]) == 2
    assert "a whole number from 0 to 63" in capsys.readouterr().err
    assert main([*line, "--document-end", "7"]) == 0
    (found,) = losses(capsys)
    model = load_model(spec).model
    ids, labels = open_data(str(tmp_path / "a.bin"), 64).batch(0, 4, 16)
    total = 0.0
    for row, following in zip(ids, labels, strict=True):
        ends = [i + 1 for i, token in enumerate(row.tolist()) if token == 7]
        for first, last in pairwise(sorted({0, *ends, 16})):
            own = {"ids": row[None, first:last], "labels": following[None, first:last]}
            # Sixteen rows, as the model's mask has, of which the first ones count.
            size = last - first
            padded = {n: F.pad(x, (0, 16 - size), value=0) for n, x in own.items()}
            padded["labels"][:, size:] = -100
            alone = torch.zeros(1, 16, dtype=torch.int64)
            at = torch.arange(16)[None]
            loss = model(**padded, document_ids=alone, position_ids=at)
            total += loss.item() * size
    assert found == pytest.approx(total / 64, rel=1e-5)


def test_data_that_are_not_there_are_told_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["run", "no.py:model", "--data", "a.bin:0.5", "--data", "stdlib:1"]) == 2
    )
    assert "no data named 'a.bin'" in capsys.readouterr().err


def test_fields_that_do_not_follow_from_tokens() -> None:
    shape = ((4, 16), "int64")
    check_fields({"input_ids": shape, "labels": shape, "position_ids": shape}, None)
    with pytest.raises(ModelError, match="'ids' and 'token_type_ids': which are"):
        check_fields({"ids": shape, "token_type_ids": shape}, 0)
    with pytest.raises(ModelError, match=r"'labels', int64\[4, 15\], but"):
        check_fields({"ids": shape, "labels": ((4, 15), "int64")}, 0)
    with pytest.raises(DataError, match="'doc_ids', but nobody says which token"):
        check_fields({"ids": shape, "doc_ids": shape}, None)
    ids = torch.tensor([[1, 0, 2, 2, 0, 0, 3], [0, 1, 1, 1, 1, 1, 0]])
    made = fields_of({"x": shape, "positions": shape, "doc_ids": shape}, ids, ids, 0)
    assert made["doc_ids"].tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert made["positions"].tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    plain = fields_of({"positions": shape}, ids, ids, None)["positions"]
    assert plain.tolist() == [[*range(7)]] * 2
