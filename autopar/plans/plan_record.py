"""estimate.json: what a search was asked, and the best plans that it found.

It lies beside the plan.json of the first of them, and is all that `autopar explain` and
`autopar simulate` need: no model is loaded to read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from autopar.machine.cluster_file import cluster_data, cluster_from
from autopar.passes.decode import decode, decode_fields, parse_json
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import AUTO, CONTEXT_PARALLEL, RECOMPUTE
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.ranges import check_range, shown
from autopar.passes.schedule.make_schedule import SCHEDULES
from autopar.passes.search.search import Ranking
from autopar.read_file import read_text
from autopar.terminal import command
from autopar.version import VERSION

FORMAT = 2
ESTIMATE = "estimate.json"
SLOWER, SHOWN = 1.5, 1000  # than the best one; candidates that are kept with it
AGAIN = "plan again with this version of autopar"


class EstimateError(AutoparError):
    """There is no estimate.json, or `autopar plan` did not write it."""


@dataclass(frozen=True)
class PlanRecord:
    """What a search was asked and found.

    plan: the checksum of the plan.json beside it, of the chosen estimate. model, seed:
    as `load_model` reads them. global_batch: samples of a step; seq: tokens of one, if
    the batch is made up. runs: of layers in the model; parameters: elements of it.
    best: the chosen estimate, then the runners-up. tried: candidates. Of a cluster that
    was measured only the name of its profile is kept. options: of
    `autopar.options.Options`, that all of them have. priced: see `priced_near`.
    """

    plan: str
    model: str
    seed: int
    seq: int | None
    global_batch: int
    runs: int
    parameters: int
    cluster: Cluster
    best: tuple[Estimate, ...]
    tried: int
    options: Mapping[str, Any]
    priced: tuple[tuple[str, float, float], ...] = ()

    def to_json(self) -> str:
        data = {
            "format": FORMAT,
            "autopar": VERSION,
            "torch": torch.__version__,
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "cluster": cluster_data(self.cluster),
            "profile": self.cluster.profile,
            "best": [estimate_data(e) for e in self.best],
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = ESTIMATE) -> PlanRecord:
        """Read `to_json`'s text. Raises EstimateError that names the key at fault."""
        data = parse_json(text, where, EstimateError, AGAIN)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise EstimateError(f"{where} is not of format {FORMAT}", fix=AGAIN)
        data = {k: v for k, v in data.items() if k not in ("format", *VERSIONS)}
        read = decode_fields(cls, data, where, EstimateError, AGAIN, WRITTEN)
        measured = read.pop("profile")
        cluster = replace(cluster_from(read["cluster"]), profile=measured)
        for name in ("global_batch", "seed", *(["seq"] if read["seq"] is not None else [])):
            check_range(name, read[name], EstimateError)
        best = tuple(
            _estimate(f"best[{i}] of {where}", e) for i, e in enumerate(read["best"])
        )
        _check_ends(f"'priced' of {where}", [row[1:] for row in read.get("priced", ())])
        if not best:
            raise EstimateError(f"{where} holds no estimate", fix="plan again")
        return cls(**{**read, "cluster": cluster, "best": best})


def priced_near(plans: Ranking) -> tuple[tuple[str, float, float], ...]:
    """Candidates, their seconds and bytes by the formula alone, fastest first: those
    that are not far slower than the best, and no more than a page can show."""
    limit = SLOWER * plans.best[0].seconds
    near = [row for row in plans.priced if row.seconds <= limit][:SHOWN]
    return tuple((name, float(f"{s:.4g}"), round(peak)) for name, s, peak in near)


def read_record(folder: Path) -> PlanRecord:
    """Reads the record that `autopar plan -o` wrote. Raises EstimateError."""
    if folder.is_file():
        raise EstimateError(
            f"'{folder}' is a file, not a directory",
            fix=f"give the directory that it is in: {folder.parent}",
        )
    path = folder / ESTIMATE
    if not path.is_file():
        raise EstimateError(
            f"'{folder}' has no {ESTIMATE}",
            fix=f"let it be planned: autopar plan MODEL --devices 8xH100 -o {command(folder)}",
        )
    return PlanRecord.from_json(read_text(path, EstimateError, AGAIN), str(path))


# --- estimates as data ---------------------------------------------------------------

VERSIONS = ("autopar", "torch")
MOST = 1e30  # of a number: sums of more have no end
# What JSON has otherwise than the dataclasses do, or beside them.
WRITTEN = {"cluster": dict[str, Any], "profile": str, "best": tuple[Any, ...]}


def estimate_data(e: Estimate) -> dict[str, Any]:
    """An estimate as values for JSON."""
    data = asdict(e)
    data["candidate"]["mesh"] = str(e.candidate.mesh)
    return data


def _estimate(where: str, data: Any) -> Estimate:
    _check_ends(where, data)
    e: Estimate = decode(Estimate, data, where, EstimateError, AGAIN)
    candidate = e.candidate
    _check_candidate(where, candidate)
    ranks = candidate.mesh.pipeline_ranks
    counts = {"memory": ranks, "once": ranks, "stages": len(candidate.layers)}
    for key, count in counts.items():
        if len(getattr(e, key)) != count:
            raise EstimateError(f"'{key}' in {where} is not of {count}", fix=AGAIN)
    if e.seconds <= 0 or not all(e.memory):
        raise EstimateError(f"{where} takes no time, or no memory", fix=AGAIN)
    return e


def _check_candidate(where: str, candidate: Candidate) -> None:
    """Raises EstimateError for decisions that no plan has, or stages without layers."""
    for name in ("samples", "microbatches", "stages_per_rank", "zero"):
        check_range(name, getattr(candidate, name), EstimateError)
    choices = {
        "schedule": (*SCHEDULES, AUTO),
        "recompute": RECOMPUTE,
        "context_parallel": tuple(CONTEXT_PARALLEL),
    }
    for name, known in choices.items():
        if getattr(candidate, name) not in known:
            raise EstimateError(
                f"'{name}' of the candidate in {where} is {getattr(candidate, name)!r}",
                fix=f"use one of {', '.join(known)}",
            )
    stages = candidate.mesh.pipeline_ranks * candidate.stages_per_rank
    if len(candidate.layers) != stages or min(candidate.layers) < 0:
        raise EstimateError(
            f"'layers' of the candidate in {where} are not those of {stages} stages",
            fix=AGAIN,
        )


def _check_ends(where: str, data: Any) -> None:
    """Raises EstimateError for a number that is too large to add others to it."""
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            _check_ends(where, value)
    elif isinstance(data, int | float) and abs(data) > MOST:
        raise EstimateError(f"{where} has {shown(data)}", fix=AGAIN)
