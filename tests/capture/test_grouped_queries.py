"""Queries that share keys and values: these are moved before they are copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, on_rank
from models import llama
from torch import Tensor, nn

from autopar.machine.hardware import cluster_of
from autopar.options import make_plan
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.capture.trace import trace
from autopar.passes.graph import Node, Value
from autopar.passes.mesh import Mesh, usual_split
from autopar.passes.ops.op import OPS
from autopar.passes.pipeline import compile_program
from autopar.passes.plan import CONTEXT_PARALLEL, PlanError
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import ParameterSpec
from autopar.passes.search.candidates import meshes
from autopar.planner.planner import (
    ShortModel,
    find_plans,
    make_space,
    open_ops,
    plan_of,
)
from autopar.planner.request import PlanRequest
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.kernels.sdpa import attention, attention_backward
from autopar.verify import verify
from examples.benchmarks.live_bytes import LiveBytes

GROUPS, SHARED = 2, 3  # heads of keys, and of queries for each
BATCH, SEQ, WIDTH = 2, 4, 5


# --- one spelling --------------------------------------------------------------------


class Body(nn.Module):
    """Attention of x [2, 6, 4, 5] to keys and values made of 2 heads."""

    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.repeat(x[:, :GROUPS] @ w) for w in (self.w, -self.w))
        return F.scaled_dot_product_attention(x, k, v, is_causal=True).sum()


def expanded(k: Tensor) -> Tensor:
    b, g, t, e = k.shape
    return k[:, :, None].expand(b, g, SHARED, t, e).reshape(b, g * SHARED, t, e)


def interleaved_inside(k: Tensor) -> Tensor:
    return k.transpose(1, 2).repeat_interleave(SHARED, dim=2).transpose(1, 2)


def cast(k: Tensor) -> Tensor:
    return expanded(k.double()).float()


def tiled(k: Tensor) -> Tensor:
    return k.repeat(1, SHARED, 1, 1)


def expanded_outside(k: Tensor) -> Tensor:
    b, g, t, e = k.shape
    return k[:, None].expand(b, SHARED, g, t, e).reshape(b, g * SHARED, t, e)


@pytest.mark.parametrize(
    ("repeat", "heads"),
    [
        (expanded, GROUPS),
        (interleaved_inside, GROUPS),
        (lambda k: k.repeat_interleave(SHARED, 1), GROUPS),
        (cast, GROUPS),
        (tiled, GROUPS * SHARED),  # neighbours differ
        (expanded_outside, GROUPS * SHARED),
    ],
)
def test_attention_reads_each_head_of_keys_once(repeat, heads) -> None:
    x = torch.randn(BATCH, GROUPS * SHARED, SEQ, WIDTH)
    graph = normalize(trace(Body(repeat), {"x": x})).graph
    (node,) = [n for n in graph.nodes if n.op == "autopar.attention"]
    assert [v.shape[1] for v in node.operands] == [GROUPS * SHARED, heads, heads]


# --- what is moved -------------------------------------------------------------------


def options(method: str) -> dict[str, Any]:
    return {"split": {**usual_split(), "cp": CONTEXT_PARALLEL[method]}}


def moved(method: str, kv_heads: int) -> Counter[str]:
    """Bytes that a rank of `cp` logs in a step, of the collectives of one layer."""
    two, one = (logged(method, layers, kv_heads) for layers in (2, 1))
    return two - one


def logged(method: str, layers: int, kv_heads: int) -> Counter[str]:
    case = llama(layers=layers, kv_heads=kv_heads)
    program = case.compile("cp=2", **options(method))

    def body(comm: Comm) -> Counter[str]:
        on_rank(program, comm, case.model).step(case.batch)
        return Counter({kind: t.bytes for (kind, _), t in comm.log.items()})

    return run_virtual(program.mesh, 1, body)[0]


# [batch, one head, a rank's rows, head_dim] in float32.
HEAD = 8 * 8 * 8 * 4


@pytest.mark.matrix(quick=0)
@pytest.mark.parametrize("kv_heads", [2, 4, 1])
def test_a_layer_moves_a_head_of_keys_once(kv_heads) -> None:
    """Of 4 heads of queries; keys and values, there and back."""
    gathered = moved("gather", kv_heads)
    assert gathered["all_gather"] == 2 * kv_heads * HEAD
    assert gathered["reduce_scatter"] == 2 * 2 * kv_heads * HEAD  # of all rows
    # Forward and backward; and in the backward gradients, which go one further.
    assert moved("ring", kv_heads)["shift"] == 2 * kv_heads * HEAD * (1 + 1 + 2)


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_ulysses_exchanges_a_head_of_keys_once(kv_heads) -> None:
    """And all of the queries, and of what comes out."""
    assert moved("ulysses", kv_heads)["all_to_all"] == 2 * 2 * (4 + kv_heads) * HEAD


def spelled_out(case: Case) -> Case:
    """With the products of attention written out, which read keys for each query."""
    case.model.config._attn_implementation = "eager"
    return case


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
def test_what_copies_are_made_of_is_moved(padded) -> None:
    """Of any op that reads copies: the collective goes before the expand."""
    case = spelled_out(llama(layers=2, kv_heads=2, padded=padded)).double()
    program = case.compile("cp=2")
    attends = llama(layers=2, kv_heads=2, padded=padded).double().compile("cp=2")
    assert program.communication == attends.communication
    case.verify("cp=2", 2)


# --- more ranks than heads of keys ---------------------------------------------------


@pytest.mark.matrix(quick=0, daily=5)
@pytest.mark.parametrize(
    ("mesh", "seen", "options"),
    [
        ("tp=4", "tp=2,qp=2", {"padded": True}),
        ("tp=4", "tp=2,qp=2", {"sequence_parallel": False}),
        ("dp=2,tp=4", "dp=2,tp=2,qp=2", {"zero": 3}),
        ("cp=2,tp=4", "cp=2,tp=2,qp=2", {"seq": 17}),
        ("pp=2,tp=4", "pp=2,tp=2,qp=2", {"recompute": "full"}),
        ("tp=3", "qp=3", {"heads": 6}),
        ("tp=6", "tp=3,qp=2", {"heads": 12, "kv_heads": 3}),
    ],
)
def test_heads_of_keys_are_split_and_the_queries_of_each(mesh, seen, options) -> None:
    of_model = {k: options.pop(k) for k in MODEL if k in options}
    case = llama(layers=2, **of_model).double()
    program = case.compile(mesh, 2, **options)
    assert str(program.mesh) == seen
    heads = prod(n for axis, n in program.mesh.axes if axis in ("tp", "qp"))
    q, k = (program.parameters[WEIGHT.format(name)] for name in "qk")
    assert local(q, program.mesh) * heads >= q.shape[0] > local(q, program.mesh)
    assert local(k, program.mesh) * program.mesh.axis_size("tp") == k.shape[0]
    case.verify(mesh, 2, **options)


MODEL = ("padded", "seq", "heads", "kv_heads")
WEIGHT = "model.layers.0.self_attn.{}_proj.weight"


def local(spec: ParameterSpec, mesh: Mesh) -> int:
    """Rows of a parameter that a rank computes with."""
    rows = spec.shape[0]
    for axes in spec.slots[0]:
        rows //= prod(mesh.axis_size(axis) for axis in axes if axis != "dp")
    return rows


@pytest.mark.slow
def test_both_axes_are_gathered_and_scattered_as_one() -> None:
    """As often as if tp were one axis; and keys and values, over qp alone."""

    def calls(layers: int) -> Counter[tuple[str, str, tuple[str, ...]]]:
        program = llama(layers=layers).compile("tp=4")
        return Counter(
            {(c.part, c.kind, c.axes): c.calls for c in program.communication}
        )

    both, shared = ("tp", "qp"), ("qp",)
    assert calls(3) - calls(2) == {
        ("forward", "all_gather", both): 2,
        ("forward", "reduce_scatter", both): 2,
        ("forward", "all_gather", shared): 2,
        ("backward", "all_gather", both): 2,
        ("backward", "reduce_scatter", both): 2,
        ("backward", "reduce_scatter", shared): 2,
    }


@pytest.mark.slow
def test_without_groups_both_axes_split_heads() -> None:
    case = llama(layers=1, kv_heads=4).double()
    slots = case.compile("tp=2,qp=2").parameters[WEIGHT.format("k")].slots
    assert slots == ((("tp", "qp"), ()), ((),))
    case.verify("tp=2,qp=2")


def test_a_note_says_how_an_axis_is_seen() -> None:
    note, _ = llama(layers=1).compile("tp=4").remarks
    assert note.startswith("tp=4 is tp=2,qp=2, as there are 2 kv_heads x 2 q_per_kv")
    assert llama(layers=1).compile("tp=2").remarks == ()


@pytest.mark.slow
def test_a_note_says_what_would_be_split() -> None:
    """Five ranks, of 2 heads of keys for 3 of queries each."""
    (note,) = llama(layers=1, heads=6).compile("tp=5").remarks
    assert "with 2 kv_heads and 3 q_per_kv on 5 ranks along 'seq' only" in note
    assert note.endswith("; tp=3 would split them")


def test_labels_of_an_axis_leave_it_as_it_is() -> None:
    labels = {"tp": {"model.layers.*.mlp.up_proj:linear": "ffn"}}
    assert str(llama(layers=1).compile("tp=4", op_shardings=labels).mesh) == "tp=4"


@cache
def grouped() -> ShortModel:
    """2 heads of keys, of 2 queries each."""
    case = llama(layers=4)
    return case.short()


CLUSTER = cluster_of("4xA100-80GB")


@pytest.mark.slow
def test_the_planner_has_sizes_of_tp_that_groups_divide() -> None:
    space = make_space(grouped(), CLUSTER, 8)
    assert space.sizes["tp"] == (1, 2, 4)
    found = {str(mesh) for mesh in meshes(space)}
    assert {"tp=2,qp=2", "dp=2,tp=2"} <= found and "tp=4" not in found


@pytest.mark.slow
def test_the_planner_prices_what_is_compiled() -> None:
    best = find_plans(grouped(), CLUSTER, 8, Mesh.parse("tp=4")).best[0]
    plan = plan_of(best.candidate, grouped())
    assert str(plan.mesh) == "tp=2,qp=2"
    terms = {"gradients qp", "all_gather qp", "reduce_scatter tp,qp"}
    assert terms <= set(best.parts)
    case = llama(layers=4)
    program = compile_program(case.trace(), plan, PLAIN)
    assert program.mesh == plan.mesh and len(program.remarks) == 1


@pytest.mark.slow
def test_labels_are_found_for_both_axes() -> None:
    sharded = open_ops(grouped(), make_plan("tp=4"), CLUSTER).choose()
    assert set(sharded.plan.op_shardings) == {"tp", "qp"}
    case = llama(layers=4).double()
    verify(compile_program(case.trace(), sharded.plan, PLAIN), *case).check()


def test_a_part_of_a_mesh_has_no_axis_that_shares_keys() -> None:
    with pytest.raises(PlanError, match="share heads of keys") as caught:
        PlanRequest(cluster_of("8xA100-80GB"), Mesh.parse("tp=2,qp=2"))
    assert caught.value.fix.startswith("write tp with the product")


# --- what kernels copy ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_inside_of_kernels_are_predicted(dtype: torch.dtype) -> None:
    """In float32 there are none."""
    q, dy = torch.randn(2, BATCH, GROUPS * SHARED, 64, 32, dtype=dtype)
    k, v = torch.randn(2, BATCH, GROUPS, 64, 32, dtype=dtype)

    def added(run: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], int]:
        with LiveBytes() as live:
            before = live.now
            results = run()
            return results, live.peak - before

    (out, lse), forward = added(lambda: attention(q, k, v, None, True))
    given = (dy, q, k, v, out, lse)
    grads, backward = added(lambda: attention_backward(*given, None, True))
    said = [
        node_workspace("autopar.attention", q, k, v),
        node_workspace("autopar.attention_backward", dy, q, k, v),
    ]
    assert forward == pytest.approx(said[0] + out.nbytes + lse.nbytes, rel=0.01)
    own = sum(x.nbytes for x in grads)
    assert 0.8 * backward < said[1] + own <= 1.25 * backward
    assert bool(said[0]) == (dtype == torch.bfloat16)


def node_workspace(op: str, *operands: Tensor) -> int:
    workspace = OPS[op].workspace
    assert workspace is not None
    values = tuple(Value(f"x{i}", x.shape, x.dtype) for i, x in enumerate(operands))
    return workspace(Node(op, values, {}, ()))
