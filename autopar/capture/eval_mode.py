"""Tells whether a model computes in eval mode what a step does without dropout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.capture_model import capture_model
from autopar.passes.capture.mixed_precision import Lowering
from autopar.passes.errors import AutoparError
from autopar.passes.graph import Graph, Node
from autopar.passes.ops.arguments import arguments, call

LOG = logging.getLogger("autopar")
OFF = {"train": False, "dropout_p": 0.0}  # of those that draw, by argument


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model's modules as `.eval()` has them, and afterwards as they were."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def differs_in_eval_mode(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    lowering: Lowering,
) -> bool:
    """Whether the model computes something else in eval mode than as it is, without
    dropout. Where that is refused, a warning says so, and it does not."""
    if not any(module.training for module in model.modules()):
        return False
    mode = "train"
    try:
        trained = _without_dropout(capture_model(model, batch, loss_fn, lowering).graph)
        mode = "eval"
        with in_eval_mode(model):
            evaluated = capture_model(model, batch, loss_fn, lowering).graph
    except AutoparError as error:
        LOG.warning(
            "evaluating is a step without dropout: what the model computes in %s "
            "mode is refused: %s",
            mode,
            error.message,
        )
        return False
    return trained != _without_dropout(evaluated)


def _without_dropout(graph: Graph) -> str:
    """A captured graph's text, as if all dropout in it were off."""

    def changed(node: Node) -> Node:
        bound = arguments(node)
        if not OFF.keys() & bound.keys():
            return node
        args, kwargs = call(node.op, {k: OFF.get(k, v) for k, v in bound.items()})
        return replace(node, args=args, kwargs=kwargs)

    return str(replace(graph, nodes=tuple(map(changed, graph.nodes))))
