"""Ring attention: keys and values are passed round, and no rank ever holds them all."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import Case, on_rank
from models import Block, Stack, llama, plain_gpt, token_batch
from processes import run_ranks
from torch import Tensor
from trajectories import check_trajectory

from autopar.cli import main
from autopar.passes.errors import ShardingConflict
from autopar.passes.mesh import Mesh, balanced, usual_split
from autopar.passes.plan import CONTEXT_PARALLEL
from autopar.passes.shard.layout import causal_tiles, extent, layout, within
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.process_groups import ProcessComm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.kernels import positions
from examples.benchmarks.live_bytes import LiveBytes

ROOT = Path(__file__).parents[2]
RING = {"split": {**usual_split(), "cp": CONTEXT_PARALLEL["ring"]}, "zigzag": ("cp",)}


def rows_of(pieces) -> list[int]:
    return [row for begin, length in pieces for row in range(begin, begin + length)]


# --- who holds which rows ----------------------------------------------------------


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_shares_hold_each_row_once(parts, zigzag) -> None:
    for n in range(1, 24):
        found = layout(n, parts, zigzag)
        assert sorted(row for share in found for row in rows_of(share)) == [*range(n)]
        assert tuple(map(extent, found)) == balanced(n, parts)


def test_zigzag_is_a_piece_and_its_mirror_image() -> None:
    assert layout(16, 4, zigzag=True) == (
        ((0, 2), (14, 2)),
        ((2, 2), (12, 2)),
        ((4, 2), (10, 2)),
        ((6, 4),),
    )


@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_are_the_causal_mask(zigzag) -> None:
    """Each entry of it once, for all shares of rows, split further or not."""
    for n, parts, inner in itertools.product((5, 12, 17), (1, 2, 3), (1, 2)):
        held = layout(n, parts, zigzag)
        for share, keys in itertools.product(held, [*held, ((0, n),)]):
            for part in layout(extent(share), inner):
                rows = within(share, part)
                mask = torch.zeros(extent(rows), extent(keys), dtype=torch.int64)
                for tile in causal_tiles(rows, keys):
                    ones = torch.ones(tile.rows, tile.keys, dtype=torch.int64)
                    block = mask.narrow(0, tile.row, tile.rows)
                    block = block.narrow(1, tile.key, tile.keys)
                    block += ones.tril() if tile.causal else ones
                seen = torch.tensor(rows_of(rows))[:, None] >= torch.tensor(
                    rows_of(keys)
                )
                assert torch.equal(mask, seen.long())


def test_zigzag_gives_all_ranks_the_same_work() -> None:
    def work(zigzag: bool) -> list[float]:
        held = layout(1024, 4, zigzag)
        return [
            sum(
                tile.rows * tile.keys * (0.5 if tile.causal else 1.0)
                for keys in held
                for tile in causal_tiles(rows, keys)
            )
            for rows in held
        ]

    assert max(work(zigzag=True)) == min(work(zigzag=True))
    assert max(work(zigzag=False)) == 7 * min(work(zigzag=False))


# --- the attention of one call -----------------------------------------------------


def operands(seq: int, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dy of 4 heads; v has another width than k."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, seq, 8), (2, groups, seq, 8), (2, groups, seq, width)]
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (*shapes, (2, 4, seq, width))
    ]


def masks(kind: str, seq: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """A mask and whether it is causal. Under "padded" some rows attend to nothing;
    "added" is to be added to the scores, as ALiBi's is."""
    if kind == "causal":
        return None, True
    if kind == "full":
        return None, False
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    if kind == "padded":
        return causal & (torch.arange(seq) >= torch.tensor([[[[5]]], [[[0]]]])), False
    distance = torch.arange(seq) - torch.arange(seq)[:, None]
    return (distance * 0.1).to(dtype).masked_fill_(~causal, -1e4), False


