"""What a rank's stage holds in memory, as amounts of an account.

ZeRO shares out a parameter over the ranks that would hold the same of it. Experts that
an axis ep splits are others on each of its ranks, so they are counted apart, as is the
most that is alive where nobody shares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ..cost import traffic
from ..mesh import TIME
from ..ops.op import op_of
from ..ops.products import of_weight_grad
from ..schedule.footprint import footprints
from ..shard.parameter_sharding import find_casts
from ..stage.blocks import Beside, beside_blocks, block_messages
from ..stage.local_stage import LocalStage
from ..stage.reuse import ADD_EACH

Key = tuple[str, ...]
FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
# Keys of the most bytes alive at once, by the stage of ZeRO; with 1 as without.
PEAK = {0: "peak", 2: "peak by zero 2", 3: "peak by zero 3"}
# The same where no rank shares experts with another one.
PEAK_BUT_EXPERTS = {2: "peak by zero 2 but experts", 3: "peak by zero 3 but experts"}
AMONG = (*PEAK.values(), *PEAK_BUT_EXPERTS.values())
# With ZeRO, of a piece that is a stage by itself: nothing is gathered for neighbours.
ALONE = {peak: f"{peak} alone" for peak in AMONG[1:]}
EVERY_PEAK = (*AMONG, *ALONE.values())


def held_amounts(local: LocalStage, shares: bool = True) -> dict[Key, float]:
    """The amounts "memory", "experts", "peak" and "message" of
    `passes.price.price.Account`, in bytes; "pending"; and messages by block. shares:
    with what ranks that hold shares of parameters would have alive."""
    found: Counter[Key] = Counter()
    experts = _experts(local)
    found.update(_by_block(local, experts))
    besides = _besides(local, experts) if shares else [beside_blocks(local, 0)]
    sizes, *others = footprints(local, besides)
    among, alone = others[: len(others) // 2], others[len(others) // 2 :]
    if not experts:
        among, alone = 2 * among, 2 * alone  # there is nothing to leave out
    for peak, of in zip(EVERY_PEAK, (sizes, *among, *alone), strict=shares):
        for part in (FORWARD, BACKWARD, WEIGHT):
            found[peak, part] = getattr(of, f"{part}_peak")
    for term in ("saved", "kept", "step", "edges"):
        found["memory", term] = getattr(sizes, term)
    for end in ("received", "sent"):
        found["message", end] = getattr(sizes, end)
    casts = find_casts(local.prologue, local.params)
    read = _read(local, casts)
    for v in local.params:
        own = {"parameters": v.bytes, "trained": 0, "cast": 0, "read": 0}
        if v.name in local.grads:
            own["trained"] = v.bytes
            varying = local.stage.shardings[v.name].varying
            pending = ("pending", *sorted(varying - {TIME}))
            found[pending] += v.bytes
        own["cast"] = sum(n for name, n in read.items() if casts.get(name) == v.name)
        own["read"] = own["cast"] + read.get(v.name, 0)
        for term, amount in own.items():
            found["memory", term] += amount
            if v.name in experts:
                found["experts", term] += amount
    found["memory", "buffers"] = sum(v.bytes for v in local.buffers)
    return dict(found)


def _by_block(local: LocalStage, experts: Collection[str]) -> dict[Key, float]:
    """Messages of parameters and gradients, by block, see `passes.price.share`."""
    found: dict[Key, float] = {}
    late = local.weight_half or ()
    parts = {FORWARD: local.forward, BACKWARD: local.backward, WEIGHT: late}
    for part, nodes in parts.items():
        for what, grads in (("gathered", False), ("scattered", True)):
            if grads and part == FORWARD:
                continue
            sent = block_messages(local, nodes, experts, grads)
            found[f"{what} calls", part] = sent.calls
            found[f"{what} bytes", part] = sent.bytes
            found[f"{what} bytes of experts", part] = sent.of_some
            if part == FORWARD:
                found["memory", "block"] = sent.largest
        # Gradients that products add to are set to 0; what is made is not added.
        zeroed = [n for n in nodes if op_of(n).flops is of_weight_grad]
        added = [n for n in nodes if n.op == ADD_EACH]
        found["zeroed calls", part] = len(zeroed) - len(added)
        zeros = sum(n.operands[0].bytes for n in zeroed)
        found["zeroed bytes", part] = zeros - sum(map(traffic, added))
    return found


def _experts(local: LocalStage) -> set[str]:
    """Parameters of which each rank of ep has others."""
    shardings = local.stage.shardings
    return {v.name for v in local.params if shardings[v.name].place("ep") is not None}


def _besides(local: LocalStage, experts: Collection[str]) -> list[Beside]:
    """What is alive by block, in the order of `EVERY_PEAK`; without experts, of `PEAK`,
    as sweeps take time."""
    some = (frozenset[str](), *([frozenset(experts)] if experts else []))
    return [
        beside_blocks(local, 0),
        *(
            beside_blocks(local, zero, unshared, neighbours)
            for neighbours in (True, False)
            for unshared in some
            for zero in PEAK_BUT_EXPERTS
        ),
    ]


def _read(local: LocalStage, casts: Mapping[str, str]) -> dict[str, int]:
    """Bytes of parameters and of casts that are computed with, by name."""
    readers = (n for n in local.nodes if not {v.name for v in n.results} & casts.keys())
    read = {v.name for n in readers for v in n.operands}
    found = {v.name: v.bytes for v in local.params if v.name in read}
    made = (v for n in local.prologue for v in n.results)
    return found | {v.name: v.bytes for v in made if v.name in casts}
