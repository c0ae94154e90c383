"""overlap: parameters' collectives in blocks, under way while another block computes.

A block is a layer, or what runs between two of them. All that it reads of parameters
comes by one all-gather: it starts when the block before has what it needs, and is
waited for at the block's first use. Weights are dropped after their last use, so those
of two blocks at most are there at once, forward and backward. All gradients that a
block makes leave by one reduce-scatter, which is waited for a block later.

After FSDP (Zhao 2023, arXiv:2304.11277, section 3.3). What is gathered or scattered
once a step goes in such blocks too. Of gradients that are reduced once a step a text
says, block by block, when a microbatch has added to them: in the last one they leave
while it computes on (Li 2020, arXiv:2006.15704, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from ..builder import Builder
from ..graph import Location, Node, Value
from ..ops.memory import ADD, find_owners
from ..ops.op import is_view
from ..shard.parameter_sharding import GATHER, RESHARDINGS, find_gathered
from ..stage.split_backward import GRADIENT

SCATTER = "comm.reduce_scatter"
SCALE = "aten.mul.Tensor"  # by a number: what has one operand

# What a collective begins with in a message of its own, and what is under way then.
STARTS = {
    GATHER: ("comm.start_gather", "gathering"),
    SCATTER: ("comm.start_scatter", "scattering"),
}

# What leads from a scattered gradient to a parameter's: shares in one piece, unlike
# those of rows, which a scatter of activations may have in zigzag.
HANDS_ON = (SCATTER, "aten.reshape.default", "aten.to.dtype", SCALE)

# What leads from a parameter's share to what is whole of it. A shard of what was whole
# may lie as rows do.
FROM_SHARES = RESHARDINGS - {"comm.shard"}

READY = "comm.ready"
# Where what runs once a step goes on as soon as some gradients are ready, or somebody
# reads what comes after.
PAUSE = "comm.pause"

Blocks = Callable[[Sequence[Node]], list[list[Node]]]


def by_layer(collectives: Sequence[Node]) -> list[list[Node]]:
    """Neighbours of the same layer."""
    return [list(own) for _, own in groupby(collectives, lambda n: n.location.layer)]


def gather_ahead(
    nodes: Sequence[Node], sources: Collection[str], blocks: Blocks, builder: Builder
) -> list[Node]:
    """Gather parameters by block, each block's while the one before it computes.

    sources: names of parameters, buffers, and constants. Where several axes split a
    parameter, all but the last of its gathers come right before that one starts.
    """
    made = find_gathered(nodes, sources)
    last = _last_gathers(made)
    if not last:
        return list(nodes)
    parts = blocks(last)
    ahead = [_leading(part, made) for part in parts]
    moved = {id(n) for part in (*parts, *ahead) for n in part}
    known = {*sources, *made}
    placed: list[Node] = []
    done: set[int] = set()
    waits: list[Node] = []

    def start(part: Sequence[Node], before: Sequence[Node]) -> None:
        new = [n for n in before if id(n) not in done]
        done.update(map(id, new))
        placed.extend(gather_ahead(new, known, _at_once, builder))
        starts, waits[:] = _messages(part, builder)
        placed.extend(starts)

    coming = zip(parts, ahead, strict=True)
    first = {id(part[0]) for part in parts}
    start(*next(coming))
    for node in nodes:
        if id(node) in first:
            placed += waits
            if following := next(coming, None):
                start(*following)
        if id(node) not in moved:
            placed.append(node)
    return placed


def _last_gathers(made: dict[str, Node]) -> list[Node]:
    """The gathers of parameters' shards that no other such gather follows.

    What is computed of parameters, and gathered, may lie as rows do: not in one piece.
    """
    shares: set[str] = set()
    for name, node in made.items():
        x = node.operands[0].name
        if (node.op in FROM_SHARES or is_view(node)) and (x in shares or x not in made):
            shares.add(name)
    last: dict[int, Node] = {}
    followed: set[str] = set()
    for name in reversed(made):
        node = made[name]
        gathers = node.op == GATHER and name in shares
        if gathers and name not in followed:
            last[id(node)] = node
        if gathers or name in followed:
            followed.update(v.name for v in node.operands)
    return list(last.values())[::-1]


def _leading(part: Sequence[Node], made: dict[str, Node]) -> list[Node]:
    """What some gathers' operands are made by, in order."""
    needed = {v.name for n in part for v in n.operands}
    leading: dict[int, Node] = {}
    for name in reversed(made):
        if name in needed:
            leading[id(made[name])] = made[name]
            needed.update(v.name for v in made[name].operands)
    return list(leading.values())[::-1]


