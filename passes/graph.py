"""The graph that every pass reads and returns: values, nodes, and a program of them.

A graph is a flat list of nodes in execution order. It is immutable; a pass that
changes something builds a new one (`Builder`). Facts that a pass finds out about a
value (its named dims, its sharding) live in tables keyed by the value's name, in the
type that the pass returns.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from .graph_text import (
    SOURCE,
    VALUE,
    constant_text,
    name_text,
    op_text,
    read_call,
    read_name,
    read_outs,
    read_type,
    type_text,
)

SOURCES = ("input", "param", "buffer", "const")

# The number of a repeated layer in a module path; `+1` counts from a stage's first.
LAYER = re.compile(r"(?:^|(?<=\.))(\+?\d+)(?=\.|$)")


# Arguments of ops of our own: name -> place and default. `passes.ops` declares them.
OWN: dict[str, Mapping[str, tuple[int | None, Any]]] = {}


class InvalidGraph(AssertionError):
    """A pass broke an invariant of the graph: a bug of ours, not of the user."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its name is unique in its graph."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def type(self) -> str:
        """`f32[4,16,48]`."""
        return type_text(self.shape, self.dtype)

    def __str__(self) -> str:
        return name_text(self.name)


@cache
def layer_of(module: str) -> str:
    """Returns the path of a module's layer, as `h.3`; '' outside of layers."""
    match = LAYER.search(module)
    return module[: match.end()] if match else ""


@cache
def without_overload(op: str) -> str:
    """Drops an op's overload: `aten.add` of `aten.add.Tensor`."""
    return op.rpartition(".")[0] if op.count(".") > 1 else op


@cache
def bare(op: str) -> str:
    """`aten.add_.Tensor` -> `add_`, `autopar.attention` -> `attention`."""
    return op.split(".")[1]


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a node: module path, and line of the user's source."""

    module: str = ""
    source: str = ""

    @property
    def layer(self) -> str:
        """`transformer.h.3` of `transformer.h.3.attn.c_proj`; "" outside of layers."""
        return layer_of(self.module)

    @classmethod
    def parse(cls, comment: str) -> Location:
        """Reads the remark behind a printed node."""
        source, _, module = comment.partition("  ")
        return cls(module, source)

    def __str__(self) -> str:
        return "  ".join(part for part in (self.source, self.module) if part)


