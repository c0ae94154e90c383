"""running_stage: one stage of a program on a rank, its module and its state."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor

from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.own_rows import Field


class Batch(dict[str, Field]):
    """The fields of a batch, and the prologue's results, made when they are read.

    What is gathered is on its way until somebody reads it.
    """

    rest: Iterator[object] = iter(())

    def begin(self, prologue: Callable[..., Any], *args: object) -> None:
        """args: of the prologue, before the batch."""
        self.rest = prologue(*args, self) or iter(())
        next(self.rest, None)

    def __missing__(self, key: str) -> Field:
        for _ in self.rest:
            if key in self:
                break
        if key not in self:
            raise KeyError(key)
        return self[key]

    def end(self) -> None:
        """Runs the rest of the prologue, which nobody has waited for."""
        for _ in self.rest:
            pass


@dataclass
class RunningStage:
    """One stage on this rank: its module and what it keeps between actions."""

    module: dict[str, Any]
    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]
    constants: dict[str, Tensor] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)
    # By microbatch: from forward to backward, and from its input to its weight half.
    residuals: dict[int, list[Tensor]] = field(default_factory=dict)
    weight_residuals: dict[int, list[Tensor]] = field(default_factory=dict)
    # What is done once a step after the backwards; it waits for these to be ready.
    epilogue: Iterator[list[Tensor]] | None = None
    awaited: list[Tensor] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Frees what a failed step has left."""
        self.batch, self.epilogue, self.awaited = Batch(), None, []
        self.residuals.clear()
        self.weight_residuals.clear()

    def begin_epilogue(self, comm: Comm) -> None:
        """Begins the epilogue in the last backward; `go_on` runs it."""
        if "epilogue" in self.module:
            self.ready.clear()
            of_step = self.tensors, self.grads, self.constants, self.batch
            self.epilogue = self.module["epilogue"](comm, *of_step)
            self.awaited = next(self.epilogue)

    def go_on(self, gradients: Sequence[Tensor]) -> None:
        """Scatter whole gradients, as far as all of a block are ready."""
        self.ready.update(map(id, gradients))
        while self.awaited and self.ready.issuperset(map(id, self.awaited)):
            self.awaited = []  # what runs now says itself what is ready
            self.awaited = next(self.epilogue or iter(()), [])

    def end_epilogue(self) -> None:
        """Runs the rest of the epilogue, with the last scatters."""
        assert not self.awaited, "all gradients are ready"
        for _ in self.epilogue or ():
            pass
        self.epilogue = None
        for name in self.module["WHOLE_GRADIENTS"]:
            del self.grads[name]


def load_module(text: str, name: str) -> dict[str, Any]:
    """Run an emitted module's text; returns its names."""
    module: dict[str, Any] = {"__name__": name}
    file = f"<{name}>"
    # Tracebacks show the line, and with it where in the model that is.
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(_compiled(text, file), module)
    return module


@lru_cache(maxsize=64)
def _compiled(text: str, file: str) -> CodeType:
    """One for all virtual ranks that run the text, whichever step or proof it is in."""
    return compile(text, file, "exec")
