"""Metrics of a step: its speed, the share of the devices' peak, memory."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.machine.hardware import named_by_torch
from autopar.passes.price.cluster import ClusterError
from autopar.passes.program import Program
from autopar.step import Step

Row = Mapping[str, float]
METRIC = "metrics/"  # begins the names of what a model returns beside its loss


@dataclass
class Clock:
    """Steps a second since it was read last. done: steps that were made by then."""

    done: int
    began: float = field(default_factory=time.perf_counter)

    def leave_out(self, seconds: float) -> None:
        """Do not count them: they went into something else."""
        self.began += seconds

    def read(self, done: int) -> float:
        """Returns steps a second since the last reading."""
        now = time.perf_counter()
        speed = (done - self.done) / (now - self.began)
        self.done, self.began = done, now
        return speed


@dataclass(frozen=True)
class Meter:
    """Makes rows of numbers. tokens: of a step. flops: of the model, in a step, as
    Chowdhery 2022 (arXiv 2204.02311), appendix B, counts them: a backward as twice the
    forward, and nothing for recomputation. peak: FLOP/s of all devices; None: unknown.
    """

    tokens: int
    flops: int
    peak: float | None
    device: torch.device

    @classmethod
    def of(cls, step: Step, tokens: int) -> Meter:
        """A meter of a step over `tokens` tokens, with the devices' peak FLOP/s if
        known."""
        program = step.program
        peak = peak_flops(program, step.device)
        if peak is not None:
            peak *= program.mesh.size
        return cls(tokens, 3 * program.forward_flops, peak, step.device)

    def row(
        self, done: int, loss: Tensor, norm: Tensor, lr: float, clock: Clock
    ) -> dict[str, float]:
        """Returns a step's metrics; `done` counts it too. Reading waits for a GPU."""
        row = {"step": done, "loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
        speed = clock.read(done)
        row["tokens_per_second"] = self.tokens * speed
        if self.peak is not None:
            row["mfu"] = self.flops * speed / self.peak
        row["peak_memory"] = peak_memory(self.device)
        return row


def peak_flops(program: Program, device: torch.device) -> float | None:
    """FLOP/s of a GPU of the table in what the program computes in; else None."""
    if device.type != "cuda":
        return None
    device_of = torch.cuda.get_device_properties(device)
    try:
        known = named_by_torch(device_of.name, device_of.total_memory)
    except ClusterError:
        return None
    flops = known.running(program.plan.tf32, program.plan.backend).flops
    return flops.get(computed_in(program), flops["float32"])


def computed_in(program: Program) -> str:
    """The dtype of products: the plan's, or that of the largest parameter."""
    if program.plan.dtype is not None:
        return str(program.plan.dtype).removeprefix("torch.")
    largest = max(program.parameters.values(), key=lambda p: math.prod(p.shape))
    return largest.dtype


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the process on a CPU; the most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def as_json(row: Row) -> str:
    """A row as one line of JSON; numbers that are not finite are null."""
    return json.dumps({k: v if math.isfinite(v) else None for k, v in row.items()})
