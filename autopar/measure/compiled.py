"""Measures the gain of compiling: a few layers as Python, and by Inductor."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autopar.machine.clock import clock_of
from autopar.measure.ops import Job, Running
from autopar.runtime.execute.code_cache import CodeCache
from autopar.runtime.execute.executor import load_module
from autopar.runtime.execute.inductor import compile_functions

BUDGET = 120.0  # seconds after which no more functions are compiled


@torch.no_grad()
def measure_compiled(
    job: Job, device: torch.device, repeats: int, budget: float = BUDGET
) -> tuple[float, float] | None:
    """Seconds of a forward and backward as Python, and with compiled functions; None if
    compiling takes more than so many seconds.

    The first are a median, the others so much times the median ratio of a run to that
    just before it: for how fast a machine is changes within seconds.
    """
    running, clock = Running(job, device), clock_of(device)
    with tempfile.TemporaryDirectory() as folder:
        cache = _Bounded(Path(folder), budget)
        compiled = load_module(job.text, "autopar.measured.compiled")
        compile_functions(compiled, job.text, cache)
        eager, ratios = [], []
        for number in range(repeats + 1):
            took = []
            for module in (running.plain, compiled):
                begin = clock()
                running.microbatch(module)
                took.append(clock() - begin)
                if cache.late:
                    return None
            if number:  # the first run compiles
                eager.append(took[0])
                ratios.append(took[1] / took[0])
    return median(eager), median(eager) * median(ratios)


class _Bounded(CodeCache):
    """A code cache that compiles within a budget of seconds, silently."""

    def __init__(self, directory: Path, budget: float) -> None:
        super().__init__(directory)
        self.late, self._until = False, time.monotonic() + budget

    def say(self, line: str) -> None:
        """Says nothing: a user who profiles did not ask to compile."""

    def take(self, *args: Any) -> Any:
        self.late = self.late or time.monotonic() > self._until
        if self.late:
            raise TimeoutError
        return super().take(*args)
