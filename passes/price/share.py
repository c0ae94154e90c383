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
from functools import cached_property, lru_cache

from ..cost import Exchange, Exchanges, join_exchanges
from ..mesh import AXES, Mesh
from ..price.account import Account, Alive, Held, Kernels, PartCost
from ..price.candidate import Candidate
from ..price.cluster import Device
from ..price.price import retimed_part
from ..stage.blocks import BlockMessages

NOTHING = Kernels()


def resting_bytes(account: Account, candidate: Candidate) -> tuple[float, float]:
    """Bytes of a rank's shards of parameters, gradients and optimizer state; and of
    what is whole for a step."""
    mine = _Shares(account, candidate)
    return mine.held.resting, account.whole + (mine.more_whole if mine.zero else 0.0)


def share(account: Account, candidate: Candidate, device: Device) -> Account:
    """See above. Of the most alive there is what the stage of ZeRO has."""
    account = account.changed(step=_with_counts(account, candidate.mesh))
    mine = _Shares(account, candidate)
    if not mine.zero:
        return account.changed(pending=_pending_over_dp(account, candidate.mesh))
    trained = account.held.trained
    return account.with_parts(*mine.parts(device)).changed(
        held=mine.held,
        experts=mine.experts,
        tied=_share_of(account.tied, candidate.alike),
        pending=mine.pending,
        update=account.update * (mine.held.trained / trained if trained else 1.0),
        gathered=mine.whole,
        whole=account.whole + mine.more_whole,
        edges=mine.edges,
    )


def _with_counts(account: Account, mesh: Mesh) -> PartCost:
    """The step, with numbers that data parallel ranks add up as well, each of its own
    rows."""
    if not account.counts or not mesh.data_axes:
        return account.step
    exchanges = list(account.step.exchanges)
    for e in account.counts:
        exchanges += [Exchange(e.kind, e.axes, -e.calls, -e.bytes)] if e.axes else []
        exchanges.append(replace(e, axes=tuple(sorted({*e.axes, *mesh.data_axes}))))
    return account.step.changed(exchanges=join_exchanges(exchanges))


def _pending_over_dp(account: Account, mesh: Mesh) -> Exchanges:
    """The sums that are pending without ZeRO: over dp and their own axes."""
    if not (axes := mesh.data_axes):
        return account.pending
    return join_exchanges(
        replace(e, axes=tuple(sorted({*e.axes, *axes}))) for e in account.pending
    )


class _Axes:
    """The axes over which parameters and those of experts are sharded, and the axes
    over which shards are replicated."""

    def __init__(self, mesh: Mesh) -> None:
        self.of_others = mesh.sharing_axes
        self.of_experts = tuple(a for a in self.of_others if not AXES[a].holds_experts)
        self.replicated = {*mesh.data_axes}.difference(self.of_others)


_axes = lru_cache(maxsize=64)(_Axes)  # candidates of a mesh come in a row