@pytest.mark.parametrize("axis", ["cp", None], ids=["ring", "all keys"])
@pytest.mark.parametrize("kind", ["causal", "full", "padded", "added"])
@pytest.mark.parametrize(
    ("seq", "groups", "width", "dtype"),
    [
        (16, 4, 8, torch.float64),
        (17, 2, 8, torch.float32),
        (13, 1, 6, torch.float64),
        (16, 4, 8, torch.bfloat16),
    ],
    ids=str,
)
def test_shares_of_attention_are_those_of_the_whole(
    seq, groups, width, dtype, kind, axis
) -> None:
    q, k, v, dy = operands(seq, groups, width, dtype)
    mask, causal = masks(kind, seq, dtype)
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    added = mask.double() if mask is not None and mask.is_floating_point() else mask
    out = F.scaled_dot_product_attention(
        *wide, attn_mask=added, is_causal=causal, scale=0.4, enable_gqa=True
    )
    want = [out, *torch.autograd.grad(out, wide, dy.double())]
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]

    def body(comm: Comm) -> None:
        comm.state.zigzag = frozenset({"cp"})
        rows = ((seq, ("cp",)),)
        keys = rows if axis else ((seq, ()),)
        mine = positions(comm.pieces(*rows[0]), comm.device)
        held = positions(comm.pieces(*keys[0]), comm.device)
        own = (q[:, :, mine], k[:, :, held], v[:, :, held])
        seen = None if mask is None else mask[..., mine, :]
        scoring = (seen, causal, 0.4, rows, keys, axis)
        got, lse = comm.attention(*own, *scoring)
        grads = comm.attention_backward(dy[:, :, mine], *own, got, lse, *scoring)
        if axis is None:
            grads = (grads[0], *(comm.all_reduce(x, ("cp",)) for x in grads[1:]))
        for found, whole, at in zip(
            (got, *grads), want, (mine, mine, held, held), strict=True
        ):
            assert found.dtype == dtype
            close(found, whole[:, :, at], tolerance)

    run_virtual(Mesh.parse("cp=3"), 1, body)


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def hold_few_keys() -> tuple[float, float]:
    """The most bytes at once of a call forward and backward, beside its operands and
    results, in shares of keys and values."""
    comm = ProcessComm(Mesh.parse("cp=4"), groups=[("cp",)])
    q, dy = torch.randn(2, 1, 2, 1, 64)
    k, v = torch.randn(2, 1, 2, 1024, 64)
    split = (((4, ("cp",)),), ((4096, ("cp",)),), "cp")

    def peak(run):
        with LiveBytes() as live:
            before = live.now
            results = run()
            return results, (live.peak - before) / ((k.numel() + v.numel()) * 4)

    (out, lse), forward = peak(
        lambda: comm.attention(q, k, v, None, False, None, *split)
    )
    _, backward = peak(
        lambda: comm.attention_backward(
            dy, q, k, v, out, lse, None, False, None, *split
        )
    )
    return forward, backward


@pytest.mark.slow
def test_a_ring_holds_the_keys_of_few_ranks() -> None:
    """Forward: those at work and those under way. Backward: their gradients too, which
    are also added up and passed on; and what the kernel finds."""
    for forward, backward in run_ranks(hold_few_keys, 4):
        assert 1.9 < forward < 2.1
        assert 4.9 < backward < 6.1


