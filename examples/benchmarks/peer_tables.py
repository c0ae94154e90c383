"""What `peers.py` measured, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tabulate import tabulate

from examples.benchmarks.peer_runs import ROWS

Runs = Mapping[str, Mapping[str, Any]]  # name -> what was measured of it


@dataclass(frozen=True)
class Best:
    """The fastest run of others in a row, and the fastest of ours.

    speed: their seconds over ours, cpu: of the CPUs, first: until a first step, warm;
    memory: our bytes over theirs.
    """

    row: str
    theirs: str
    ours: str
    speed: float
    cpu: float
    memory: float
    first: float
    goal: float | None


def paired(runs: Runs, one: str, other: str, quantity: str) -> float:
    """The median of one's seconds over the other's in the same round."""
    pairs = zip(runs[one][quantity], runs[other][quantity], strict=True)
    return median(a / b for a, b in pairs)


def rows_of(runs: Runs) -> Iterator[tuple[str, list[str]]]:
    for row in ROWS:
        if own := [name for name in runs if name.startswith(f"{row}/")]:
            yield row, own


def run_table(runs: Runs) -> str:
    """A line a run; its speed is that of the row's first as a multiple."""
    lines = []
    for _, own in rows_of(runs):
        for name in own:
            run = runs[name]
            lines.append(
                {
                    "run": name,
                    "s/step": median(run["wall"]),
                    "CPU s/step": median(run["cpu"]),
                    "MiB/rank": run["peak"] / 2**20,
                    "speed": paired(runs, own[0], name, "wall"),
                    "by CPU s": paired(runs, own[0], name, "cpu"),
                    "cold s": run["cold"],
                    "warm s": run["warm"],
                    "loss off by": f"{run['off']:.0e}",
                }
            )
    form = ("", ".3f", ".3f", ".1f", ".2f", ".2f", ".1f", ".1f")
    return tabulate(lines, headers="keys", floatfmt=form, disable_numparse=[8])


def bests(runs: Runs, config: str) -> list[Best]:
    """Returns the best of both sides in each row that has both."""
    fastest = []
    for row, own in rows_of(runs):
        sides = [
            min(names, key=lambda name: median(runs[name]["wall"]))
            for side in ("torch", "ours")
            if (names := [name for name in own if name.startswith(f"{row}/{side}-")])
        ]
        if len(sides) < 2:
            continue
        theirs, ours = sides
        best = Best(
            row,
            theirs.rpartition("torch-")[2],
            ours.rpartition("ours-")[2],
            paired(runs, theirs, ours, "wall"),
            paired(runs, theirs, ours, "cpu"),
            runs[ours]["peak"] / runs[theirs]["peak"],
            runs[theirs]["warm"] / runs[ours]["warm"],
            ROWS[row].goal.get(config),
        )
        fastest.append(best)
    return fastest


def best_table(runs: Runs, config: str) -> str:
    lines = [
        {
            "row": best.row,
            "best of torch": best.theirs,
            "best of ours": best.ours,
            "speed-up": best.speed,
            "goal": best.goal,
            "": "below" if best.speed < (best.goal or 0.0) else "",
            "by CPU s": best.cpu,
            "memory": best.memory,
            "first step": best.first,
        }
        for best in bests(runs, config)
    ]
    return tabulate(lines, headers="keys", floatfmt=".2f", tablefmt="github")


def drawing(runs: Runs, config: str) -> str:
    """Speed-ups as bars of an SVG, each with a tick where its goal is."""
    rows = bests(runs, config)
    scale = 300 / max([2.0, *(best.speed for best in rows)])
    lines = []
    for i, best in enumerate(rows):
        y, long = 24 * i + 30, scale * best.speed
        told = f"{best.speed:.2f}x  {best.ours} / {best.theirs}"
        lines += [
            f'<text x="90" y="{y + 13}" text-anchor="end">{best.row}</text>',
            f'<rect x="100" y="{y}" width="{long:.1f}" height="18" fill="#4a7"/>',
            f'<text x="{106 + long:.1f}" y="{y + 13}">{told}</text>',
        ]
        if best.goal:
            x = 100 + scale * best.goal
            lines.append(f'<path d="M{x:.1f} {y}v18" stroke="#c33"/>')
    high, one = 24 * len(rows) + 40, 100 + scale
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{high}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="10" y="18">{config}: seconds of torch over ours</text>',
            *lines,
            f'<path d="M{one:.1f} 26V{high - 6}" stroke="#888"/>',
            "</svg>\n",
        ]
    )
