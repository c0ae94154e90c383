"""Seconds of ops, measured in place: each statement of a rank's emitted module.

A whole forward and backward runs as the executor runs it, on weights and tokens drawn
at random, so that caches and the allocator are as in a real step; the time is read
between statements. What an op takes thus holds what starting it takes, and freeing
what is dead after it. On a CPU the time is the thread's own: other processes that
want the same core do not count. On a GPU each statement is waited for.
"""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.machine.clock import clock_of
from autopar.passes.cost import flops, signature, traffic
from autopar.passes.dims.origins import is_real_or_complex
from autopar.passes.emit.emit import emit
from autopar.passes.emit.names import RESIDUALS
from autopar.passes.graph import Node, Value
from autopar.passes.mesh import Mesh
from autopar.passes.ops.collectives import SPEAKS
from autopar.passes.price.measured import Timed
from autopar.passes.shard.collectives import collective
from autopar.passes.stage.local_stage import LocalStage
from autopar.runtime.comm.fake_comm import FakeComm
from autopar.runtime.execute.running_stage import load_module
from autopar.units import seconds

MARK = "_mark"
NO_MESH = Mesh(())
SCALE = 0.02  # of random weights, as GPTs are initialised


@dataclass(frozen=True)
class Kind:
    """The key of a statement to measure: its signature, and its size by the count."""

    signature: str
    bytes: int
    flops: int


@dataclass(frozen=True)
class Job:
    """A stage of one rank, to be run and timed; processes can hand it on.

    text: its module. held: "p" (parameters, buffers, constants), "b" (inputs), "g"
    (gradients), "x" (what it receives) or "dy" (cotangents of what it sends), each
    value with what it is, or None for what is to be drawn. kinds: of each statement of
    a function, None for a collective.
    """

    name: str
    text: str
    mesh: Mesh
    microbatches: int
    held: tuple[tuple[str, Value, Tensor | None], ...]
    kinds: Mapping[str, tuple[Kind | None, ...]]


@dataclass(frozen=True)
class JobTimes:
    """timed: signature -> what it took, adding up to the whole. parts: function -> its
    seconds, statement by statement. as_they_are: the share in these of products and
    collectives, which are called as they are wherever functions are compiled. whole:
    seconds of all functions, when the clock was not read in between."""

    timed: Mapping[str, Timed]
    parts: Mapping[str, float]
    as_they_are: float
    whole: float

    def __str__(self) -> str:
        """`forward and backward 32.4 ms, 98.6% of it in 61 ops`: how much of the whole
        its statements add up to."""
        share = sum(self.parts.values()) / self.whole
        ops = f"{share:.1%} of it in {len(self.timed)} ops"
        return f"forward and backward {seconds(self.whole)}, {ops}"


def make_job(
    name: str,
    local: LocalStage,
    mesh: Mesh = NO_MESH,
    microbatches: int = 1,
    known: Mapping[str, Tensor] = MappingProxyType({}),
    outlined: bool = False,
) -> Job:
    """known: values of inputs and constants, by name; the others are drawn. outlined:
    as it runs, see `emit`; its statements cannot be timed."""
    held = {
        "p": (*local.params, *local.buffers, *local.constants),
        "b": local.inputs,
        "g": tuple(local.grads[p.name] for p in local.params if p.name in local.grads),
        "x": local.receives,
        "dy": tuple(v for v in local.d_sends if v is not None),
    }
    parts = {"forward": local.forward, "backward": local.backward}
    if local.weight_half is not None:
        parts["backward_input"] = parts.pop("backward")
        parts["backward_weight"] = local.weight_half
    return Job(
        name,
        emit(local, 1, outlined),
        mesh,
        microbatches,
        tuple((at, v, known.get(v.name)) for at, those in held.items() for v in those),
        {part: tuple(map(_kind, nodes)) for part, nodes in parts.items()},
    )


def _kind(node: Node) -> Kind | None:
    if collective(node) or node.op in SPEAKS:
        return None
    return Kind(signature(node), traffic(node), flops(node))


