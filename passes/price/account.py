"""The account of a stage on a device: seconds, messages and bytes, each by its name.

An account is counted on the nodes that a rank would run, forward and backward, with
their own shapes. Stages of equal layers differ by whole layers, so accounts are added
and subtracted: what a layer costs is what two cost less what one costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost import NO_LEVELS, Amounts, Exchanges, Levels
from ..schedule.footprint import BACKWARD, FORWARD, WEIGHT, Footprint, peak_bytes
from ..schedule.schedule import Schedule
from ..stage.blocks import ENDS, BlockMessages

# AdamW keeps two values for each one that it trains, in the parameter's own type.
OPTIMIZER_STATES = 2
WHERE = "alive", "begins", "ends", "alone"  # by `ENDS`, see `PartCost`


@dataclass(frozen=True)
class Alive(Amounts):
    """The most bytes alive at once: as it is run; by block with ZeRO-2 and ZeRO-3; of
    these where a block's gradients are ready and shares of those of the block before
    arrive, without these, and if they were whole; and the same where no rank shares
    experts with another one."""

    whole: float = 0.0
    zero_2: float = 0.0
    zero_3: float = 0.0
    ready_2: float = 0.0
    ready_3: float = 0.0
    arrived_2: float = 0.0
    arrived_3: float = 0.0
    zero_2_but_experts: float = 0.0
    zero_3_but_experts: float = 0.0
    ready_2_but_experts: float = 0.0
    ready_3_but_experts: float = 0.0
    arrived_2_but_experts: float = 0.0
    arrived_3_but_experts: float = 0.0

    def of(self, zero: int, shares_experts: bool, ranks: float = math.inf) -> float:
        """Bytes alive under a ZeRO stage. ranks: that share gradients out."""
        if zero < 2:
            return self.whole
        which = f"_{zero}" if shares_experts else f"_{zero}_but_experts"
        alive, ready, arrived = (
            getattr(self, name + which) for name in ("zero", "ready", "arrived")
        )
        most: float = max(alive, ready + (arrived - ready) / ranks)
        return most

    def largest(self, other: Alive, beside: float) -> Alive:
        """Returns the larger of each amount; the other's with `beside` added."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Alive(*[max(x, beside + y) for x, y in pairs])


@dataclass(frozen=True)
class Kernels(Amounts):
    """Costs of some nodes, in parts that a device gives seconds, see `PartCost`.
    seconds: of nodes that were measured."""

    launches: float = 0.0
    moved: float = 0.0
    work: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class PartCost(Amounts):
    """What a part of a microbatch, or of a step, computes and moves.

    seconds: of computing. They come of measured, between, beyond: what nodes were
    measured to take, see `passes.price.measured`; of the others' launches, moved bytes,
    work in seconds of products at the device's peak, and attention in seconds: see
    `passes.price.price.retimed`. exchanges: what is waited for; beside: of parameters
    and their gradients, by block, while it computes. gathered, scattered: what would
    move by block if ranks shared parameters, see `passes.price.share`; made: what it
    then takes more to make gradients instead of adding to them, and what of that is of
    experts. alive: of a piece of a stage with others before and after it; begins, ends:
    of one that its stage begins or ends with; alone: of one that is a stage by itself.
    """

    seconds: float = 0.0
    measured: float = 0.0
    between: float = 0.0
    beyond: float = 0.0
    launches: float = 0.0
    moved: float = 0.0
    work: float = 0.0
    attention: float = 0.0
    flops: float = 0.0
    exchanges: Exchanges = ()
    beside: Exchanges = ()
    gathered: BlockMessages = field(default_factory=BlockMessages)
    scattered: BlockMessages = field(default_factory=BlockMessages)
    made: Kernels = Kernels()
    made_of_experts: Kernels = Kernels()
    alive: Alive = Alive()
    begins: Alive = Alive()
    ends: Alive = Alive()
    alone: Alive = Alive()


