"""The roll call: before each operation ranks tell which one it is, and what of it must
be the same on all of them.

A rank that evaluates while another steps would wait in a collective that never comes,
or meet one that is not its own. So every operation begins with a message of four
numbers, in a process group of its own: what the rank is about to do, whether it can,
and digests of what it does it with. Only where these differ ranks send more, to say
what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.runtime.comm import Comm
from autopar.runtime.digest import digest_of_text
from passes.errors import AutoparError

# What ranks do together, and how an error says it of one rank and of several.
OPERATIONS = {
    "step": ("steps", "step"),
    "evaluate": ("evaluates", "evaluate"),
    "clip_grad_norm_": ("clips gradients", "clip gradients"),
    "state_dict": ("takes a state dict", "take a state dict"),
    "load_state_dict": ("loads a state dict", "load a state dict"),
    "save": ("saves", "save"),
    "load": ("loads", "load"),
    "gather_for": ("prepares an optimizer", "prepare an optimizer"),
    "build": ("compiles", "compile"),
}

Facts = Mapping[tuple[str, str], Any]
"""(kind, name) -> a plain value, such as a digest: all ranks must have the same."""

Judge = Callable[[str, Mapping[int, Any]], AutoparError | None]
"""From a fact's name and its values by rank (None: it has none) to an error, if the
difference is one."""


class RanksDisagree(AutoparError):
    """Ranks are not in the same operation."""


class RollCall:
    """One rank's part in the roll calls of a step.

    comm: of all ranks. judges: by kind of fact, what is said where ranks differ.
    """

    def __init__(self, comm: Comm, judges: Mapping[str, Judge]) -> None:
        self.comm, self.judges = comm, judges
        # What ranks told that was not the same, and yet right.
        self._right: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(
        self, operation: str, facts: Facts | None = None, of_stage: Facts | None = None
    ) -> None:
        """Begin an operation; on all ranks, or on none.

        facts: the same on all ranks. of_stage: the same on those of the same stages.
        Raises, on all ranks: RanksDisagree, or what a judge says of the first fact that
        is not the same on all of them.
        """
        self._meet(operation, dict(facts or {}), dict(of_stage or {}), None)

    def refuse(self, operation: str, error: AutoparError) -> None:
        """Begin an operation that this rank cannot take part in: the others raise too,
        and say why. The caller raises the error."""
        self._meet(operation, {}, {}, error)

    def _meet(
        self,
        operation: str,
        facts: dict[tuple[str, str], Any],
        of_stage: dict[tuple[str, str], Any],
        error: AutoparError | None,
    ) -> None:
        mesh = self.comm.mesh
        if mesh.size == 1:
            return
        number = list(OPERATIONS).index(operation)
        digests = [digest_of_text(repr(found)) for found in (facts, of_stage)]
        rows = self.comm.meet([number, error is not None, *digests], operation)
        alike = all(row[:3] == rows[0][:3] for row in rows) and not rows[0][1]
        if alike and all(
            rows[rank][3] == rows[ranks[0]][3]
            for ranks in self._by_stage()
            for rank in ranks
        ):
            return
        if (key := tuple(map(tuple, rows))) in self._right:
            return
        told = self.comm.gather_object((operation, facts, of_stage, error))
        if error is None:
            self._judge(told)
            self._right.add(key)

    def _by_stage(self) -> list[list[int]]:
        """The ranks of each coordinate of the pipeline."""
        found: dict[int, list[int]] = {}
        for rank in range(self.comm.mesh.size):
            found.setdefault(self.comm.mesh.coords(rank).get("pp", 0), []).append(rank)
        return list(found.values())

    def _judge(self, told: Sequence[tuple[str, Facts, Facts, Any]]) -> None:
        for rank, (operation, *_, error) in enumerate(told):
            if error is not None:
                raise RanksDisagree(
                    f"rank {rank} cannot {operation}: {error.what}", fix=error.fix
                )
        check_operations([operation for operation, *_ in told])
        self._compare({rank: facts for rank, (_, facts, *_) in enumerate(told)})
        for ranks in self._by_stage():
            self._compare({rank: told[rank][2] for rank in ranks})

    def _compare(self, by_rank: Mapping[int, Facts]) -> None:
        names = dict.fromkeys(key for facts in by_rank.values() for key in facts)
        for kind, name in names:
            values = {r: facts.get((kind, name)) for r, facts in by_rank.items()}
            if others(values) and (found := self.judges[kind](name, values)):
                raise found


def check_operations(by_rank: Sequence[str]) -> None:
    """Raises RanksDisagree unless all ranks are in the same operation."""
    if len(set(by_rank)) == 1:
        return
    parts = []
    for operation in dict.fromkeys(by_rank):
        ranks = [r for r, other in enumerate(by_rank) if other == operation]
        words = OPERATIONS[operation][len(ranks) > 1]
        parts.append(f"{ranks_text(ranks)} {words}")
    called = " and ".join(f"step.{o}()" for o in dict.fromkeys(by_rank) if o != "step")
    raise RanksDisagree(
        ", but ".join(parts),
        fix=f"call {called} on all ranks, at the same place, and not within "
        "`if rank == 0`; on one rank only print, or write files of your own",
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1 and 2`, `ranks 1 to 7`, `ranks 1, 3 and 5`; ascending."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def others(values: Mapping[int, Any]) -> list[int]:
    """The ranks whose value is not that of the first."""
    first = next(iter(values.values()))
    return [rank for rank, value in values.items() if value != first]
