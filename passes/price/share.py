"""share: the account of a rank of the whole mesh, from that of one without data
parallel ranks.

Layers are priced without the axes whose ranks would hold the same parameters: these
change nothing of what is computed. What they add is counted here as the nodes of a
compiled rank have it: gradients that are summed, and with ZeRO parameters that come and
gradients that leave by block (`passes.stage.overlap`), of which a rank keeps a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from ..cost import Exchange, Exchanges, join_exchanges
from ..price.account import Account, Alive, Held, PartCost
from ..price.candidate import Candidate
from ..price.cluster import Device
from ..stage.blocks import BlockMessages


def resting_bytes(account: Account, candidate: Candidate) -> float:
    """Parameters, gradients and the optimizer's state that a rank keeps a share of."""
    return _Shares(account, candidate).held.resting


def share(account: Account, candidate: Candidate, device: Device) -> Account:
    """See above. Of the most alive there is what the stage of ZeRO has."""
    zero, among = candidate.shares, candidate.data_parallel > 1
    account = account.with_alive(
        Alive(p.alive.of(zero, among)) for p in account.microbatch.values()
    )
    if not zero:
        return replace(account, pending=_pending_over_dp(account, candidate))
    mine = _Shares(account, candidate)
    trained = account.held.trained
    return replace(
        account.with_parts(*mine.parts(device)),
        held=mine.held,
        experts=mine.experts,
        tied=_share_of(account.tied, candidate.alike),
        pending=mine.pending,
        update=account.update * (mine.held.trained / trained if trained else 1.0),
        gathered=mine.whole,
        whole=account.whole + mine.more_whole,
        edges=max(account.edges, mine.edges),
    )


def _pending_over_dp(account: Account, candidate: Candidate) -> Exchanges:
    """Without ZeRO: over dp, with the axes on which they are pending anyway."""
    if candidate.mesh.axis_size("dp") == 1:
        return account.pending
    return join_exchanges(
        replace(e, axes=tuple(sorted({*e.axes, "dp"}))) for e in account.pending
    )


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

    @cached_property
    def experts(self) -> Held:
        return _share_of(self.account.experts, self.data_parallel if self.zero else 1)

    @cached_property
    def held(self) -> Held:
        others = self.account.held - self.account.experts
        return _share_of(others, self.alike if self.zero else 1) + self.experts

    @cached_property
    def shared(self) -> Held:
        """Bytes, whole, of what is shared out."""
        held = self.account.held
        return held if self.data_parallel > 1 else held - self.account.experts

    @cached_property
    def pending(self) -> Exchanges:
        """What is pending on other axes is summed of shares alone, as is what dp ranks
        replicate of them."""
        found = []
        for e in self.account.pending:
            axes = {*e.axes}.difference(self.of_others) | {*self.replicated}
            whole = e.bytes / self.alike
            found.append(Exchange(e.kind, tuple(sorted(axes)), e.calls, whole))
        return join_exchanges(found)

    def parts(self, device: Device) -> Iterable[PartCost]:
        """Messages of parameters and gradients, of each microbatch or once a step; and
        what comes of a scatter is added to the shares, block by block. Where gradients
        leave with each microbatch, products add theirs to what is set to 0 before."""
        found = {**self.account.microbatch, "step": self.account.step}
        halves = {name: found[name] for name in ("backward", "weight")}
        where = "forward" if self.zero == 3 else "step"
        moves = self.messages("all_gather", found["forward"].gathered, True)
        found[where] = _with(found[where], moves)
        scattered = max(1, sum(part.scattered.bytes for part in halves.values()))
        speed = device.bytes_per_second * device.bandwidth_efficiency
        for name, part in halves.items():
            again = self.messages("all_gather", part.gathered, False)
            leave = self.messages("reduce_scatter", part.scattered, True)
            where = name if self.zero > 1 else "step"
            kept = self.held.trained * part.scattered.bytes / scattered
            launches, moved = self.calls(part.scattered, True), 2 * kept
            if self.zero > 1:
                launches += part.zeroed_calls
                moved += part.zeroed_bytes
            seconds = device.launch * launches + moved / speed
            moves = [*again, *leave] if self.zero == 3 else leave
            found[where] = _with(found[where], moves, launches, moved, seconds)
        return found.values()

    def calls(self, sent: BlockMessages, tied_too: bool) -> float:
        """Messages of a part by block; a weight of both ends of the model is one by
        itself on the last, but what the backward gathers."""
        alone = tied_too and self.account.tied.trained and self.account.received
        return sent.calls + bool(alone and sent.calls)

    def messages(
        self, kind: str, sent: BlockMessages, tied_too: bool
    ) -> list[Exchange]:
        """One message for all axes that share a block out."""
        calls = self.calls(sent, tied_too)
        sizes = {self.of_others: sent.bytes - sent.of_some}
        sizes[self.of_experts] = sizes.get(self.of_experts, 0.0) + sent.of_some
        own = ((axes, size) for axes, size in sizes.items() if axes and size > 0)
        return [Exchange(kind, axes, calls, size) for axes, size in own]

    # At the begin of a step parameters are whole and in rows; at its end gradients are,
    # beside the others' addends and the shares.

    @property
    def whole(self) -> float:
        """Bytes that are whole for a step."""
        shared = self.shared
        return {1: shared.read + shared.trained, 2: shared.read}.get(self.zero, 0.0)

    @property
    def more_whole(self) -> float:
        """What is gathered is the cast, if there is one; of shares only shares are
        cast."""
        casts = self.held.cast - (self.account.held.cast - self.shared.cast)
        return self.whole - self.shared.cast + (casts if self.zero == 3 else 0.0)

    @property
    def edges(self) -> float:
        account = self.account
        block = account.forward.gathered.largest / max(1, account.held.read)
        least = self.data_parallel if account.experts.trained else self.alike
        ends = {
            1: self.whole + (2 + 1 / max(1, least)) * self.shared.trained * block,
            2: self.whole + self.shared.read * block,
        }
        return ends.get(self.zero, 0.0)


def _share_of(held: Held, ranks: int) -> Held:
    return Held(*[size / ranks for size in vars(held).values()])


def _with(
    part: PartCost,
    beside: Sequence[Exchange],
    launches: float = 0.0,
    moved: float = 0.0,
    seconds: float = 0.0,
) -> PartCost:
    return replace(
        part,
        beside=join_exchanges((*part.beside, *beside)),
        launches=part.launches + launches,
        moved=part.moved + moved,
        seconds=part.seconds + seconds,
    )
