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
from autopar.read_file import read_text
from autopar.version import VERSION
from passes.decode import decode, parse_json
from passes.errors import AutoparError
from passes.mesh import Mesh
from passes.plan import AUTO, CONTEXT_PARALLEL, RECOMPUTE
from passes.price.candidate import Candidate
from passes.price.cluster import Cluster
from passes.price.estimate import Estimate
from passes.price.stage_seconds import StageSeconds
from passes.ranges import check_range
from passes.schedule.footprint import Footprint
from passes.schedule.make_schedule import SCHEDULES

FORMAT = 1
ESTIMATE = "estimate.json"
AGAIN = "plan again with this version of autopar"


class EstimateError(AutoparError):
    """An estimate.json that is not there, or not what `autopar plan` wrote."""


@dataclass(frozen=True)
class PlanRecord:
    """What a search was asked and found.

    plan: the checksum of the plan.json beside it, of the chosen estimate. model, seed:
    as `load_model` reads them. samples: of a step; seq: tokens of one, if
    the batch is made up. runs: of layers in the model; parameters: elements of it.
    best: the chosen estimate, then the runners-up. tried: candidates. Of a cluster that
    was measured only the name of its profile is kept. options: of
    `autopar.options.Options`, that all of them have.
    """

    plan: str
    model: str
    seed: int
    seq: int | None
    samples: int
    runs: int
    parameters: int
    cluster: Cluster
    best: tuple[Estimate, ...]
    tried: int
    options: Mapping[str, Any]

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
        kept = {k: v for k, v in data.items() if k not in ("format", *VERSIONS)}
        _check(where, kept, FINDINGS)
        measured = kept.pop("profile")
        cluster = replace(cluster_from(kept["cluster"]), profile=measured)
        for name in ("samples", "seed", *(["seq"] if kept["seq"] is not None else [])):
            check_range(name, kept[name], EstimateError)
        best = tuple(
            _estimate(f"best[{i}] of {where}", e) for i, e in enumerate(kept["best"])
        )
        if not best:
            raise EstimateError(f"{where} holds no estimate", fix="plan again")
        return cls(**{**kept, "cluster": cluster, "best": best})


def read_record(folder: Path) -> PlanRecord:
    """Those of a directory that `autopar plan -o` wrote. Raises EstimateError."""
    if folder.is_file():
        raise EstimateError(
            f"'{folder}' is a file, not a directory",
            fix=f"give the directory that it is in: {folder.parent}",
        )
    path = folder / ESTIMATE
    if not path.is_file():
        raise EstimateError(
            f"'{folder}' has no {ESTIMATE}",
            fix=f"let it be planned: autopar plan MODEL --devices 8xH100 -o {folder}",
        )
    return PlanRecord.from_json(read_text(path, EstimateError, AGAIN), str(path))


# --- estimates as data ---------------------------------------------------------------

Kinds = Mapping[str, tuple[type, ...]]

VERSIONS = ("autopar", "torch")
NUMBER: tuple[type, ...] = (int, float)
MOST = 1e30  # of a number: sums of more have no end
FINDINGS: Kinds = {
    "plan": (str,),
    "model": (str,),
    "seed": (int,),
    "seq": (int, type(None)),
    "samples": (int,),
    "runs": (int,),
    "parameters": (int,),
    "cluster": (dict,),
    "profile": (str,),
    "best": (list,),
    "tried": (int,),
    "options": (dict,),
}
STAGE: Kinds = {
    **dict.fromkeys(("forward", "backward", "weight", "send"), NUMBER),
    "waits": (list,),
    "footprint": (dict,),
}
FOOTPRINT: Kinds = {f.name: (int,) for f in fields(Footprint)}
WHAT: Kinds = {
    "candidate": (dict,),
    "seconds": NUMBER,
    "memory": (list,),
    "parts": (dict,),
    "bubble": NUMBER,
    "flops": NUMBER,
    "stages": (list,),
    "once": (list,),
    "sources": (dict,),
}
CHOSEN: Kinds = {
    "mesh": (str,),
    "samples": (int,),
    "microbatches": (int,),
    "schedule": (str,),
    "stages_per_rank": (int,),
    "zero": (int,),
    "recompute": (str,),
    "layers": (list,),
    "context_parallel": (str,),
    "labelled": (bool,),
    "order": (list,),
}


