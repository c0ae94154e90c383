"""check_alike: whether the ranks of a stage meet in every collective.

Ranks that hold more of a dim than others run other texts. Each was decided on by
itself; were one of these decisions made from a rank's own extents, ranks would wait for
each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..graph import InvalidGraph
from ..ops.attention import ring_of
from ..shard.collectives import collective
from ..stage.local_stage import LocalStage

Call = tuple[str, tuple[str, ...]]  # a collective, and the axes it runs over


def check_alike(
    ranks: Sequence[tuple[Mapping[str, int], str]], stages: Mapping[str, LocalStage]
) -> None:
    """Checks that ranks which differ on some axes only, and so talk over these, call
    the same collectives over them in the same order, in each part.

    ranks: the coordinates of each, and its key in `stages`. Raises: InvalidGraph.
    """
    if len(stages) < 2:
        return
    for part in next(iter(stages.values())).parts:
        calls = {key: _calls(local, part) for key, local in stages.items()}
        for axes in {axes for own in calls.values() for _, axes in own}:
            over = {
                key: [op for op, at in own if at == axes] for key, own in calls.items()
            }
            first: dict[tuple[int, ...], str] = {}
            for coords, key in ranks:
                group = tuple(n for axis, n in coords.items() if axis not in axes)
                other = first.setdefault(group, key)
                if over[key] != over[other]:
                    raise InvalidGraph(
                        f"ranks do not meet over {'+'.join(axes)} in {part}: "
                        f"{len(over[other])} collectives and {len(over[key])}"
                    )


def _calls(local: LocalStage, part: str) -> list[Call]:
    calls: list[Call] = []
    for node in local.parts[part]:
        if (sent := collective(node)) is not None:
            calls.append(sent)
        elif (axis := ring_of(node)) is not None:
            calls.append((node.op, (axis,)))
    return calls
