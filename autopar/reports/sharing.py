"""Bytes that ZeRO leaves on a rank, beside those of its formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from autopar.passes.program import ParameterSpec, Program
from autopar.reports.tables import Table
from autopar.runtime.parameters.shards import local_shape
from autopar.units import count, size

# Adam's two moments, of the parameter's own type.
MOMENTS = 2

# By the stage of ZeRO.
GATHERED = {
    1: "once a step, and gradients scattered at its end",
    2: "once a step, and gradients scattered by block, one block behind",
    3: "by block, one block ahead, and gradients scattered by block, one behind: "
    "activations include those of two blocks",
}


@dataclass(frozen=True)
class Share:
    """Bytes of one rank of a stage: parameters, their gradients, and Adam's state.

    elements: of parameters. whole: without ZeRO. at_rest: between steps. formula: of
    each parameter the whole over the ranks that share it (Rajbhandari 2020, figure 1).
    step: more during a step, whole for all of it.
    """

    stage: int
    elements: int
    whole: int
    at_rest: int
    formula: float
    step: int


def shares(program: Program) -> list[Share]:
    """The shares of each stage's first rank, which has the largest uneven parts."""
    mesh, rest = program.mesh, program.plan.parameter_axes
    shares_of_stages = []
    for stage, spec in enumerate(program.stages):
        first = next(r for r in range(mesh.size) if stage in program.stages_of(r))
        coords = mesh.coords(first)
        elements = whole = at_rest = 0
        formula = 0.0
        for p in program.tensors.values():
            if stage not in p.stages:
                continue
            # An axis that an op splits it on, as ep splits experts, shares nothing out.
            axes = [a for a in rest if a in p.gathered or a not in p.split_axes]
            extent = prod(local_shape(_without(p, axes), mesh, coords))
            copies = 1 + (1 + MOMENTS) * p.trainable
            each = getattr(torch, p.dtype).itemsize * copies
            elements += extent
            whole += each * extent
            at_rest += each * prod(local_shape(p, mesh, coords))
            formula += each * extent / prod(mesh.axis_size(a) for a in axes)
        step = spec.footprint.step
        shares_of_stages.append(Share(stage, elements, whole, at_rest, formula, step))
    return shares_of_stages


def _without(spec: ParameterSpec, axes: Sequence[str]) -> ParameterSpec:
    """The spec of a parameter that these axes do not split."""
    slots = tuple(
        tuple(tuple(a for a in own if a not in axes) for own in dim)
        for dim in spec.slots
    )
    return replace(spec, slots=slots)


def share_table(program: Program) -> Table:
    """Returns bytes a rank by stage of what ZeRO shards, beside the formula whole /
    ranks."""
    plan = program.plan
    axes = " and ".join(plan.parameter_axes) or "no axis of more than one rank"
    rows = tuple(
        (
            s.stage,
            count(s.elements),
            size(s.whole),
            size(s.at_rest),
            size(s.formula),
            f"{s.at_rest / s.formula - 1:+.1%}" if s.formula else "",
            size(s.step),
        )
        for s in shares(program)
    )
    notes = [
        f"formula: whole / {prod(map(plan.size, plan.parameter_axes))}, but for "
        "experts, which ep splits anyway. off by: what does not divide.",
        f"parameters are gathered {GATHERED[plan.zero]}.",
    ]
    if plan.offload:
        notes.append("the moments are on the CPU, and a copy of the rest.")
    return Table(
        f"zero {plan.zero}: parameters, gradients and Adam's moments of one rank, "
        f"shared out over {axes}",
        ("stage", "params", "whole", "at rest", "formula", "off by", "more in a step"),
        rows,
        tuple(notes),
    )
