"""The folder of the plan that `autopar run MODEL` makes, and finds when started again.

Its name ends in a digest of all that the plan follows from: the model as captured, its
parameters, the devices and what was measured of them, the batch, the options, and the
versions that compiled it.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from autopar.models.load import LoadedModel
from autopar.planner.planner import ShortModel
from autopar.planner.request import PlanRequest
from autopar.plans.store import FORMAT, checksum
from autopar.version import VERSION

LONGEST = 40  # characters of a model's name
DIGITS = 8


def plan_folder(
    plans: Path,
    of: ShortModel,
    loaded: LoadedModel,
    request: PlanRequest,
    global_batch: int,
    seed: int,
) -> Path:
    """Returns the folder in `plans` for the plan of such a run.

    of: the model as it was captured, with a few of its layers. seed: of weights.
    """
    shapes = {n: (list(p.shape), p.dtype) for n, p in loaded.model.named_parameters()}
    follows_from = (
        *(FORMAT, VERSION, torch.__version__, loaded.spec, seed, global_batch),
        *(str(of.named.graph), of.layers, shapes),
        *(request.cluster, str(request.mesh), request.shape),
        sorted(request.options.items()),
    )
    digest = checksum(repr(follows_from))[:DIGITS]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", _short(loaded.spec)).strip("-.")
    cluster = request.cluster
    return plans / f"{name}-{cluster.devices}x{_plain(cluster.device.name)}-{digest}"


def _short(spec: str) -> str:
    """`gpt-demo` of examples/gpt.py:demo, `Llama-3.1-8B` of hf:meta-llama/Llama-3.1-8B
    with whatever values."""
    if spec.startswith("hf:"):
        name = spec.removeprefix("hf:").partition("?")[0]
        return Path(name.removesuffix("/config.json")).name[:LONGEST]
    where, _, factory = spec.rpartition(":")
    return f"{Path(where).name.removesuffix('.py')}-{factory}"[:LONGEST]


def _plain(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", device)
