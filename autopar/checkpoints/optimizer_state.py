"""An optimizer's state and options by the model's own names, for any torch.optim one.

State of a parameter's shape is split as the parameter is; the rest are numbers, which
all ranks have alike, and what is made of whole parameters, as factors of variances.
Options go by group, each with the names of its parameters, which on a pipeline no rank
has all of.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.checkpoints.dcp import CheckpointError
from autopar.runtime.agreement.updates import plain
from autopar.runtime.parameters.whole_updates import WholeUpdates

NAMES = ("params", "param_names")
# Options of how something is computed, and not of what.
HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Group:
    """names: of the parameters, in the model's order. options: lr, betas ..."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


def local_groups(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    cut: Collection[str],
    whole: WholeUpdates | None,
) -> list[Group]:
    """The groups, with those of their parameters that this rank holds.

    cut: the parameters that ranks have parts of. whole: what gathers them for each
    update. Raises: CheckpointError for a parameter that is none of the step's, or state
    that is neither of its parameter's shape nor a number, nor alike on all ranks, or is
    kept elsewhere.
    """
    _check_kept(optimizer)
    by_id = {id(p): name for name, p in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for p in group["params"]:
            if id(p) not in by_id:
                raise CheckpointError(
                    f"the optimizer holds a parameter {list(p.shape)} that is not the "
                    "step's",
                    fix="make the optimizer of step.parameters(), after step.build",
                )
            names.append(by_id[id(p)])
            stored = optimizer.state.get(p, {})
            if names[-1] not in cut:
                alike = set(stored)
            else:
                alike = set() if whole is None else whole.made_of_all(names[-1], stored)
            _check_state(names[-1], p, stored, alike)
        options = {k: v for k, v in group.items() if k not in NAMES}
        groups.append(Group(tuple(names), options))
    return groups


def merge_groups(by_rank: Sequence[list[Group]], order: Sequence[str]) -> list[Group]:
    """The groups of the whole model; order: all names.

    Raises: CheckpointError if the ranks' groups or options differ.
    """
    fix = "make the same groups with the same options on all ranks, even empty ones"
    place = {name: i for i, name in enumerate(order)}
    merged = []
    for rank, groups in enumerate(by_rank):
        if len(groups) != len(by_rank[0]):
            raise CheckpointError(
                f"the optimizer has {len(groups)} groups on rank {rank}, but "
                f"{len(by_rank[0])} on rank 0",
                fix=fix,
            )
    for i, first in enumerate(by_rank[0]):
        names: set[str] = set()
        for rank, groups in enumerate(by_rank):
            names.update(groups[i].names)
            for option, value in groups[i].options.items():
                if not _same(value, first.options.get(option)):
                    raise CheckpointError(
                        f"'{option}' of the optimizer's group {i} is {value} on rank "
                        f"{rank}, but {first.options.get(option)} on rank 0",
                        fix=fix,
                    )
        ordered = tuple(sorted(names, key=place.__getitem__))
        merged.append(Group(ordered, first.options))
    return merged


def join_parts(groups: Sequence[Group], sources: Mapping[str, str]) -> list[Group]:
    """The groups, with the model's own parameters for parts of them.

    sources: name of each parameter -> of the model's own that it is part of. Raises:
    CheckpointError if parts of one are in several groups.
    """
    joined = [
        Group(tuple(dict.fromkeys(sources[n] for n in group.names)), group.options)
        for group in groups
    ]
    seen: dict[str, int] = {}
    for i, group in enumerate(joined):
        for name in group.names:
            if name in seen:
                raise CheckpointError(
                    f"parts of '{name}' are in the optimizer's groups {seen[name]} "
                    f"and {i}",
                    fix="put all parts of a parameter into one group",
                )
            seen[name] = i
    return joined


def check_groups(saved: Sequence[Group], ours: Sequence[Group]) -> None:
    """Whether groups have the same parameters. Raises CheckpointError."""
    if len(saved) != len(ours):
        raise CheckpointError(
            f"the optimizer has {len(ours)} groups of parameters, but the checkpoint "
            f"has {len(saved)}",
            fix="make the optimizer with the groups that were saved",
        )
    for i, (before, now) in enumerate(zip(saved, ours, strict=True)):
        for name in (*before.names, *now.names):
            if (name in before.names) != (name in now.names):
                held, lacking = "the checkpoint's", "the optimizer's"
                if name in now.names:
                    held, lacking = lacking, held
                raise CheckpointError(
                    f"'{name}' is in {held} group {i}, but not in {lacking}",
                    fix="make the optimizer with the groups that were saved",
                )


def made_with(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class, and the options that it was made with, as JSON has them.

    A schedule changes options of groups, and not these.
    """
    options = {k: v for k, v in plain(optimizer.defaults).items() if k not in HOW}
    kind = type(optimizer).__qualname__
    made: dict[str, Any] = json.loads(json.dumps({"class": kind, "options": options}))
    return made


def check_made(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Checks that an optimizer can go on with what another one stored. Raises:
    CheckpointError."""
    made = made_with(optimizer)
    if not saved:
        return  # written before it was recorded
    if made["class"] != saved["class"]:
        raise CheckpointError(
            f"the checkpoint has the state of {saved['class']}, but the optimizer is "
            f"{made['class']}",
            fix=f"make the optimizer {saved['class']}, or load without it, and go on "
            "with a fresh one: step.load(directory)",
        )
    before, now = saved["options"], made["options"]
    for option in {**before, **now}:
        if before.get(option) != now.get(option):
            was = f"{option}={before.get(option)}"
            raise CheckpointError(
                f"the optimizer was saved as {made['class']}({was}), but is made with "
                f"{option}={now.get(option)}, which a load would replace",
                fix=f"make it with {was}; to change it, set group['{option}'] of "
                "optimizer.param_groups after the load",
            )


def set_state(
    optimizer: Optimizer,
    local: Sequence[Group],
    saved: Sequence[Group],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Put options and state into the optimizer, also before its first step.

    local: this rank's groups. state: by name of parameter, on the CPU.
    """
    numbers: dict[int, Mapping[str, Any]] = {}
    groups, number = [], 0
    for ours, group in zip(local, saved, strict=True):
        here = range(number, number + len(ours.names))
        number += len(ours.names)
        for i, name in zip(here, ours.names, strict=True):
            if name in state:
                numbers[i] = dict(state[name])
        groups.append({**group.options, "params": list(here)})
    optimizer.load_state_dict({"state": numbers, "param_groups": groups})


def _check_kept(optimizer: Optimizer) -> None:
    """Raises CheckpointError for state of parameters outside of `state`, as an
    optimizer that wraps another one keeps."""
    own = vars(optimizer)
    inner = [k for k, v in own.items() if isinstance(v, Optimizer)]
    kept, fix = [k for k in inner if own[k].state is not optimizer.state], ""
    if kept:
        fix = f"give that one: step.save(folder, optimizer.{kept[0]}); and "
    else:
        kept = [k for k in optimizer.state_dict() if k not in ("state", "param_groups")]
        for name, table in own.items():
            if isinstance(table, dict) and table is not optimizer.state:
                kept += [name] if any(map(torch.is_tensor, table)) else []
    if kept:
        path = f"optimizer.{kept[0]}" if fix else "optimizer"
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {', '.join(kept)} beside its state, "
            "which a checkpoint would be without",
            fix=f"{fix}keep what else belongs to a parameter in {path}.state[p]",
        )


def _check_state(
    name: str, p: Tensor, state: Mapping[str, Any], alike: Collection[str]
) -> None:
    """alike: entries that are the same on all ranks."""
    for key, value in state.items():
        if value is None or isinstance(value, int | float | str) or key in alike:
            continue
        shape = value.shape if isinstance(value, Tensor) else None
        if shape in (p.shape, torch.Size()):
            continue
        kind = type(value) if shape is None else f"{list(shape)}"
        raise CheckpointError(
            f"the optimizer's '{key}' of '{name}' is {kind}: neither of the "
            f"parameter's shape {list(p.shape)} nor a number",
            fix="use an optimizer that keeps tensors or numbers of each parameter, and "
            "step.gather_for(optimizer) for what it makes of a whole one",
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)
