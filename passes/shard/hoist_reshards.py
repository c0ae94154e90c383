"""hoist_reshards: a value copied along a dim is best moved before the copies are made.

Moving a value and taking a view of it may be done in either order, if the view keeps
the dims that are split. An expand makes its result as many times larger as it makes
copies, so what is moved before it is smaller, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dims.name_dims import Dims, Factor
from ..shard.sharding import Sharding


def before_view(
    factors: Sequence[Factor], lies: Sharding, dims: Dims
) -> Sharding | None:
    """How the operand of a view must lie for its result to lie so.

    factors: the dims that flow through the view. dims: of its operand. An axis that
    splits copies finds the operand whole, and uses it differently on each rank. None:
    the view does not keep a dim that is split.
    """
    slots: list[list[tuple[str, ...]]] = [[() for _ in own] for own in dims]
    varying = set(lies.varying)
    for d, own in enumerate(lies.slots):
        for i, axes in enumerate(own):
            if not axes:
                continue
            through = [f for f in factors if (0, d, i) in f.outs and f.role == "map"]
            if not through:
                return None
            for _, at, spot in through[0].operands:
                slots[at][spot] = axes
            if not through[0].operands:
                varying.update(axes)
    return Sharding(tuple(map(tuple, slots)), (), frozenset(varying))
