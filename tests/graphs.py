"""Graphs of tests, as text: what passes read, and what they make."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import dedent

from autopar.passes.graph import Graph, Node


def nodes_of(text: str) -> list[Node]:
    """The nodes of a graph that is written as it prints."""
    return list(Graph.parse(text).nodes)


def calls(nodes: Iterable[Node]) -> str:
    """Nodes as they print, without types and places."""
    return "\n".join(map(str, nodes))


def lines(text: str) -> str:
    """Text without what indents all of it."""
    return dedent(text).strip()
