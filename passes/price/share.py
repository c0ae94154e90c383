"""share: the account of a rank of the whole mesh, from that of one without data
parallel ranks.

Layers are priced without the axes whose ranks would hold the same parameters: these
change nothing of what is computed. What they add is counted here as the nodes of a
compiled rank have it: gradients that are summed, and with ZeRO parameters that come and
gradients that leave by block (`passes.stage.overlap`), of which a rank keeps a share.
"""

from __future__ import annotations

from ..price.candidate import Candidate
from ..price.cluster import Device
from ..price.price import BESIDE, STEP, TIED, UPDATE, Account
from ..price.price_memory import (
    BACKWARD,
    EVERY_PEAK,
    FORWARD,
    PEAK,
    PEAK_BUT_EXPERTS,
    WEIGHT,
    Key,
)
from ..schedule.memory import OPTIMIZER_STATES

PARTS = (FORWARD, BACKWARD, WEIGHT)
HELD = ("parameters", "trained", "read", "cast")
OTHER_PEAKS = frozenset(EVERY_PEAK[1:])


def resting_bytes(account: Account, candidate: Candidate) -> float:
    """Parameters, gradients and the optimizer's state that a rank keeps a share of."""
    mine = _Shares(account, candidate)
    states = (1 + OPTIMIZER_STATES) * mine.kept("trained")
    return mine.kept("parameters") + states


def share(account: Account, candidate: Candidate, device: Device) -> Account:
    """See above. Of the most alive there is what the stage of ZeRO has."""
    zero = candidate.shares
    found = {k: x for k, x in account.amounts.items() if k[0] not in OTHER_PEAKS}
    peaks = PEAK if candidate.data_parallel > 1 else PEAK | PEAK_BUT_EXPERTS
    for part in PARTS:
        found["peak", part] = account[peaks.get(zero, PEAK[0]), part]
    if not zero:
        _sum_gradients(account, candidate, found)
        return Account(found)
    mine = _Shares(account, candidate)
    for term in HELD:
        found["memory", term] = mine.kept(term)
        found["experts", term] = mine.kept_experts(term)
    for term in ("parameters", "trained"):
        found[TIED, term] = account[TIED, term] / candidate.alike
    _sum_shares(account, mine, found)
    _move_by_block(account, mine, found)
    _add_shares(account, mine, found, device)
    _hold_for_a_step(account, mine, found)
    if trained := account["memory", "trained"]:
        kept = found["memory", "trained"] / trained
        found["seconds", UPDATE] = account["seconds", UPDATE] * kept
    return Account(found)


def _sum_gradients(
    account: Account, candidate: Candidate, found: dict[Key, float]
) -> None:
    """Without ZeRO: over dp, with the axes on which they are pending anyway."""
    if candidate.mesh.axis_size("dp") == 1:
        return
    for key in [k for k in found if k[0] == "pending"]:
        axes = ("pending", *sorted({*key[1:], "dp"}))
        found[axes] = found.get(axes, 0.0) + found.pop(key)


class _Shares:
    """What ranks share out, and over which axes; of experts over fewer."""

    def __init__(self, account: Account, candidate: Candidate) -> None:
        self.account, self.zero = account, candidate.shares
        sizes = {a: n for a, n in candidate.mesh.axes if n > 1}
        own = [a for a in (candidate.sharing, "cp") if a in sizes]
        order = list(sizes)
        self.of_experts = tuple(sorted(own, key=order.index))
        both = [*own, *(a for a in ("ep",) if a in sizes)]
        self.replicated = tuple(a for a in ("dp",) if a in sizes and a not in own)
        self.of_others = tuple(sorted(both, key=order.index))
        self.alike, self.data_parallel = candidate.alike, candidate.data_parallel

    def kept_experts(self, term: str) -> float:
        parts = self.data_parallel if self.zero else 1
        return self.account["experts", term] / parts

    def kept(self, term: str) -> float:
        others = self.account["memory", term] - self.account["experts", term]
        return others / (self.alike if self.zero else 1) + self.kept_experts(term)

    def shared(self, term: str) -> float:
        """Bytes, whole, of what is shared out."""
        held = self.account["memory", term]
        return held if self.data_parallel > 1 else held - self.account["experts", term]

    def calls(self, what: str, part: str) -> float:
        """Messages of a part by block; a weight of both ends of the model is one by
        itself on the last, but what the backward gathers."""
        account = self.account
        calls = account[f"{what} calls", part]
        alone = account[TIED, "trained"] and account["message", "received"]
        again = what == "gathered" and part != FORWARD
        return calls + bool(alone and calls and not again)

    def messages(
        self, what: str, part: str
    ) -> dict[tuple[str, ...], tuple[float, float]]:
        """Axes -> calls, and bytes of what is whole: one message for all axes."""
        account, calls = self.account, self.calls(what, part)
        experts = account[f"{what} bytes of experts", part]
        sizes = {self.of_others: account[f"{what} bytes", part] - experts}
        sizes[self.of_experts] = sizes.get(self.of_experts, 0.0) + experts
        return {axes: (calls, n) for axes, n in sizes.items() if axes and n > 0}


