"""Learning rate schedules: functions of the step alone, so a resumed run is exact.

With w steps of warmup and n in all, of which the last d decay (w + d <= n), step i from
0 has lr (i + 1) / w while i < w, then lr, and from step n - d on what is between lr and
min_lr at a progress of (i - (n - d)) / d: as torch.optim.lr_scheduler has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

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
