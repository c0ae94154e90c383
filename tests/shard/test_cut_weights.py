"""One weight that is cut into pieces of any size: each rank must do the same to what it
shares with others, and all together what one device does.

Proved by training: a step of all ranks with clipped gradients and AdamW, whose state
dict must be that of the untouched model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import Case, on_rank, plan
from models import VOCAB, WIDTH, randomize, token_batch
from torch import Tensor, nn

from autopar.checkpoints.dcp import CheckpointError
from autopar.checkpoints.optimizer_state import Group, join_parts
from autopar.checkpoints.state import remember
from autopar.passes.capture.normalize.normalize import normalize
from autopar.passes.dims.name_dims import name_dims
from autopar.passes.graph import Graph, Node
from autopar.passes.program import Program
from autopar.passes.shard.cut_weights import cut_weights
from autopar.passes.shard.insert_collectives import insert_collectives
from autopar.passes.shard.propagate import propagate
from autopar.rank_step import RankStep
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.parameters.shards import local_shape

CLIP = 0.5
HEAD = 4  # extent of a head


class Fused(nn.Module):
    """A block with one projection of everything: q, k and v of any number of heads, a
    gated product, and columns that each sample's sum goes through."""

    def __init__(
        self, heads: int, kv: int, ffn: int, extra: int, bias: bool, turned: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv = heads, kv
        self.sizes = [heads * HEAD, kv * HEAD, kv * HEAD, ffn, ffn + extra]
        self.ffn, self.turned = ffn, turned
        self.norm = nn.LayerNorm(WIDTH)
        shape = (sum(self.sizes), WIDTH)
        self.weight = nn.Parameter(torch.zeros(*(shape[::-1] if turned else shape)))
        self.bias = nn.Parameter(torch.zeros(shape[0])) if bias else None
        self.out = nn.Linear(heads * HEAD + ffn, WIDTH, bias=bias)
        self.mix = nn.Linear(max(extra, 1), WIDTH)
        randomize(self)

    def project(self, x: Tensor) -> Tensor:
        if not self.turned:
            return F.linear(x, self.weight, self.bias)
        y = x @ self.weight
        return y if self.bias is None else y + self.bias

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v, up, rest = self.project(self.norm(x)).split(self.sizes, -1)
        gate, extra = rest[..., : self.ffn], rest[..., self.ffn :]
        q = q.view(batch, seq, self.heads, HEAD).transpose(1, 2)
        k, v = (t.view(batch, seq, self.kv, HEAD).transpose(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).reshape(batch, seq, -1)
        x = x + self.out(torch.cat([y, up * F.silu(gate)], -1))
        if extra.shape[-1]:
            x = x + self.mix(extra.cumsum(1))
        return x


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Cropped(Model):
    """A vocabulary that is padded, and logits without what pads it."""

    def __init__(self, tied: bool, bias: bool) -> None:
        super().__init__(Fused(4, 1, 12, 0, bias=False, turned=False))
        self.embed = nn.Embedding(VOCAB + 11, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB + 11, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        randomize(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks[0](self.embed(input_ids)))[..., :VOCAB]
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def drawn(seed: int) -> tuple[Case, str, int, dict[str, object]]:
    """A model with weights of pieces drawn at random, and a plan."""
    draw = random.Random(seed)
    kv = draw.choice([1, 1, 2, 3])
    heads = kv * draw.choice([1, 2, 3, 4])
    torch.manual_seed(seed)
    block = Fused(
        heads,
        kv,
        ffn=draw.choice([5, 6, 12, heads * HEAD]),
        extra=draw.choice([0, 1, 3, 8]),
        bias=draw.random() < 0.5,
        turned=draw.random() < 0.3,
    )
    case = Case(Model(block), token_batch(batch=4, seq=6)).double()
    zero = draw.choice([0, 0, 1, 2, 3])
    mesh = f"tp={draw.choice([2, 3, 4])}"
    if zero or draw.random() < 0.2:
        mesh = f"dp=2,{mesh}"
    options = {"zero": zero, "sequence_parallel": draw.random() < 0.3}
    return case, mesh, draw.choice([1, 2]), options


def step_on(comm: Comm, program: Program, model: nn.Module) -> RankStep:
    """The step of one rank of a virtual mesh."""
    step = RankStep(comm.device)
    step.start(on_rank(program, comm, model), *remember(model, program, {}))
    return step


def check_training(program: Program, case: Case, tolerance: float = 1e-9) -> None:
    """Loss, clip norm and all weights after a step are those of one device."""

    def body(comm: Comm) -> SimpleNamespace:
        step = step_on(comm, program, case.model)
        optimizer = torch.optim.AdamW(step.parameters(), lr=0.01)
        loss, norms = step(**case.batch), step.gradient_norms()
        norm = step.clip_grad_norm_(CLIP)
        optimizer.step()
        state = step.state_dict()
        return SimpleNamespace(loss=loss, norm=norm, norms=norms, state=state)

    ranks = run_virtual(program.mesh, program.plan.microbatches, body)
    whole, loss, norm, norms = trained(case)
    for found in ranks:
        assert found.loss.item() == pytest.approx(loss, rel=tolerance)
        assert found.norm.item() == pytest.approx(norm, rel=tolerance)
        assert found.norms.keys() == norms.keys()
        for name, each in found.norms.items():
            torch.testing.assert_close(
                each, norms[name], rtol=tolerance, atol=tolerance
            )
        for name, want in whole.items():
            torch.testing.assert_close(
                found.state[name], want, rtol=tolerance, atol=tolerance
            )


def trained(
    case: Case,
) -> tuple[Mapping[str, Tensor], float, float, Mapping[str, Tensor]]:
    """The state dict after the same step on one device, the loss, the norm, and those
    of each parameter's gradient."""
    model = case.model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = model(**case.batch)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    norms = {n: grad.norm() for n, grad in grads.items() if grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    after = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(before)
    model.zero_grad()
    return after, loss.item(), norm.item(), norms


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize("seed", [100, 114])
def test_ranks_train_as_one_device_does(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(101, 114))
def test_more_ranks_train_as_one_device_does(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    case, mesh, microbatches, options = drawn(seed)
    case.verify(mesh, microbatches, **options)
    check_training(case.compile(mesh, microbatches, **options), case)


CROPPED = [
    (False, False, "tp=2", {}),
    pytest.param(False, True, "pp=2,tp=2", {}, marks=pytest.mark.slow),
    pytest.param(False, True, "dp=2,tp=3", {"zero": 3}, marks=pytest.mark.slow),
    pytest.param(False, True, "tp=1", {}, marks=pytest.mark.slow),
    pytest.param(True, False, "tp=2", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tied", "bias", "mesh", "options"), CROPPED)
def test_a_padded_vocabulary_is_split_and_its_padding_trained(
    tied, bias, mesh, options
) -> None:
    """With decay: rows that only pad have a gradient of 0, and shrink."""
    case = Case(Cropped(tied, bias), token_batch(batch=4, seq=6)).double()
    program = case.compile(mesh, 2, **options)
    whole = {n for n, s in program.parameters.items() if "tp" not in s.split_axes}
    padding = set() if tied else {"head[101:112].weight"}
    if mesh != "tp=1":
        heads = {n for n in whole if n.startswith("head") and n.endswith("weight")}
        assert heads == padding
    case.verify(mesh, 2, **options)
    check_training(program, case)


def test_what_fits_not_together_is_no_lowered_graph() -> None:
    """Pieces of one weight cannot be pending on some of them, and whole on others."""
    case, *_ = drawn(100)
    named = name_dims(normalize(case.trace()))
    lowered = insert_collectives(propagate(named, plan("tp=2")))
    cut = next(n for n in lowered.graph.nodes if "split" in n.op and len(n.results) > 2)
    piece = cut.results[0].name
    state = lowered.shardings[piece]
    changed = state.with_varying(frozenset({"tp"}) - state.varying)
    with pytest.raises(AssertionError, match="on axis 'tp'"):
        replace(lowered, shardings={**lowered.shardings, piece: changed}).verify()


@pytest.mark.parametrize(("kv", "share"), [(1, 0.54), (2, 0.5)])
def test_a_rank_holds_its_share_of_each_piece(kv: int, share: float) -> None:
    """Of one head of keys and values there is no half."""
    block = Fused(heads=8, kv=kv, ffn=32, extra=0, bias=False, turned=False)
    program = Case(Model(block), token_batch(batch=4, seq=6)).compile("tp=2")
    first = program.mesh.coords(0)
    specs = program.parameters.values()
    specs = [s for s in specs if s.part.source == "blocks.0.weight"]
    held = sum(prod(local_shape(s, program.mesh, first)) for s in specs)
    assert held / block.weight.numel() == pytest.approx(share, abs=0.01)


class Packed(nn.Module):
    """Torch's own cross attention, whose weight is cut by rows: no dim is named."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.cumsum(1)
        return x + self.attn(x, seen, seen, need_weights=False)[0]


def test_a_weight_may_be_cut_along_the_usual_dim() -> None:
    case = Case(randomize(Model(Packed())), token_batch(batch=4, seq=6))
    case.double().verify("tp=2")


def test_pieces_of_a_weight_go_into_one_group_of_an_optimizer() -> None:
    groups = [Group(("w[0:4]",), {}), Group(("w[4:6]", "b"), {})]
    sources = {"w[0:4]": "w", "w[4:6]": "w", "b": "b"}
    with pytest.raises(CheckpointError, match="'w' are in the optimizer's groups 0"):
        join_parts(groups, sources)
    (group,) = join_parts([Group(("w[0:4]", "w[4:6]", "b"), {})], sources)
    assert group.names == ("w", "b")


def test_who_reads_what_is_asked_once_for_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the time for it grows as the square of the number of layers."""
    torch.manual_seed(0)
    blocks = (Fused(4, 1, 12, 0, bias=False, turned=False) for _ in range(3))
    case = Case(Model(*blocks), token_batch(batch=4, seq=6))
    sharded = propagate(name_dims(normalize(case.trace())), plan("tp=2"))
    asked: list[Graph] = []

    def consumers(graph: Graph) -> dict[str, list[Node]]:
        asked.append(graph)
        return find_consumers(graph)

    find_consumers = Graph.consumers
    monkeypatch.setattr(Graph, "consumers", consumers)
    cut = cut_weights(sharded)
    assert len(cut.graph.params) > len(sharded.graph.params) + 3
    assert len(asked) == len({*map(id, asked)}) == 2  # and once with the pieces
