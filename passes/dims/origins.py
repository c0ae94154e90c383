"""Finds what each value depends on: nothing, the batch, parameters, or both.

It decides when a value is computed: constants once, values of the batch alone possibly
ahead of the microbatches, everything else in the loop.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

import torch

from ..builder import find_reached
from ..graph import Graph
from ..ops.random import CHANCE


class Origin(enum.Flag):
    """The sources that a value depends on; none, if it is a constant."""

    CONSTANT = 0  # also buffers and literals
    INPUT = enum.auto()
    PARAM = enum.auto()
    BOTH = INPUT | PARAM


def find_origins(graph: Graph) -> dict[str, Origin]:
    """Value name -> the sources that it depends on."""
    origins = {v.name: Origin.CONSTANT for v in (*graph.buffers, *graph.constants)}
    origins.update((v.name, Origin.INPUT) for v in graph.inputs)
    origins.update((v.name, Origin.PARAM) for v in graph.params)
    for node in graph.nodes:
        origin = Origin.CONSTANT
        for v in node.operands:
            origin |= origins[v.name]
        if node.op in CHANCE and origin is Origin.CONSTANT:
            origin = Origin.INPUT  # another one in each step
        origins.update((v.name, origin) for v in node.results)
    return origins


def is_real_or_complex(dtype: torch.dtype) -> bool:
    """Whether a gradient can flow through values of this type."""
    return dtype.is_floating_point or dtype.is_complex


def find_differentiable(graph: Graph, trainable: Collection[str]) -> frozenset[str]:
    """Names of the values that a gradient flows through: real or complex, made from a
    trainable parameter without a detach in between, and the loss from them."""
    flows = {v.name for v in graph.params if v.name in trainable}
    for node in graph.nodes:
        if node.op == "aten.detach.default":
            continue
        if any(v.name in flows for v in node.operands):
            flows.update(v.name for v in node.results if is_real_or_complex(v.dtype))
    return frozenset(flows & find_reached(graph))
