"""profile: seconds of each distinct op on this machine, measured once and kept.

Forward and backward of an op are timed on random tensors of its local shapes, on one
thread, as torchrun starts its ranks; the fastest of a few runs counts, since others are
only slowed down by something else. Results are cached by machine and torch version.
What is too large to run here is estimated from the best of what was measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.kernels import attention, attention_backward
from passes.cost import VIEWS, Costs, flops, signature, traffic
from passes.graph import Node, Value, map_values, resolve
from passes.insert_collectives import Lowered
from passes.localize import Localizer

FORMAT = 2
# An op that touches more than this many bytes is not run, but estimated.
LARGEST = 1 << 28
REPEATS = 5


def profile(lowered: Lowered) -> Costs:
    """Costs of the graph's nodes, at the shapes of the first rank."""
    plan = lowered.plan
    sizes = {axis: plan.size(axis) for axis in plan.axes}
    local = Localizer(
        lowered.dims, lowered.shardings, sizes, dict.fromkeys(plan.axes, 0)
    )
    nodes: dict[str, Node] = {}
    for node in lowered.graph.nodes:
        mine = local.node(node)
        if _is_measurable(mine):
            nodes.setdefault(signature(mine), mine)
    store = _Store()
    missing = [key for key in nodes if key not in store.seconds]
    with _one_thread():
        for key in missing:
            store.seconds[key] = measure(nodes[key])
    if missing:
        store.save()
    known = {key: store.seconds[key] for key in nodes}
    return Costs(known, *_rates(nodes, known))


def _is_measurable(node: Node) -> bool:
    kind = node.op.rpartition(".")[0]
    if kind in VIEWS or not node.results or not node.operands:
        return False
    if node.op.startswith("comm.") or traffic(node) > LARGEST:
        return False
    return node.op.startswith("aten.") or node.op == "autopar.attention"


def _rates(nodes: dict[str, Node], known: dict[str, float]) -> tuple[float, float]:
    """FLOP/s and bytes/s of the best measured ops, for those that were not."""
    default = Costs()
    speeds, bandwidths = [default.flops_per_second], [default.bytes_per_second]
    for key, node in nodes.items():
        work, seconds = flops(node), max(known[key], 1e-9)
        if work > 1e7 and work > 8 * traffic(node):
            speeds.append(3 * work / seconds)
        elif traffic(node) > 1e6:
            bandwidths.append(3 * traffic(node) / seconds)
    return max(speeds), max(bandwidths)


def measure(node: Node) -> float:
    """Seconds of one forward and backward of a node, the fastest of a few runs."""
    operands = [_random(v) for v in node.operands]
    run = _attention(node, operands) if node.op == "autopar.attention" else None
    run = run or _with_autograd(node, operands)
    run()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _random(v: Value) -> torch.Tensor:
    if v.dtype.is_floating_point:
        return torch.rand(v.shape, dtype=v.dtype)
    return torch.zeros(v.shape, dtype=v.dtype)


def _attention(node: Node, operands: list[torch.Tensor]) -> Callable[[], Any]:
    q, k, v, *mask = operands
    is_causal, scale = node.args[4:6]
    keep = mask[0] if mask else None

    def run() -> None:
        out, lse = attention(q, k, v, keep, is_causal, scale)
        attention_backward(out, q, k, v, out, lse, keep, is_causal, scale)

    return run


def _with_autograd(node: Node, operands: list[torch.Tensor]) -> Callable[[], Any]:
    has_gradient = any(v.dtype.is_floating_point for v in node.results)
    for x in operands:
        if x.is_floating_point() and has_gradient:
            x.requires_grad_()
    values = iter(operands)
    args = map_values(lambda _: next(values), node.args)
    kwargs = map_values(lambda _: next(values), dict(node.kwargs))
    op = resolve(node.op)

    def run() -> None:
        result = op(*args, **kwargs)
        outs = result if isinstance(result, tuple | list) else [result]
        ends = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
        if ends:
            sources = [x for x in operands if x.requires_grad]
            cotangents = [torch.ones_like(o) for o in ends]
            torch.autograd.grad(ends, sources, cotangents, allow_unused=True)

    return run


class _Store:
    """The cache on disk: signature -> seconds, for this machine and torch."""

    def __init__(self) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        machine = f"{platform.machine()}-{_processor()}"
        self.key = f"{machine}-torch{torch.__version__}"
        self.path = pathlib.Path(home) / "autopar" / f"profile-{FORMAT}.json"
        self.seconds: dict[str, float] = dict(self._read().get(self.key, {}))

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            return dict(json.loads(self.path.read_text()))
        except (OSError, ValueError):
            return {}  # none yet, or damaged: measured again

    def save(self) -> None:
        """Replace the file in one step; another process's entries of it are kept."""
        data = self._read()
        data[self.key] = {**data.get(self.key, {}), **self.seconds}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
            temporary.replace(self.path)
        except OSError:
            return  # a read-only home: measure again next time


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "cpu"
