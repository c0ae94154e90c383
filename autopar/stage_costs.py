"""stage_costs: seconds of each distinct op by itself, by which stages are cut.

The forward of an op and both halves of its backward (the gradients of activations, and
of weights) are timed on random tensors of its local shapes, on one thread, as torchrun
starts its ranks; the fastest of a few runs counts, since others are only slowed down by
something else. Results are kept in this machine's profile. What is too large to run
here is estimated from the best of what was measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.kernels import attention, attention_backward
from autopar.profile_file import Profile, read_profile, save_profile
from passes.cost import VIEWS, Costs, Seconds, flops, signature, traffic, weights_of
from passes.graph import Node, Value, map_values, resolve
from passes.insert_collectives import Lowered
from passes.localize import Localizer

# An op that touches more than this many bytes is not run, but estimated.
LARGEST = 1 << 28
REPEATS = 5


def stage_costs(lowered: Lowered) -> Costs:
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
    held = read_profile().halves
    with _one_thread():
        new = {key: measure(node) for key, node in nodes.items() if key not in held}
    if new:
        # A read-only home: measured again next time.
        with contextlib.suppress(OSError):
            save_profile(Profile(halves=new))
    known = {key: new.get(key) or held[key] for key in nodes}
    return Costs(known, *_rates(nodes, known))


def _is_measurable(node: Node) -> bool:
    kind = node.op.rpartition(".")[0]
    if kind in VIEWS or not node.results or not node.operands:
        return False
    if node.op.startswith("comm.") or traffic(node) > LARGEST:
        return False
    return node.op.startswith("aten.") or node.op == "autopar.attention"


def _rates(nodes: dict[str, Node], known: dict[str, Seconds]) -> tuple[float, float]:
    """FLOP/s and bytes/s of the best measured ops, for those that were not."""
    default = Costs()
    speeds, bandwidths = [default.flops_per_second], [default.bytes_per_second]
    for key, node in nodes.items():
        work, seconds = flops(node), max(known[key].total, 1e-9)
        if work > 1e7 and work > 8 * traffic(node):
            speeds.append(3 * work / seconds)
        elif traffic(node) > 1e6:
            bandwidths.append(3 * traffic(node) / seconds)
    return max(speeds), max(bandwidths)


def measure(node: Node) -> Seconds:
    """Seconds of each part of a node, each the fastest of a few runs."""
    operands = [_random(v) for v in node.operands]
    if node.op == "autopar.attention":
        return _attention(node, operands)
    return _with_autograd(node, operands)


def _fastest(run: Callable[[], Any]) -> float:
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


def _attention(node: Node, operands: list[torch.Tensor]) -> Seconds:
    """It has no weights: all of its backward is the input half."""
    q, k, v, *mask = operands
    is_causal, scale = node.args[4:6]
    keep = mask[0] if mask else None
    out, lse = attention(q, k, v, keep, is_causal, scale)
    return Seconds(
        _fastest(lambda: attention(q, k, v, keep, is_causal, scale)),
        _fastest(
            lambda: attention_backward(out, q, k, v, out, lse, keep, is_causal, scale)
        ),
        0.0,
    )


def _with_autograd(node: Node, operands: list[torch.Tensor]) -> Seconds:
    has_gradient = any(v.dtype.is_floating_point for v in node.results)
    late = weights_of(node)
    weights: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for value, x in zip(node.operands, operands, strict=True):
        if x.is_floating_point() and has_gradient:
            (weights if value.name in late else sources).append(x.requires_grad_())
    values = iter(operands)
    args = map_values(lambda _: next(values), node.args)
    kwargs = map_values(lambda _: next(values), dict(node.kwargs))
    op = resolve(node.op)
    result = op(*args, **kwargs)
    outs = result if isinstance(result, tuple | list) else [result]
    ends = [o for o in outs if isinstance(o, torch.Tensor) and o.requires_grad]
    cotangents = [torch.ones_like(o) for o in ends]

    def gradient(of: list[torch.Tensor]) -> float:
        if not (ends and of):
            return 0.0
        return _fastest(
            lambda: torch.autograd.grad(
                ends, of, cotangents, retain_graph=True, allow_unused=True
            )
        )

    forward = _fastest(lambda: op(*args, **kwargs))
    return Seconds(forward, gradient(sources), gradient(weights))
