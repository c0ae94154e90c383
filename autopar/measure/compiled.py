"""What a backend gains here: a few layers as Python, and as Inductor compiles them."""

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
    """Seconds of a forward and backward as Python, and with compiled functions; medians
    of runs in turns. None if compiling takes more than so many seconds."""
    running, clock = Running(job, device), clock_of(device)
    with tempfile.TemporaryDirectory() as folder:
        cache = _Bounded(Path(folder), budget)
        compiled = load_module(job.text, "autopar.measured.compiled")
        compile_functions(compiled, job.text, cache)
        took: dict[str, list[float]] = {"eager": [], "inductor": []}
        for number in range(repeats + 1):
            for module, samples in zip(
                (running.plain, compiled), took.values(), strict=True
            ):
                begin = clock()
                running.microbatch(module)
                if cache.late:
                    return None
                if number:  # the first run compiles
                    samples.append(clock() - begin)
    return median(took["eager"]), median(took["inductor"])


class _Bounded(CodeCache):
    """What is compiled within a budget of seconds, of which nobody is told."""

    def __init__(self, directory: Path, budget: float) -> None:
        super().__init__(directory)
        self.late, self._until = False, time.monotonic() + budget

    def say(self, line: str) -> None:
        """One who profiles asked for none of it."""

    def take(self, *args: Any) -> Any:
        self.late = self.late or time.monotonic() > self._until
        if self.late:
            raise TimeoutError
        return super().take(*args)
