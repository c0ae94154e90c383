"""The methods of context parallelism side by side, one process a rank, on gloo.

    python examples/benchmarks/context_parallel.py --ranks 4 --seq 2048

For each method and layout of rows: the seconds of a step; the CPU seconds of attention
on the ranks that spend least and most of them, and their ratio, which a causal mask
makes; and the most bytes of tensors alive at once on a rank, parameters included.
"""

import argparse
import os
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

import autopar  # noqa: E402
from autopar.runtime import kernels  # noqa: E402
from examples.benchmarks.live_bytes import peak_bytes  # noqa: E402
from examples.gpt import GPT, Config  # noqa: E402

VARIANTS = (
    ("gather", "contiguous"),
    ("gather", "zigzag"),
    ("ring", "contiguous"),
    ("ring", "zigzag"),
    ("ulysses", "contiguous"),
)
STEPS = 5
Measured = tuple[float, float, int]  # seconds, CPU seconds of attention, peak bytes


class Stopwatch:
    """CPU seconds that this thread spends in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            result = run(*args)
            self.seconds += time.thread_time() - begin
            return result

        return timed

    def watch_attention(self, step: autopar.Step) -> None:
        """Times attention on whatever path a method takes to it."""
        names = ("attention", "attention_backward")
        for name in names:
            setattr(step.comm, name, self.around(getattr(step.comm, name)))
        watched = {name: self.around(getattr(kernels, name)) for name in names}
        for stage in step.executor.stages.values():
            stage.module["kernels"] = types.SimpleNamespace(**vars(kernels) | watched)


def measure(method: str, layout: str, sizes: argparse.Namespace) -> Measured:
    """Measures on this rank: medians over steps, and the peak of one more."""
    torch.manual_seed(0)
    config = Config(sizes.layers, sizes.width, sizes.heads, sizes.seq, vocab=512)
    ids = torch.randint(config.vocab, (1, sizes.seq))
    batch = {"ids": ids, "labels": ids}
    step = autopar.compile(
        GPT(config),
        f"cp={sizes.ranks}",
        context_parallel=method,
        cp_layout=layout,
        example_inputs=batch,
    )
    watch = Stopwatch()
    watch.watch_attention(step)
    walls, attention = [], []
    for _ in range(STEPS):
        dist.barrier()
        watch.seconds, begin = 0.0, time.perf_counter()
        step(**batch)
        walls.append(time.perf_counter() - begin)
        attention.append(watch.seconds)
    return median(walls), median(attention), peak_bytes(lambda: step(**batch))


def run_rank(rank: int, port: int, sizes: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(sizes.ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=sizes.ranks
    )
    rows = []
    for method, layout in VARIANTS:
        measured: list[Any] = [None] * sizes.ranks
        dist.all_gather_object(measured, measure(method, layout, sizes))
        walls, attention, peaks = zip(*measured, strict=True)
        least, most = min(attention), max(attention)
        ratio = most / least
        size = max(peaks) / 2**20
        rows.append((method, layout, max(walls), least, most, ratio, size))
    if rank == 0:
        head = ("method", "rows", "step s", "least s", "most s", "ratio", "peak MiB")
        formats = ("", "", ".3f", ".3f", ".3f", ".2f", ".1f")
        print(tabulate(rows, head, floatfmt=formats))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, usual in (
        ("ranks", 4), ("seq", 2048), ("width", 256), ("heads", 4), ("layers", 2)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    sizes = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (port, sizes), nprocs=sizes.ranks)


if __name__ == "__main__":
    main()
