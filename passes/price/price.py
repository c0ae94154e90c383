"""The account of a stage, counted on the nodes that a rank would run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..cost import Exchange, flops, join_exchanges, traffic
from ..graph import Node, Value
from ..ops.attention import passed_round, ring_of
from ..ops.collectives import SPEAKS, UNDER_WAY
from ..ops.cotangents import ZEROS
from ..ops.op import op_of
from ..ops.products import of_weight_grad
from ..price.account import Account, Kernels, PartCost
from ..price.attention import attention_share
from ..price.cluster import Device
from ..price.fusion import fused_traffic
from ..price.measured import BETWEEN, BEYOND, MEASURED, SOURCES, TABLE, between
from ..price.price_memory import Sharing, find_experts, with_held
from ..shard.collectives import collective, contributed_bytes
from ..shard.parameter_sharding import find_casts
from ..stage.local_stage import LocalStage


def price(
    local: LocalStage,
    device: Device,
    sharing: Sharing | None = None,
    offload: bool = False,
) -> Account:
    """The account of one rank's stage. sharing: for what it would take and have alive
    if ranks of dp held shares of it, see `passes.price.share`. offload: the optimizer's
    state is not on the device."""
    account = compute(local, device)
    if sharing:
        account = _with_made(account, sharing, device)
    return with_held(account, local, sharing, offload)


def _with_made(account: Account, sharing: Sharing, device: Device) -> Account:
    """Adds what a backward costs in addition where it makes whole gradients."""
    local, made, *_ = sharing
    experts = {made[name].name for name in find_experts(local) & made.keys()}
    halves = []
    parts = account.backward, account.weight
    for part, (nodes, ends) in zip(parts, _backward(local), strict=True):
        more = _kernels(compute_part(nodes, device, {v.name for v in ends}))
        zeros = [n for n in nodes if n.op == ZEROS and n.out.name in experts]
        own = _kernels(compute_part(zeros, device))
        halves.append(part.changed(made=more - _kernels(part), made_of_experts=own))
    return account.with_parts(account.forward, *halves)


def _kernels(part: PartCost) -> Kernels:
    """The kernels of a part: launches, bytes, FLOPs and known seconds."""
    known = part.measured + part.between + part.beyond
    return Kernels(part.launches, part.moved, part.work, known)


def compute(local: LocalStage, device: Device) -> Account:
    """The account of a rank's stage: computing and traffic, without what it holds."""
    ends = [*local.residuals, *local.ends]
    parts: tuple[tuple[Sequence[Node], Sequence[Value]], ...] = (
        (local.forward, ends),
        *_backward(local),
        ((*local.prologue, *local.epilogue), []),
    )
    trained = [v for v in local.params if v.name in local.grads and device.ops.update]
    update = sum(between(device.ops.update, v.bytes)[0] for v in trained)
    made = find_casts(local.prologue, local.params)
    casts = [n for n in local.prologue if any(v.name in made for v in n.results)]
    return Account(update=update, casts=compute_part(casts, device)).with_parts(
        *(compute_part(ns, device, {v.name for v in out}) for ns, out in parts)
    )


def _backward(local: LocalStage) -> list[tuple[Sequence[Node], Sequence[Value]]]:
    """The nodes of both halves, and the values that are read after them."""
    halves = [v for v in (*local.d_receives, *local.weight_residuals) if v is not None]
    return [(local.backward, halves), (local.weight_half or (), [])]


def compute_part(
    nodes: Sequence[Node], device: Device, live_out: Collection[str] = ()
) -> PartCost:
    """The costs of some nodes of a rank. live_out: values that live on."""
    known = dict.fromkeys(SOURCES, 0.0)
    work = attention = 0.0
    launches = bytes_moved = operations = 0
    exchanges: list[Exchange] = []
    beside: list[Exchange] = []
    moves = _moves(nodes, live_out, device)
    for node, (moved, begins) in zip(nodes, moves, strict=True):
        if collective_kind := collective(node):
            there = beside if node.op in UNDER_WAY else exchanges
            there.append(Exchange(*collective_kind, 1.0, float(_whole(node))))
        elif node.op not in SPEAKS:
            seconds, how = device.ops.seconds(node)
            own = flops(node)
            operations += own
            if how != TABLE:
                known[how] += seconds
            else:
                at_peak = own / _peak(node, device) if moved else 0.0
                if share := attention_share(node, device.attention):
                    attention += at_peak / share
                else:
                    work += at_peak
                launches += begins
                bytes_moved += moved
        if ring := ring_of(node):
            for _, calls, passed in passed_round(node):
                sent = Exchange("send", (ring,), float(calls), float(passed))
                exchanges.append(sent)
    cost = PartCost(
        measured=known[MEASURED],
        between=known[BETWEEN],
        beyond=known[BEYOND],
        launches=launches,
        moved=bytes_moved,
        work=work,
        attention=attention,
        flops=operations,
        exchanges=join_exchanges(exchanges),
        beside=join_exchanges(beside),
    )
    return retimed_part(cost, device)


def retimed(account: Account, device: Device) -> Account:
    """The account with seconds of a device of the same peak, but other efficiencies."""
    parts = (*account.microbatch.values(), account.step, account.casts)
    *others, casts = (retimed_part(part, device) for part in parts)
    return account.with_parts(*others).changed(casts=casts)


def retimed_part(part: PartCost, device: Device) -> PartCost:
    """The part with seconds of its kernels, and what nodes were measured to take."""
    seconds = device.seconds(part.launches, part.moved, part.work) + part.attention
    measured = part.measured + part.between + part.beyond
    return replace(part, seconds=seconds + measured)


def _whole(node: Node) -> int:
    """Bytes that a node gathers, reduces or exchanges."""
    return max(contributed_bytes(node), sum(v.bytes for v in node.results))


def _moves(
    nodes: Sequence[Node], live_out: Collection[str], device: Device
) -> list[tuple[int, bool]]:
    """Returns each node's bytes, and whether a kernel begins there."""
    if device.fused and not device.ops.timed and len(nodes) > 1:
        return fused_traffic(nodes, live_out)
    return [(moved := traffic(node), moved > 0) for node in nodes]


def _peak(node: Node, device: Device) -> float:
    """Operations a second of the dtype with the most floating bytes; a weight's
    gradient counts its factors alone."""
    values = (*node.operands, *node.results)
    if op_of(node).flops is of_weight_grad:
        values = node.operands[1:3]
    floating = [v for v in values if v.dtype.is_floating_point] or values
    dtype, *others = {v.dtype for v in floating}
    if others:
        dtype = max(floating, key=lambda v: v.bytes).dtype
    return device.peak(str(dtype).removeprefix("torch."))
