"""An optimizer of a model's parameters is given those of a step, parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.parameters.shards import take_shard

Names = Callable[[Tensor], str | None]
REPLACED = "param_groups", "state"  # of an optimizer


@torch.no_grad()
def prepare(
    optimizer: Optimizer,
    program: Program,
    coords: Mapping[str, int],
    held: Mapping[str, nn.Parameter],
    name_of: Names,
) -> None:
    """Replaces a model's parameters by a rank's, in groups and in the state.

    coords: of the rank. held: its parameters. name_of: of the model's own. Each part
    takes the place of the whole, with its options; a part has that part of what the
    optimizer stores of each element. Groups of which a rank has nothing are empty.
    Raises: AutoparError, with nothing changed, for parameters that are not the model's,
    and for the model's where they would stay.
    """
    parts = {
        source: [(n, held[n]) for n in names if n in held]
        for source, names in program.sources.items()
    }
    own = {id(p) for p in held.values()}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in members if id(p) not in own and name_of(p) is None]
    if foreign:
        kind = type(optimizer).__name__
        raise AutoparError(
            f"{kind} holds a parameter {list(foreign[0].shape)} that is not of the "
            "model that was compiled",
            fix="make it of model.parameters() of that model, or of step.parameters()",
        )
    if attribute := _kept_beside(optimizer, name_of):
        kind = type(optimizer).__name__
        raise AutoparError(
            f"{kind} keeps parameters of the model in its '{attribute}' as well, which "
            "it would update: the step has copies of them",
            fix=f"make it of the step's, after step.build(**batch) or the first step: "
            f"{kind}(step.parameters())",
        )
    for group in optimizer.param_groups:
        params = group["params"]
        named = [
            part
            for p in params
            for part in ([("", p)] if id(p) in own else parts.get(name_of(p) or "", ()))
        ]
        if "param_names" in group:
            of = {id(p): name for name, p in held.items()}
            group["param_names"] = [of[id(p)] for _, p in named]
        params[:] = [p for _, p in named]  # some optimizers keep the list
    for whole, stored in list(optimizer.state.items()):
        if id(whole) in own:
            continue
        del optimizer.state[whole]
        for name, p in parts.get(name_of(whole) or "", ()):
            spec = program.parameters[name]

            def part_of(value: Any, whole: Tensor = whole, spec: Any = spec) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if value.shape != whole.shape:
                    return value.clone()
                return take_shard(value, spec, program.mesh, coords)

            for key, value in stored.items():
                optimizer.state[p][key] = part_of(value)


def _kept_beside(optimizer: Optimizer, name_of: Names) -> str | None:
    """The attribute in which an optimizer has a model's parameters that are in none of
    the lists of its groups; None: it has no such attribute."""
    lists = {id(group["params"]) for group in optimizer.param_groups}

    def has(value: object) -> bool:
        if isinstance(value, Tensor):
            return name_of(value) is not None
        if isinstance(value, Mapping):
            return any(has(x) for pair in value.items() for x in pair)
        if not isinstance(value, list | tuple | set | frozenset) or id(value) in lists:
            return False
        return any(has(x) for x in value)

    kept = {n: x for n, x in vars(optimizer).items() if n not in REPLACED}
    return next((name for name, value in kept.items() if has(value)), None)