@dataclass(frozen=True)
class PartLevels(PartCost):
    """A part with what `alive` and its kind, `WHERE`, are the peaks of: first `whole`,
    which all have, then the others of each; without the cases in which experts are left
    out, where there are none."""

    levels: Levels = NO_LEVELS

    def settled(self) -> PartCost:
        """The part with peaks in place of its levels."""
        fields = dict(vars(self))
        levels: Levels = fields.pop("levels")
        part = PartCost(**fields)
        if not levels.rows.size:
            return part
        whole, *others = levels.peaks
        cases, count = len(vars(part.alive)) - 1, len(others) // len(WHERE)
        each = (others[i : i + count] for i in range(0, len(others), count))
        alive = (Alive(whole, *own * (cases // count)) for own in each)
        return part.changed(**dict(zip(WHERE, alive, strict=True)))


@dataclass(frozen=True)
class Held(Amounts):
    """Bytes of parameters: all; trained; read by products; of these, cast to another
    precision once a step; and updated elsewhere, so that the optimizer's state is not
    on the device."""

    parameters: float = 0.0
    trained: float = 0.0
    read: float = 0.0
    cast: float = 0.0
    offloaded: float = 0.0

    @property
    def optimizer(self) -> float:
        """Bytes of the optimizer's state."""
        return OPTIMIZER_STATES * (self.trained - self.offloaded)

    @property
    def resting(self) -> float:
        """Bytes of parameters, gradients and the optimizer's state."""
        return self.parameters + self.trained + self.optimizer


@dataclass(frozen=True)
class Account(Amounts):
    """What a stage's rank does and holds, in seconds and bytes.

    forward, backward (its input half) and weight (its other half): each of one
    microbatch; step: once a step; casts: what of that casts parameters to another
    precision. held: of all parameters; experts: of those that ep
    splits; tied: of those that the model's other end uses as well, see `once_a_rank`.
    residuals, weight_residuals, whole (for a step), edges, received, sent: as in
    `passes.schedule.footprint.Footprint`; batch_residuals: of the residuals, what
    grows with the samples; gathered: of what is whole, parameters.
    pending: gradients by the axes over which they are summed, all at once. counts:
    numbers of the batch that ranks add up once a step, which dp joins. update: seconds
    of the optimizer, if it was measured.
    """

    forward: PartCost = PartCost()
    backward: PartCost = PartCost()
    weight: PartCost = PartCost()
    step: PartCost = PartCost()
    casts: PartCost = PartCost()
    held: Held = Held()
    experts: Held = Held()
    tied: Held = Held()
    residuals: float = 0.0
    batch_residuals: float = 0.0
    weight_residuals: float = 0.0
    whole: float = 0.0
    edges: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    pending: Exchanges = ()
    counts: Exchanges = ()
    update: float = 0.0

    def __hash__(self) -> int:
        """Hashes a few of the amounts, as searches ask for it often."""
        return hash((self.forward.seconds, self.backward.seconds, self.residuals))

    @property
    def microbatch(self) -> Mapping[str, PartCost]:
        """The parts of a microbatch by name."""
        return {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT: self.weight}

    @property
    def footprint(self) -> Footprint:
        """The memory of a stage's rank, in whole bytes."""
        return Footprint(
            residuals=round(self.residuals),
            forward_peak=round(self.forward.alive.whole),
            backward_peak=round(self.backward.alive.whole),
            weight_residuals=round(self.weight_residuals),
            step=round(self.whole),
            weight_peak=round(self.weight.alive.whole),
            edges=round(self.edges),
            received=round(self.received),
            sent=round(self.sent),
        )

    def with_parts(
        self,
        forward: PartCost,
        backward: PartCost,
        weight: PartCost,
        step: PartCost | None = None,
    ) -> Account:
        """The account with other costs of its parts; the step's may stay."""
        step = step or self.step
        return self.changed(
            forward=forward, backward=backward, weight=weight, step=step
        )

    def with_alive(self, alive: Iterable[Alive]) -> Account:
        """The account with this alive in the parts of a microbatch."""
        parts = zip(self.microbatch.values(), alive, strict=True)
        return self.with_parts(*(part.changed(alive=most) for part, most in parts))


def at_ends(account: Account, begins: bool, ends: bool) -> Account:
    """The account of a piece that a stage begins or ends with."""
    where = WHERE[ENDS.index((begins, ends))]
    alive = (getattr(part, where) for part in account.microbatch.values())
    return account.with_alive(alive)


def in_a_row(
    whole: Account, parts: Sequence[tuple[Account, int]], tied: Held
) -> Account:
    """The account of parts that run one after another, each so many times, which add up
    to `whole`, but for the most that they have alive (of each it is beside the
    residuals of those before it, and in a backward beside what those after it have kept
    for their weight half) and for messages, which are those of both ends. tied: weights
    of the last part that the model's first uses as well."""
    (first, _), (last, _) = parts[0], parts[-1]
    most = dict.fromkeys((FORWARD, BACKWARD, WEIGHT), Alive())
    residuals = weight_residuals = 0.0
    later = sum(count * part.weight_residuals for part, count in parts)
    # With ZeRO such a weight is whole for a forward, and its gradient once it is made;
    # the last part's own account has both.
    weights = Alive(zero_3=tied.read, zero_3_but_experts=tied.read)
    grads = Alive(0.0, *[tied.trained] * (len(vars(weights)) - 1))
    by_half = (Alive(), grads) if last.weight.scattered.calls else (grads, Alive())
    own = {FORWARD: weights, BACKWARD: by_half[0], WEIGHT: by_half[1]}
    for part, count in parts:
        alive = {k: p.alive for k, p in part.microbatch.items()}
        if tied.read and part is not last:
            alive = {k: x + own[k] for k, x in alive.items()}
        # Of equal ones in a row the first or the last has most beside it.
        beside = residuals + max(0.0, (count - 1) * part.residuals)
        most[FORWARD] = most[FORWARD].largest(alive[FORWARD], beside)
        later -= count * part.weight_residuals
        each = max(0.0, part.residuals, part.weight_residuals)
        beside = residuals + (count - 1) * each + later
        most[BACKWARD] = most[BACKWARD].largest(alive[BACKWARD], beside)
        beside = weight_residuals + max(0.0, (count - 1) * part.weight_residuals)
        most[WEIGHT] = most[WEIGHT].largest(alive[WEIGHT], beside)
        residuals += count * part.residuals
        weight_residuals += count * part.weight_residuals
    account = whole.with_alive(most.values())
    return account.changed(received=first.received, sent=last.sent)


def once_a_rank(
    accounts: Sequence[Account], placement: Sequence[int]
) -> list[list[Account]]:
    """The accounts of each rank's stages. Of a rank that runs both ends of the model,
    weights that both use rest once, and there is no gradient of them to exchange.

    accounts: of each stage; placement: its rank.
    """
    first, *inner = accounts
    if inner and placement[0] == placement[-1]:
        last = inner.pop()
        first = replace(first, tied=first.tied - last.tied)
        inner.append(replace(last, tied=Held(), held=last.held - last.tied))
    return by_rank((first, *inner), placement)


def by_rank(
    accounts: Sequence[Account], placement: Sequence[int]
) -> list[list[Account]]:
    """The accounts of each rank's stages."""
    ranks: list[list[Account]] = [[] for _ in range(max(placement) + 1)]
    for account, rank in zip(accounts, placement, strict=True):
        ranks[rank].append(account)
    return ranks


def memory_of(
    ranks: Sequence[Sequence[Account]],
    footprints: Sequence[Footprint],
    schedule: Schedule,
) -> list[dict[str, float]]:
    """Bytes of each rank, term -> bytes, see `rank_memory`. footprints: of each
    stage."""
    return [
        rank_memory(own, peak_bytes(schedule, rank, footprints))
        for rank, own in enumerate(ranks)
    ]


def rank_memory(accounts: Sequence[Account], peak: float = 0) -> dict[str, float]:
    """Bytes on a rank, term -> bytes (Rajbhandari 2020, section 5).

    accounts: of its stages, see `passes.price.estimate.run_accounts`. peak: of
    activations, with messages and what is whole for a step, see `peak_bytes`.
    """
    gathered = sum(a.gathered for a in accounts)
    return {
        "parameters": sum(a.held.parameters for a in accounts),
        "gradients": sum(a.held.trained for a in accounts),
        "optimizer": sum(a.held.optimizer for a in accounts),
        "buffers": sum(a.buffers for a in accounts),
        "gathered": gathered,
        "activations": peak - gathered,
    }
