"""Seconds of ops, measured in place: each statement of a rank's emitted module.

A whole forward and backward runs as the executor runs it, on weights and tokens drawn
at random, so that caches and the allocator are as in a real step; the time is read
between statements. What an op takes thus holds what starting it takes, and freeing
what is dead after it. On a CPU the time is the thread's own: other processes that
want the same core do not count.
"""

from __future__ import annotations

import ast
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from autopar.echo import EchoComm
from autopar.executor import load_module
from passes.collectives import collective
from passes.cost import flops, signature, traffic
from passes.emit import emit
from passes.graph import Node, Value
from passes.local_stage import LocalStage
from passes.measured import Timed
from passes.mesh import Mesh

MARK = "_mark"
SCALE = 0.02  # of random weights, as GPTs are initialised


@dataclass(frozen=True)
class Kind:
    """What is measured of a statement: its signature, and its size by the count."""

    signature: str
    bytes: int
    flops: int


@dataclass(frozen=True)
class Job:
    """A whole model on one rank, to be run and timed; processes can hand it on.

    text: its module. held: parameters, buffers, constants and inputs: where ("p" or
    "b"), name -> values, or what to draw. kinds: of each statement of a function, None
    for a collective.
    """

    name: str
    text: str
    mesh: Mesh
    microbatches: int
    held: tuple[tuple[str, Value, Tensor | None], ...]
    grads: tuple[Value, ...]
    kinds: Mapping[str, tuple[Kind | None, ...]]


@dataclass(frozen=True)
class JobTimes:
    """timed: signature -> what it took. parts: the seconds of a forward and a backward
    that was timed by statements. whole: of one that was not."""

    timed: Mapping[str, Timed]
    parts: float
    whole: float


def make_job(
    name: str,
    local: LocalStage,
    mesh: Mesh,
    microbatches: int,
    known: Mapping[str, Tensor],
) -> Job:
    """known: values of inputs and constants, by name; the others are drawn."""
    held = [("p", v, known.get(v.name)) for v in local.params]
    held += [("p", v, known.get(v.name)) for v in (*local.buffers, *local.constants)]
    held += [("b", v, known.get(v.name)) for v in local.inputs]
    parts = {"forward": local.forward, "backward": local.backward}
    return Job(
        name,
        emit(local, 1),
        mesh,
        microbatches,
        tuple(held),
        tuple(local.grads[p.name] for p in local.params if p.name in local.grads),
        {part: tuple(map(_kind, nodes)) for part, nodes in parts.items()},
    )


def _kind(node: Node) -> Kind | None:
    if collective(node) or node.op == "comm.wait":
        return None
    return Kind(signature(node), traffic(node), flops(node))


class Running:
    """A job with its tensors, ready to run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.comm = EchoComm(job.mesh, job.microbatches, device)
        tensors: dict[str, dict[str, Tensor]] = {"p": {}, "b": {}}
        draw = torch.Generator(device=device).manual_seed(0)
        for where, v, value in job.held:
            tensors[where][v.name] = _drawn(v, draw) if value is None else value
        self.p, self.b = tensors["p"], tensors["b"]
        self.g = {
            v.name.removeprefix("grad."): torch.zeros(
                v.shape, dtype=v.dtype, device=device
            )
            for v in job.grads
        }
        self.plain = load_module(job.text, "autopar.measured.plain")
        self.marked = load_module(marked(job.text), "autopar.measured.marked")
        self.k = self.plain["setup"](self.comm, self.p)
        self.b |= self.plain["prologue"](self.comm, self.p, self.k, self.b)

    def microbatch(self, module: Mapping[str, Any]) -> None:
        c = self.comm
        _, saved = module["forward"](c, self.p, self.k, self.b)
        module["backward"](c, self.p, self.g, self.k, self.b, saved)


@torch.no_grad()
def run_job(job: Job, device: torch.device, repeats: int) -> JobTimes:
    """Time each statement, each by the median of its runs, and the whole as well."""
    running, clock = Running(job, device), clock_of(device)
    overhead = _overhead(clock)
    marks: list[float] = []
    running.marked[MARK] = lambda: marks.append(clock())
    running.microbatch(running.plain)  # what is allocated once
    rows: list[list[float]] = []
    wholes = []
    for _ in range(repeats):
        marks.clear()
        running.microbatch(running.marked)
        rows.append(marks[:])
        begin = clock()
        running.microbatch(running.plain)
        wholes.append(clock() - begin)
    # Each function has a mark before each statement, and one behind the last.
    found: dict[Kind, list[float]] = defaultdict(list)
    parts, start = 0.0, 0
    for kinds in job.kinds.values():
        for i, kind in enumerate(kinds, start):
            took = median(row[i + 1] - row[i] - overhead for row in rows)
            parts += took
            if kind is not None:
                found[kind].append(max(took, 0.0))
        start += len(kinds) + 1
    assert all(len(row) == start for row in rows), "a statement for each node"
    timed = {k.signature: Timed(mean(s), k.bytes, k.flops) for k, s in found.items()}
    return JobTimes(timed, parts, median(wholes))


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds of this thread, if it does all of the work; else on the wall."""
    if device.type == "cpu":
        alone = torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def after_kernels() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_kernels


def _overhead(clock: Callable[[], float]) -> float:
    """Of reading the clock."""
    marks: list[float] = []
    mark = lambda: marks.append(clock())  # noqa: E731
    for _ in range(200):
        mark()
    return median(b - a for a, b in pairwise(marks))


def _drawn(v: Value, draw: torch.Generator) -> Tensor:
    """Random weights; integers and masks are 0, which indexes anything."""
    if not v.dtype.is_floating_point:
        return torch.zeros(v.shape, dtype=v.dtype, device=draw.device)
    made = torch.randn(v.shape, generator=draw, device=draw.device) * SCALE
    return made.to(v.dtype)


def marked(text: str) -> str:
    """The module with a mark before each node of its functions, and after the last."""
    tree = ast.parse(text)
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            function.body = _with_marks(function.body)
    return ast.unparse(ast.fix_missing_locations(tree))


def _with_marks(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    mark = ast.parse(f"{MARK}()").body
    *body, last = body
    found: list[ast.stmt] = []
    for statement in body:
        if _is_node(statement):
            found += mark
        found.append(statement)
    return [*found, *mark, last]


def _is_node(statement: ast.stmt) -> bool:
    """Not what frees values, or unpacks those that were saved."""
    if isinstance(statement, ast.Delete):
        return False
    if isinstance(statement, ast.Assign):
        value = statement.value
        return not (isinstance(value, ast.Name) and value.id == "saved")
    return ast.unparse(statement) != "saved.clear()"
