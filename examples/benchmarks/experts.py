"""What a rank sends for the experts of a mixture, routed and gathered, on an axis ep.

    python examples/benchmarks/experts.py hf:mixtral --ep 8 --samples 1 --seq 4096

Of the program that a plan is compiled to, for each layer and microbatch of so many
samples a rank: MB sent in the forward and the backward, and calls. Routed rows go to
the rank of their expert and home, here with tokens that choose evenly; gathered, each
product with experts has the rows of all ranks. Nothing runs, and no weight exists.

    python examples/benchmarks/experts.py --products

What the products of one layer take on the device at hand, forward and backward: a
product for each expert, or one kernel for all (`autopar.runtime.kernels.experts`), in
turns; and their paired ratio. On a GPU an error says if the kernel's host waits for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

from autopar.compiler import compile_offline  # noqa: E402
from autopar.machine.clock import clock_of  # noqa: E402
from autopar.models.load import example_batch, load_model  # noqa: E402
from autopar.options import make_plan  # noqa: E402
from autopar.passes.plan import Plan  # noqa: E402
from autopar.passes.price.cluster import PLAIN  # noqa: E402
from autopar.passes.schedule.footprint import Communication  # noqa: E402
from autopar.runtime.kernels.experts import expert_linear, expert_weight_grad_  # noqa: E402

LAYERS = 2  # of which one more is what a layer takes


def gathered(plan: Plan) -> Plan:
    """The same plan, in which no rows are routed."""
    experts = tuple(dim for dim in plan.split["ep"] if not dim.startswith("routed:"))
    return replace(plan, split={**plan.split, "ep": experts})


def sent(c: Communication, ranks: int) -> float:
    """MB that a rank sends of a collective: of its own part to each other rank, or all
    other ranks' parts of what it gives."""
    share = ranks - 1 if c.kind == "all_gather" else (ranks - 1) / ranks
    return c.bytes * share / 1e6


def measure(spec: str, layers: int, plan: Plan, samples: int, seq: int) -> list[float]:
    """MB sent forward and backward, and calls, over ep in one microbatch."""
    mark = "," if "?" in spec else "?"
    loaded = load_model(f"{spec}{mark}num_hidden_layers={layers}")
    ranks = plan.mesh.axis_size("ep")
    assert loaded.vocab is not None, "configurations of experts have a vocabulary"
    batch = example_batch(loaded.vocab, samples * ranks, seq)
    program = compile_offline(loaded.model, batch, plan, cluster=PLAIN)
    exchanges = [c for c in program.communication if c.axes == ("ep",)]
    parts = ("forward", "backward")
    moved = [sum(sent(c, ranks) for c in exchanges if c.part == part) for part in parts]
    return [*moved, sum(c.calls for c in exchanges if c.part in parts)]


def products(
    rows: int, experts: int, width: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """One layer's product with experts [width, width], forward and backward."""
    options = {"dtype": dtype, "device": device}
    x, dy = torch.randn(rows, width, **options), torch.randn(rows, width, **options)
    weight = torch.randn(experts, width, width, **options)
    expert = torch.randint(experts, (rows,), device=device)
    grad = torch.zeros_like(weight)

    def run() -> None:
        expert_linear(x, expert, weight.mT)
        expert_linear(dy, expert, weight)
        expert_weight_grad_(grad, dy, x, expert)

    return run


def compare(run: Callable[[], None], device: torch.device, rounds: int) -> list[float]:
    """Milliseconds one by one and at once, and the median of their ratio."""
    clock = clock_of(device)
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for at_once, seconds in took.items():
            choice = "autopar.runtime.kernels.experts.has_grouped_products"
            with patch(choice, lambda device, dtype, is_so=at_once: is_so):
                begin = clock()
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("error" if at_once else "default")
                run()
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
                if number:  # the first round allocates
                    seconds.append(clock() - begin)
    apart, at_once = took.values()
    ratio = median(a / b for a, b in zip(apart, at_once, strict=True))
    return [1e3 * median(apart), 1e3 * median(at_once), ratio]


@torch.no_grad()
def compare_products(rows: int, rounds: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = []
    for experts in (8, 64):
        for width in (256, 1024):
            run = products(rows, experts, width, torch.bfloat16, device)
            table.append([experts, width, *compare(run, device, rounds)])
    print(f"{rows} rows in bfloat16, on {device.type}\n")
    head = ("experts", "width", "ms one by one", "ms at once", "ratio")
    print(tabulate(table, head, floatfmt=("", "", ".2f", ".2f", ".2f")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="hf:mixtral")
    for name, usual in (("ep", 8), ("samples", 1), ("seq", 4096)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--products", action="store_true", help="time them here")
    for name, usual in (("rows", 2048), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    if args.products:
        compare_products(args.rows, args.rounds)
        return
    routed = make_plan(f"ep={args.ep}")
    rows = []
    for name, plan in (("routed", routed), ("gathered", gathered(routed))):
        more, fewer = (
            measure(args.model, layers, plan, args.samples, args.seq)
            for layers in (LAYERS, LAYERS - 1)
        )
        rows.append([name, *(a - b for a, b in zip(more, fewer, strict=True))])
    head = ("rows", "MB forward", "MB backward", "calls")
    print(tabulate(rows, head, floatfmt=("", ".0f", ".0f", ".0f")))


if __name__ == "__main__":
    main()
