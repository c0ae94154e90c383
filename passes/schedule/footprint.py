"""What a rank's stage keeps in memory and sends, counted on its emitted nodes.

Memory is counted by storage: a view costs nothing, and what a view is made of lives as
long as the view does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from ..graph import Node
from ..graph_text import DTYPES
from ..ops.attention import passed_round, ring_of
from ..ops.op import op_of
from ..schedule.messages import (
    AHEAD,
    prefetched_receives,
    send_completions,
    sizes,
)
from ..schedule.schedule import Action, Kind, Schedule
from ..shard.collectives import bytes_of, collective, contributed_bytes
from ..shard.parameter_sharding import find_made
from ..stage.blocks import Beside, Runs
from ..stage.local_stage import LocalStage
from ..stage.outline import find_all_runs
from ..stage.reuse import find_owners


@dataclass(frozen=True)
class Communication:
    """One kind of message of a stage's rank.

    part: "forward" or "backward" (calls and bytes are of one microbatch), or "step"
    (of one step). kind: a collective, "shift" (to the next rank of a ring), or "send".
    dtype: as `f32`. bytes: of the tensors that the rank gives, all calls together.
    """

    stage: int
    part: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank: kept from a microbatch's forward to its backward; and the most
    that a forward, or a backward with what it was given, has alive at once. Where the
    backward is split, that is of the input half; kept: what it keeps for the weight
    half; weight_peak: the most that this has alive. step: of what is made of parameters
    for a whole step, gathered or in another precision, and of gradients whole as long.
    edges: the most before the first forward or after the last backward, when some of
    these are in messages. received, sent: of a forward's messages; gradients are as
    large, the other way.
    """

    saved: int
    forward_peak: int
    backward_peak: int
    kept: int
    step: int
    weight_peak: int = 0
    edges: int = 0
    received: int = 0
    sent: int = 0

    @property
    def each(self) -> int:
        """Bytes of a microbatch in flight, at most, while something else runs."""
        return max(self.saved + self.sent, self.kept)

    @property
    def working(self) -> int:
        """Bytes that an action has alive beyond those of microbatches in flight."""
        forward = max(self.forward_peak, self.backward_peak) - self.saved
        messages = AHEAD * max(self.received, self.sent)
        return messages + max(0, forward, self.weight_peak - self.kept)

    def most(self, in_flight: int) -> int:
        """Bytes at most, with this many microbatches between forward and backward."""
        most = max(self.forward_peak, self.backward_peak, self.weight_peak)
        return max((in_flight - 1) * self.each + most + self.step, self.edges)


def peak_bytes(
    schedule: Schedule,
    rank: int,
    footprints: Sequence[Footprint] | Mapping[int, Footprint],
) -> int:
    """The most bytes of activations and messages that a rank has alive at once.

    schedule: with its messages. footprints: of each stage, by its index.
    """
    own = {s: footprints[s] for s, r in enumerate(schedule.stage_to_rank) if r == rank}
    ends = sum(f.edges for f in own.values())
    run = bytes_alive(schedule, rank, footprints)
    return max(ends, *(most for _, most, _ in run))


def bytes_alive(
    schedule: Schedule,
    rank: int,
    footprints: Sequence[Footprint] | Mapping[int, Footprint],
) -> Iterator[tuple[Action | None, int, int]]:
    """(action, the most alive until it ends, bytes alive then), in order; None: before
    the first."""
    actions = schedule.ranks[rank]
    own = {s: footprints[s] for s in {a.stage for a in actions}}
    received = {s: f.received for s, f in own.items()}
    sent = {s: f.sent for s, f in own.items()}
    size = sizes(actions, received, sent)
    done = send_completions(schedule, rank)
    now = sum(f.step for f in own.values())
    yield None, now, now
    for action, coming in prefetched_receives(actions):
        now += sum(size[recv] for recv in coming)
        peak = now
        if action.kind.is_compute:
            before, most, after = _alive(action.kind, own[action.stage])
            peak = max(peak, now - before + most)
            now += after - before
        for send in done.get(action, ()):
            now -= size[send]
        yield action, peak, now


def _alive(kind: Kind, of: Footprint) -> tuple[int, int, int]:
    """Bytes of a microbatch before an action, the most in it, and after it."""
    return {
        Kind.F: (of.received, of.forward_peak, of.saved + of.sent),
        Kind.B: (of.saved + of.sent, of.backward_peak, of.received),
        Kind.I: (of.saved + of.sent, of.backward_peak, of.kept + of.received),
        Kind.W: (of.kept, of.weight_peak, 0),
    }[kind]


def footprint(local: LocalStage) -> Footprint:
    """Activation memory of one microbatch."""
    return footprints(local, [_nothing])[0]


