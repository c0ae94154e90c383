"""Traces of some steps of a run, and their seconds beside those that were predicted."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from autopar.planner.planned import read_decided
from autopar.plans.store import StoredPlan
from autopar.step import Step
from autopar.training.options import RunOptions

TRACES = "traces"


class Profile:
    """Profiles some steps of this rank with torch.profiler. before: each step calls
    `begin`, and `end` after it."""

    def __init__(self, step: Step, stored: StoredPlan, options: RunOptions) -> None:
        self.steps = options.profiled_steps
        self.device, self.rank = step.device, step.comm.rank
        self.predicted = predicted_seconds(stored)
        name = f"steps-{self.steps[0]}-{self.steps[-1]}-rank-{self.rank}.json"
        self.path = (options.save or stored.directory) / TRACES / name
        self.traced: list[float] = []
        self.plain: list[float] = []
        self._began = 0.0
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    @classmethod
    def of(
        cls, step: Step, stored: StoredPlan, options: RunOptions, done: int
    ) -> Profile | None:
        """None if no steps are to be profiled, or a run goes on after their first."""
        steps = options.profiled_steps
        return cls(step, stored, options) if steps and steps[0] > done else None

    def begin(self, number: int) -> None:
        """Begins a step. number: of the step, from 1."""
        if number == self.steps[0]:
            self._profiler.start()
        self._synchronize()
        self._began = time.perf_counter()

    def end(self, number: int) -> str | None:
        """Ends a step; after the last profiled one, returns the text to print."""
        self._synchronize()
        held = self.traced if number in self.steps else self.plain
        held.append(time.perf_counter() - self._began)
        if number != self.steps[-1]:
            return None
        self._profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        return self.text()

    def text(self) -> str:
        """Seconds of a step: while profiled, before that (of all but the first, which
        warms up), and as predicted."""
        means = {"profiled": self.traced, "before that": self.plain[1:]}
        parts = [f"{_mean(t):.4g} s {name}" for name, t in means.items() if t]
        if self.predicted is None:
            parts.append("nothing predicted: autopar plan did not make this plan")
        else:
            parts.append(f"{self.predicted:.4g} s predicted")
        first, last = self.steps[0], self.steps[-1]
        return (
            f"steps {first} to {last}: {', '.join(parts)}\n"
            f"traces of all ranks: {self.path.parent} (chrome://tracing, Perfetto)"
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def predicted_seconds(stored: StoredPlan) -> float | None:
    """Returns a step's, by the planner that made the plan, if one did."""
    record = read_decided(Path(stored.directory)).record
    return None if record is None else record.best[0].seconds


def _mean(seconds: list[float]) -> float:
    return sum(seconds) / len(seconds)
