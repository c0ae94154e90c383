from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_ranks

from autopar.passes.mesh import Mesh, balanced, nested
from autopar.runtime.comm.comm import CommError
from autopar.runtime.comm.host_comm import HostComm
from autopar.runtime.comm.process_groups import ProcessComm
from autopar.runtime.comm.virtual import run_virtual
from autopar.runtime.kernels import positions

AXES = [("dp",), ("tp",), ("dp", "tp")]
EXTENTS = [8, 7, 2]  # even, uneven, and fewer than there may be ranks


def whole(seed, *shape, dtype=torch.float64):
    """The same values on all ranks."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def equal(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got.is_contiguous()


def held(comm, extent, axes):
    """The rows that this rank holds of a dim."""
    return positions(comm.pieces(extent, axes), comm.device)


# Checks: each runs on one rank, on either engine, and compares with what follows from
# the values of all ranks.


def check_all_reduce(comm):
    for axes in AXES:
        ranks = comm.ranks(axes)
        rows = torch.stack([whole(rank, 3, 4) for rank in range(comm.mesh.size)])
        x = rows[comm.rank].clone()
        equal(comm.all_reduce(x, axes), rows[list(ranks)].sum(0))
        equal(comm.all_reduce(x, axes, op="max"), rows[list(ranks)].amax(0))
        equal(comm.all_reduce(x.T, axes), rows[list(ranks)].sum(0).T.contiguous())
        equal(x, rows[comm.rank])  # not in place
        assert comm.all_reduce(x, axes, inplace=True) is x
        equal(x, rows[list(ranks)].sum(0))


def check_reduce_ranks(comm):
    ranks = tuple(range(comm.mesh.size))
    flat = torch.full((5,), comm.rank + 1.0)
    assert comm.reduce_ranks_(flat, ranks) is flat
    equal(flat, torch.full((5,), sum(rank + 1.0 for rank in ranks)))


def check_gather_and_scatter(comm):
    n, i = comm.mesh.axis_size("tp"), comm.coords["tp"]
    for extent in EXTENTS:
        sizes = balanced(extent, n)
        for dim, shape in enumerate([(extent, 3), (2, extent), (1, extent, 3)]):
            dim = min(dim, 1)
            x = whole(0, *shape)
            mine = comm.shard(x, "tp", dim)
            assert mine.shape[dim] == sizes[i]
            equal(comm.all_gather(mine, "tp", dim, extent), x)
            equal(comm.all_gather(mine, "tp", dim - len(shape), extent), x)
            if min(sizes) == max(sizes):
                equal(comm.all_gather(mine, "tp", dim), x)
            rows = torch.stack([whole(r, *shape) for r in comm.ranks(("tp",))])
            total = rows.sum(0).index_select(dim, held(comm, extent, ("tp",)))
            equal(comm.reduce_scatter(rows[i], "tp", dim), total)
            equal(comm.reduce_scatter(rows[i], "tp", dim - len(shape)), total)


def check_gather_and_scatter_over_two_axes(comm):
    """Parts of parts, in the order of the ranks."""
    axes = tuple(axis for axis, _ in comm.mesh.axes)
    ranks = comm.ranks(axes)
    for extent in EXTENTS:
        sizes = nested(extent, tuple(map(comm.mesh.axis_size, axes)))
        for dim, shape in enumerate([(extent, 3), (2, extent)]):
            x = whole(0, *shape)
            mine = x.index_select(dim, held(comm, extent, axes))
            assert mine.shape[dim] == sizes[comm.place(axes)]
            equal(comm.all_gather(mine, axes, dim, extent), x)
            rows = torch.stack([whole(r, *shape) for r in ranks])
            total = rows.sum(0).index_select(dim, held(comm, extent, axes))
            own = rows[comm.place(axes)]
            equal(comm.reduce_scatter(own, axes, dim), total)


def check_several_at_once(comm):
    """As one by one, whatever happens to the tensors meanwhile; shares lie in one piece
    where rows are in zigzag too."""
    n, i = comm.mesh.axis_size("tp"), comm.coords["tp"]
    rows = comm.state.zigzag
    for extent in EXTENTS:
        shapes = [(extent, 3), (2, extent), (extent,), (2, extent, 2)]
        dims = [0, 1, 0, 1]
        for count in (1, 4):
            wholes = [whole(seed, *s) for seed, s in enumerate(shapes[:count])]
            mine = [x * (i + 1) for x in wholes]
            comm.state.zigzag = frozenset()
            shards = [
                comm.shard(x, "tp", d).clone()
                for x, d in zip(wholes, dims, strict=False)
            ]
            want = [
                comm.reduce_scatter(x, "tp", d)
                for x, d in zip(mine, dims, strict=False)
            ]
            comm.state.zigzag = rows
            uneven = extent if extent % n else None
            gathering = comm.start_gather(shards, "tp", dims[:count], [uneven] * count)
            scattering = comm.start_scatter(mine, "tp", dims[:count])
            for x in (*shards, *mine):
                x.zero_()
            for got, x in zip(comm.wait(gathering), wholes, strict=True):
                equal(got, x)
            for got, x in zip(comm.wait(scattering), want, strict=True):
                assert torch.equal(got, x)


def check_who_starts_does_not_wait(comm):
    """The second rank starts only when it hears that the first one has started."""
    comm.state.zigzag = frozenset()
    ranks, i = comm.ranks(("tp",)), comm.coords["tp"]
    x = torch.full((3,), float(comm.rank), dtype=torch.float64)
    if i == 1:
        comm.recv((1,), torch.float32, ranks[0], 9).wait()
    gathering = comm.start_gather([x], "tp", [0])
    scattering = comm.start_scatter([x.repeat(len(ranks))], "tp", [0])
    if i == 0:
        comm.send(torch.ones(1), ranks[1], 9)
    rows = torch.tensor(ranks, dtype=torch.float64)
    equal(comm.wait(scattering)[0], rows.sum().repeat(3))
    equal(comm.wait(gathering)[0], rows.repeat_interleave(3))
    comm.flush()


def check_all_to_all(comm):
    n = comm.mesh.axis_size("tp")
    for rows in EXTENTS:
        for columns in EXTENTS:
            for shape in [(rows, columns), (2, rows, columns), (rows, 2, columns)]:
                split, concat = shape.index(rows), len(shape) - 1
                x = whole(1, *shape)
                before = comm.shard(x, "tp", concat)
                after = comm.shard(x, "tp", split).contiguous()
                equal(comm.all_to_all(before, "tp", split, concat, columns), after)
                if columns % n == 0:
                    equal(comm.all_to_all(before, "tp", split, concat), after)
                back = comm.all_to_all(after, "tp", concat, split, rows)
                equal(back, before.contiguous())


def check_dtypes(comm):
    for dtype in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        x = torch.arange(12).remainder(3).to(dtype)
        got = comm.all_gather(comm.shard(x, "tp", 0), "tp", 0)
        assert got.dtype == dtype
        assert torch.equal(got, x)


def check_nested_shards(comm):
    """dp outside, tp inside: gathered from the inside out."""
    x = whole(2, 11, 3)
    mine = comm.shard(comm.shard(x, "dp", 0), "tp", 0)
    equal(mine, x[held(comm, 11, ("dp", "tp"))])
    outer = balanced(11, comm.mesh.axis_size("dp"))
    inner = outer[comm.coords["dp"]]
    equal(comm.all_gather(comm.all_gather(mine, "tp", 0, inner), "dp", 0, 11), x)


def check_lookup(comm):
    """Looked up in shards and summed: F.embedding and its gradient, as of the whole."""
    for extent in (11, 2):
        for axes in [(), *AXES]:
            ids = torch.arange(12).remainder(extent).view(3, 4)
            weight = whole(3, extent, 5).requires_grad_()
            want = F.embedding(ids, weight)
            dy = whole(4, 3, 4, 5)
            (dweight,) = torch.autograd.grad(want, weight, dy)
            rows = held(comm, extent, axes)
            mine = weight.detach()[rows]
            equal(comm.all_reduce(comm.lookup(mine, ids, extent, axes), axes), want)
            grad = torch.zeros(len(rows), 5, dtype=dy.dtype)
            comm.lookup_grad_(grad, dy, ids, extent, axes)
            equal(grad, dweight[rows])


def check_pick(comm):
    for extent in (11, 2):
        for axes in [(), *AXES]:
            index = torch.arange(12).remainder(extent).view(3, 4)
            ignored = torch.zeros(3, 4, dtype=torch.bool)
            ignored[1, 1:] = True
            x = whole(5, 3, 4, extent).requires_grad_()
            want = x.gather(-1, index[..., None])[..., 0].masked_fill(ignored, 0)
            dy = whole(6, 3, 4)
            (dx,) = torch.autograd.grad(want, x, dy)
            index = index.masked_fill(ignored, -100)
            columns = held(comm, extent, axes)
            mine = x.detach()[..., columns]
            equal(
                comm.all_reduce(comm.pick(mine, index, -100, extent, axes), axes), want
            )
            dx = dx[..., columns].contiguous()
            buffer = torch.ones_like(dx)
            added = comm.pick_backward_add_(buffer, dy, index, extent, axes)
            assert added is buffer
            equal(buffer, dx + 1)


def check_pad(comm):
    """The transpose of a shard: each row in its place, or zero."""
    x = whole(7, 2, 11)
    padded = comm.pad(comm.shard(x, "tp", 1), "tp", 1, 11)
    mine = held(comm, 11, ("tp",))
    equal(padded[:, mine], x[:, mine])
    assert padded.count_nonzero() == 2 * len(mine)


def check_shift(comm):
    """Round a ring, with more than one shift under way."""
    n, here = comm.mesh.axis_size("tp"), comm.coords["tp"]
    if n == 1:
        return
    before = comm.ranks(("tp",))[here - 1]
    first = comm.shift(whole(comm.rank, 3 + comm.rank), "tp", 3 + before)
    second = comm.shift(whole(comm.rank + 50, 2), "tp", 2)
    equal(first.wait(), whole(before, 3 + before))
    equal(second.wait(), whole(before + 50, 2))


def check_messages(comm):
    """Around a ring, twice, with all receives posted first."""
    n = comm.mesh.size
    to, source = (comm.rank + 1) % n, (comm.rank - 1) % n
    receipts = [comm.recv((2, 3), torch.float64, source, tag) for tag in (0, 1)]
    for tag in (0, 1):
        comm.send(whole(10 * comm.rank + tag, 3, 2).T, to, tag)
    for tag in (1, 0):
        equal(receipts[tag].wait(), whole(10 * source + tag, 3, 2).T.contiguous())
        equal(receipts[tag].wait(), whole(10 * source + tag, 3, 2).T.contiguous())
    sent = comm.send(torch.ones(4), to, 2)
    equal(comm.recv((4,), torch.float32, source, 2).wait(), torch.ones(4))
    equal(sent.wait(), torch.ones(4))
    comm.flush()


def check_objects(comm):
    mine = {"rank": comm.rank}
    values = comm.gather_object(mine)
    assert values == [{"rank": rank} for rank in range(comm.mesh.size)]
    mine["rank"] = -1
    assert {"rank": -1} not in comm.gather_object(None) + values
    assert comm.broadcast_object(("from", comm.rank), source=1) == ("from", 1)


def check_refusals(comm):
    x = torch.ones(4, 4)
    with pytest.raises(ValueError, match="same dim 1"):
        comm.all_to_all(x, "tp", 1, -1)
    with pytest.raises(ValueError, match=r"holds \d+, where x has 4"):
        comm.all_gather(x, "tp", 0, 20)
    with pytest.raises(ValueError, match="no op 'mean'"):
        comm.all_reduce(x, ("tp",), op="mean")
    with pytest.raises(ValueError, match="contiguous"):
        comm.reduce_ranks_(x.T, tuple(range(comm.mesh.size)))
    with pytest.raises(ValueError, match="cannot send"):
        comm.send(x, comm.rank, 0)
    with pytest.raises(ValueError, match="cannot recv"):
        comm.recv((2,), x.dtype, comm.mesh.size, 0)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
MESHES = ["tp=2,dp=1", "dp=2,tp=2", "tp=2,dp=2"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("mesh", [*MESHES, "dp=2,tp=3"])
@pytest.mark.parametrize("zigzag", [(), ("tp",), ("dp", "tp")])
def test_virtual_ranks(mesh, zigzag, check):
    def check_one(comm):
        comm.state.zigzag = frozenset(zigzag)
        check(comm)

    run_virtual(Mesh.parse(mesh), 1, check_one)


def check_all(mesh, engine=ProcessComm):
    return check_all_of(engine(Mesh.parse(mesh), groups=AXES))


def check_all_of(comm):
    for zigzag in ((), ("tp",)):
        for check in CHECKS:
            comm.state.zigzag = frozenset(zigzag)
            check(comm)
    return {key: traffic.calls for key, traffic in comm.log.items()}


@pytest.mark.matrix(quick=1)
@pytest.mark.parametrize(
    ("mesh", "engine"),
    # By way of the host, each tensor is copied on the CPU too.
    [*zip(MESHES, [HostComm, ProcessComm, ProcessComm], strict=True)],
)
def test_real_ranks(mesh, engine):
    """Every check on gloo, where the ranks make just the calls that virtual ones do."""
    calls = run_ranks(check_all, Mesh.parse(mesh).size, mesh, engine)
    assert calls == run_virtual(Mesh.parse(mesh), 1, check_all_of)


def some_step(comm, bits):
    x = whole(comm.rank, 8, 5, dtype=torch.float32)
    gathered = comm.all_gather(x, "tp", 1)
    scattered = comm.reduce_scatter(gathered.sin(), "tp", 0)
    transit = comm.start_scatter([gathered.cos(), gathered], "tp", [0, 1])
    bits.extend(part.sum().item() for part in comm.wait(transit))
    moved = comm.all_to_all(scattered.repeat(2, 1), "tp", 0, 1)
    bits.append(comm.all_reduce(moved.exp(), ("tp",), op="max").sum().item())
    return bits


def some_real_step():
    return some_step(ProcessComm(Mesh.parse("tp=4"), groups=[("tp",)]), [])


def test_both_engines_give_the_same_bits():
    want = run_virtual(Mesh.parse("tp=4"), 1, lambda comm: some_step(comm, []))
    assert run_ranks(some_real_step, 4) == want


def refuse_world():
    with pytest.raises(CommError, match="has 4 ranks, but 2 processes run\n  fix  s"):
        ProcessComm(Mesh.parse("tp=4"))
    with pytest.raises(CommError, match=r"ranks \(1, 0\) are not ascending ranks"):
        ProcessComm(Mesh.parse("tp=2"), rank_groups=[(1, 0)])
    comm = ProcessComm(Mesh.parse("tp=2"))
    with pytest.raises(CommError, match=r"no process group for ranks \(0, 1\)\n  fix"):
        comm.all_reduce(torch.ones(1), ("tp",))


def test_a_process_comm_says_what_it_lacks():
    run_ranks(refuse_world, 2)


def test_one_rank_needs_no_process_group():
    comm = ProcessComm(Mesh.parse("tp=1"), groups=AXES)
    x = torch.ones(2, 2)
    assert comm.all_reduce(x, ("tp",)) is not x
    equal(comm.all_gather(x, "tp", 0), x)
    equal(comm.reduce_scatter(x, "cp", 0), x)
    equal(comm.wait(comm.start_gather([x], "tp", [0]))[0], x)
    equal(comm.wait(comm.start_scatter([x], "tp", [0]))[0], x)
    equal(comm.all_to_all(x, "tp", 0, 1), x)
    assert comm.gather_object(3) == [3]
    assert comm.broadcast_object(3) == 3
    assert run_virtual(Mesh(()), 1, lambda comm: comm.gather_object(3)) == [[3]]


def be_late():
    """Rank 0 is late until rank 1 has lost patience."""
    comm = ProcessComm(
        Mesh.parse("pp=2,tp=2"), groups=[("tp",)], timeout=timedelta(seconds=8)
    )
    word = torch.ones(1)
    if comm.rank == 0:
        dist.recv(word, 1)
    if comm.rank == 1:
        with pytest.raises(RuntimeError):
            comm.all_reduce(word, ("tp",))
        dist.send(word, 0)


@pytest.mark.slow
def test_a_late_rank_raises_in_the_others():
    run_ranks(be_late, 4)
