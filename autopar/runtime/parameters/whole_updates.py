"""Whole parameters for optimizers that need them, as Muon: only while they update.

Before an update each rank gathers the weights that it has a part of, their gradients
and what the optimizer stores of them. It updates them as one device would, all ranks of
a stage alike, and keeps its part again. So what is at rest is split as ever, and goes
into checkpoints as that of other optimizers does. The price is three all-reduces of
each such weight in an update, and the work of the update on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.passes.errors import AutoparError
from autopar.passes.mesh import PIPELINE
from autopar.passes.program import ParameterSpec, Program
from autopar.runtime.comm.comm import Comm
from autopar.runtime.parameters.shards import put_shard, take_shard
from autopar.runtime.parameters.update_hooks import is_nested


class WholeUpdates:
    """Hooks around `optimizer.step()`; all ranks of a stage have to update alike.

    parameters: this rank's, by name. Raises: AutoparError if the optimizer has a part
    of a weight, and not all parts in one group.
    """

    def __init__(
        self,
        program: Program,
        comm: Comm,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
    ) -> None:
        self.program, self.comm = program, comm
        self.parameters = parameters
        groups = {
            id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]
        }
        self.cut: dict[str, list[str]] = {}
        for source, names in program.sources.items():
            mine = [name for name in names if name in parameters]
            places = {groups.get(id(parameters[name])) for name in mine}
            if len(places) > 1:
                raise AutoparError(
                    f"parts of '{source}' are in several groups of the optimizer, or "
                    "not all of them in one",
                    fix="put " + ", ".join(f"'{n}'" for n in mine) + " into one group",
                )
            if places - {None} and any(is_cut(program, name) for name in mine):
                self.cut[source] = mine
        # By weight, what the optimizer stores of each element.
        self._entries: dict[str, set[str]] = {}
        self._aside: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        # Of each group, what is in it but while it is updated.
        self._members: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(self.gather)
        optimizer.register_step_post_hook(self.scatter)

    @torch.no_grad()
    def gather(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Replaces the first part of each weight by the whole; the other parts have no
        gradient meanwhile, and are in no group. Raises: AutoparError, for a closure."""
        if is_nested(optimizer):
            return
        if self.cut and any(map(callable, (*args[1:], *kwargs.values()))):
            raise AutoparError(
                f"{type(optimizer).__name__}.step is given a closure, but whole "
                "parameters are gathered before it computes their gradients",
                fix="call it before: loss = closure(), and optimizer.step()",
            )
        others: set[int] = set()
        for source, names in self.cut.items():
            held = [self.parameters[name] for name in names]
            grads = [p.grad for p in held]
            if all(grad is None for grad in grads):
                continue
            self._aside[source] = [
                (p.data, grad) for p, grad in zip(held, grads, strict=True)
            ]
            whole = self._whole(names, [p.data for p in held])
            filled = [
                torch.zeros_like(p) if grad is None else grad
                for p, grad in zip(held, grads, strict=True)
            ]
            grad = self._whole(names, filled)
            self._gather_state(source, names, optimizer.state)
            for p in held:
                p.grad = None
            held[0].data = whole
            held[0].grad = grad
            others |= {id(p) for p in held[1:]}
        groups = [g["params"] for g in optimizer.param_groups] if others else []
        self._members = [[*group] for group in groups]
        for group in groups:
            group[:] = [p for p in group if id(p) not in others]

    def _gather_state(
        self, source: str, names: Sequence[str], stored: dict[Tensor, dict[str, Any]]
    ) -> None:
        held = [self.parameters[name] for name in names]
        states = [stored.get(p, {}) for p in held]
        if (entries := self._entries.get(source)) is None:
            # What was loaded is as large as the part that it is of.
            loaded = states[0].items()
            entries = {entry for entry, value in loaded if _is_like(value, held[0])}
        for entry in sorted(entries):
            whole = self._whole(names, [state[entry] for state in states])
            stored[held[0]][entry] = whole

    @torch.no_grad()
    def scatter(self, optimizer: Optimizer, *_: Any) -> None:
        """Keeps each rank's parts of whole weights and of their stored state."""
        if is_nested(optimizer):
            return
        for group, members in zip(optimizer.param_groups, self._members, strict=False):
            group["params"][:] = members
        for source, aside in self._aside.items():
            names = self.cut[source]
            leader = self.parameters[names[0]]
            whole, state = leader.data, dict(optimizer.state.get(leader, {}))
            self._entries[source] = {e for e, v in state.items() if _is_like(v, whole)}
            for name, (data, grad) in zip(names, aside, strict=True):
                p = self.parameters[name]
                data.copy_(self._part(name, whole))
                p.grad = None
                p.data = data
                p.grad = grad
                for entry, value in state.items():
                    if entry in self._entries[source]:
                        value = self._part(name, value)
                    elif isinstance(value, Tensor) and p is not leader:
                        value = value.clone()
                    optimizer.state[p][entry] = value
        self._aside.clear()

    def made_of_all(self, name: str, state: Mapping[str, Any]) -> set[str]:
        """Names of the state of a parameter that is the same on all ranks: neither it
        nor parts of it are split. Raises: AutoparError for what looks like a part."""
        p, source = self.parameters[name], self.program.parameters[name].part.source
        if source not in self._entries:
            return {e for e, v in state.items() if not _is_like(v, p)}
        alike = set(state) - self._entries[source]
        for entry in sorted(alike):
            if _is_like(state[entry], p):
                refuse_alike(entry, name, p)
        return alike

    def _whole(self, names: Sequence[str], parts: Sequence[Tensor]) -> Tensor:
        """A weight [...] from all ranks' parts of it, each element from its first."""
        spec = self.program.parameters[names[0]]
        like, mesh = parts[0], self.program.mesh
        whole = torch.zeros(spec.part.shape, dtype=like.dtype, device=self.comm.device)
        for name, part in zip(names, parts, strict=True):
            spec = self.program.parameters[name]
            alike = set(self.comm.coords) - set(spec.split_axes) - {PIPELINE}
            if not any(self.comm.coords[axis] for axis in alike):
                put_shard(whole, part.to(whole.device), spec, mesh, self.comm.coords)
        ranks = beside(self.program, self.comm.rank, spec)
        return self.comm.reduce_ranks_(whole, ranks).to(like.device)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        spec = self.program.parameters[name]
        return take_shard(whole, spec, self.program.mesh, self.comm.coords)


