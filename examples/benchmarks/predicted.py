"""Steps as they are predicted, and as they are measured on this machine.

    python examples/benchmarks/predicted.py
    python examples/benchmarks/predicted.py --backend inductor --plans 6

Measures this machine as `autopar profile` does, predicts seconds and bytes of varied
plans (`predicted_plans.py`) the way the planner does, and runs them under gloo, one
thread a rank: all plans of a number of ranks in the same processes, a few steps each in
turn. Bytes are of live tensors, of the rank that has the most.

How fast a machine is that others share changes within minutes. So the same processes
measure it again before each round of steps, and each round's prediction is by that: the
ratio of a plan is the median of its rounds'. How much predictions differ between rounds
is printed, as that is how much the machine did.
"""

from __future__ import annotations

import argparse
import json
import shutil
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
from examples.benchmarks.published_fit import rank_correlation  # noqa: E402

RANKS = (2, 4)
TIMEOUT = 900.0  # seconds of all ranks of a number


@dataclass(frozen=True)
class Planned:
    """A plan of a workload, as the planner sees it. pick: it is the planner's own."""

    workload: str
    estimate: Estimate
    plan: str
    pick: bool = False

    @property
    def ranks(self) -> int:
        return self.estimate.candidate.mesh.size

    @property
    def name(self) -> str:
        return ("* " if self.pick else "") + str(self.estimate.candidate)


@dataclass(frozen=True)
class Row:
    """A plan, measured in rounds, and its seconds as predicted by what was measured of
    the machine in each of them."""

    planned: Planned
    measured: Measured
    predicted: Sequence[float]

    @property
    def seconds(self) -> float:
        return median(self.measured.seconds)

    @property
    def time_error(self) -> float:
        pairs = zip(self.predicted, self.measured.seconds, strict=True)
        return median(predicted / measured for predicted, measured in pairs) - 1

    @property
    def drift(self) -> float:
        """How far a round's prediction is from the median one, in the mean."""
        usual = median(self.predicted)
        return mean(abs(seconds / usual - 1) for seconds in self.predicted)

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

    def seconds(self, plan: Planned) -> float:
        """What it predicts of a plan that another one chose."""
        candidate = plan.estimate.candidate
        return run_on_paper(candidate, self.prices, self.cluster).seconds

    def _planned(self, candidate: Candidate) -> Planned:
        estimate = run_on_paper(candidate, self.prices, self.cluster)
        return Planned(self.workload, estimate, plan_of(candidate, self.of).to_json())


def make_planners(
    profile: Path | None, backend: str, numbers: Sequence[int] = RANKS
) -> dict[tuple[str, int], Planner]:
    """Makes a planner for each workload and number of ranks, see `predict`."""
    planners = {}
    for workload, spec in WORKLOADS.items():
        loaded = load_model(spec)
        batch = batch_for(loaded, SAMPLES, SEQ)
        of = capture_short(loaded.model, with_samples(batch, SAMPLES), backend=backend)
        for ranks in numbers:
            cluster = measured_cluster(ranks, profile)
            planners[workload, ranks] = Planner(of, cluster, workload)
    return planners


def predict_rounds(
    plans: Sequence[Planned], profiles: Sequence[Path], backend: str
) -> list[list[float]]:
    """Seconds of each plan by each of the profiles."""
    rounds = []
    for path in profiles:
        planners = make_planners(path, backend)
        rounds.append([planners[p.workload, p.ranks].seconds(p) for p in plans])
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


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


def measure_plans(
    plans: Sequence[Planned], rounds: int, profile: Path | None, backend: str
) -> list[Row]:
    """profile: what is known of the machine, to which each round adds its own."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in sorted({p.ranks for p in plans}):
            own = [p for p in plans if p.ranks == ranks]
            source, target = Path(scratch) / "jobs.json", Path(scratch) / "found.json"
            profiles = [Path(scratch) / f"profile{i}.json" for i in range(rounds)]
            for path in profiles:
                path.unlink(missing_ok=True)
                if profile is not None:
                    shutil.copy(profile, path)
            jobs = [Job(WORKLOADS[p.workload], SEQ, BATCH, p.plan) for p in own]
            source.write_text(json.dumps([asdict(job) for job in jobs]))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks), "-m"]
            command += ["examples.benchmarks.predicted_runs", str(source), str(target)]
            run([*command, *map(str, profiles)], TIMEOUT)
            measured = [Measured(**entry) for entry in json.loads(target.read_text())]
            predicted = predict_rounds(own, profiles, backend)
            rows += map(Row, own, measured, predicted)
    return rows


# --- saying -------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    shown = [
        {
            "model": row.planned.workload,
            "plan (*: the planner's)": row.planned.name,
            "ms predicted": 1e3 * median(row.predicted),
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
    drift = median(row.drift for row in rows)
    lines = [
        f"{len(rows)} plans: median error {time:.1%} in time, {memory:.1%} in memory; "
        f"predictions of a plan differ by {drift:.1%} between rounds"
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
        [median(row.predicted) for row in rows], [row.seconds for row in rows]
    )
    return (
        f"the planner's pick is {behind:.1%} slower than the best measured, "
        f"{best.planned.name}; rank correlation {order:.2f}"
    )


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
        rows = measure_plans(plans, options.rounds, profile, options.backend)
    print(table(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
