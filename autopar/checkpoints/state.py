"""State dicts of a step: whole tensors by the model's own names, from and to shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.runtime.match import check_names
from autopar.runtime.shards import put_shard, take_shard

if TYPE_CHECKING:
    from autopar.step import Step


@torch.no_grad()
def state_dict(step: Step) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers on the CPU; on all ranks."""
    held = dict(step.named_parameters())
    program = step.program
    found = {n: t.clone() for n, t in step.unused.items()}
    for name, spec in program.parameters.items():
        if not spec.stages:
            continue
        dtype = getattr(torch, spec.dtype)
        whole = torch.zeros(spec.shape, dtype=dtype, device=step.device)
        if name in held and step.owns(name):
            put_shard(whole, held[name], spec, program.mesh, step.comm.coords)
        found[name] = step.comm.reduce_ranks_(whole, step.everyone()).cpu()
    for alias, name in program.aliases.items():
        found[alias] = found[name]
    return {name: found[name] for name in step.names if name in found}


def check_state_dict(step: Step, state: Mapping[str, Tensor]) -> None:
    """Raises ModelMismatch for names and shapes that are not the model's."""
    program = step.program
    known = {*step.names, *program.parameters, *program.buffers}
    shapes = {n: spec.shape for n, spec in program.parameters.items()}
    given = {n: t.shape for n, t in state.items()}
    check_names("the state dict", "step.state_dict", shapes, known, given)


@torch.no_grad()
def load_state_dict(step: Step, state: Mapping[str, Tensor]) -> None:
    """Take this rank's shards of what `check_state_dict` let pass."""
    program = step.program
    for name, p in step.named_parameters():
        spec = program.parameters[name]
        p.copy_(take_shard(state[name], spec, program.mesh, step.comm.coords))
    step.set_whole(state)