def footprints(local: LocalStage, besides: Sequence[Beside]) -> list[Footprint]:
    """The footprint with each of several things beside: their bytes at each node."""
    arrived = {v.name: v.bytes for v in local.receives}
    ends = {v.name for v in (*local.residuals, *local.ends)}
    sizes = _sizes(local.forward) | arrived
    owners = find_owners(local.forward, {name: name for name in arrived})
    roots = {owners[v.name] for v in local.residuals if v.name in owners}
    saved = sum(sizes[r] for r in roots)
    halves = local.forward, local.backward, local.weight_half or ()
    runs = find_all_runs(halves)
    forward = _peaks(local.forward, arrived, ends, owners, besides, runs[0])
    # The backward holds what was saved until the last reader of it, or of its views.
    held = {v.name: owners[v.name] for v in local.residuals if v.name in owners}
    entering = {v.name: v.bytes for v in local.d_sends if v is not None}
    entering |= {r: sizes[r] for r in roots}
    results = {
        v.name for v in (*local.d_receives, *local.weight_residuals) if v is not None
    }
    owners = find_owners(local.backward, {n: n for n in entering} | held)
    backward = _peaks(local.backward, entering, results, owners, besides, runs[1])
    sizes = _sizes(local.backward) | entering
    held = {v.name: owners[v.name] for v in local.weight_residuals if v.name in owners}
    left = {root: sizes[root] for root in held.values()}
    owners = find_owners(local.weight_half or (), {n: n for n in left} | held)
    weight = _peaks(local.weight_half or (), left, (), owners, besides, runs[2])
    kept = sum(left.values())
    step, edges = _whole(local)
    received, sent = (sum(v.bytes for v in vs) for vs in (local.receives, local.sends))
    return [
        Footprint(saved, f, b, kept, step, w, edges, received, sent)
        for f, b, w in zip(forward, backward, weight, strict=True)
    ]


def saved_by_layer(local: LocalStage) -> dict[str, int]:
    """Returns the kept bytes that each layer's forward makes ("": none)."""
    owners = find_owners(local.forward, {v.name: v.name for v in local.receives})
    roots = {owners[v.name] for v in local.residuals if v.name in owners}
    found: dict[str, int] = {}
    for node in local.forward:
        size = sum(v.bytes for v in node.results if v.name in roots)
        found[node.location.layer] = found.get(node.location.layer, 0) + size
    return found


def _whole(local: LocalStage) -> tuple[int, int]:
    """Bytes of what is there for a step, though something else rests between steps;
    and the most at both ends of the step."""
    rests = {v.name for v in (*local.params, *local.buffers, *local.constants)}
    rests |= {v.name for n in local.setup for v in n.results}
    owners, sizes = find_owners(local.prologue), _sizes(local.prologue)
    made = find_made(local.prologue, rests)
    later = (*local.forward, *local.whole_backward, *local.epilogue)
    read = {v.name for n in later for v in n.operands}
    roots = {owners[name] for name in made if name in owners and name in read}
    grads = sum(v.bytes for v in local.wholes)
    step = sum(sizes[root] for root in roots) + grads
    (begin,) = _peaks(local.prologue, {}, read, owners)
    (end,) = _peaks(local.epilogue, {}, (), find_owners(local.epilogue))
    return step, max(begin + grads, step + end)


def _sizes(nodes: Sequence[Node]) -> dict[str, int]:
    return {v.name: bytes_of(n, v) for n in nodes for v in n.results}


def _nothing(nodes: Sequence[Node], runs: Runs) -> list[int]:
    return [0] * len(nodes)


def _peaks(
    nodes: Sequence[Node],
    entering: dict[str, int],
    keep: Collection[str],
    owners: Mapping[str, str],
    besides: Sequence[Beside] = (_nothing,),
    runs: Runs = (),
) -> list[int]:
    """The most bytes alive at once, with each storage dropped after its last reader.

    entering: storages that are there already, and their bytes. owners: value -> its
    storage. besides: bytes at each node that no value stands for; a peak for each.
    runs: of nodes that are a function.
    """
    sizes = _sizes(nodes) | entering
    last: dict[str, int] = dict.fromkeys(entering, -1)
    for i, node in enumerate(nodes):
        for v in (*node.operands, *node.results):
            if v.name in owners:
                last[owners[v.name]] = i
    for name in keep:
        if name in owners:
            last[owners[name]] = len(nodes)
    # What a function is given is there until it returns.
    for begin, end in runs:
        given = {v.name for n in nodes[begin:end] for v in n.operands}
        given -= {v.name for n in nodes[begin:end] for v in n.results}
        for name in given & owners.keys():
            last[owners[name]] = max(last[owners[name]], end - 1)
    alive = sum(size for name, size in entering.items() if last[name] >= 0)
    before, levels = alive, []
    dying: dict[int, list[str]] = {}
    for name, i in last.items():
        dying.setdefault(i, []).append(name)
    for i, node in enumerate(nodes):
        made = [v.name for v in node.results if owners.get(v.name) == v.name]
        alive += sum(sizes[name] for name in made)
        workspace = op_of(node).workspace
        levels.append(alive + (workspace(node) if workspace else 0))
        alive -= sum(sizes[name] for name in dying.get(i, ()))
    return [max([before, *map(add, levels, beside(nodes, runs))]) for beside in besides]


def communication(local: LocalStage) -> list[Communication]:
    """Collectives and sends of the first rank of a stage, for one microbatch."""
    found = []
    stage = local.stage.index
    for part, nodes, handed in (
        ("forward", local.forward, local.sends),
        ("backward", local.whole_backward, local.d_receives),
        ("step", (*local.prologue, *local.epilogue), ()),
    ):
        calls: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        moved: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        for node in nodes:
            if (ring := ring_of(node)) is not None:
                for dtype, count, size in passed_round(node):
                    calls["shift", (ring,), DTYPES[dtype]] += count
                    moved["shift", (ring,), DTYPES[dtype]] += size
            elif over := collective(node):
                x = node.operands[0]
                key = (*over, DTYPES.get(x.dtype, str(x.dtype)))
                calls[key] += 1
                moved[key] += contributed_bytes(node)
        for v in handed:
            if v is not None:
                sent = ("send", ("pp",), DTYPES.get(v.dtype, str(v.dtype)))
                calls[sent] += 1
                moved[sent] += v.bytes
        found += [
            Communication(stage, part, *key, calls[key], moved[key]) for key in calls
        ]
    return found