def scatter_behind(
    nodes: Sequence[Node], keep: Collection[str], blocks: Blocks, builder: Builder
) -> list[Node]:
    """Scatter gradients by block, each block's while the next one computes.

    keep: names of the values that are read after the last node. nodes: before `reuse`,
    so that only nodes without results write over something, their first operand.
    """
    first, tails = _first_scatters(nodes, keep)
    if not first:
        return list(nodes)
    after = {id(n): own for n, own in zip(first, tails, strict=True)}
    moved = {id(n) for own in tails for n in own}
    ends = {id(part[-1]) for part in blocks(first)}
    owners = find_owners(nodes)
    placed: list[Node] = []
    waiting: list[Node] = []  # scatters, for the others of their block
    behind: list[Node] = []  # what is left to do when the block under way is there

    def land() -> None:
        placed.extend(behind)
        behind.clear()

    def launch() -> None:
        land()
        starts, waits = _messages(waiting, builder)
        placed.extend(starts)
        rest = [n for scatter in waiting for n in after[id(scatter)]]
        behind.extend([*waits, *scatter_behind(rest, keep, _at_once, builder)])
        waiting.clear()

    for node in nodes:
        if id(node) in after:
            waiting.append(node)
            if id(node) in ends:
                launch()
        elif id(node) not in moved:
            if _writes_over(node, waiting, owners):
                launch()
            placed.append(node)
    launch()
    land()
    return placed


def _first_scatters(
    nodes: Sequence[Node], keep: Collection[str]
) -> tuple[list[Node], list[list[Node]]]:
    """The first scatters of parameters' gradients, and the nodes that follow on each.

    A node that follows on several is with the latest of them.
    """
    final = _final(nodes, keep)
    scatters: list[Node] = []
    tails: list[list[Node]] = []
    follows: dict[str, int] = {}  # value -> number of the scatter that it comes of
    for node in nodes:
        if id(node) not in final:
            continue
        sources = [follows[v.name] for v in node.operands if v.name in follows]
        if sources:
            number = max(sources)
            tails[number].append(node)
        elif node.op == SCATTER:
            number = len(scatters)
            scatters.append(node)
            tails.append([])
        else:
            continue
        follows.update((v.name, number) for v in node.results)
    return scatters, tails


def tell_ready(
    parts: Sequence[Sequence[Node]], gradients: Mapping[str, Value]
) -> list[Node]:
    """The last of the parts that make gradients or add to them, with nodes in it that
    say, by block, to which of them nothing will be added any more.

    gradients: by name. What other parts add to is ready when the last one begins.
    """
    *before, nodes = parts
    last: dict[str, tuple[int, str]] = dict.fromkeys(gradients, (-1, ""))
    for early, part in [*((True, p) for p in before), (False, nodes)]:
        for i, node in enumerate(part):
            for v in node.results or node.operands[:1]:
                if v.name in last:
                    last[v.name] = (-1 if early else i), node.location.layer
    told: dict[int, list[Node]] = {}
    order = sorted(last.items(), key=lambda item: item[1][0])
    for (layer, _), group in groupby(order, lambda item: (item[1][1], item[1][0] < 0)):
        own = list(group)
        values = tuple(gradients[name] for name, _ in own)
        at = own[-1][1][0]
        told.setdefault(at, []).append(Node(READY, (values,), {}, (), Location(layer)))
    placed = told.get(-1, [])
    for i, node in enumerate(nodes):
        placed += [node, *told.get(i, ())]
    return placed


