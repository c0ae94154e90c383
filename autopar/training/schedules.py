"""Learning rate schedules: functions of the step alone, so a resumed run is exact.

With w steps of warmup and n in all, of which the last d decay (w + d <= n), step i from
0 has lr (i + 1) / w while i < w, then lr, and from step n - d on what is between lr and
min_lr at a progress of (i - (n - d)) / d: as torch.optim.lr_scheduler has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from autopar.passes.errors import AutoparError

if TYPE_CHECKING:
    from autopar.training.options import RunOptions

# Share of lr - min_lr that is left, of the progress of the decay in [0, 1].
DECAY: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda progress: 1.0,
        # Loshchilov 2016 (arXiv 1608.03983), equation 5, without restarts.
        "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
        "linear": lambda progress: 1 - progress,
        # Warmup, stable, decay: Hu 2024 (arXiv 2404.06395), section 4.
        "wsd": lambda progress: 1 - progress,
    }
)


class ScheduleError(AutoparError):
    """A learning rate schedule that cannot be."""


def decay_steps(options: RunOptions) -> int:
    """The last steps of a run, in which the learning rate decays."""
    if options.lr_schedule == "constant":
        return 0
    if options.lr_schedule == "wsd":
        return max(1, round(options.decay_ratio * options.steps))
    return max(0, options.steps - options.warmup)


def learning_rate(step: int, options: RunOptions) -> float:
    """Returns that of a step, counted from 0."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    decaying = decay_steps(options)
    begun = step - (options.steps - decaying)
    if begun <= 0 or not decaying:
        return options.lr
    left = DECAY[options.lr_schedule](min(1.0, begun / decaying))
    return options.min_lr + (options.lr - options.min_lr) * left


def check_schedule(options: RunOptions) -> None:
    """Raises ScheduleError for options that contradict each other."""
    name, steps, warmup = options.lr_schedule, options.steps, options.warmup
    if name not in DECAY:
        raise ScheduleError(
            f"lr_schedule={name!r}", fix=f"use one of {', '.join(DECAY)}"
        )
    if name == "constant":
        if options.min_lr:
            raise ScheduleError(
                f"--min-lr {options.min_lr:g} is never reached: the rate is constant",
                fix="add --lr-schedule cosine, linear or wsd, or leave --min-lr out",
            )
        return
    if options.min_lr > options.lr:
        raise ScheduleError(
            f"--min-lr {options.min_lr:g} is above --lr {options.lr:g}",
            fix=f"use --min-lr {options.lr / 10:g}",
        )
    decaying = max(1, decay_steps(options))
    if warmup + decaying > steps:
        raise ScheduleError(
            f"--lr-schedule {name}: {warmup} steps of warmup and {decaying} that decay "
            f"are more than {steps} steps",
            fix=f"use --warmup {steps - decaying}, or more --steps",
        )
