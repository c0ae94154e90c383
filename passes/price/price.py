"""What a stage costs on a device, as an account of named amounts.

An account is counted on the nodes that a rank would run, forward and backward, with
their own shapes: seconds of computing, bytes of every collective by the axes that it
runs over, bytes of memory. Stages of equal layers differ by whole layers, so accounts
are added and subtracted: what a layer costs is what two cost less what one costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ..cost import flops, traffic
from ..graph import Node
from ..ops.attention import passed_round, ring_of
from ..ops.op import op_of
from ..ops.products import of_weight_grad
from ..price.attention import attention_share
from ..price.cluster import Device
from ..price.fusion import fused_traffic
from ..price.measured import SOURCES, TABLE, between
from ..price.price_memory import (
    ALONE,
    AMONG,
    BACKWARD,
    FORWARD,
    PEAK,
    PEAK_BUT_EXPERTS,
    WEIGHT,
    Key,
    held_amounts,
)
from ..schedule.footprint import Footprint
from ..shard.collectives import SPEAKS, UNDER_WAY, collective, contributed_bytes
from ..stage.local_stage import LocalStage

STEP = "step"
PARTS = (FORWARD, BACKWARD, WEIGHT, STEP)
BESIDE = "beside "  # a part: what moves of parameters while it computes
# Collective, axes, calls and bytes of all calls.
Exchange = tuple[str, tuple[str, ...], float, float]
UPDATE = "update"
TIED = "tied"


@dataclass(frozen=True, eq=False)
class Account:
    """Amounts by what they are of. Keys:

    ("seconds", part): of computing; they come of ("known", part, how), what nodes were
    measured to take, see `passes.price.measured`; and of the others' ("launches",
    part), ("moved", part) in bytes and ("work", part), seconds of the products at the
    device's peak, see `retimed`; ("attention", part): seconds of it; ("seconds",
    "update"): of the optimizer, if it was measured. ("flops", part). ("calls" or
    "bytes", part, kind, axes ...): of collectives; bytes of the whole tensor, see
    `passes.price.cluster.Link`; of parameters and their gradients, by block, the part
    is `BESIDE` it.
    ("memory", term): bytes that add up: "saved", "kept", "step", "edges" as in
    `passes.schedule.footprint.Footprint`, "parameters", "trained" and "buffers" at
    rest, "read" of parameters as products read them, of these "cast" to another
    precision once a step; ("experts", term): of these four, without buffers, what ep
    splits. ("tied", "parameters" or "trained"): those of them that the model's other
    end uses as well, see `once_a_rank`. ("peak", part): bytes alive at once, see
    `in_a_row` and `PEAK`. ("message", "received" or "sent"): bytes of what crosses the
    stage's ends in a forward. part: forward, backward (its input half), weight (its
    other half), each of one microbatch; step.
    """

    amounts: Mapping[Key, float]

    def __getitem__(self, key: Key) -> float:
        return self.amounts.get(key, 0.0)

    def __add__(self, other: Account) -> Account:
        return self.plus(other, 1.0)

    def __sub__(self, other: Account) -> Account:
        return self.plus(other, -1.0)

    def __mul__(self, times: float) -> Account:
        return Account({key: times * x for key, x in self.amounts.items()})

    def plus(self, other: Account, times: float) -> Account:
        """The account with another one's amounts so many times."""
        found = dict(self.amounts)
        for key, x in other.amounts.items():
            found[key] = found.get(key, 0.0) + times * x
        return Account(found)

    def to_data(self) -> dict[str, float]:
        """The amounts that are not 0, by keys in one line each."""
        return {"/".join(key): x for key, x in self.amounts.items() if x}

    @classmethod
    def from_data(cls, data: Mapping[str, float]) -> Account:
        return cls({tuple(key.split("/")): x for key, x in data.items()})

    def exchanges(self, part: str, beside: str = "") -> list[Exchange]:
        """Of a part; beside: `BESIDE` for what moves of parameters meanwhile."""
        return self._exchanges.get(beside + part, [])

    @cached_property
    def _exchanges(self) -> dict[str, list[Exchange]]:
        found: dict[str, list[Exchange]] = {}
        for key, amount in self.amounts.items():
            if key[0] == "bytes":
                calls = ("calls", *key[1:])
                exchange = key[2], key[3:], self[calls], amount
                found.setdefault(key[1], []).append(exchange)
        return found