class _Shares:
    """The costs that ranks share out, for one account and candidate."""

    def __init__(self, account: Account, candidate: Candidate) -> None:
        self.account, self.candidate = account, candidate
        self.axes = _axes(candidate.mesh)
        self.zero = candidate.shares

    @cached_property
    def experts(self) -> Held:
        parts = self.candidate.data_parallel if self.zero else 1
        return _share_of(self.account.experts, parts)

    @cached_property
    def held(self) -> Held:
        parts = self.candidate.alike if self.zero else 1
        if not self.account.experts.parameters:
            return _share_of(self.account.held, parts)
        others = self.account.held - self.account.experts
        return _share_of(others, parts) + self.experts

    @cached_property
    def shared(self) -> Held:
        """Bytes of parameters that ranks shard, counted whole."""
        held = self.account.held
        return held if self.candidate.data_parallel > 1 else held - self.account.experts

    @cached_property
    def pending(self) -> Exchanges:
        """Pending sums: those on other axes, and of dp's replicas, are over shards
        only."""
        exchanges = []
        for e in self.account.pending:
            axes = {*e.axes}.difference(self.axes.of_others) | self.axes.replicated
            whole = e.bytes / self.candidate.alike
            exchanges.append(Exchange(e.kind, tuple(sorted(axes)), e.calls, whole))
        return join_exchanges(exchanges)

    def parts(self, device: Device) -> Iterable[PartCost]:
        """Yields costs of messages of parameters and gradients, of each microbatch or
        once a step, and of adding what is scattered to the shards, by block. Where
        gradients leave with each microbatch, products add to zeros."""
        zero, account = self.zero, self.account
        step = account.step + self.casts_less(device)
        parts = {**account.microbatch, "step": step}
        among = self.candidate.data_parallel > 1
        has_experts = among and account.experts.trained > 0
        ranks = self.candidate.data_parallel if has_experts else self.candidate.alike
        for name, part in account.microbatch.items() if zero > 1 else ():
            most = part.alive.of(zero, among, ranks)
            parts[name] = part.changed(alive=Alive(most))
        where = "forward" if zero == 3 else "step"
        moves = self.messages("all_gather", account.forward.gathered, True)
        parts[where] = _with(parts[where], moves)
        halves = {"backward": account.backward, "weight": account.weight}
        scattered = max(1, sum(map(_scattered, halves.values())))
        for name, part in halves.items():
            moves = scatters = self.messages("reduce_scatter", part.scattered, True)
            if zero == 3:
                moves = [*self.messages("all_gather", part.gathered, False), *moves]
            kept = self.held.trained * _scattered(part) / scattered
            own = Kernels(float(sum(e.calls for e in scatters)), 2 * kept)
            if zero > 1:
                own += part.made if among else part.made - part.made_of_experts
            where = name if zero > 1 else "step"
            seconds = device.seconds(own.launches, own.moved, own.work)
            parts[where] = _with(parts[where], moves, own, seconds + own.seconds)
        return parts.values()

    def casts_less(self, device: Device) -> PartCost:
        """The savings of casting shards, not whole parameters: as many kernels are
        launched."""
        whole = self.account.held.cast
        less = self.account.casts * (self.held.cast / whole - 1 if whole else 0.0)
        return retimed_part(less.changed(launches=0.0), device)

    def messages(
        self, kind: str, sent: BlockMessages, tied_too: bool
    ) -> list[Exchange]:
        """One message for all axes that share a block out; a weight of both ends of the
        model is one by itself on the last, but what the backward gathers."""
        alone = tied_too and self.account.tied.trained and self.account.received
        calls = sent.calls + bool(alone and sent.calls)
        each = (
            (self.axes.of_others, calls, sent.bytes),
            (self.axes.of_experts, sent.calls_of_some, sent.of_some),
        )
        return [
            Exchange(kind, axes, calls, size)
            for axes, calls, size in each
            if axes and size > 0
        ]

    # At the begin of a step parameters are whole and in rows; at its end gradients are,
    # beside the others' addends and the shares.

    @property
    def whole(self) -> float:
        """Bytes that are whole for a step."""
        shared = self.shared
        return {1: shared.read + shared.trained, 2: shared.read}.get(self.zero, 0.0)

    @property
    def more_whole(self) -> float:
        """Bytes that are gathered whole: the cast, if there is one; of shards, only
        they are cast."""
        casts = self.held.cast - (self.account.held.cast - self.shared.cast)
        return self.whole - self.shared.cast + (casts if self.zero == 3 else 0.0)

    @property
    def edges(self) -> float:
        """Bytes at the begin and end of a step; where nothing is whole, casts are of
        shares."""
        account = self.account
        if self.zero == 3:
            return account.edges + self.more_whole
        block = account.forward.gathered.largest / max(1, account.held.read)
        least = (
            self.candidate.data_parallel
            if account.experts.trained
            else self.candidate.alike
        )
        ends = {
            1: self.whole + (2 + 1 / max(1, least)) * self.shared.trained * block,
            2: self.whole + self.shared.read * block,
        }
        return max(account.edges, ends[self.zero])


def _share_of(held: Held, ranks: int) -> Held:
    return Held(*[size / ranks for size in vars(held).values()])


def _scattered(part: PartCost) -> float:
    """Bytes of all gradients that leave it by block."""
    return part.scattered.bytes + part.scattered.of_some


def _with(
    part: PartCost,
    beside: Sequence[Exchange],
    own: Kernels = NOTHING,
    seconds: float = 0.0,
) -> PartCost:
    both = (*part.beside, *beside)
    return part.changed(
        beside=join_exchanges(both) if part.beside else both,
        launches=part.launches + own.launches,
        moved=part.moved + own.moved,
        work=part.work + own.work,
        seconds=part.seconds + seconds,
    )