def await_gradients(nodes: Sequence[Node], gradients: Collection[str]) -> list[Node]:
    """What is scattered once a step, with pauses in it: before each block one until its
    gradients are ready, and one before the last of them is waited for.

    gradients: names of those that are scattered.
    """
    blocks = _split_after(nodes, STARTS[SCATTER][0])
    awaited: set[str] = set()
    placed: list[Node] = []
    for number, block in enumerate(blocks):
        reads = [[v for v in n.operands if v.name in gradients] for n in block]
        new = {v.name: v for own in reads for v in own if v.name not in awaited}
        awaited |= new.keys()
        first = next((i for i, own in enumerate(reads) if own), 0)
        if new or (block and number == len(blocks) - 1):
            where = Location(block[first].location.layer)
            pause = Node(PAUSE, (tuple(new.values()),), {}, (), where)
            block = [*block[:first], pause, *block[first:]]
        placed += block
    return placed


def pause_before_waits(nodes: Sequence[Node]) -> list[Node]:
    """Puts a pause before the waits of gathers that are done once a step: the prologue
    goes on when somebody reads what comes after."""
    placed: list[Node] = []
    for node in nodes:
        first = not placed or placed[-1].op != "comm.wait"
        if node.op == "comm.wait" and first:
            placed.append(Node(PAUSE, ((),), {}, (), Location(node.location.layer)))
        placed.append(node)
    return placed


def _split_after(nodes: Sequence[Node], op: str) -> list[list[Node]]:
    """Parts of which each but the last ends with such a node."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.op == op:
            pieces.append([])
    return pieces


def _final(nodes: Sequence[Node], keep: Collection[str]) -> set[int]:
    """Ids of the nodes that only hand on gradients of parameters."""
    last: set[int] = set()
    wanted = set(keep)
    for node in reversed(nodes):
        if node.results:
            unread = wanted.isdisjoint(v.name for v in node.results)
            alone = len(node.operands) == 1
            final = unread and node.op in HANDS_ON and alone
        else:
            into_gradient = node.operands[0].name.startswith(GRADIENT)
            final = into_gradient and node.op == ADD
        if final:
            last.add(id(node))
        else:
            wanted.update(v.name for v in node.operands)
    return last


def _writes_over(
    node: Node, waiting: Sequence[Node], owners: Mapping[str, str]
) -> bool:
    """Whether a node writes to what a waiting scatter is going to send."""
    if node.results or not waiting:
        return False
    target, *sent = (
        owners.get(n.operands[0].name, n.operands[0].name) for n in (node, *waiting)
    )
    return target in sent


def _messages(
    collectives: Sequence[Node], builder: Builder
) -> tuple[list[Node], list[Node]]:
    """Nodes that start a message for each axis and dtype, and those that await it."""
    alike: dict[tuple[str, str, str], list[Node]] = {}
    for n in collectives:
        key = (n.op, n.arg("axes"), str(n.operands[0].dtype))
        alike.setdefault(key, []).append(n)
    starts, waits = [], []
    for (op, axis, _), own in alike.items():
        kind, name = STARTS[op]
        first = own[0]
        extent = sum(_whole(n).numel for n in own)
        under_way = builder.value(name, (extent,), first.operands[0].dtype)
        # Of each the dim; of gathers the whole extents too, if shares are unlike.
        xs, *details = zip(*(n.named("x dim whole") for n in own), strict=True)
        details = [told for told in details if any(d is not None for d in told)]
        where = Location(first.location.layer)
        starts.append(Node(kind, (xs, axis, *details), {}, (under_way,), where))
        outs = tuple(n.out for n in own)
        waits.append(Node("comm.wait", (under_way,), {}, outs, where))
    return starts, waits


def _whole(collective: Node) -> Value:
    """The value that is gathered, or is to be scattered."""
    return collective.out if collective.op == GATHER else collective.operands[0]


def _at_once(collectives: Sequence[Node]) -> list[list[Node]]:
    return [list(collectives)]
