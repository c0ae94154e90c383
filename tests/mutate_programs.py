"""Mutants of programs beside their text: where parameters rest, who runs what, when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from autopar.passes.program import ParameterSpec, Program
from autopar.passes.schedule.schedule import Action, Kind, Schedule

Named = Iterator[tuple[str, Program]]  # what was changed, and the program


def with_spec(program: Program, name: str, **changes: object) -> Program:
    spec = replace(program.tensors[name], **changes)
    return replace(program, tensors={**program.tensors, name: spec})


# --- parameters ---------------------------------------------------------------------


def sum_of_gradient_lost(program: Program) -> Named:
    for name, spec in program.tensors.items():
        for axis in spec.pending:
            rest = tuple(a for a in spec.pending if a != axis)
            yield f"{name} on {axis}", with_spec(program, name, pending=rest)


def sum_of_gradient_doubled(program: Program) -> Named:
    """Over an axis where ranks have it whole already."""
    for name, spec in program.tensors.items():
        for axis, size in program.mesh.axes:
            known = {*spec.pending, *spec.split_axes, *spec.gathered, "pp"}
            if axis not in known and size > 1 and spec.trainable:
                more = (*spec.pending, axis)
                yield f"{name} on {axis}", with_spec(program, name, pending=more)


def share_of_another_factor(program: Program) -> Named:
    """The axis splits the factor before or after the one that it should."""
    for name, spec in program.tensors.items():
        flat = [
            (dim, i) for dim, axes in enumerate(spec.slots) for i in range(len(axes))
        ]
        for here, there in pairwise(flat):
            slots = [list(dim) for dim in spec.slots]
            a, b = slots[here[0]][here[1]], slots[there[0]][there[1]]
            if a != b:
                slots[here[0]][here[1]], slots[there[0]][there[1]] = b, a
                moved = tuple(map(tuple, slots))
                yield name, with_spec(program, name, slots=moved)


def share_of_another_rank(program: Program) -> Named:
    """Two axes of one factor in the other order; a factor's own extents swapped."""
    for name, spec in program.tensors.items():
        turned = tuple(tuple(axes[::-1] for axes in dim) for dim in spec.slots)
        if turned != spec.slots:
            yield name, with_spec(program, name, slots=turned)
        for dim, factors in enumerate(spec.factors):
            if len(set(factors)) > 1 and any(spec.slots[dim]):
                changed = list(spec.factors)
                changed[dim] = factors[::-1]
                slots = list(spec.slots)
                slots[dim] = spec.slots[dim][::-1]
                found = with_spec(
                    program, name, factors=tuple(changed), slots=tuple(slots)
                )
                yield name, found


def tied_weight_not_summed(program: Program) -> Named:
    for name, spec in program.tensors.items():
        if len(spec.stages) > 1:
            for stage in spec.stages:
                rest = tuple(s for s in spec.stages if s != stage)
                yield f"{name} without {stage}", with_spec(program, name, stages=rest)


def frozen_though_trained(program: Program) -> Named:
    for name, spec in program.tensors.items():
        if spec.trainable:
            yield name, with_spec(program, name, trainable=False)


def weights_of_another_layer(program: Program) -> Named:
    def layout(spec: ParameterSpec) -> tuple:
        return spec.shape, spec.slots

    for number, stage in enumerate(program.stages):
        for a, b in combinations(stage.names, 2):
            one, other = stage.names[a], stage.names[b]
            if one not in program.tensors or other not in program.tensors:
                continue
            if layout(program.tensors[one]) == layout(program.tensors[other]):
                names = {**stage.names, a: other, b: one}
                stages = list(program.stages)
                stages[number] = replace(stage, names=names)
                yield f"{one} for {other}", replace(program, stages=tuple(stages))


# --- the whole ----------------------------------------------------------------------


def loss_summed_otherwise(program: Program) -> Named:
    pending = program.loss_pending
    for axis in pending:
        rest = tuple(a for a in pending if a != axis)
        yield f"not on {axis}", replace(program, loss_pending=rest)
    for axis, size in program.mesh.axes:
        if axis not in (*pending, "pp") and size > 1:
            yield f"on {axis} too", replace(program, loss_pending=(*pending, axis))