# --- whole models ------------------------------------------------------------------


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "dp=2,cp=2", "zero": 3},
        {"mesh": "cp=4", "recompute": "full"},
        {"mesh": "cp=2,tp=2", "recompute": "selective"},
        pytest.param({"mesh": "dp=2,cp=2", "zero": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh": "pp=2,cp=2", "schedule": "zb-h1"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_it_goes_with_other_techniques(options) -> None:
    mesh = options.pop("mesh")
    llama(layers=2).double().verify(mesh, 4, **RING, **options)


@pytest.mark.parametrize("mesh", ["cp=2,tp=4", "tp=4,cp=2"])
def test_rows_may_be_split_once_more(mesh) -> None:
    """Three heads are too few for four ranks, which then share out rows of queries."""
    llama(layers=1, heads=3, kv_heads=3).double().verify(mesh, 1, **RING)


@pytest.mark.parametrize("seq", [5, 18])
def test_a_sequence_that_does_not_divide(seq) -> None:
    plain_gpt(layers=2, seq=seq).double().verify("cp=4", 1, **RING)


@pytest.mark.slow
def test_what_is_no_ring_is_refused() -> None:
    """It would quietly gather all keys."""
    for case, what in (
        (plain_gpt(layers=1, dropout=0.1), "no fused attention"),
        (plain_gpt(layers=1, seq=3), "3 rows are too few for 4 ranks"),
        (Case(Stack(Biased, 1), token_batch(), next_token), "bias of its scores"),
    ):
        with pytest.raises(ShardingConflict, match=what) as refused:
            case.compile("cp=4", **RING)
        assert "context_parallel='gather'" in refused.value.fix
        case.double().verify("cp=2", **{**RING, "split": usual_split()})


class Local(Block):
    """Attention within chunks of 4 rows."""

    def attention(self, x: Tensor) -> Tensor:
        parts = (y.unflatten(2, (-1, 4)).transpose(1, 2) for y in self.heads(x))
        q, k, v = (y.flatten(0, 1) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.join(y.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3))


@pytest.mark.parametrize("zigzag", [(), ("cp",)])
def test_attention_within_chunks_needs_no_ring(zigzag) -> None:
    case = Case(Stack(Local, 2), token_batch(), next_token).double()
    case.verify("cp=2", **{**RING, "zigzag": zigzag})


def test_a_ring_beside_chunks_is_refused_for_them() -> None:
    kinds = itertools.cycle((Local, Block))
    case = Case(Stack(lambda: next(kinds)(), 2), token_batch(), next_token).double()
    with pytest.raises(ShardingConflict, match="as some layer, or a loss by chunks,"):
        case.compile("cp=2", **RING)
    case.verify("cp=2", **{**RING, "split": usual_split()})


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attention_in_pieces_is_told_to_be_fused(p) -> None:
    model = Stack(lambda: InPieces(p), 1)
    with pytest.raises(
        ShardingConflict, match="but one in several operations"
    ) as found:
        Case(model, token_batch(), next_token).compile("cp=2", **RING)
    assert found.value.source.endswith("blocks.0")
    way_out = "compute it by F.scaled_dot_product_attention"
    assert found.value.fix.endswith(way_out + (" with dropout_p=0.0" if p else ""))


def next_token(logits: Tensor, batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class InPieces(Block):
    """Scores, their softmax, and rows of values by it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.p)
        return self.join(weights @ v)


class Biased(Block):
    """A bias of scores that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1, 1, 16, 16))

    def attention(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.heads(x), attn_mask=self.bias)
        return self.join(y)


def test_communication_is_what_ranks_do() -> None:
    case = plain_gpt(layers=2)
    program = case.compile("cp=4", 2, **RING)

    def body(comm: Comm) -> tuple[int, int]:
        on_rank(program, comm, case.model).step(case.batch)
        traffic = comm.log["shift", ("cp",)]
        return traffic.calls, traffic.bytes

    said = [c for c in program.communication if c.kind == "shift"]
    assert {c.axes for c in said} == {("cp",)}
    calls, moved = (2 * sum(getattr(c, n) for c in said) for n in ("calls", "bytes"))
    assert run_virtual(program.mesh, 2, body) == [(calls, moved)] * 4


@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.usefixtures("unrolled")
def test_what_a_forward_keeps_is_what_the_footprint_says(mesh) -> None:
    """To the byte: the result is laid out so that nobody has to copy it."""
    case = plain_gpt(layers=3, seq=64)
    program = case.compile(mesh, **RING)

    def body(comm: Comm) -> int:
        executor = on_rank(program, comm, case.model)
        held = executor.parameters
        stage = executor.stages[0]
        forward, kept = stage.module["forward"], []
        outside = {x.data_ptr() for x in (*held.values(), *stage.constants.values())}

        def run(*args):
            found = forward(*args)
            outside.update(x.data_ptr() for x in stage.batch.values())
            storages = {x.untyped_storage() for x in found[-1]}
            sizes = {s.data_ptr(): s.nbytes() for s in storages}
            kept.append(sum(n for at, n in sizes.items() if at not in outside))
            return found

        stage.module["forward"] = run
        executor.step(case.batch)
        return kept[0]

    saved = program.stages[0].footprint.residuals
    assert run_virtual(program.mesh, 1, body) == [saved] * program.mesh.size


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "mesh", "microbatches"), [("llama", "cp=4", 1), ("plain", "cp=2,tp=2", 2)]
)
def test_real_ranks_follow_one_device(model, mesh, microbatches) -> None:
    check_trajectory(model, mesh, microbatches, {"context_parallel": "ring"})


@pytest.mark.slow
def test_inspect_shows_the_ring(tmp_path, capsys) -> None:
    factory = f"{ROOT / 'examples' / 'gpt.py'}:tiny"
    ring = ["--mesh", "cp=4", "--context-parallel", "ring"]
    for how in ("zigzag", "contiguous"):
        plan = tmp_path / how
        assert (
            main(["compile", factory, *ring, "--cp-layout", how, "-o", str(plan)]) == 0
        )
        capsys.readouterr()
        assert main(["inspect", str(plan)]) == 0
        shown = capsys.readouterr().out
        assert ("rows of cp in zigzag" in shown) == (how == "zigzag")
        assert re.search(r"backward +shift +cp", shown)
        assert main(["inspect", str(plan), "--rank", "3"]) == 0
        assert "c.attention_backward(" in capsys.readouterr().out
