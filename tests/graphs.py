"""Graphs of tests, as text: what passes read, and what they make; and single nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from textwrap import dedent

import torch

from autopar.passes.dims.probe import random_operands
from autopar.passes.graph import Graph, Node, Value
from autopar.passes.ops.evaluate import evaluate

_numbers = count()


def nodes_of(text: str) -> list[Node]:
    """The nodes of a graph that is written as it prints."""
    return list(Graph.parse(text).nodes)


def calls(nodes: Iterable[Node]) -> str:
    """Nodes as they print, without types and places."""
    return "\n".join(map(str, nodes))


def lines(text: str) -> str:
    """Text without what indents all of it."""
    return dedent(text).strip()


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
    """A value with a name of its own."""
    return Value(f"x{next(_numbers)}", shape, dtype)


def ints(*shape: int) -> Value:
    return x(*shape, dtype=torch.int64)


def bools(*shape: int) -> Value:
    return x(*shape, dtype=torch.bool)


def node(op: str, *args: object, **kwargs: object) -> Node:
    """A node whose results have the shapes that the op gives them."""
    bare = Node(op, args, kwargs, ())
    results = evaluate(bare, random_operands(bare, 0))
    outs = (None if y is None else x(*y.shape, dtype=y.dtype) for y in results)
    return replace(bare, outs=tuple(outs))
