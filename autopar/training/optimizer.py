"""AdamW as GPTs are trained with it: weights decay, biases and norms do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from autopar.training.options import RunOptions
from autopar.training.schedules import DECAY

FUSED = ("cpu", "cuda")  # devices on which torch updates all parameters by one kernel


def make_optimizer(
    parameters: Iterable[tuple[nn.Parameter, int]], options: RunOptions
) -> Optimizer:
    """Makes AdamW over parameters, each with its number of dims in the model.

    Ranks have the same two groups, even where one of them is empty.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": options.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for p, dims in parameters:
        groups[dims < 2]["params"].append(p)
    held = [p for group in groups for p in group["params"]]
    fused = bool(held) and all(_can_fuse(p) for p in held)
    return AdamW(
        groups,
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        fused=fused or None,
    )


def set_learning_rate(optimizer: Optimizer, step: int, options: RunOptions) -> float:
    """Give all groups the learning rate of a step; returns it."""
    rate = learning_rate(step, options)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def learning_rate(step: int, options: RunOptions) -> float:
    """Returns that of a step, counted from 0."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    decaying = options.decay_steps
    begun = step - (options.steps - decaying)
    if begun <= 0 or not decaying:
        return options.lr
    left = DECAY[options.lr_schedule](min(1.0, begun / decaying))
    return options.min_lr + (options.lr - options.min_lr) * left


def _can_fuse(p: torch.Tensor) -> bool:
    return p.device.type in FUSED and p.is_floating_point()
