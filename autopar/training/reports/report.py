"""Reports the steps of a run to writers, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from autopar.training.reports.metrics import METRIC, Clock, Meter, Row


class Writer(Protocol):
    """Takes rows, as of the terminal or of a file."""

    clock: Clock

    def wants(self, done: int) -> bool:
        """Whether the writer takes rows of this step; it takes all evaluations."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None:
        """Nothing more is written."""


@dataclass(frozen=True)
class Report:
    """Gives rows to those that want them; to none, on other ranks than the first."""

    meter: Meter
    writers: Sequence[Writer]

    def step(
        self,
        done: int,
        loss: Tensor,
        norm: Tensor,
        lr: float,
        reference: float | None,
        metrics: Mapping[str, Tensor],
    ) -> None:
        """metrics: of the step, see `Step.metrics`."""
        for writer in self.writers:
            if writer.wants(done):
                row = self.meter.row(done, loss, norm, lr, writer.clock)
                row |= {METRIC + name: x.item() for name, x in metrics.items()}
                if reference is not None:
                    row["reference_loss"] = reference
                writer.write(row)

    def evaluation(self, done: int, losses: Row) -> None:
        """losses: losses and perplexities, by name."""
        for writer in self.writers:
            writer.write({"step": done, **losses})

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Keeps seconds from counting as part of a step."""
        began = perf_counter()
        yield
        for writer in self.writers:
            writer.clock.leave_out(perf_counter() - began)
