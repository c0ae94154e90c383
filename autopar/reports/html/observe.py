"""Observes the tensors of each statement of an emitted module: shapes, types, bytes.

A module runs once on tensors of the meta device, as when it was compiled (see
`autopar.proof.full_size`), and is watched: nothing here is worked out a second time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from autopar.passes.capture.forward.on_meta import Shapes
from autopar.passes.nested import tensors
from autopar.passes.program import Program, dtype_name
from autopar.proof.full_size import run_module
from autopar.reports.html.statements import Module, Statement

EMITTED = "<autopar.emitted."


@dataclass(frozen=True)
class Made:
    """A tensor on one rank, with the bytes of its elements."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass
class Seen:
    """What was seen of a module on one rank. made: (line, name) -> the tensor; read:
    the same of what prologue has made, as it is read from b; brought: line of a
    collective -> bytes that the rank brings. residuals: of one microbatch, name of a
    value in forward -> (how often it is kept, its storages' bytes in all). peaks: of
    forward and backward, the line with most bytes of working tensors, and these."""

    made: dict[tuple[int, str], Made] = field(default_factory=dict)
    read: dict[str, Made] = field(default_factory=dict)
    brought: dict[int, int] = field(default_factory=dict)
    residuals: dict[str, tuple[int, int]] = field(default_factory=dict)
    peaks: dict[str, tuple[int, list[tuple[str, int]]]] = field(default_factory=dict)
    stopped: bool = False


def observe(
    program: Program, stage: int, rank: int, module: Module, shapes: Shapes
) -> Seen:
    """Runs the module of a stage on a rank. stopped: shapes depend on values (rows of
    experts), and the rest was not seen."""
    watch = _Watch(module)
    with watch.tracing():
        _, _, cut_short = run_module(program, stage, rank, shapes)
    watch.seen.stopped = bool(cut_short)
    return watch.seen


class _Watch:
    def __init__(self, module: Module) -> None:
        self.seen = Seen()
        self.statements: dict[int, Statement] = {
            s.line: s for statements in module.functions.values() for s in statements
        }
        self.reshapes = {n for n, s in self.statements.items() if s.base}
        self.before: dict[FrameType, int] = {}
        self.done: set[int] = set()
        self.fresh: set[int] = set()
        self.module = module
        self.views: dict[int, int] = {}
        self.held: list[Tensor] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        outer = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(outer)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(EMITTED) or code.co_name == "<module>":
            return None
        return self._step

    def _step(self, frame: FrameType, event: str, result: Any) -> Callable[..., Any]:
        if event not in ("line", "return"):
            return self._step
        line = self.before.pop(frame, None)
        if line is not None and line in self.statements and line not in self.done:
            self.done.add(line)
            self.fresh.add(line)
            self._results(frame, self.statements[line])
        if line in self.reshapes:
            self._view(frame, self.statements[line])
        if event == "line":
            if line in self.fresh:
                self.fresh.discard(line)
                self._alive(frame)
            self.before[frame] = frame.f_lineno
            now = self.statements.get(frame.f_lineno)
            if now is not None and now.kind and now.line not in self.done:
                self._brought(frame, now)
        elif frame.f_code.co_name == "forward" and isinstance(result, tuple):
            self._residuals(frame, result[1])
        return self._step

    def _alive(self, frame: FrameType) -> None:
        """Names of what a function and its callers hold, one for each storage."""
        top, names, seen, total = frame, list[tuple[str, int]](), set[int](), 0
        while top.f_code.co_filename.startswith(EMITTED):
            for name, value in top.f_locals.items():
                if not isinstance(value, Tensor):
                    continue
                key = self._storage(value)
                if key not in seen:
                    seen.add(key)
                    size = value.untyped_storage().nbytes()
                    names.append((name, size))
                    total += size
            part, back = top.f_code.co_name, top.f_back
            if back is None:
                break
            top = back
        _, before = self.seen.peaks.get(part, (0, []))
        if total > sum(n for _, n in before):
            self.seen.peaks[part] = frame.f_lineno, names

    def _results(self, frame: FrameType, statement: Statement) -> None:
        for name in statement.targets:
            value = frame.f_locals.get(name)
            if isinstance(value, Tensor):
                self.seen.made[statement.line, name] = _made(value)
        for read in statement.reads:
            if read.startswith("b["):  # there, once the statement has run
                for x in tensors(_evaluated(frame, read)):
                    self.seen.read[read] = _made(x)

    def _brought(self, frame: FrameType, statement: Statement) -> None:
        """Bytes of the operands of a collective that is about to start."""
        brought = _evaluated(frame, statement.operand)
        self.seen.brought[statement.line] = sum(map(_bytes, tensors(brought)))

    def _residuals(self, frame: FrameType, kept: Any) -> None:
        """Notes the residuals: each storage once, by the name of the first tensor in
        it, without those of the batch or parameters."""
        names: dict[int, str] = {}
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor):
                names.setdefault(id(value), name)
        loops = [*self.module.kept.values()]
        for row in frame.f_locals.get("rows", {}).values():
            for own in loops:
                if len(own) == len(row):
                    names |= {id(x): n for n, x in zip(own, row, strict=True)}
        there = (frame.f_locals.get(name, {}) for name in "bpk")
        known = {self._storage(v) for own in there for v in tensors(own)}
        for x in tensors(kept):
            storage = self._storage(x)
            if storage in known:
                continue
            known.add(storage)
            name = names.get(id(x), "?")
            count, total = self.seen.residuals.get(name, (0, 0))
            size = x.untyped_storage().nbytes()
            self.seen.residuals[name] = count + 1, total + size

    def _storage(self, x: Tensor) -> int:
        own = x.untyped_storage()._cdata
        return self.views.get(own, own)

    def _view(self, frame: FrameType, statement: Statement) -> None:
        """What reshape copies on this device is a view on those where attention lays
        rows out for it: as memory is counted, see `passes.stage.count_footprint`."""
        made = frame.f_locals.get(statement.targets[0])
        base = frame.f_locals.get(statement.base)
        if isinstance(made, Tensor) and isinstance(base, Tensor):
            copy = made.untyped_storage()._cdata
            if copy != base.untyped_storage()._cdata:
                self.views[copy] = self._storage(base)
                self.held += [made, base]  # addresses stay theirs


def _evaluated(frame: FrameType, text: str) -> Any:
    return eval(compile(text, "<operand>", "eval"), frame.f_globals, frame.f_locals)


def _made(x: Tensor) -> Made:
    return Made(tuple(x.shape), dtype_name(x.dtype), _bytes(x))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