def text_of_another_rank(program: Program) -> Named:
    for number, stage in enumerate(program.stages):
        for a, b in combinations(stage.modules, 2):
            if stage.modules[a] != stage.modules[b]:
                modules = {**stage.modules, a: stage.modules[b], b: stage.modules[a]}
                stages = list(program.stages)
                stages[number] = replace(stage, modules=modules)
                yield f"{a} for {b}", replace(program, stages=tuple(stages))


def layout_forgotten(program: Program) -> Named:
    """Rows in zigzag are taken for contiguous ones."""
    if program.plan.zigzag:
        plan = replace(program.plan, zigzag=())
        yield "zigzag", replace(program, plan=plan)


# --- schedules ----------------------------------------------------------------------


def with_actions(
    program: Program, change: Callable[[list[Action]], Iterator[tuple[str, list]]]
) -> Named:
    schedule = program.schedule
    for rank, actions in enumerate(schedule.ranks):
        for what, changed in change(list(actions)):
            ranks = list(schedule.ranks)
            ranks[rank] = tuple(changed)
            made: Schedule = replace(schedule, ranks=tuple(ranks))
            yield f"rank {rank}: {what}", replace(program, schedule=made)


def actions_swapped(program: Program) -> Named:
    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        for i in range(len(actions) - 1):
            a, b = actions[i : i + 2]
            yield f"{b} before {a}", [*actions[:i], b, a, *actions[i + 2 :]]

    return with_actions(program, change)


def messages_swapped(program: Program) -> Named:
    """Of one kind, with others between them."""

    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        places = [i for i, a in enumerate(actions) if not a.kind.is_compute]
        for i, j in combinations(places, 2):
            if actions[i].kind is actions[j].kind:
                swapped = list(actions)
                swapped[i], swapped[j] = actions[j], actions[i]
                yield f"{actions[i]} for {actions[j]}", swapped

    return with_actions(program, change)


def action_dropped(program: Program) -> Named:
    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        for i, a in enumerate(actions):
            yield str(a), actions[:i] + actions[i + 1 :]

    return with_actions(program, change)


def action_repeated(program: Program) -> Named:
    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        for i, a in enumerate(actions):
            yield str(a), actions[: i + 1] + actions[i:]

    return with_actions(program, change)


def another_microbatch(program: Program) -> Named:
    count = program.schedule.microbatches

    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        for i, a in enumerate(actions if count > 1 else ()):
            other = a._replace(microbatch=(a.microbatch + 1) % count)
            yield f"{other} for {a}", [*actions[:i], other, *actions[i + 1 :]]

    return with_actions(program, change)


def half_a_backward(program: Program) -> Named:
    """The weights' half is forgotten, or done with the other as well."""

    def change(actions: list[Action]) -> Iterator[tuple[str, list]]:
        for i, a in enumerate(actions):
            if a.kind in (Kind.B, Kind.I):
                kind = Kind.I if a.kind is Kind.B else Kind.B
                other = a._replace(kind=kind)
                yield f"{other} for {a}", [*actions[:i], other, *actions[i + 1 :]]

    return with_actions(program, change)


OF_PROGRAMS: dict[str, Callable[[Program], Named]] = {
    "sum of a gradient lost": sum_of_gradient_lost,
    "sum of a gradient doubled": sum_of_gradient_doubled,
    "share of another factor": share_of_another_factor,
    "share of another rank": share_of_another_rank,
    "tied weight not summed": tied_weight_not_summed,
    "frozen though trained": frozen_though_trained,
    "weights of another layer": weights_of_another_layer,
    "loss summed otherwise": loss_summed_otherwise,
    "text of another rank": text_of_another_rank,
    "layout forgotten": layout_forgotten,
    "actions swapped": actions_swapped,
    "messages swapped": messages_swapped,
    "action dropped": action_dropped,
    "action repeated": action_repeated,
    "another microbatch": another_microbatch,
    "half a backward": half_a_backward,
}
