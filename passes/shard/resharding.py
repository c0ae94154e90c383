"""Resharding: the collectives that turn the state a value has into the one it needs.

On each axis a value is in one of five states: R, V, P and MAX, or split at a place, see
`passes.shard.sharding`. `TABLE` has all single steps, and what the derivative of each
is; what takes two goes by a state in between. The emitter of the graph takes these
steps, and the search for op shardings adds up their seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

R, V, P, MAX, S = "R", "V", "P", "max", "S"
State = str | tuple[int, int]
"""R, V, P or MAX; or the place that is split: (dim, factor)."""

# from, to -> what moves it there, and the collective of the backward, if there is one.
TABLE: dict[tuple[str, str], tuple[str, str | None]] = {
    (P, S): ("reduce_scatter", "all_gather"),
    (P, R): ("all_reduce", None),
    (MAX, R): ("all_reduce", None),
    (S, S): ("all_to_all", "all_to_all"),
    (S, V): ("all_gather", "reduce_scatter"),
    (S, R): ("all_gather", None),  # shard
    (R, S): ("shard", "all_gather"),
    (V, S): ("shard", None),  # zeros around it
    (R, V): ("enter", "all_reduce"),
    (V, P): ("share", None),  # each of n ranks holds 1/n of the value
}
BY_WAY_OF = {(P, V): R, (MAX, V): R, (MAX, S): R, (R, P): V}
# Where what splits a place outside of the axis does not do so yet.
NOT_DIRECTLY = {(P, S): R, (S, S): V}  # what is split again is used differently
LOCAL = ("shard", "enter", "share")


class Impossible(ValueError):
    """No collective leads from one state to the other."""


@dataclass(frozen=True)
class Step:
    """op: what moves the value forward. dual: the collective that its gradient takes
    back, if any. to: the state that it has then."""

    op: str
    dual: str | None
    to: State

    def collectives(self, flows: bool) -> list[tuple[bool, str, State]]:
        """Lists (whether backward, collective, state that it makes). flows: whether a
        gradient comes back."""
        sent = [] if self.op in LOCAL else [(False, self.op, self.to)]
        if flows and self.dual:
            sent.append((True, self.dual, self.to))
        return sent


class Need(NamedTuple):
    """How an operand must lie. passes: it may come as a pending sum, and stays one;
    joins: it must become one. flows: whether a gradient comes back from this use."""

    state: State
    passes: bool = False
    joins: bool = False
    flows: bool = True

    def of(self, have: State) -> State:
        """The state needed of an operand that is in state `have`."""
        return P if self.joins or (self.passes and have == P) else self.state

    def partial(self, have: State) -> bool:
        """Whether each rank of the axis gives only a part of the gradient."""
        return self.of(have) != R


def place_of(state: State) -> tuple[int, int] | None:
    """The (dim, factor) that a state splits, if it splits any."""
    return state if isinstance(state, tuple) else None


def kind(state: State) -> str:
    """S for a place that is split, else the state itself."""
    return state if isinstance(state, str) else S


def transition(have: State, need: State, direct: bool = True) -> tuple[Step, ...]:
    """Returns the steps that bring a value from one state to another.

    direct: whether it can be split where it is needed by the collective that ends the
    state it has. Raises: Impossible.
    """
    if have == need and direct:
        return ()
    ends = kind(have), kind(need)
    between = BY_WAY_OF.get(ends) or (None if direct else NOT_DIRECTLY.get(ends))
    if between is not None:
        return transition(have, between) + transition(between, need)
    if ends not in TABLE:
        raise Impossible(f"{have} -> {need}")
    return (Step(*TABLE[ends], need),)