def _is_like(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape


def refuse_alike(entry: str, name: str, p: Tensor) -> None:
    """Raises AutoparError for state of a whole parameter that would be taken for this
    rank's part of it."""
    raise AutoparError(
        f"the optimizer's '{entry}' of '{name}' is of all of it, but {list(p.shape)} "
        "as this rank's part is, for which it would be taken in a checkpoint",
        fix="use a mesh that splits this parameter into other sizes",
    )


def beside(program: Program, rank: int, spec: ParameterSpec) -> tuple[int, ...]:
    """The ranks that have parts of a parameter, of those that run the same stages as
    this one, which has a part; ascending."""
    rows = spec.row.slots if spec.row else ()
    apart = {axis for axes in rows for axis in axes}
    axes = (axis for axis, _ in program.mesh.stage_axes if axis not in apart)
    return program.mesh.group(rank, tuple(axes))


def all_beside(program: Program) -> list[tuple[int, ...]]:
    """Every set of ranks that gather a parameter, in the same order on all ranks."""
    kinds = {spec.row and spec.row.slots: spec for spec in program.parameters.values()}
    ranks = range(program.mesh.size)
    sets = (beside(program, rank, spec) for spec in kinds.values() for rank in ranks)
    return list(dict.fromkeys(sets))


def is_cut(program: Program, name: str) -> bool:
    """Whether no rank has the whole of the model's parameter `name` is part of."""
    spec = program.parameters[name]
    split = any(program.mesh.axis_size(axis) > 1 for axis in spec.cut_axes)
    return split or spec.shape != spec.part.shape