def _whole(node: Node) -> int:
    """Bytes of what is gathered, reduced or exchanged."""
    return max(contributed_bytes(node), sum(v.bytes for v in node.results))


def footprint_of(account: Account) -> Footprint:
    """What a stage keeps in memory, in whole bytes."""
    peak = PEAK[0]
    return Footprint(
        saved=round(account["memory", "saved"]),
        forward_peak=round(account[peak, FORWARD]),
        backward_peak=round(account[peak, BACKWARD]),
        kept=round(account["memory", "kept"]),
        step=round(account["memory", "step"]),
        weight_peak=round(account[peak, WEIGHT]),
        edges=round(account["memory", "edges"]),
        received=round(account["message", "received"]),
        sent=round(account["message", "sent"]),
    )


def by_itself(account: Account) -> Account:
    """The account of a piece that is a stage without others beside it."""
    found: dict[Key, float] = {
        (peak, part): account[alone, part]
        for peak, alone in ALONE.items()
        for part in (FORWARD, BACKWARD, WEIGHT)
    }
    return Account({**account.amounts, **found})


def in_a_row(whole: Account, parts: Sequence[Account]) -> Account:
    """The account of parts that run one after another, which add up to `whole`, but for
    the most that they have alive (of each it is beside what those before it saved) and
    for messages, which are those of both ends."""
    found: dict[Key, float] = {
        ("message", "received"): parts[0]["message", "received"],
        ("message", "sent"): parts[-1]["message", "sent"],
    }
    alike = [(part, len(list(same))) for part, same in groupby(parts)]
    for what, kept in ((FORWARD, "saved"), (BACKWARD, "saved"), (WEIGHT, "kept")):
        before = 0.0
        for part, count in alike:
            # Of equal ones in a row the first or the last has most beside it.
            saved = part["memory", kept]
            beside = before + max(0.0, (count - 1) * saved)
            for key in ((peak, what) for peak in AMONG):
                found[key] = max(found.get(key, 0.0), beside + part[key])
            before += count * saved
    # A weight that both ends use is whole between its uses, and so is its gradient.
    twice = sum(part["memory", "parameters"] for part in parts)
    tied = max(0.0, twice - whole["memory", "parameters"])
    for peak in (PEAK, PEAK_BUT_EXPERTS):
        for key in ((peak[3], FORWARD), (peak[2], BACKWARD), (peak[3], BACKWARD)):
            found[key] += tied
    return Account({**whole.amounts, **found})


def once_a_rank(
    accounts: Sequence[Account], placement: Sequence[int]
) -> list[list[Account]]:
    """The accounts of each rank's stages. Of a rank that runs both ends of the model,
    weights that both use rest once, and there is no gradient of them to exchange.

    accounts: of each stage; placement: its rank.
    """
    found: list[list[Account]] = [[] for _ in range(max(placement) + 1)]
    first, *inner = accounts
    if inner and placement[0] == placement[-1]:
        last = inner.pop()
        twice = {k: x for k, x in last.amounts.items() if k[0] == TIED}
        alone: dict[Key, float] = {k: -x for k, x in twice.items()}
        shared: dict[Key, float] = {("memory", k[1]): -x for k, x in twice.items()}
        first, last = first + Account(alone), last + Account({**alone, **shared})
        inner.append(last)
    for account, rank in zip((first, *inner), placement, strict=True):
        found[rank].append(account)
    return found


def price(local: LocalStage, device: Device, shares: bool = False) -> Account:
    """The account of one rank's stage. shares: with what it would have alive if ranks
    of dp held shares of it, see `passes.price.share`."""
    return compute(local, device) + Account(held_amounts(local, shares))


