"""What is published of runs and formulas, beside what autopar says.

    python examples/benchmarks/published.py             # formulas, and runs on A100s
    python examples/benchmarks/published.py --choose    # and our own plans for these
    python examples/benchmarks/published.py --held-out  # and runs looked up afterwards
    python examples/benchmarks/published.py --sweep     # and plans picked on H100s

`published/README.md` says where the numbers are from.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the passes are found from any directory

from examples.benchmarks import published_choices as choices  # noqa: E402
from examples.benchmarks import published_formulas as formulas  # noqa: E402
from examples.benchmarks import published_runs as megatron  # noqa: E402
from examples.benchmarks import published_sweep as sweep  # noqa: E402
from examples.benchmarks import published_zero as zero  # noqa: E402
from examples.benchmarks.published_picks import picked  # noqa: E402


def show(title: str, lines: list[dict[str, object]]) -> None:
    print(f"\n{title}\n")
    print(tabulate(lines, headers="keys", disable_numparse=True), flush=True)


def show_formulas() -> None:
    show(
        "Formulas of the traced graph",
        [
            {"what": f.quantity, "graph": f.derived, "less published": f.difference}
            for f in formulas.formulas()
        ],
    )
    show(
        "Activations and state (arXiv 2205.05198, figures 1 and 7)",
        [
            {
                "model": row["model"],
                "what": row["quantity"],
                "graph": f"{computed:.4g}",
                "published": row["published"],
                "unit": row["unit"],
            }
            for row, computed in formulas.memory_rows()
        ],
    )
    rows = formulas.zero_rows()
    off = [abs(computed / float(row["formula_gb"]) - 1) for row, computed in rows]
    print(f"\nZeRO: {len(rows)} rows of table 1, largest difference {max(off):.2%}")


def show_runs() -> None:
    constants = megatron.fitted()
    print(f"\nfitted: {constants}")
    lines: list[dict[str, object]] = []
    for layer in megatron.layer_runs():
        forward, backward = layer.predict(constants)
        ratio = (forward + backward) / (layer.forward + layer.backward)
        lines.append(
            {
                "one layer of 22B": layer.name,
                "ms": f"{forward * 1e3:.1f} + {backward * 1e3:.1f}",
                "published": f"{layer.forward * 1e3:.1f} + {layer.backward * 1e3:.1f}",
                "error": f"{ratio - 1:+.1%}",
            }
        )
    show("Milliseconds forward and backward (arXiv 2205.05198, table 4)", lines)
    lines = [step_line(run, constants) for run in megatron.runs("sc21_table1")]
    planned = list(choices.as_planned("sc21_table1"))
    for line, run in zip(lines, planned, strict=True):
        line["autopar plan"] = f"{run.error:+.1%}"
        line["of whole layers"] = f"{run.error_of_whole_layers:+.1%}"
    show("Seconds of an iteration (arXiv 2104.04473, table 1)", lines)
    show_sizes("autopar plan", [run.error for run in planned])
    show_sizes("of whole layers", [run.error_of_whole_layers for run in planned])


def show_sizes(of: str, errors: list[float]) -> None:
    sizes = [abs(error) for error in errors]
    print(f"{of}: median {median(sizes):.1%}, {max(sizes):.1%} at most")


def step_line(run: megatron.Run, constants: megatron.Constants) -> dict[str, object]:
    """Seconds of a step, predicted beside published."""
    predicted = run.predict(constants)
    return {
        "model": run.name,
        "plan": str(run.candidate),
        "s": f"{predicted:.2f}",
        "published": f"{run.seconds:.2f}",
        "error": f"{predicted / run.seconds - 1:+.1%}",
        "by the table": f"{run.by_the_table() / run.seconds - 1:+.1%}",
    }


def show_pipelines() -> None:
    def line(run: choices.Planned, got: float, known: float) -> dict[str, object]:
        return {
            "model": run.row["model"],
            "plan": str(run.estimate.candidate),
            "found": f"{got:.3g}",
            "published": f"{known:.3g}",
            "error": f"{got / known - 1:+.1%}",
        }

    runs = list(choices.as_planned("zero_bubble"))
    seconds = [line(run, run.estimate.seconds, run.published) for run in runs]
    show("Seconds of a step, by the table (arXiv 2401.10241, table 4)", seconds)
    gigabytes = [
        line(run, run.estimate.peak / 1e9, float(run.row["memory_gb"]))
        for run in choices.filled(runs)
    ]
    show("GB at the peak of the rank with most (the same)", gigabytes)


def show_others(table: str) -> None:
    constants = megatron.fitted()
    lines: list[dict[str, object]] = []
    off: dict[tuple[str, str], list[float]] = {}
    for run in megatron.runs(table):
        device, line = run.cluster.device.name, step_line(run, constants)
        lines.append({"source": run.source, "device": device, **line})
        error = run.predict(constants) / run.seconds - 1
        off.setdefault((run.source, device), []).append(error)
    show(f"Seconds of an iteration, of {table}, with the same constants", lines)
    errors = [
        {
            "source": source,
            "device": device,
            "runs": len(off_by),
            "mean error": f"{mean(off_by):+.1%}",
            "mean size of it": f"{mean(map(abs, off_by)):.1%}",
            "largest": f"{max(map(abs, off_by)):.1%}",
        }
        for (source, device), off_by in off.items()
    ]
    show(f"Errors of {table}", errors)


def show_zero() -> None:
    """Runs of ZeRO-3, as they were, and as our own plans gather: in blocks."""
    constants = megatron.fitted()
    lines: list[dict[str, object]] = []
    for run in zero.zero_runs():
        predicted, blocks = run.predict(constants), replace(run, blocks=True)
        lines.append(
            {
                "source": run.source,
                "model": run.name,
                "plan": str(run.candidate),
                "s": f"{predicted:.1f}",
                "published": f"{run.seconds:.1f}",
                "error": f"{predicted / run.seconds - 1:+.1%}",
                "in blocks, s": f"{blocks.predict(constants):.1f}",
            }
        )
    show("Seconds of an iteration of ZeRO-3, with the same constants", lines)


def show_choices() -> None:
    """Our plan for each model and its devices beside the one that ran, both priced as
    `autopar plan` does it."""
    for table in choices.TABLES:
        lines: list[dict[str, object]] = []
        for task, plans in choices.tasks(table).items():
            choice = choices.choose(task, plans)
            ours, ran = choice.picked, choice.ran
            line: dict[str, object] = {"model": str(task), "ours": str(ours.candidate)}
            line |= {"GB": f"{ours.peak / 1e9:.1f}", "s": f"{ours.seconds:.3g}"}
            line["fastest, s"] = f"{choice.fastest.seconds:.3g}"
            line["theirs, s"] = f"{ran.seconds:.3g}" if ran else "does not fit"
            line["theirs"] = str(ran.candidate) if ran else ""
            lines.append(line)
        show(f"Our own choice for the same devices, of {table}", lines)


def show_sweep() -> None:
    print(f"\nfitted to gathers and scatters: {sweep.links()}")
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        pairs = sweep.collectives(kind, sweep.links())
        ratios = [abs(math.log(got / known)) for got, known in pairs]
        print(f"{kind}: off by a factor of {math.exp(mean(ratios)):.2f} on average")
    first, second = sweep.MODELS
    everything = []
    for known, other in ((first, second), (second, first)):
        constants = sweep.fitted(known)
        picks = picked(other, constants)
        everything += picks
        print(f"\nfitted to {known}: {constants}")
        show(
            f"Plans picked for {other}, of those measured",
            [
                {
                    "nodes": p.nodes,
                    "runs": p.count,
                    "picked": str(p.pick),
                    "best": str(p.best),
                    "regret": f"{p.regret:.1%}",
                    "rank correlation": f"{p.correlation:.2f}",
                    "of the faster": f"{p.faster:.2f}",
                }
                for p in picks
            ],
        )
        show_regrets([p.regret for p in picks])
        calm = picked(other, replace(constants, stall=0.0))
        print("if nothing stalled, ", end="")
        show_regrets([p.regret for p in calm])
    print("\nboth ways, ", end="")
    show_regrets([p.regret for p in everything])


def show_regrets(regrets: list[float]) -> None:
    print(f"regret: mean {mean(regrets):.1%}, median {median(regrets):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Published runs and formulas.")
    parser.add_argument("--choose", action="store_true", help="our own plans too")
    parser.add_argument("--held-out", action="store_true", help="later runs too")
    parser.add_argument("--sweep", action="store_true", help="the H100 sweep too")
    wanted = parser.parse_args()
    show_formulas()
    show_runs()
    show_pipelines()
    show_others("others")
    show_zero()
    if wanted.held_out:
        show_others("held_out")
    if wanted.choose:
        show_choices()
    if wanted.sweep:
        show_sweep()


if __name__ == "__main__":
    main()
