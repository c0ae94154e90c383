"""What models choose by their largest scores, and programs that are told to choose it.

Rounded, a router may prefer another expert: no error, but a gradient elsewhere. To
compare computations that round differently, all of them take the choices of one; and
how far from their own these are says whether rounding explains the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.passes.errors import AutoparError


@dataclass
class RoutingReplay:
    """told: of each `topk` of a model, in order: int64 [..., k]. differing: (which, and
    of which rank and microbatch) -> rows that were told otherwise than they would have
    chosen, all rows, and the margin: the most that a row's scores of what it was told
    fall short of what it preferred, as a share of its largest score."""

    told: Sequence[Tensor]
    differing: dict[tuple[int, ...], tuple[int, int, float]] = field(
        default_factory=dict
    )

    def take(
        self, scores: Tensor, own: Tensor, rows: Tensor, which: tuple[int, ...]
    ) -> Tensor:
        """scores [..., n], own choices [..., k], those told [..., k] -> the latter."""
        if rows.shape != own.shape:
            raise AutoparError(
                f"the model's choice {which[0]} is of shape {tuple(rows.shape)}, the "
                f"program's of {tuple(own.shape)}",
                fix="verify it in float64, in which both choose alike",
            )
        otherwise = (own.sort(-1).values != rows.sort(-1).values).any(-1)
        high, low = (scores.gather(-1, x).double().sort(-1).values for x in (own, rows))
        short = torch.where(high == low, 0.0, high - low).sum(-1)  # -inf: ruled out
        scale = scores.double().where(scores.isfinite(), 0.0).abs().amax(-1)
        margin = (short / scale.clamp_min(1e-30)).max().item() if short.numel() else 0.0
        self.differing[which] = int(otherwise.sum()), otherwise.numel(), margin
        return rows

    @property
    def share(self) -> float:
        """Returns the share of rows told otherwise than they would have chosen."""
        otherwise, rows = (sum(n[i] for n in self.differing.values()) for i in (0, 1))
        return otherwise / max(1, rows)

    @property
    def margin(self) -> float:
        """The largest margin between differing choices, relative to the scores."""
        return max((m for _, _, m in self.differing.values()), default=0.0)


class Choosing(TorchFunctionMode):
    """Records a model's choices along last dims, or replays them. made: in order."""

    def __init__(self, replay: RoutingReplay | None = None) -> None:
        super().__init__()
        self.replay = replay
        self.made: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or not _is_choice(*args, **kwargs):
            return result
        x, own = args[0] if args else kwargs["input"], result.indices
        if self.replay is not None:
            number = len(self.made)
            if number >= len(self.replay.told):
                raise AutoparError(
                    f"the model chooses more often than the {number} times before",
                    fix="verify it in float64",
                )
            own = self.replay.take(x, own, self.replay.told[number], (number,))
            result = torch.return_types.topk((x.gather(-1, own), own))
        self.made.append(own.detach())
        return result


def _is_choice(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> bool:
    """Whether a topk is a choice of experts, as `recognize_experts` has it."""
    return largest and input.dim() > 0 and dim % input.dim() == input.dim() - 1