def compute(local: LocalStage, device: Device) -> Account:
    """What a rank's stage computes and moves, without what it holds."""
    ends = [*local.residuals, *local.ends]
    halves = [v for v in (*local.d_receives, *local.weight_residuals) if v is not None]
    found = Account({})
    for part, nodes, kept in (
        (FORWARD, local.forward, ends),
        (BACKWARD, local.backward, halves),
        (WEIGHT, local.weight_half or (), []),
        (STEP, (*local.prologue, *local.epilogue), []),
    ):
        found += compute_part(part, nodes, device, {v.name for v in kept})
    for v in local.params:
        if v.name in local.grads and device.ops.update:
            took, _ = between(device.ops.update, v.bytes)
            found += Account({("seconds", UPDATE): took})
    return retimed(found, device)


def compute_part(
    part: str, nodes: Sequence[Node], device: Device, kept: Collection[str] = ()
) -> Account:
    """What some nodes of a rank compute and move. kept: values that live on."""
    found: dict[Key, float] = {}

    def add(key: Key, amount: float) -> None:
        found[key] = found.get(key, 0.0) + amount

    moves = _moves(nodes, kept, device)
    for node, (moved, begins) in zip(nodes, moves, strict=True):
        if found_kind := collective(node):
            kind, axes = found_kind
            where = BESIDE + part if node.op in UNDER_WAY else part
            add(("calls", where, kind, *axes), 1)
            add(("bytes", where, kind, *axes), _whole(node))
        elif node.op not in SPEAKS:
            took, how = device.ops.seconds(node)
            add(("flops", part), flops(node))
            if how != TABLE:
                add(("known", part, how), took)
            else:
                work = flops(node) / _peak(node, device) if moved else 0.0
                if share := attention_share(node, device.attention):
                    add(("attention", part), work / share)
                    work = 0.0
                add(("launches", part), begins)
                add(("moved", part), moved)
                add(("work", part), work)
        if ring := ring_of(node):
            for _, calls, passed in passed_round(node):
                add(("calls", part, "send", ring), calls)
                add(("bytes", part, "send", ring), passed)
    return Account(found)


def retimed(account: Account, device: Device) -> Account:
    """The account with seconds of a device of the same peak, but other efficiencies.

    A kernel is launched, moves its bytes, and multiplies. The three add up, so products
    that are small or thin are slow, as they are.
    """
    speed = device.bytes_per_second * device.bandwidth_efficiency
    seconds: dict[Key, float] = {
        ("seconds", part): device.launch * account["launches", part]
        + account["moved", part] / speed
        + account["work", part] / device.efficiency
        + account["attention", part]
        + sum(account["known", part, how] for how in SOURCES)
        for part in PARTS
    }
    return Account({**account.amounts, **seconds})


def _moves(
    nodes: Sequence[Node], kept: Collection[str], device: Device
) -> list[tuple[int, bool]]:
    """Returns each node's bytes, and whether a kernel begins there."""
    if device.fused and not device.ops.timed:
        return fused_traffic(nodes, kept)
    return [(moved := traffic(node), moved > 0) for node in nodes]


def node_seconds(node: Node, device: Device) -> float:
    """Seconds of computing one node by itself."""
    took, how = device.ops.seconds(node)
    if how != TABLE:
        return took
    moved = traffic(node)
    if not moved:
        return 0.0
    speed = device.bytes_per_second * device.bandwidth_efficiency
    work = flops(node) / _peak(node, device)
    share = attention_share(node, device.attention) or device.efficiency
    return device.launch + moved / speed + work / share


def _peak(node: Node, device: Device) -> float:
    """Operations a second, of the type that most of its floating bytes have; of what is
    added up in another one, the type of what is multiplied."""
    values = (*node.operands, *node.results)
    if op_of(node).flops is of_weight_grad:
        values = node.operands[1:3]
    floating = [v for v in values if v.dtype.is_floating_point] or values
    dtype = max(floating, key=lambda v: v.bytes).dtype
    return device.peak(str(dtype).removeprefix("torch."))
