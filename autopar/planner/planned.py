"""Directories that `autopar plan -o` writes, and the batch that they were planned for.

    plan/plan.json        the decisions of the best plan
    plan/estimate.json    what was asked, and the best estimates: `autopar explain`

Compiled into the same directory (`autopar.planner.compile_planned`), it becomes one of
`autopar.plans.store`, estimate included.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from autopar.models.batches import with_samples
from autopar.models.load import LoadedModel, ModelError, example_batch
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan, PlanError
from autopar.passes.price.cluster import Cluster
from autopar.plans.plan_record import ESTIMATE, PlanRecord, read_record
from autopar.plans.store import MANIFEST, PLAN, checksum, load_plan, refuse_to_replace
from autopar.read_file import read_text


@dataclass(frozen=True)
class Decided:
    """A plan.json, and the record beside it, unless it was edited since."""

    plan: Plan
    record: PlanRecord | None


def save_record(record: PlanRecord, plan: Plan, directory: Path) -> None:
    """Write the two files, the plan first. An earlier plan there is taken away.

    Raises PlanDirectoryError when something that is no plan is in the way.
    """
    refuse_to_replace(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # What was compiled there is of an earlier plan: without this it is not read.
    (directory / MANIFEST).unlink(missing_ok=True)
    texts = {PLAN: plan.to_json(), ESTIMATE: record.to_json()}
    for name, text in texts.items():
        scratch = directory / f".{name}.{os.getpid()}"
        scratch.write_text(text, encoding="utf-8", newline="\n")
        scratch.replace(directory / name)


def read_decided(path: Path) -> Decided:
    """The decisions of a plan.json, or of a directory with one. Raises PlanError."""
    file = path / PLAN if path.is_dir() else path
    if not file.is_file():
        raise PlanError(
            f"there is no file '{file}' (looked in {Path.cwd()})",
            fix="give the plan.json, or the directory, that autopar plan or compile "
            "wrote with -o",
        )
    text = read_text(file, PlanError)
    try:
        plan, record = Plan.from_json(text), None
    except AutoparError as error:
        raise PlanError(error.message, source=str(file), fix=error.fix) from None
    if (file.parent / ESTIMATE).is_file():
        record = read_record(file.parent)
        record = record if record.plan == checksum(text) else None
    return Decided(plan, record)


def is_planned(directory: Path) -> bool:
    """Whether it was planned and is not compiled yet."""
    return (directory / ESTIMATE).is_file() and not (directory / MANIFEST).is_file()


def mesh_of(directory: Path) -> Mesh:
    """Returns the mesh of a directory that is planned or compiled."""
    if is_planned(directory):
        return read_decided(directory).plan.mesh
    return load_plan(directory).program.mesh


def other_devices(cluster: Cluster) -> Cluster | None:
    """The cluster, if a plan for it is not for processes of this machine's CPU, which
    is measured."""
    return None if cluster.device.name == "CPU" else cluster


def batch_for(
    loaded: LoadedModel, samples: int, seq: int | None, device: str = "cpu"
) -> dict[str, Tensor]:
    """A batch of a planned size: of the model's factory, or made up on a device, see
    `random_batch`."""
    if loaded.batch is not None:
        return with_samples(loaded.batch, samples)
    if loaded.vocab is None or seq is None:
        raise ModelError(
            f"'{loaded.spec}' brings no batch to compile for",
            fix="let the factory return (model, batch)",
        )
    packed = loaded.packed
    return example_batch(loaded.vocab, samples, seq, packed=packed, device=device)
