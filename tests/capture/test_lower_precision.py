"""What autocast would do, as casts: a model's own regions, and the lists of ops."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, run_all_ranks
from models import plain_gpt
from torch import Tensor, nn

from autopar.passes.capture.lower_precision import lower_precision
from autopar.passes.capture.trace import trace
from autopar.passes.errors import CaptureError
from autopar.passes.graph import Node, bare
from autopar.passes.ops.op import OPS
from autopar.passes.traced import Traced
from autopar.proof.reference import reference_step
from autopar.verify import verify


class Regions(nn.Module):
    """Parts that ask for another precision than what is around them."""

    def __init__(self, outer: bool | None = None) -> None:
        super().__init__()
        self.low, self.exact = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer = outer

    def forward(self, x: Tensor) -> Tensor:
        if self.outer is None:
            return self.inner(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.outer):
            return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        x = self.low(x)
        with torch.autocast("cpu", enabled=False):
            x = self.exact(x.float())
        return (x.softmax(-1) @ x.transpose(0, 1)).square().mean()


def products(traced: Traced) -> list[torch.dtype]:
    graph = lower_precision(traced).graph
    names = ("aten.linear.default", "aten.matmul.default")
    return [n.out.dtype for n in graph.nodes if n.op in names]


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "outer", "expected"),
    [
        (BF16, None, [BF16, F32, BF16]),
        (None, None, [F32, F32, F32]),
        (None, True, [BF16, F32, BF16]),
        (BF16, False, [F32, F32, F32]),
        (torch.float16, True, [BF16, F32, BF16]),
    ],
)
def test_regions_of_the_models_own_count(precision, outer, expected):
    x = torch.randn(8, 8)
    traced = trace(Regions(outer), {"x": x}, precision=precision)
    assert products(traced) == expected


def test_a_model_with_autocast_of_its_own_needs_no_option():
    torch.manual_seed(0)
    case = Case(Regions(True), {"x": torch.randn(8, 8)})
    program = case.compile("tp=2")
    loss, grads = run_all_ranks(program, *case[:2])
    want_loss, want = reference_step(*case)
    torch.testing.assert_close(loss, want_loss.float(), rtol=0.02, atol=0)
    for name, grad in want.items():
        torch.testing.assert_close(
            grads[name], grad, rtol=0.1, atol=grad.abs().max() / 20
        )


class Mixed(nn.Module):
    """Ops of each list, and explicit casts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Embedding(16, 8), nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.w(self.table(ids)))
        y = x.index_add(0, ids[:2], self.w(x[:2])) * self.w(x).softmax(-1)
        return (
            F.cross_entropy(torch.cat([self.w(y), y]), ids.repeat(2)) + y.pow(2).mean()
        )


@pytest.mark.parametrize("tables", [False, True])
def test_each_op_computes_in_what_its_list_says(tables):
    traced = trace(Mixed(), {"ids": torch.arange(8)}, precision=BF16)
    nodes = lower_precision(traced, tables).graph.nodes
    made: dict[str, list[Any]] = {}
    for node in nodes:
        operands = [v.dtype for v in node.operands if v.dtype.is_floating_point]
        made.setdefault(node.op.split(".")[1], []).append((operands, node.out.dtype))
    assert set(map(str, made["linear"])) == {str(([BF16, BF16], BF16))}
    looked_up = BF16 if tables else F32
    assert made["embedding"] == [([looked_up], looked_up)]
    assert made["layer_norm"] == [([F32] * 3, F32)]
    assert made["softmax"] == [([F32], F32)] and made["pow"] == [([F32], F32)]
    assert made["cross_entropy_loss"] == [([F32], F32)]
    assert made["index_add"] == [([F32, F32], F32)]
    cast = [n.operands[0].name for n in nodes if n.op == "aten.to.dtype"]
    weights = ["table.weight", "w.weight"] if tables else ["w.weight"]
    assert sorted(n for n in cast if "weight" in n) == weights


IMAGES = re.compile(r"_?upsample_.*[23]d.*|grid_sampler")
FUSED = re.compile("_thnn_fused_.*|_scaled_dot_product_flash_attention")