def _sum_shares(account: Account, mine: _Shares, found: dict[Key, float]) -> None:
    """What is pending on other axes is summed of shares alone, as is what dp ranks
    replicate of them."""
    for key, amount in account.amounts.items():
        if key[0] == "pending":
            del found[key]
            others = {a for a in key[1:] if a not in mine.of_others}
            axes = ("pending", *sorted({*others, *mine.replicated}))
            found[axes] = found.get(axes, 0.0) + amount / mine.alike


def _move_by_block(account: Account, mine: _Shares, found: dict[Key, float]) -> None:
    """Messages of parameters and gradients, of each microbatch or once a step."""

    def add(where: str, kind: str, what: str, part: str) -> None:
        for axes, (calls, size) in mine.messages(what, part).items():
            for of, n in (("calls", calls), ("bytes", size)):
                key = of, BESIDE + where, kind, *axes
                found[key] = found.get(key, 0.0) + n

    add(FORWARD if mine.zero == 3 else STEP, "all_gather", "gathered", FORWARD)
    for part in (BACKWARD, WEIGHT):
        if mine.zero == 3:
            add(part, "all_gather", "gathered", part)
        add(part if mine.zero > 1 else STEP, "reduce_scatter", "scattered", part)


def _add_shares(
    account: Account, mine: _Shares, found: dict[Key, float], device: Device
) -> None:
    """What comes of a scatter is added to the shares, block by block. Where gradients
    leave with each microbatch, products add theirs to what is set to 0 before."""
    scattered = {part: account["scattered bytes", part] for part in (BACKWARD, WEIGHT)}
    for part in (BACKWARD, WEIGHT):
        where = part if mine.zero > 1 else STEP
        kept = mine.kept("trained") * scattered[part] / max(1, sum(scattered.values()))
        launches, moved = mine.calls("scattered", part), 2 * kept
        if mine.zero > 1:
            launches += account["zeroed calls", part]
            moved += account["zeroed bytes", part]
        speed = device.bytes_per_second * device.bandwidth_efficiency
        seconds = device.launch * launches + moved / speed
        more = {"launches": launches, "moved": moved, "seconds": seconds}
        for what, n in more.items():
            found[what, where] = found.get((what, where), 0.0) + n


def _hold_for_a_step(account: Account, mine: _Shares, found: dict[Key, float]) -> None:
    """Bytes of what is whole for a step. At its begin parameters are whole and in rows;
    at its end gradients are, beside the others' addends and the shares."""
    trained, read, cast = map(mine.shared, ("trained", "read", "cast"))
    whole = {1: read + trained, 2: read}.get(mine.zero, 0.0)
    # What is gathered is the cast, if there is one; of shares only shares are cast.
    casts = mine.kept("cast") - (account["memory", "cast"] - cast)
    found["memory", "gathered"] = whole
    found["memory", "step"] += whole - cast + (casts if mine.zero == 3 else 0.0)
    block = account["memory", "block"] / max(1, account["memory", "read"])
    least = mine.data_parallel if account["experts", "trained"] else mine.alike
    ends = {
        1: whole + (2 + 1 / max(1, least)) * trained * block,
        2: whole + read * block,
    }
    found["memory", "edges"] = max(
        found.get(("memory", "edges"), 0.0), ends.get(mine.zero, 0.0)
    )
