"""functionalize: a program without side effects. A write in place becomes a new value.

After `x.mul_(2)`, whatever reads x reads the new value. What x is a view of gets the
new value put back (`views`), and other views of that are taken anew when they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import torch

from ...builder import Builder
from ...errors import CaptureError
from ...graph import Graph, Node, Value, parameters, short
from ...ops.arguments import arguments, shows_operand
from ...ops.evaluate import results_like
from ...ops.op import op_of
from ...ops.random import draw_of
from ..exported.buffer_updates import (
    Functional,
    refuse_write,
    sum_apart,
)
from ..exported.in_place import operator_of, without_write
from ..exported.overlaps import overlap_in_part
from ..exported.views import is_view, put_back

# Leave the same, however often they are made, where what they write is the same.
FILLS = ("aten.copy_", "aten.fill_", "aten.zero_", "aten.index_put_")

# What copies a tensor that the code holds as a literal; a trace has both in one place.
LITERAL = "aten.lift_fresh_copy"


def functionalize(
    graph: Graph,
    memory: Mapping[str, Hashable],
    trained: Collection[str] = (),
    assigned: Sequence[str] = (),
) -> Functional:
    """Returns the same graph without ops that write in place.

    memory: value name -> the memory in which the model had it, where that is known.
    trained: names of parameters that change from step to step. assigned: buffers whose
    values after it are the graph's last outputs.
    A write to the batch makes a new value too: the caller's tensor stays as it was. One
    to a buffer makes what it has after the step, unless each forward fills it with the
    same before any reads it, as a table is filled.
    Raises: CaptureError on a write to what else outlives the step (a parameter, a
    tensor that the model holds); or to memory that is read later by a name of which it
    is not sure that it is a view, and on random numbers that `passes.ops.random` does
    not know.
    """
    changing, made = set(trained), graph.producers()
    own = graph.outputs[len(graph.outputs) - len(assigned) :]
    becoming = {_before_writes(v, made).name for v in own}
    while True:  # a table that is filled from a buffer that a step changes is none
        known = _Memory(graph, memory, changing, becoming)
        functional = _without_writes(graph, known, assigned)
        if known.updates <= changing:
            return functional
        changing |= known.updates


def _before_writes(v: Value, made: Mapping[str, Node]) -> Value:
    """The tensor that writes in place have given back as v."""
    while (node := made.get(v.name)) and operator_of(node)._schema.is_mutable:
        v = node.operands[0]
    return v


def _without_writes(
    graph: Graph, known: _Memory, assigned: Sequence[str]
) -> Functional:
    nodes = known.builder.nodes
    for position, node in enumerate(graph.nodes):
        _refuse_chance(node)
        known.refuse_statistics(node)
        new = node.substitute(known.now)
        if operator_of(node)._schema.is_mutable:
            target = _target(node, known)
            known.check_reads(target, node)
            shared = known.check(target, node, position)
            new = replace(new, op=without_write(node))
            if known.is_updated(target):
                *before, new = sum_apart(known.builder, new)
                nodes += before
            nodes += _written(known.builder, new)
            known.write(target, node.out, shared)
        else:
            known.note_views(node)
            nodes.append(new)
    outputs = [*map(known.now, graph.outputs)]
    count = len(outputs) - len(assigned)
    updated = known.updated() | dict(zip(assigned, outputs[count:], strict=True))
    del outputs[count:]
    made = replace(graph, nodes=tuple(nodes), outputs=(*outputs, *updated.values()))
    return Functional(made.verify(), updated)


def _written(builder: Builder, node: Node) -> list[Node]:
    """The node, and a cast of what it makes: a write keeps the type of what it writes
    to, where a new value would have the widest type of the operands."""
    out = node.out
    if all(v.dtype == out.dtype for v in node.operands):
        return [node]
    (made,) = results_like(node.op, node.args, node.kwargs)
    if made is None or made.dtype == out.dtype:
        return [node]
    wide = builder.value(out.name, out.shape, made.dtype)
    cast = Node("aten.to.dtype", (wide, out.dtype), {}, (out,), node.location)
    return [replace(node, outs=(wide,)), cast]


def _refuse_chance(node: Node) -> None:
    """Ranks that hold the same value would draw different ones."""
    if torch.Tag.nondeterministic_seeded not in operator_of(node).tags:
        return
    p = node.arg("dropout")  # between the layers of a recurrent op
    if node.arg("train") is False or p == 0:
        return
    if p:
        raise CaptureError(
            f"the dropout of {p:g} between the layers of "
            f"'{short(node.op)}' would differ by rank",
            source=str(node.location),
            fix="make the layers one by one, with nn.Dropout between them, or "
            "dropout=0.0",
        )
    if operator_of(node)._schema.is_mutable:
        new = replace(node, op=without_write(node))
    else:
        new = node
    is_dropout = {"train", "dropout_p"}.intersection(op_of(new).heeds.split())
    if is_dropout or draw_of(new.name, arguments(new)):
        return
    raise CaptureError(
        f"'{short(node.op)}' draws random numbers, which would differ by rank",
        source=str(node.location),
        fix="make them of torch.rand, randn, randint, bernoulli or exponential_, "
        "without a generator, or pass them in the batch; for dropout use nn.Dropout or "
        "F.dropout",
    )


class _Memory:
    """Knows which values are the same tensor, and which share memory."""

    def __init__(
        self,
        graph: Graph,
        memory: Mapping[str, Hashable],
        changing: Collection[str],
        becoming: Collection[str],
    ) -> None:
        self.graph, self.memory, self.changing = graph, memory, changing
        self.becoming = becoming  # tensors that buffers are after the step
        self.tensor: dict[str, str] = {}  # another name of a tensor -> its first name
        self.current: dict[str, Value] = {}  # first name -> what the tensor holds now
        self.root: dict[str, str] = {}  # first name -> whose memory it sees
        self.sharers: dict[str, list[str]] = {}  # root -> who sees its memory
        self.views: dict[str, Node] = {}  # first name -> what took the view
        self.writes: dict[str, int] = {}  # root -> how many writes its views must see
        self.seen: dict[str, int] = {}  # first name -> how many of them it has seen
        made = (v for node in graph.nodes for v in node.results)
        self.builder = Builder.beside([*graph.sources, *made])
        self.last_read: dict[str, int] = {}
        self.params = {v.name for v in graph.params}
        self.lasting = {v.name: "parameter" for v in graph.params}
        self.lasting |= {v.name: "buffer" for v in graph.buffers}
        self.lasting |= {v.name: "constant" for v in graph.constants}
        self.buffers = {v.name: v for v in graph.buffers}
        self.updates: set[str] = set()  # buffers that are written to
        for position, node in enumerate(graph.nodes):
            for v in node.operands:
                self.last_read[v.name] = position
        for v in graph.outputs:
            self.last_read[v.name] = len(graph.nodes)

    def now(self, v: Value) -> Value:
        """The tensor's present value, taken anew if a write through another name made
        it stale."""
        first = self._first(v.name)
        writes = self.writes.get(self._root(first), 0)
        if first in self.views and self.seen.get(first, 0) < writes:
            node = self.views[first]
            out = self.builder.value(first, node.out.shape, node.out.dtype)
            self.builder.nodes.append(replace(node.substitute(self.now), outs=(out,)))
            self.current[first], self.seen[first] = out, writes
        return self.current.get(first, v)

    def note_views(self, node: Node) -> None:
        """Remember what the results of a node share memory with."""
        for v in node.results:
            source = self._source(node, v)
            if source is None:
                continue
            root = self._root(source.name)
            self.root[v.name] = root
            self.sharers.setdefault(root, [root]).append(v.name)
            self.seen[v.name] = self.writes.get(root, 0)
            if is_view(node):
                self.views[v.name] = node

    def _source(self, node: Node, v: Value) -> Value | None:
        """The operand that a result of a node shares memory with."""
        if {"p", "train"} <= parameters(node.op).keys():  # its operand itself, if off
            is_on = node.arg("train") and node.arg("p") > 0
            return None if is_on else node.operands[0]
        if node.name == LITERAL:
            return None
        place = self.memory.get(v.name)
        places = [self.memory.get(x.name) for x in node.operands]
        if place is None or None in places:
            shown = shows_operand(node.op, written=True)
            return node.operands[0] if shown else None
        return node.operands[places.index(place)] if place in places else None

    def check(self, target: Value, node: Node, position: int) -> bool:
        """Whether the write must be seen by other names, which are known to be views;
        refuse it if they may be copies."""
        first = self._first(target.name)
        root = self._root(target.name)
        write = short(node.op)
        lasts = root in self.lasting
        if lasts and not self._fills_table(node, target, position):
            self._write_lasting(root, node)
        others = [
            name
            for name in self.sharers.get(root, [])
            if self._first(name) != first
            and (self.last_read.get(name, -1) > position or name in self.updates)
        ]
        for other in others:
            if not (self._is_view(first, root) and self._is_view(other, root)):
                raise CaptureError(
                    f"'{write}' writes in place into what may be a view: "
                    f"%{target.name} may share memory with %{other}, which is read "
                    "later",
                    source=str(node.location),
                    fix="make a new tensor: y = x.mul(2) instead of x.mul_(2), "
                    "torch.where or torch.cat instead of x[...] = y",
                )
        return bool(others)

    def _write_lasting(self, root: str, node: Node) -> None:
        """A buffer has another value after the step; nothing else may."""
        if root in self.buffers:
            self.updates.add(root)
        else:
            refuse_write(self.lasting[root], root, node)

    def check_lasting(self, target: Value, node: Node) -> None:
        """Refuses a write to a lasting tensor by an op with another result."""
        if (root := self._root(target.name)) in self.lasting:
            refuse_write(self.lasting[root], root, node)

    def refuse_statistics(self, node: Node) -> None:
        """Refuses a norm that writes the statistics of the batch to its buffers, which
        its schema does not say."""
        if "running_mean" not in parameters(node.op):
            return
        bound = arguments(node)
        by_batch = bound.get("training") or bound.get("use_input_stats")
        if by_batch and isinstance(running := bound["running_mean"], Value):
            self.check_lasting(running, node)

    def is_updated(self, target: Value) -> bool:
        """Whether a tensor is, or is to become, a buffer that is written to, or a part
        of one."""
        root = self._root(target.name)
        return root in self.updates or root in self.becoming

    def updated(self) -> dict[str, Value]:
        """The value of each buffer that was written to, after the writes."""
        changed = {k: v for k, v in self.buffers.items() if k in self.updates}
        return {name: self.now(v) for name, v in changed.items()}

    def check_reads(self, target: Value, node: Node) -> None:
        """Refuses a write that reads what it has just written: what comes of it
        depends on the order in which a kernel goes through the elements."""
        first, root = self._first(target.name), self._root(target.name)
        for v in node.operands:
            other = self._first(v.name)
            if other == first or self._root(other) != root:
                continue
            if not (self._is_view(first, root) and self._is_view(other, root)):
                continue  # refused as what may be a view, if anybody reads it later
            ways = (self._path(name, root)[-2::-1] for name in (first, other))
            one, two = ([self.views[part] for part in way] for way in ways)
            if overlap_in_part((one or two)[0].operands[0], one, two):
                raise CaptureError(
                    f"'{short(node.op)}' writes to a part of a tensor what it reads of "
                    "another part that overlaps it, and may read what it has just "
                    "written",
                    source=str(node.location),
                    fix="read a copy: x[:, 1:] = x[:, :-1].clone()",
                )

    def _fills_table(self, node: Node, target: Value, position: int) -> bool:
        """Whether the write gives a buffer, or a tensor that the model holds, what it
        has after every forward, before it is read: then each may fill it anew."""
        root = self._root(target.name)
        if node.name not in FILLS or node.arg("accumulate") or root in self.params:
            return False
        for before in self.graph.nodes[:position]:
            written = (
                before.operands[:1] if operator_of(before)._schema.is_mutable else ()
            )
            read = () if is_view(before) else before.operands[len(written) :]
            if any(self._root(v.name) == root for v in read):
                return False
        alike = {v.name for v in (*self.graph.buffers, *self.graph.constants)}
        alike = (alike | self.params).difference(self.changing)
        for made in self.builder.nodes:
            seeded = torch.Tag.nondeterministic_seeded in operator_of(made).tags
            if not seeded and all(v.name in alike for v in made.operands):
                alike.update(v.name for v in made.results)
        others = [v for v in node.operands if v is not target]
        return all(self.now(v).name in alike for v in others)

    def _is_view(self, name: str, root: str) -> bool:
        """Whether only views lead from the root to this tensor, or it is the root."""
        name = self._first(name)
        while name != root:
            if name not in self.views:
                return False
            name = self._first(self.views[name].operands[0].name)
        return True

    def write(self, target: Value, result: Value, shared: bool) -> None:
        """The tensor holds the result now; so does what it is a view of, if shared."""
        first = self._first(target.name)
        root = self._root(first)
        self.tensor[result.name] = first
        self.sharers.setdefault(root, [root]).append(result.name)
        if not shared:
            self.current[first] = result
            return
        path = self._path(first, root)
        values = [result]
        for part in path[:-1]:
            base = self.now(self.views[part].operands[0])
            values.append(put_back(self.builder, self.views[part], base, values[-1]))
        self.writes[root] = self.writes.get(root, 0) + 1
        for name, value in zip(path, values, strict=True):
            self.current[name], self.seen[name] = value, self.writes[root]

    def _path(self, name: str, root: str) -> list[str]:
        """The tensor, what it is a view of, and so on, to the root."""
        path = [name]
        while path[-1] != root:
            path.append(self._first(self.views[path[-1]].operands[0].name))
        return path

    def _first(self, name: str) -> str:
        return self.tensor.get(name, name)

    def _root(self, name: str) -> str:
        first = self._first(name)
        return self.root.get(first, first)


def _target(node: Node, known: _Memory) -> Value:
    """The tensor that a node writes to."""
    schema = operator_of(node)._schema.arguments
    written = [a.name for a in schema if a.alias_info and a.alias_info.is_write]
    first = schema[0].name
    if written == [first] and isinstance(value := node.arg(first), Value):
        return value
    # What the model keeps cannot be written by any form of the call.
    for name in written:
        if isinstance(value := node.arg(name), Value):
            known.check_lasting(value, node)
    raise CaptureError(
        f"'{short(node.op)}' writes into an argument that is not its first one",
        source=str(node.location),
        fix="use the form of the call that returns its result (no out=)",
    )