def test_the_lists_have_every_op_that_autocast_has():
    """Those of the header that torch is built from, which the wheel brings along."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")
    lists = {
        name: set(re.findall(r"_\((?:ADD_NS\()?(\w+)", line))
        for name, line in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*)", text)
    }
    wide = lists["FP32"] | lists["FP32_SET_OPT_DTYPE"]
    wide |= lists["DIFFERENT_REDISPATCH_SIGNATURE"]
    assert {"linear", "mm"} <= lists["LOWER_PRECISION_FP"] and {"exp", "norm"} <= wide
    for of_torch, autocast in (
        (lists["LOWER_PRECISION_FP"], "low"),
        (wide, "wide"),
        (lists["PROMOTE"], "equal"),
    ):
        ours = {bare(name) for name, op in OPS.items() if op.autocast == autocast}
        left = {name for name in of_torch - ours if not FUSED.fullmatch(name)}
        assert {name for name in left if not IMAGES.fullmatch(name)} == set()


class Cells(nn.Module):
    """Recurrent cells as gates, and products of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.gate, self.mixer = nn.GRUCell(8, 8), nn.LSTMCell(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).flatten(0, 1)
        x = self.gate(self.w(x), x)
        y, _ = self.mixer(x, (self.w(x), x))
        y = torch.addcmul(y, x, torch.linalg.vecdot(x, y)[:, None])
        return F.cross_entropy(y @ self.table.weight.mT, ids.flatten())


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-stream"])
def test_cells_are_of_the_low_precision(precision):
    case = Case(Cells(), {"ids": torch.arange(12).view(4, 3)})
    verify(case.compile("dp=2,tp=2", precision=precision), *case).check()


class OfOneDtype(nn.Module):
    """Ops that raise under autocast on the CPU, and some also on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x, some = self.table(ids), torch.arange(2)
        y = torch.lerp(x, self.w(x), weight=0.3)
        y = y + torch.lerp(self.w(x), x, torch.sigmoid(y))
        y = y.index_add(-1, some, source=self.w(y)[..., :2])
        y = y.clone().index_add_(-1, some, self.w(y)[..., :2])
        return F.cross_entropy((y @ self.table.weight.mT).flatten(0, 1), ids.flatten())


def test_ops_that_want_one_dtype_are_compared_in_the_widest():
    case = Case(OfOneDtype(), {"ids": torch.arange(12).view(4, 3)})
    verify(case.compile("dp=2,tp=2", precision="bf16"), *case).check()


def test_float64_stays_as_it_is():
    case = plain_gpt(layers=1).double()
    program = case.compile("tp=2", precision="bf16")
    assert "bfloat16" not in "".join(program.modules.values())
    assert any("parameters are f64" in note for note in program.remarks)
    verify(program, *case).check()


@pytest.mark.slow
def test_a_model_in_bfloat16_works_and_is_told_of():
    case = plain_gpt(layers=2)
    case.model.bfloat16()
    for precision in ("model", "bf16"):
        program = case.compile("dp=2,tp=2", 2, precision=precision, zero=3)
        assert any("parameters are bf16" in note for note in program.remarks)
        _, ours = run_all_ranks(program, case.model, case.batch)
        assert {g.dtype for g in ours.values()} == {BF16}
        verify(program, *case, tolerance=0.06).check()


class Shown(nn.Module):
    """Weights that are seen turned, in part, or one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(8, 12))
        self.each = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        q, k = (x @ w for w in self.fused.chunk(2, 1))
        v = torch.bmm(x[:, None], self.each[which])[:, 0]
        return (q @ self.fused.t()[:6]).square().mean() + (k * v).square().mean()


def test_a_weight_is_cast_before_it_is_seen_in_parts():
    fields = {"x": torch.randn(5, 8), "which": torch.tensor([0, 3, 1, 0, 2])}
    traced = trace(Shown(), fields, precision=BF16)
    nodes = lower_precision(traced).graph.nodes
    cast = [n.operands[0].name for n in nodes if n.op == "aten.to.dtype"]
    assert sorted(n for n in cast if n in ("each", "fused")) == ["each", "fused"]
    assert not any(n.startswith(("chunk", "index", "t")) for n in cast)
    looked_up = [n for n in nodes if n.op == "aten.index.Tensor"]
    assert [n.out.dtype for n in looked_up] == [BF16]
    case = Case(Shown(), fields)
    case.verify("tp=2", precision="bf16")


class Solves(nn.Module):
    """An op that is on no list and takes operands of one dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.w(x)
        with torch.autocast("cpu", enabled=False):
            a = a.float()
        return torch.linalg.solve(a, torch.log_softmax(x, -1)).sum()


def test_what_cannot_run_is_an_error_that_shows_the_types():
    traced = trace(Solves(), {"x": torch.eye(4)}, precision=BF16)

    def narrow(node: Node) -> Node:
        """As if the model had not asked for float32."""
        to_low = node.op.startswith("aten.to.")
        return replace(node, args=(node.args[0], BF16)) if to_low else node

    graph = replace(traced.graph, nodes=tuple(map(narrow, traced.graph.nodes)))
    with pytest.raises(CaptureError, match=r"linalg_solve.*bf16\[4,4\], f32\[4,4\]"):
        lower_precision(replace(traced, graph=graph))