class Running:
    """A job with its tensors, ready to run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.comm = FakeComm(job.mesh, job.microbatches, device)
        held: dict[str, dict[str, Tensor]] = defaultdict(dict)
        draw = torch.Generator(device=device).manual_seed(0)
        for at, v, value in job.held:
            name = v.name.removeprefix("grad.") if at == "g" else v.name
            held[at][name] = _drawn(v, draw) if value is None else value.to(device)
        self.p, self.b, self.g = held["p"], held["b"], held["g"]
        self.xs, self.dys = tuple(held["x"].values()), tuple(held["dy"].values())
        self.plain = load_module(job.text, "autopar.measured.plain")
        self.k = self.plain["setup"](self.comm, self.p)
        for _ in self.plain["prologue"](self.comm, self.p, self.k, self.b) or ():
            pass

    def microbatch(self, module: Mapping[str, Any]) -> None:
        """Forward and backward, as the executor calls them."""
        c, p, g, k, b = self.comm, self.p, self.g, self.k, self.b
        _, residuals = module["forward"](c, p, k, b, *self.xs)
        if "backward" in module:
            module["backward"](c, p, g, k, b, residuals, *self.dys)
        else:
            _, residuals = module["backward_input"](c, p, g, k, b, residuals, *self.dys)
            module["backward_weight"](c, p, g, k, b, residuals)


@torch.no_grad()
def run_job(
    job: Job, device: torch.device, repeats: int, seconds: float = math.inf
) -> JobTimes:
    """Time each statement, each by the median of its runs, and the whole as well.

    repeats: runs, but once they have taken more than `seconds` no further one begins.
    """
    running, clock = Running(job, device), clock_of(device)
    overhead = _overhead(clock)
    marks: list[float] = []
    timed = load_module(marked(job.text), "autopar.measured.marked")
    timed[MARK] = lambda: marks.append(clock())
    start = clock()
    running.microbatch(running.plain)  # what is allocated once
    rows: list[list[float]] = []
    wholes: list[float] = []
    while not rows or (len(rows) < repeats and clock() - start < seconds):
        marks.clear()
        running.microbatch(timed)
        rows.append(marks[:])
        begin = clock()
        running.microbatch(running.plain)
        wholes.append(clock() - begin)
    return _sum_up(job, rows, overhead, median(wholes))


def _sum_up(
    job: Job, rows: Sequence[Sequence[float]], overhead: float, whole: float
) -> JobTimes:
    """rows: what the clock said, in each run: each function has a mark before each
    statement, and one behind the last.

    What statements do not add up to of the whole is shared out among them: calls, and
    that some run in a row takes more than the median of each.
    """
    samples: dict[Kind, list[float]] = defaultdict(list)
    parts, start = {}, 0
    for part, kinds in job.kinds.items():
        parts[part] = 0.0
        for i, kind in enumerate(kinds, start):
            took = max(0.0, median(row[i + 1] - row[i] for row in rows) - overhead)
            parts[part] += took
            if kind is not None:
                samples[kind].append(took)
        start += len(kinds) + 1
    assert all(len(row) == start for row in rows), "a statement for each node"
    total = sum(parts.values())
    more = whole / total if total else 1.0
    timed = {
        kind.signature: Timed(more * mean(took), kind.bytes, kind.flops)
        for kind, took in samples.items()
    }
    rest = sum(sum(samples[k]) for k in samples if not timed[k.signature].is_product)
    return JobTimes(timed, parts, 1 - rest / total if total else 0.0, whole)


def _overhead(clock: Callable[[], float]) -> float:
    """Returns the seconds that reading the clock takes."""
    marks: list[float] = []
    mark = lambda: marks.append(clock())  # noqa: E731
    for _ in range(200):
        mark()
    return median(b - a for a, b in pairwise(marks))


def _drawn(v: Value, draw: torch.Generator) -> Tensor:
    """Random weights; integers and masks are 0, which indexes anything."""
    if not is_real_or_complex(v.dtype):
        return torch.zeros(v.shape, dtype=v.dtype, device=draw.device)
    kind = torch.complex64 if v.dtype.is_complex else torch.float32
    made = torch.randn(v.shape, generator=draw, device=draw.device, dtype=kind) * SCALE
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
    marked: list[ast.stmt] = []
    for statement in body:
        if _is_node(statement):
            marked += mark
        marked.append(statement)
    return [*marked, *mark, last]


def _is_node(statement: ast.stmt) -> bool:
    """Whether a statement computes, not frees values or unpacks residuals."""
    if isinstance(statement, ast.Delete):
        return False
    if isinstance(statement, ast.Assign):
        value = statement.value
        return not (isinstance(value, ast.Name) and value.id == RESIDUALS)
    return ast.unparse(statement) != f"{RESIDUALS}.clear()"
