"""Storages of a list of nodes, the values that lie in them, and the bytes alive while
each node runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import add
from types import MappingProxyType

from ..graph import Node, live_in
from ..ops.memory import find_owners, takes_memory
from ..ops.op import op_of
from ..shard.collectives import bytes_of
from ..stage.local_stage import LocalStage
from ..stage.runs import find_remade, find_runs, passed_on


class Storages:
    """The bytes of storages alive at each node; each is dropped after its last reader.

    entering: bytes of storages from before, by name. held: values from before -> their
    storage among these. keep: names of what is read later. runs: of nodes that are a
    function, whose arguments stay until it returns, and so do its results, named in
    `returned`.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        keep: Collection[str],
        entering: Mapping[str, int] = MappingProxyType({}),
        held: Mapping[str, str] = MappingProxyType({}),
        runs: Collection[tuple[int, int]] = (),
        returned: Collection[str] = (),
    ) -> None:
        self.nodes, self.runs, self.returned = nodes, runs, returned
        self.sizes = {v.name: bytes_of(n, v) for n in nodes for v in n.results}
        self.sizes |= entering
        self.owners = find_owners(nodes, {n: n for n in entering} | dict(held))
        # Storage -> the number of the last node that uses it.
        self.last = self._last_uses(keep, entering)
        # Bytes alive before the first node, and while each one runs.
        self.before = sum(n for name, n in entering.items() if self.last[name] >= 0)
        self.levels = self._levels()

    @property
    def peak(self) -> int:
        return max([self.before, *self.levels])

    def _last_uses(
        self, keep: Collection[str], entering: Mapping[str, int]
    ) -> dict[str, int]:
        owners = self.owners
        last: dict[str, int] = dict.fromkeys(entering, -1)
        for i, node in enumerate(self.nodes):
            for v in (*node.operands, *node.results):
                if v.name in owners:
                    last[owners[v.name]] = i
        last |= {owners[n]: len(self.nodes) for n in keep if n in owners}
        for begin, end in self.runs:
            own = self.nodes[begin:end]
            made = {v.name for n in own for v in n.results}.intersection(self.returned)
            for name in (live_in(own).keys() | made) & owners.keys():
                last[owners[name]] = max(last[owners[name]], end - 1)
        return last

    def _levels(self) -> list[int]:
        dying: dict[int, list[str]] = {}
        for name, i in self.last.items():
            dying.setdefault(i, []).append(name)
        alive, levels = self.before, []
        for i, node in enumerate(self.nodes):
            for v in node.results:
                if self.owners.get(v.name) == v.name:
                    alive += self.sizes[v.name]
            workspace = op_of(node).workspace
            levels.append(alive + (workspace(node) if workspace else 0))
            for name in dying.get(i, ()):
                alive -= self.sizes[name]
        return levels


class Alive:
    """How many bytes are alive while statements run, and how many may be.

    calls: id of a call -> the nodes that it runs. at_once: what is not read any more is
    let go of at once; else where the peak would be higher otherwise.
    """

    def __init__(
        self,
        storages: Storages,
        calls: Mapping[int, Sequence[Node]] = MappingProxyType({}),
        at_once: bool = False,
    ) -> None:
        self.storages = storages
        self.numbers = {id(node): i for i, node in enumerate(storages.nodes)}
        copied = list(map(self._copied, storages.nodes))
        self.levels = list(map(add, storages.levels, copied))
        # Storages of views that may be copies: each value may have its own.
        self.apart = {
            storages.owners.get(v.name)
            for node, size in zip(storages.nodes, copied, strict=True)
            if size
            for v in node.results
        }
        self.calls = calls
        self.peak = 0 if at_once else storages.peak

    def level(self, nodes: Iterable[Node]) -> int:
        """The most that is alive while any of these runs; 0 if they take none."""
        own = [n for node in nodes for n in self.calls.get(id(node), [node])]
        if not any(map(takes_memory, own)):
            return 0
        return max(self.levels[self.numbers[id(n)]] for n in own)

    def freed(self, name: str, node: Node) -> int:
        """Bytes that nothing else holds when a value is let go of after a node."""
        owner = self.storages.owners.get(name)
        if owner is None:
            return 0
        after = self.numbers[id(self.calls.get(id(node), [node])[-1])]
        last = self.storages.last[owner] <= after or owner in self.apart
        return self.storages.sizes[owner] * last

    def _copied(self, node: Node) -> int:
        """Bytes that a view takes where it is a copy after all."""
        owners = self.storages.owners
        shared = [v.bytes for v in node.results if owners.get(v.name) != v.name]
        return sum(shared) if shared and takes_memory(node) else 0


def storages(local: LocalStage) -> tuple[Storages, Storages, Storages]:
    """The storages of a microbatch's forward, of its backward, and of the weight
    half."""
    halves = local.forward, local.backward, local.weight_half or ()
    remade = find_remade(halves)
    runs = [list(find_runs(nodes, remade)) for nodes in halves]
    returned = passed_on(halves, remade)
    ends = {v.name for v in (*local.residuals, *local.ends)}
    arrived = {v.name: v.bytes for v in local.receives}
    forward = Storages(local.forward, ends, arrived, {}, runs[0], returned)
    # The backward holds what was saved until the last reader of it, or of its views.
    owners = forward.owners
    held = {v.name: owners[v.name] for v in local.residuals if v.name in owners}
    entering = {v.name: v.bytes for v in local.d_sends if v is not None}
    entering |= {root: forward.sizes[root] for root in held.values()}
    ends = {v.name for v in (*local.d_receives, *local.weight_residuals) if v}
    backward = Storages(local.backward, ends, entering, held, runs[1], returned)
    owners = backward.owners
    held = {v.name: owners[v.name] for v in local.weight_residuals if v.name in owners}
    left = {root: backward.sizes[root] for root in held.values()}
    return forward, backward, Storages(halves[2], (), left, held, runs[2], returned)
