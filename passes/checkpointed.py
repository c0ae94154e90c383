"""Checkpoints of a model that are not of its layers, as those of a loss by chunks.

    for h, y in zip(hidden.chunk(8, 1), labels.chunk(8, 1)):
        total += checkpoint(loss_of, h, y)

Layers are computed again as the plan says, whatever checkpoints a model has around
them. What another checkpoint runs is a layer by itself, which is computed again as the
model says, unless the plan names it: nothing of one chunk is alive beside another.
"""

from __future__ import annotations

CHECKPOINT = "checkpoint."


def in_checkpoint(number: int, module: str) -> str:
    """The path of a module that runs in a checkpoint; "": of the model's own code."""
    return f"{CHECKPOINT}{number}.{module}".removesuffix(".")


def is_checkpoint(layer: str) -> bool:
    """Whether a layer, by its path, is what a checkpoint runs."""
    return layer.startswith(CHECKPOINT)
