"""What it takes to bring a value from one state to another, on a single axis.

The table of `passes.shard.insert_collectives` as data, so that a labelling can be
priced without making its graph.
"""

from __future__ import annotations

from dataclasses import dataclass

# A place is a split there: (dim, factor). The rest as in `passes.shard.sharding`.
R, V, P, MAX = "R", "V", "P", "max"
State = str | tuple[int, int]

FORWARD, BACKWARD = "forward", "backward"
# (part, collective, the state that the value is brought to)
Move = tuple[str, str, State]


class Impossible(ValueError):
    """No collective leads from one state to the other."""


@dataclass(frozen=True)
class Need:
    """How an operand must lie. passes: it may come as a pending sum, and stays one;
    joins: it must become one. flows: whether a gradient comes back from this use."""

    state: State
    flows: bool
    passes: bool = False
    joins: bool = False

    def of(self, have: State) -> State:
        return P if self.joins or (self.passes and have == P) else self.state

    def partial(self, have: State) -> bool:
        """Whether each rank of the axis gives only a part of the gradient."""
        return self.of(have) != R


def moves(have: State, need: State, flows: bool) -> frozenset[Move]:
    """The collectives, forward and transposed. flows: whether gradients come back.

    A move for one use of a value serves all that want it so: the cost of several uses
    is that of the union. Raises: Impossible.
    """
    if have == need:
        return frozenset()
    found = _moves(have, need)
    return frozenset(m for m in found if flows or m[0] == FORWARD)


def _moves(have: State, need: State) -> frozenset[Move]:
    if have in (P, MAX):
        if isinstance(need, tuple) and have == P:
            return _both("reduce_scatter", "all_gather", need)
        if need != P:
            reduced = frozenset({(FORWARD, "all_reduce", R)})
            return reduced if need == R else reduced | _moves(R, need)
    elif isinstance(have, tuple):
        if isinstance(need, tuple):
            return _both("all_to_all", "all_to_all", need)
        if need == V:
            return _both("all_gather", "reduce_scatter", V)
        if need == R:
            return frozenset({(FORWARD, "all_gather", R)})
    elif have == V:
        if need != R:
            return frozenset()
    elif isinstance(need, tuple):
        return frozenset({(BACKWARD, "all_gather", need)})
    else:  # each rank uses it in its own way, or as its share of a sum
        return frozenset({(BACKWARD, "all_reduce", V)})
    raise Impossible(f"{have} -> {need}")


def _both(forward: str, backward: str, state: State) -> frozenset[Move]:
    return frozenset({(FORWARD, forward, state), (BACKWARD, backward, state)})
