"""Simulated bubbles and memory beside those published for zero-bubble schedules.

    python examples/benchmarks/bubbles.py

Published: tables 4 and 5 of Qi 2023 (arXiv:2401.10241), which give the seconds of F, I
and W and of a message on 8 A100s, the share of idle time that they find by simulation,
and the peak memory that they measured. `published/zero_bubble.csv` has these numbers.
There a step ends on each rank by itself; `this step` is with all ranks waiting for the
last one, as autopar does. ZB-1p and ZB-2p are made for the memory of p and 2p
microbatches, as `--schedule auto` makes schedules, but for steps that do not wait.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the passes are found from any directory

from autopar.passes.cost import Seconds  # noqa: E402
from autopar.passes.schedule.fit_schedule import fit_schedule  # noqa: E402
from autopar.passes.schedule.footprint import Footprint, peak_bytes  # noqa: E402
from autopar.passes.schedule.make_schedule import make_schedule  # noqa: E402
from autopar.passes.schedule.schedule import Schedule, add_communication  # noqa: E402
from autopar.passes.schedule.simulate_schedule import simulate  # noqa: E402

PUBLISHED = Path(__file__).parent / "published" / "zero_bubble.csv"

# The paper's names -> ours, and for those that are made, microbatches for each rank.
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
MADE = {"ZB-1p": 1, "ZB-2p": 2}

# Bytes of weights, gradients and optimizer state a parameter, mixed precision
# (Korthikanti 2022, arXiv:2205.05198).
STATE = 18


@dataclass(frozen=True)
class Row:
    """A line of the published table; seconds are of one microbatch on one rank."""

    model: str
    layers: int
    width: int
    heads: int
    seq: int
    samples: int
    ranks: int
    stages_per_rank: int
    microbatches: int
    schedule: str
    forward_ms: float
    input_ms: float
    weight_ms: float
    send_ms: float
    bubble: float
    memory_gb: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Result:
    """bubble: idle share if each rank ends by itself; waiting: if all wait for the
    last. memory: GB on the fullest rank. in_flight: microbatches there at most."""

    name: str
    bubble: float
    waiting: float
    in_flight: float
    memory: float


def published() -> list[Row]:
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [read(row) for row in csv.DictReader(file)]


def read(row: dict[str, str]) -> Row:
    hints = get_type_hints(Row)
    kinds: dict[object, Callable[[str], Any]] = {str: str, int: int, float: float}
    return Row(**{key: kinds.get(hints[key], _maybe)(row[key]) for key in row})


def _maybe(text: str) -> float | None:
    """The number, if there is one: only four of the schedules were also run."""
    return float(text) if text else None


def footprints(row: Row) -> list[Footprint]:
    """Returns each stage's footprint, with one layer less on the first and the last.

    A layer keeps s b h (34 + 5 a s / h) bytes (Korthikanti 2022, equation 1); from the
    input half to the weight half the operands of its four products: inputs of
    2 + 2 + 2 + 8 and their outputs' gradients of 6 + 2 + 8 + 2 bytes for each s b h.
    """
    each = row.seq * row.samples * row.width
    saved = each * (34 + 5 * row.heads * row.seq // row.width)
    layers = layers_of(row)
    return [
        Footprint(saved * n, saved * n, saved * n, 32 * each * n, 0, 32 * each * n)
        for n in layers
    ]


def layers_of(row: Row) -> list[int]:
    """Layers of each stage: embedding and head count as one."""
    stages = row.ranks * row.stages_per_rank
    equal = (row.layers + 2) // stages
    return [equal - (stage in (0, stages - 1)) for stage in range(stages)]


def scheduled(row: Row) -> Schedule:
    if row.schedule in NAMES:
        name = NAMES[row.schedule]
        return make_schedule(name, row.ranks, row.microbatches, row.stages_per_rank)
    own = footprints(row)
    room = MADE[row.schedule] * row.ranks * max(f.residuals for f in own)
    # The bound is the same for every rank, as if all had as many layers.
    equal = [own[1]] * row.ranks
    return fit_schedule(
        row.microbatches,
        row.ranks,
        1,
        [Seconds(row.forward_ms, row.input_ms, row.weight_ms)] * row.ranks,
        equal,
        lambda placement: [room] * row.ranks,
        row.send_ms,
        steps_overlap=True,
    ).schedule


def simulated(row: Row) -> Result:
    schedule, v = scheduled(row), row.stages_per_rank
    stage = Seconds(row.forward_ms / v, row.input_ms / v, row.weight_ms / v)
    timeline = simulate(schedule, [stage] * schedule.stages, row.send_ms)
    work = row.microbatches * (row.forward_ms + row.input_ms + row.weight_ms)
    return Result(
        name=schedule.name,
        bubble=1 - work / max(timeline.elapsed),
        waiting=timeline.bubble,
        in_flight=max(timeline.in_flight) / v,
        memory=max(memory(row, schedule)) / 1e9,
    )


def memory(row: Row, schedule: Schedule) -> Sequence[float]:
    """Bytes on each rank: activations, and the states of its layers' parameters.

    Left out is what the embeddings take, as the paper does not state the vocabulary.
    """
    own, layers = footprints(row), layers_of(row)
    peaks = []
    schedule = add_communication(schedule)
    for rank in range(row.ranks):
        held = sum(layers[s] for s, r in enumerate(schedule.stage_to_rank) if r == rank)
        states = STATE * 12 * row.width**2 * held
        peaks.append(states + peak_bytes(schedule, rank, own))
    return peaks


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        result = simulated(row)
        lines.append(
            {
                "model": row.model,
                "m": row.microbatches,
                "schedule": row.schedule,
                "ours": result.name,
                "bubble": f"{result.bubble:.2%}",
                "published": f"{row.bubble:.2%}",
                "this step": f"{result.waiting:.2%}",
                "in flight": f"{result.in_flight:.1f}",
                "GB": f"{result.memory:.1f}",
                "GB published": "" if row.memory_gb is None else f"{row.memory_gb:.0f}",
            }
        )
    return tabulate(lines, headers="keys", disable_numparse=True)


def main() -> None:
    rows = published()
    print(table(rows))
    off = [abs(simulated(row).bubble - row.bubble) for row in rows]
    print(f"median difference of bubbles {sorted(off)[len(off) // 2]:.4%}")


if __name__ == "__main__":
    main()
