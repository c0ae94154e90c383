"""Loops over experts beside the one step that does all their turns.

A model that is small is compared as a whole, see `beside_model`. Of one that is not, or
has no weights here, what was read and what was made of it are put into one graph, made
small, and run in float64: the losses and all gradients must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.passes.capture.rows.loops_beside import of_each, put_together
from autopar.passes.capture.rows.rows import CHOOSES
from autopar.passes.errors import AutoparError
from autopar.passes.graph import Graph
from autopar.passes.proof.choose_sizes import Order, choose_sizes
from autopar.passes.proof.find_extents import find_extents
from autopar.passes.proof.shrink import SMALL_NUMBER, Shrinker
from autopar.passes.proof_record import Loops
from autopar.passes.traced import Traced
from autopar.progress import tell
from autopar.proof.differences import differences, result_of_model
from autopar.proof.interpret import run_graph
from autopar.proof.ranks import VerificationFailed
from autopar.proof.reference_runs import default_dtype
from autopar.proof.values import draw_values, values_of_buffers

TOLERANCE = 1e-9  # rounding of float64, through some thousand operations


def compare_loops(
    looped: Traced, batched: Traced, real: Mapping[str, Tensor], seed: int = 0
) -> Loops:
    """Runs both, small.

    real: values of parameters and buffers, of those that are known, by name. Raises:
    VerificationFailed where the losses or a gradient differ.
    """
    tell("proof: loops over experts beside one step")
    try:
        both = put_together(looped, batched)
        shrinker = _shrinker(both)
        small = shrinker.graph(both)
    except AutoparError as error:
        return Loops(why=error.message)
    held = {v.name for v in (*small.graph.params, *small.graph.buffers)}
    less = {k: shrinker.tensor(k, x.cpu()) for k, x in real.items() if k in held}
    buffers = values_of_buffers(small.graph.buffers, less, seed)
    one, other = of_each(small)
    for weights, inputs in draw_values(small, less, {}, seed):
        values = {**inputs, **weights, **buffers, **small.literals}
        with default_dtype(torch.float64):
            want, ours = (
                result_of_model(*run_graph(way, values, None)[:2])
                for way in (one, other)
            )
        if not all(bool(step.loss.isfinite().all()) for step in (want, ours)):
            continue
        errors = differences(ours, want)
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] > TOLERANCE:
            raise VerificationFailed(
                "a loop over experts was made one step that computes something else: "
                f"'{worst}' is {errors[worst]:.0e} off",
                source=_place_of(looped.graph),
                fix="report this model; compile with prove=False (--unproved) runs it "
                "unproved",
            )
        return Loops(len(errors), worst, errors[worst])
    return Loops(why="the model gives no finite numbers")


def _shrinker(both: Traced) -> Shrinker:
    """A shrinker to the smallest possible extents, except those that count experts."""
    extents = find_extents(both).united
    sizes = choose_sizes(
        extents.sizes, extents.sums, {}, {}, {}, extents.most, [Order.DIFFERENT]
    )
    counts = [extent.size for extent in extents.fixed]
    return Shrinker(extents, sizes, max(counts, default=SMALL_NUMBER))


def _place_of(graph: Graph) -> str:
    """The user's line where a loop's turns choose their rows."""
    return next(str(n.location.source) for n in graph.nodes if n.op == CHOOSES)
