"""value_costs: the collectives that a value takes, and the memory, on one axis.

A value is brought from the state in which it is made to those in which it is needed,
each once for all uses that share it. A parameter is sharded as its uses want it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..dims.origins import find_differentiable
from ..graph import Value
from ..price.account import OPTIMIZER_STATES
from ..price.cluster import Device, Link
from ..price.estimate import OPTIMIZER_TRAFFIC
from ..shard.parameter_sharding import place_at_rest
from ..shard.propagate import Sharded
from ..shard.resharding import Impossible, Need, R, State, V, place_of, transition
from ..shard.sharding import Sharding

COMPUTE, COMMUNICATION, MEMORY = range(3)  # of an amount; seconds, seconds, bytes
Amount = tuple[float, float, float]
NEVER: Amount = (math.inf, 0.0, 0.0)
Use = tuple[tuple[Need, ...], bool]
"""The needs of a consumer's operands that are one value; whether its backward reads it.
"""


@dataclass(frozen=True)
class Setting:
    """The problem of choosing op shardings along one axis: the shardings on all axes so
    far, of which those on `axis` are ignored, its link, and the device. residuals:
    values that forward keeps for backward, and those that these are views of -> the
    value whose storage they show. in_flight: microbatches between the two. decided:
    whether ops with alternatives to their rules stay as the plan splits them."""

    sharded: Sharded
    axis: str
    device: Device
    link: Link
    residuals: Mapping[str, str] = field(default_factory=dict)
    in_flight: int = 1
    decided: bool = False

    @cached_property
    def storages(self) -> frozenset[str]:
        return frozenset(self.residuals.values())

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return self.sharded.plan.sizes

    @cached_property
    def differentiable(self) -> frozenset[str]:
        traced = self.sharded.named.traced
        return find_differentiable(traced.graph, traced.trainable)

    def local_shape(
        self, v: Value, lies: Sharding, place: tuple[int, int] | None
    ) -> tuple[int, ...]:
        """The shape of a value on the first rank. place: what the axis splits of it."""
        lies = lies.without_split(self.axis)
        if place is not None:
            lies = lies.with_split(place, self.axis, list(self.sizes))
        first = dict.fromkeys(self.sizes, 0)
        return lies.local_shape(self.sharded.named.dims[v.name], self.sizes, first)

    def bytes_of(self, v: Value, state: State) -> int:
        """Bytes of a value on the first rank; other axes split it as it is made."""
        shape = self.local_shape(v, self.sharded.states[v.name], place_of(state))
        return math.prod(shape) * v.dtype.itemsize


@dataclass(frozen=True)
class ValueCosts:
    """The costs of a value, by how it is made and needed."""

    setting: Setting
    v: Value
    is_parameter: bool

    @property
    def flows(self) -> bool:
        return self.v.name in self.setting.differentiable

    @property
    def is_residual(self) -> bool:
        return self.v.name in self.setting.storages

    @property
    def signature(self) -> tuple[object, ...]:
        """Values of the same signature cost the same."""
        sharded = self.setting.sharded
        lies = sharded.states[self.v.name].without_split(self.setting.axis)
        dims = sharded.named.dims[self.v.name]
        sizes = tuple(tuple(d.size for d in dim) for dim in dims)
        other = (sizes, lies.slots, self.v.dtype)
        return (*other, self.is_parameter, self.flows, self.is_residual)

    def __call__(self, made: tuple[State, bool], uses: Sequence[Use]) -> Amount:
        """made: the state that the producer leaves it in, and whether it might be V.
        uses: of all consumers; what several have in common costs no more."""
        have, can_vary = made
        needs = [need for own, _ in uses for need in own]
        partial = all(need.partial(have) for need in needs)
        if self.is_parameter:
            places = (need.state for need in needs)
            place = place_at_rest(self.setting.sharded.plan, self.setting.axis, places)
            have = place or (V if partial else R)
        elif can_vary and (have == V) != partial:
            return NEVER  # see `passes.shard.settle_varying`
        try:
            moves = dict.fromkeys(  # each once, in an order that does not change
                sent
                for need in needs
                for step in transition(have, need.of(have))
                for sent in step.collectives(self.flows and need.flows)
            )
        except Impossible:
            return NEVER
        seconds = sum(self._seconds(kind, have, to) for _, kind, to in moves)
        if not self.is_parameter:
            return 0.0, seconds, self._residual_seconds(have, uses)
        update, reduction, resting = self._at_rest(have)
        return update, seconds + reduction, resting

    def _seconds(self, kind: str, have: State, to: State) -> float:
        """Returns a collective's seconds; see `passes.price.cluster.Link`."""
        ends = (have, to) if kind == "all_to_all" else (R,)
        amount = max(self.setting.bytes_of(self.v, end) for end in ends)
        return self.setting.link.seconds(kind, amount)

    def _at_rest(self, have: State) -> Amount:
        """A microbatch's share of a parameter's update and of the reduction of its
        gradient; bytes of both and of the optimizer's state."""
        setting, amount = self.setting, self.setting.bytes_of(self.v, have)
        if not self.flows:
            return 0.0, 0.0, float(amount)
        share = 1.0 / setting.sharded.plan.microbatches
        # Gradients go together, so each only adds its bytes to the message.
        link = setting.link.without_latency()
        reduction = link.seconds("all_reduce", amount) if have == V else 0.0
        update = setting.device.seconds(moved=OPTIMIZER_TRAFFIC * amount)
        return share * update, share * reduction, float(amount * (2 + OPTIMIZER_STATES))

    def _residual_seconds(self, have: State, uses: Sequence[Use]) -> float:
        """Bytes kept for the backward: in each state that a backward reads it in. As it
        is made it is kept once with all views of its storage."""
        read = {place_of(need.of(have)) for own, keeps in uses if keeps for need in own}
        produced = place_of(have)
        places = (read or {produced}) if self.is_residual else read - {produced}
        size = sum(self.setting.bytes_of(self.v, place or R) for place in places)
        return float(size * self.setting.in_flight)
