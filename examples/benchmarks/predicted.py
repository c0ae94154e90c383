"""Steps as they are predicted, and as they are measured on this machine.

    python examples/benchmarks/predicted.py
    python examples/benchmarks/predicted.py --backend inductor --plans 6

Measures this machine as `autopar profile` does, predicts seconds and bytes of varied
plans (`predicted_plans.py`) the way the planner does, and runs them under gloo, one
thread a rank: all plans of a number of ranks in the same processes, a step each in
turn. Seconds are the median of the rounds; bytes are of live tensors, of the rank that
has the most.

How fast a machine is that others share changes within minutes. So it is measured once
more after the runs, and a prediction is the mean of those by both; how far these are
apart is printed: errors that are as large say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the examples are found from any directory

from autopar.machine.measured_cluster import measured_cluster  # noqa: E402
from autopar.models.batches import with_samples  # noqa: E402
from autopar.models.load import load_model  # noqa: E402
from autopar.passes.price.candidate import Candidate  # noqa: E402
from autopar.passes.price.cluster import Cluster  # noqa: E402
from autopar.passes.price.estimate import Estimate  # noqa: E402
from autopar.passes.price.price_layers import Prices  # noqa: E402
from autopar.passes.search.by_formula import rough  # noqa: E402
from autopar.passes.search.search import run_on_paper  # noqa: E402
from autopar.planner.choose import SAMPLES  # noqa: E402
from autopar.planner.planned import batch_for  # noqa: E402
from autopar.planner.planner import (  # noqa: E402
    ShortModel,
    capture_short,
    find_plans,
    make_prices,
    make_space,
    plan_of,
)
from examples.benchmarks.predicted_plans import (  # noqa: E402
    BATCH,
    CHOICES,
    SEQ,
    WORKLOADS,
    Choice,
    spread,
)
from examples.benchmarks.predicted_runs import Job, Measured  # noqa: E402
from examples.benchmarks.processes import run  # noqa: E402

RANKS = (2, 4)
TIMEOUT = 900.0  # seconds of all ranks of a number


@dataclass(frozen=True)
class Planned:
    """A plan of a workload, as the planner sees it. pick: it is the planner's own.
    again: as it would see it after the runs."""

    workload: str
    estimate: Estimate
    plan: str
    pick: bool = False
    again: Estimate | None = None

    @property
    def seconds(self) -> float:
        return mean([x.seconds for x in (self.estimate, self.again) if x is not None])

    @property
    def apart(self) -> float:
        """What it takes after the runs over what it took before them, less one."""
        return self.again.seconds / self.estimate.seconds - 1 if self.again else 0.0

    @property
    def ranks(self) -> int:
        return self.estimate.candidate.mesh.size

    @property
    def name(self) -> str:
        return ("* " if self.pick else "") + str(self.estimate.candidate)


@dataclass(frozen=True)
class Row:
    """A plan, predicted and measured."""

    planned: Planned
    measured: Measured

    @property
    def seconds(self) -> float:
        return median(self.measured.seconds)

    @property
    def time_error(self) -> float:
        return self.planned.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        return self.planned.estimate.peak / max(self.measured.peaks) - 1


# --- predicting ---------------------------------------------------------------------


class Planner:
    """What the planner knows of a workload on a cluster."""

    def __init__(
        self, of: ShortModel, cluster: Cluster, workload: str, samples: int = BATCH
    ) -> None:
        self.of, self.cluster, self.workload = of, cluster, workload
        self.samples = samples
        self.prices: Prices = make_prices(of, cluster)
        self.space = make_space(of, cluster, samples)

    def choice(self, choice: Choice) -> Planned:
        """The plan of a choice, its layers balanced."""
        priced = rough(choice.candidate(self.samples), self.space, self.prices)
        assert priced is not None, f"too few layers for {choice}"
        return self._planned(priced[-1])

    def pick(self) -> Planned:
        """What it would choose itself, of all that there is."""
        plans = find_plans(self.of, self.cluster, self.samples)
        return replace(self._planned(plans.best[0].candidate), pick=True)

    def _planned(self, candidate: Candidate) -> Planned:
        estimate = run_on_paper(candidate, self.prices, self.cluster)
        return Planned(self.workload, estimate, plan_of(candidate, self.of).to_json())


def make_planners(profile: Path | None, backend: str) -> dict[tuple[str, int], Planner]:
    """For each workload and number of ranks, see `predict`."""
    planners = {}
    for workload, spec in WORKLOADS.items():
        loaded = load_model(spec)
        batch = batch_for(loaded, SAMPLES, SEQ)
        of = capture_short(loaded.model, with_samples(batch, SAMPLES), backend=backend)
        for ranks in RANKS:
            cluster = measured_cluster(ranks, profile)
            planners[workload, ranks] = Planner(of, cluster, workload)
    return planners


def predict_again(profile: Path, rows: Sequence[Row], backend: str) -> list[Row]:
    """The same plans by another profile beside."""
    planners = make_planners(profile, backend)

    def priced(plan: Planned) -> Planned:
        planner = planners[plan.workload, plan.ranks]
        candidate = plan.estimate.candidate
        again = run_on_paper(candidate, planner.prices, planner.cluster)
        return replace(plan, again=again)

    return [replace(row, planned=priced(row.planned)) for row in rows]


def predict(
    profile: Path | None, choices: Sequence[Choice], backend: str = "eager"
) -> Iterator[Planned]:
    """All choices on all workloads, and what the planner picks for each.

    profile: of this machine; None: as the table of hardware has it. backend: what runs
    functions.
    """
    planners = make_planners(profile, backend)
    for workload in WORKLOADS:
        for ranks in RANKS:
            own = [c for c in choices if c.ranks == ranks]
            planner = planners[workload, ranks]
            predicted = [planner.choice(choice) for choice in own]
            pick = planner.pick()
            known = [p.plan for p in predicted]
            if own and pick.plan in known:
                place = known.index(pick.plan)
                predicted[place] = replace(predicted[place], pick=True)
            elif own:
                predicted.append(pick)
            yield from predicted


# --- measuring ----------------------------------------------------------------------


def measure_machine(path: Path, seconds: float) -> None:
    """Profile this machine for the workloads into a file, in processes of its own."""
    for spec in WORKLOADS.values():
        command = [sys.executable, "-m", "autopar", "profile", spec, "-o", str(path)]
        command += ["--ranks", ",".join(map(str, RANKS)), "--seq", str(SEQ)]
        command += ["--samples", str(BATCH), "--seconds", str(seconds)]
        run(command, TIMEOUT)


def measure_plans(plans: Sequence[Planned], rounds: int, folder: Path) -> list[Row]:
    rows = []
    for ranks in sorted({p.ranks for p in plans}):
        own = [p for p in plans if p.ranks == ranks]
        source, target = folder / f"jobs{ranks}.json", folder / f"found{ranks}.json"
        jobs = [Job(WORKLOADS[p.workload], SEQ, BATCH, p.plan) for p in own]
        source.write_text(json.dumps([asdict(job) for job in jobs]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m"]
        command += ["examples.benchmarks.predicted_runs", str(source), str(target)]
        run([*command, str(rounds)], TIMEOUT)
        measured = [Measured(**entry) for entry in json.loads(target.read_text())]
        rows += [Row(p, m) for p, m in zip(own, measured, strict=True)]
    return rows


# --- saying -------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    shown = [
        {
            "model": row.planned.workload,
            "plan (*: the planner's)": row.planned.name,
            "ms predicted": 1e3 * row.planned.seconds,
            "measured": 1e3 * row.seconds,
            "ratio": 1 + row.time_error,
            "MiB predicted": row.planned.estimate.peak / 2**20,
            "measured ": max(row.measured.peaks) / 2**20,
            "ratio ": 1 + row.memory_error,
        }
        for row in rows
    ]
    form = ("", "", ".1f", ".1f", ".3f", ".2f", ".2f", ".3f")
    return tabulate(shown, headers="keys", floatfmt=form)


def summary(rows: Sequence[Row]) -> str:
    """Errors of all, and for each workload and number of ranks how well it chooses."""
    time, memory = (
        median(abs(error) for error in errors)
        for errors in ([r.time_error for r in rows], [r.memory_error for r in rows])
    )
    apart = median(abs(row.planned.apart) for row in rows)
    lines = [
        f"{len(rows)} plans: median error {time:.1%} in time, {memory:.1%} in memory; "
        f"predictions before and after the runs are {apart:.1%} apart"
    ]
    for workload in WORKLOADS:
        for ranks in RANKS:
            own = [
                r
                for r in rows
                if r.planned.workload == workload and r.planned.ranks == ranks
            ]
            if own:
                lines.append(f"{workload}, {ranks} ranks: {choosing(own)}")
    return "\n".join(lines)


def choosing(rows: Sequence[Row]) -> str:
    """How the planner's pick compares with the best that was measured."""
    best = min(rows, key=lambda row: row.seconds)
    (pick,) = [row for row in rows if row.planned.pick]
    behind = pick.seconds / best.seconds - 1
    order = rank_correlation(
        [row.planned.seconds for row in rows], [row.seconds for row in rows]
    )
    return (
        f"the planner's pick is {behind:.1%} slower than the best measured, "
        f"{best.planned.name}; rank correlation {order:.2f}"
    )


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    n = len(xs)
    if n < 2:
        return 1.0
    places = [sorted(values) for values in (xs, ys)]
    square = sum(
        (places[0].index(x) - places[1].index(y)) ** 2
        for x, y in zip(xs, ys, strict=True)
    )
    return 1 - 6 * square / (n * (n * n - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plans", type=int, help="a few of them; else all")
    parser.add_argument("--seconds", type=float, default=15, help="for messages")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--profile", type=Path, help="measured before, by `-o` of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        profile = options.profile or Path(scratch) / "profile.json"
        if options.profile is None:
            measure_machine(profile, options.seconds)
        choices = spread(CHOICES, options.plans)
        plans = list(predict(profile, choices, options.backend))
        rows = measure_plans(plans, options.rounds, Path(scratch))
        if options.profile is None:
            after = Path(scratch) / "after.json"
            measure_machine(after, options.seconds)
            rows = predict_again(after, rows, options.backend)
    print(table(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
