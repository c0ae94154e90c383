"""Dynamic loss scaling: keeps gradients in float16 away from zero and from infinity.

float16 has no number below 6e-8, and many gradients are smaller. So the loss is
multiplied by a scale before the backward and gradients are divided by it after they
are summed, in float32; where that overflows, the step is left out and the scale halved
(Micikevicius 2018, section 3.2). The constants are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from autopar.passes.errors import AutoparError

GROWTH, BACKOFF = 2.0, 0.5
INTERVAL = 2000  # good steps in a row before the scale grows


@dataclass
class LossScale:
    """scale: of the next step. good: steps since it changed. skipped: steps left out,
    of all."""

    scale: float = 2.0**16
    good: int = 0
    skipped: int = 0

    def unscale_(self, gradients: Iterable[Tensor]) -> Tensor | int:
        """Divide in place by the scale; how many of them overflowed. Waits for none."""
        finite = [g.mul_(1.0 / self.scale).isfinite().all() for g in gradients]
        return sum(one.logical_not() for one in finite)

    def update(self, overflowed: bool) -> None:
        """Adapts the scale after a step. overflowed: some gradient was not finite."""
        if overflowed:
            self.scale, self.good = self.scale * BACKOFF, 0
            self.skipped += 1
            return
        self.good += 1
        if self.good == INTERVAL:
            self.scale, self.good = self.scale * GROWTH, 0

    def state_dict(self) -> dict[str, float]:
        """Numbers to go on with, in a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Raises: AutoparError, for what `state_dict` did not give."""
        if set(state) != set(asdict(self)):
            raise AutoparError(
                f"a loss scale has {', '.join(asdict(self))}, not {', '.join(state)}",
                fix="load what state_dict() gave",
            )
        self.scale = float(state["scale"])
        self.good, self.skipped = int(state["good"]), int(state["skipped"])