def estimate_data(e: Estimate) -> dict[str, Any]:
    """An estimate as values for JSON; keys of waits are lists of words."""
    stages = []
    for stage in e.stages:
        waits = [[*key, seconds] for key, seconds in stage.waits.items()]
        stages.append({**asdict(stage), "waits": waits})
    return {
        "candidate": {**asdict(e.candidate), "mesh": str(e.candidate.mesh)},
        "seconds": e.seconds,
        "memory": [dict(terms) for terms in e.memory],
        "parts": dict(e.parts),
        "bubble": e.bubble,
        "flops": e.flops,
        "stages": stages,
        "once": [dict(terms) for terms in e.once],
        "sources": {what: dict(shares) for what, shares in e.sources.items()},
    }


def _estimate(where: str, data: Any) -> Estimate:
    _check(where, data, WHAT)
    chosen = data["candidate"]
    _check(f"the candidate in {where}", chosen, CHOSEN)
    axes = [list(axis) for axis in Mesh.parse(chosen["mesh"]).axes]
    chosen = {**chosen, "mesh": {"axes": axes}}
    candidate = decode(Candidate, chosen, f"the candidate in {where}", EstimateError)
    _check_candidate(where, candidate)
    ranks = candidate.mesh.axis_size("pp")
    counts = {"memory": ranks, "once": ranks, "stages": len(candidate.layers)}
    for key, count in counts.items():
        if len(data[key]) != count:
            raise EstimateError(f"'{key}' in {where} is not of {count}", fix=AGAIN)
    if data["seconds"] <= 0 or not all(data["memory"]):
        raise EstimateError(f"{where} takes no time, or no memory", fix=AGAIN)
    _amounts(where, data["parts"])
    for terms in (*data["memory"], *data["once"], *data["sources"].values()):
        _amounts(where, terms)
    return Estimate(
        candidate=candidate,
        seconds=data["seconds"],
        memory=tuple(data["memory"]),
        parts=data["parts"],
        bubble=data["bubble"],
        flops=data["flops"],
        stages=tuple(_stage(f"a stage in {where}", s) for s in data["stages"]),
        once=tuple(data["once"]),
        sources=data["sources"],
    )


def _check_candidate(where: str, candidate: Candidate) -> None:
    """Its decisions are those of a plan, and its stages as many as it has layers of."""
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
    stages = candidate.mesh.axis_size("pp") * candidate.stages_per_rank
    if len(candidate.layers) != stages or min(candidate.layers) < 0:
        raise EstimateError(
            f"'layers' of the candidate in {where} are not those of {stages} stages",
            fix=AGAIN,
        )


def _stage(where: str, data: Any) -> StageSeconds:
    _check(where, data, STAGE)
    waits = {}
    for row in data["waits"]:
        if not isinstance(row, list) or len(row) < 3:
            raise EstimateError(f"{where} has a wait {row!r}", fix="plan again")
        *key, seconds = row
        waits[tuple(key)] = seconds
    _amounts(where, {"/".join(map(str, key)): s for key, s in waits.items()})
    sizes = data["footprint"]
    _check(f"the footprint of {where}", sizes, FOOTPRINT)
    return StageSeconds(**{**data, "waits": waits, "footprint": Footprint(**sizes)})


def _amounts(where: str, data: Any) -> None:
    """Names and numbers."""
    if not isinstance(data, dict):
        raise EstimateError(f"{where} has {data!r}, not amounts", fix="plan again")
    _check(where, data, dict.fromkeys(data, NUMBER))


def _check(where: str, data: Any, kinds: Kinds) -> None:
    """All of the keys and no other, each of its kind. True is no number."""
    if not isinstance(data, dict):
        raise EstimateError(f"{where} is {data!r}, not an object", fix="plan again")
    for key in kinds:
        if key not in data:
            raise EstimateError(f"{where} has no '{key}'", fix="plan again")
    for key, value in data.items():
        if key not in kinds:
            raise EstimateError(f"unknown key '{key}' in {where}", fix="plan again")
        endless = kinds[key] is NUMBER and type(value) in NUMBER and abs(value) > MOST
        if type(value) not in kinds[key] or endless:
            raise EstimateError(f"'{key}' in {where} is {value!r}", fix="plan again")
