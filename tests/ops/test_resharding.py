"""The table of reshardings: its steps lead where they should, and back."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.passes.shard.resharding import (
    LOCAL,
    MAX,
    TABLE,
    Impossible,
    P,
    R,
    S,
    V,
    kind,
    transition,
)  # fmt: skip

ROWS, COLUMNS = (0, 0), (1, 0)
# The state of a value -> that of its gradient, see `passes.shard.sharding`.
GRADIENT = {S: S, R: R, V: P, P: R}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("have", "need"), [*product((R, V, P, MAX, ROWS), (R, V, P, COLUMNS))]
)
def test_steps_follow_each_other_to_what_is_needed(have, need, direct) -> None:
    try:
        steps = transition(have, need, direct or kind(need) != S)
    except Impossible:
        assert (kind(have), need) in {(V, R), (S, P), (MAX, P)}
        return
    at = have
    for step in steps:
        assert TABLE[kind(at), kind(step.to)] == (step.op, step.dual)
        at = step.to
    assert at == need


def test_the_backward_of_a_step_is_the_step_of_the_gradient() -> None:
    """What is sent back is what takes the gradient's state to where it was before."""
    for (have, need), (_, dual) in TABLE.items():
        if MAX in (have, need):
            continue  # has no gradient
        back = TABLE.get((GRADIENT[need], GRADIENT[have]))
        sent = back and back[0] not in LOCAL
        assert dual == (back[0] if back and sent else None), (have, need)