@dataclass(frozen=True)
class Node:
    """One operation: `outs = op(*args, **kwargs)`.

    `op` is `aten.<name>.<overload>`, `autopar.<kernel>` or `comm.<collective>`.
    Arguments are constants, values, and (nested) tuples of them. An out that nobody
    reads may be None.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[Value | None, ...]
    location: Location = Location()

    @property
    def name(self) -> str:
        """The op without its overload: `aten.add` of `aten.add.Tensor`."""
        return without_overload(self.op)

    @property
    def is_aten(self) -> bool:
        """Whether the op is one of torch's."""
        return self.op.startswith("aten.")

    @property
    def is_comm(self) -> bool:
        """Whether the op is one of `Comm`: a collective, or of a rank's place."""
        return self.op.startswith("comm.")

    def arg(self, name: str) -> Any:
        """An argument by its name in the schema, or its default; None if neither."""
        place, default = parameters(self.op).get(name, (None, None))
        if place is not None and place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def named(self, names: str) -> tuple[Any, ...]:
        """Arguments by their names, one behind the other: `dim keepdim`."""
        return tuple(map(self.arg, names.split()))

    def with_args(self, /, **changed: Any) -> Node:
        """The same node with other arguments, by name; each stays where it is given."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changed.items():
            place, _ = parameters(self.op)[name]
            if place is not None and place < len(args):
                args[place] = value
            else:
                kwargs[name] = value
        return replace(self, args=tuple(args), kwargs=kwargs)

    @property
    def out(self) -> Value:
        """The single result."""
        (value,) = self.outs
        assert value is not None, f"{self.op} has no result"
        return value

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The values among the arguments, in order, repeats included."""
        operands: list[Value] = []
        _collect(self.args, operands)
        _collect(tuple(self.kwargs.values()), operands)
        return tuple(operands)

    @cached_property
    def results(self) -> tuple[Value, ...]:
        return tuple(v for v in self.outs if v is not None)

    def substitute(self, change: Callable[[Value], Any]) -> Node:
        """The same node with every operand replaced by `change(operand)`."""
        args, kwargs = map_values(change, self.args), self.kwargs
        if kwargs:
            kwargs = map_values(change, kwargs)
        return Node(self.op, args, kwargs, self.outs, self.location)

    def in_module(self, module: str) -> Node:
        """The same node, of another module."""
        where = Location(module, self.location.source)
        return Node(self.op, self.args, self.kwargs, self.outs, where)

    def __str__(self) -> str:
        outs = ", ".join("_" if v is None else str(v) for v in self.outs)
        parts = [show(a) for a in self.args]
        parts += [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        call = f"{op_text(self.op)}({', '.join(parts)})"
        return f"{outs} = {call}" if outs else call


@dataclass(frozen=True)
class Graph:
    """A straight-line program over named tensors.

    inputs: what a call passes in (the batch; for a stage also what it receives).
    params: parameters, by the model's own names. buffers: as params, without gradient.
    constants: tensors that the model's code holds as literals.
    """

    inputs: tuple[Value, ...]
    params: tuple[Value, ...]
    buffers: tuple[Value, ...]
    constants: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    @property
    def sources(self) -> tuple[Value, ...]:
        """Every value that no node makes."""
        return self.inputs + self.params + self.buffers + self.constants

    def producers(self) -> dict[str, Node]:
        return {v.name: n for n in self.nodes for v in n.results}

    def consumers(self) -> dict[str, list[Node]]:
        """Value name -> nodes that read it, in order, each once."""
        table: dict[str, list[Node]] = {v.name: [] for v in self.sources}
        for node in self.nodes:
            for v in dict.fromkeys(node.operands):
                table[v.name].append(node)
            for v in node.results:
                table[v.name] = []
        return table

    def verify(self) -> Graph:
        """Checks that names are unique and all values are made before they are read."""
        made: dict[str, Value] = {}
        for v in self.sources:
            if v.name in made:
                raise InvalidGraph(f"two sources are named %{v.name}")
            made[v.name] = v
        for node in self.nodes:
            for v in node.operands:
                if made.get(v.name) != v:
                    raise InvalidGraph(f"{node} reads %{v.name} before it is made")
            for v in node.results:
                if v.name in made:
                    raise InvalidGraph(f"{node} makes %{v.name} a second time")
                made[v.name] = v
        for v in self.outputs:
            if made.get(v.name) != v:
                raise InvalidGraph(f"the output %{v.name} is never made")
        return self

    def __str__(self) -> str:
        return self.text()

    def text(
        self,
        note: Callable[[Value], str] | None = None,
        titles: Mapping[int, str] = MappingProxyType({}),
        places: bool = True,
    ) -> str:
        """Prints as `passes.graph_text` says, with a `note` behind values, `titles`
        before nodes by number, and the `places` that nodes are from."""

        def typed(v: Value, gap: str) -> str:
            return v.type + (gap + note(v) if note else "")

        groups = self.inputs, self.params, self.buffers, self.constants
        lines = [
            f"{word:6} {v}  {typed(v, '  ')}"
            for word, group in zip(SOURCES, groups, strict=True)
            for v in group
        ]
        for i, node in enumerate(self.nodes):
            lines += [f"# {titles[i]}"] if i in titles else []
            types = ", ".join(typed(v, " ") for v in node.results)
            place = f"{node.location.source}  {node.location.module}".rstrip()
            comment = f"  # {place}" if place and places else ""
            lines.append(f"{types:24} {node}{comment}")
        lines += [f"# {title}" for i, title in titles.items() if i >= len(self.nodes)]
        lines.append(f"return {', '.join(map(str, self.outputs))}".rstrip())
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Graph:
        """Reads what `text` prints, without its notes. Raises: InvalidGraph."""
        return cls.parse_noted(text)[0]

    @classmethod
    def parse_noted(cls, text: str) -> tuple[Graph, dict[str, str]]:
        """Reads what `text` prints, and its notes, by the names of values."""
        sources: dict[str, list[Value]] = {word: [] for word in SOURCES}
        values: dict[str, Value] = {}
        notes: dict[str, str] = {}
        nodes: list[Node] = []
        outputs: tuple[Value, ...] = ()

        def made(name: str, of_type: str, note: str) -> Value:
            values[name] = Value(name, *read_type(of_type))
            notes.update({name: note} if note else {})
            return values[name]

        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                if match := SOURCE.fullmatch(line):
                    word, name, of_type, note = match.groups("")
                    sources[word].append(made(read_name(name), of_type, note))
                elif line.partition(" ")[0] == "return":
                    names = re.findall(VALUE, line)
                    outputs = tuple(values[read_name(name)] for name in names)
                elif not line.startswith("#"):
                    types, names_of_outs, call = read_outs(line)
                    op, args, kwargs, comment = read_call(call, values)
                    own = iter(types)
                    outs = tuple(
                        None if name is None else made(name, *next(own))
                        for name in names_of_outs
                    )
                    nodes.append(Node(op, args, kwargs, outs, Location.parse(comment)))
            except (KeyError, SyntaxError, ValueError, StopIteration) as error:
                raise InvalidGraph(f"{line!r} cannot be read: {error!r}") from error
        inputs, params, buffers, constants = map(tuple, sources.values())
        graph = cls(inputs, params, buffers, constants, tuple(nodes), outputs)
        return graph.verify(), notes


def live_in(nodes: Iterable[Node]) -> dict[str, Value]:
    """The values that nodes read but do not make, by name, in order of reading."""
    nodes = list(nodes)
    made = {v.name for n in nodes for v in n.results}
    return {v.name: v for n in nodes for v in n.operands if v.name not in made}


def values_in(tree: Any) -> Iterator[Value]:
    """The values of nested tuples and dicts, in order."""
    values: list[Value] = []
    _collect((tree,), values)
    return iter(values)


def _collect(items: Iterable[Any], values: list[Value]) -> None:
    """Add the values in each item. Passes spend more time here than anywhere else."""
    for item in items:
        if isinstance(item, Value):
            values.append(item)
        elif isinstance(item, (tuple, list)):
            _collect(item, values)
        elif isinstance(item, dict):
            _collect(item.values(), values)


def map_values(change: Callable[[Value], Any], tree: Any) -> Any:
    """The same nested structure with each value replaced by `change(value)`."""
    if isinstance(tree, Value):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([map_values(change, item) for item in tree])
    if isinstance(tree, dict):
        return {key: map_values(change, item) for key, item in tree.items()}
    return tree


def show(arg: Any) -> str:
    """An argument as printed in a node."""
    if isinstance(arg, Value):
        return str(arg)
    if isinstance(arg, tuple | list):
        return f"[{', '.join(map(show, arg))}]"
    return constant_text(arg)


def short(op: str) -> str:
    """`aten.add.Tensor` -> `add`; our own ops stay as they are."""
    return bare(op) if op.startswith("aten.") else op


@cache
def resolve(op: str) -> Any:
    """The torch operator that `aten.<name>.<overload>` names."""
    return operator.attrgetter(op)(torch.ops)


@cache
def parameters(op: str) -> Mapping[str, tuple[int | None, Any]]:
    """An op's arguments, in order: name -> (place or None, default or None)."""
    if op in OWN:
        return OWN[op]
    defaults: dict[str, tuple[int | None, Any]] = {}
    for place, a in enumerate(resolve(op)._schema.arguments):
        default = a.default_value
        plain = tuple(default) if isinstance(default, list) else default
        defaults[a.name] = (None if a.kwarg_only else place, plain)
    return defaults
