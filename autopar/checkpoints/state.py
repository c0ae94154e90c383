"""State dicts of a step: whole tensors by the model's own names, from and to shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.checkpoints.own_form import OwnForm, held_by_modules, own_state
from autopar.checkpoints.safetensors_file import TensorKind
from autopar.passes.program import Program
from autopar.runtime.agreement.validate import check_known, check_names
from autopar.runtime.execute.executor import Executor
from autopar.runtime.parameters.shards import put_shard, take_shard

if TYPE_CHECKING:
    from autopar.held_state import HeldState


def state_dict(step: HeldState, rank0_only: bool = False) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers on the CPU; on all ranks, or one."""
    state = dict(whole_tensors(step, kinds_of(step), rank0_only))
    if rank0_only and step.comm.rank:
        return {}
    for alias, name in step.program.aliases.items():
        state[alias] = state[name]
    held = {name: state[name] for name in step.names if name in state}
    return held if step.form is None else step.form.write(held)


def tied_names(step: HeldState) -> dict[str, str]:
    """Further name of a tied weight -> the name under which it is stored."""
    return {
        alias: name
        for alias, name in step.program.aliases.items()
        if alias in step.names and alias not in step.unused
    }


def kinds_of(step: HeldState) -> dict[str, TensorKind]:
    """Shapes and dtypes of what `whole_tensors` gives, by name; tied weights once."""
    program = step.program
    kinds = {name: TensorKind.of(value) for name, value in step.unused.items()}
    for source, names in program.sources.items():
        first = program.parameters[names[0]]
        dtype = getattr(torch, first.dtype)
        kinds[source] = TensorKind(tuple(first.part.shape), dtype)
    return kinds


def whole_tensors(
    step: HeldState, wanted: Iterable[str], rank0_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of `kinds_of` in turn, on the CPU. All ranks must go through them, and
    nothing here keeps one. rank0_only: those of other ranks have no values."""
    held = dict(step.named_parameters())
    program, sources = step.program, step.program.sources

    @torch.no_grad()  # around the generator it would keep what was yielded last
    def put_together(names: list[str]) -> Tensor:
        first = program.parameters[names[0]]
        dtype = getattr(torch, first.dtype)
        whole = torch.zeros(first.part.shape, dtype=dtype, device=step.device)
        for name in names:
            if name in held and step.owns(name):
                spec = program.parameters[name]
                put_shard(whole, held[name], spec, program.mesh, step.comm.coords)
        step.comm.reduce_ranks_(whole, step.comm.everyone)
        return whole.to("meta" if rank0_only and step.comm.rank else "cpu")

    for name in wanted:
        own = step.unused.get(name)
        yield name, put_together(sources[name]) if own is None else own.clone()


class IncompatibleKeys(NamedTuple):
    """The result of a module's `load_state_dict`: names that the loaded state dict
    lacks, and names that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def check_state_dict(
    step: HeldState, state: Mapping[str, Tensor], strict: bool = True
) -> IncompatibleKeys:
    """Compares names and shapes. Raises ModelMismatch for shapes that are not the
    model's, if strict also for names, and for what `check_known` tells."""
    program = step.program
    parts = [spec.part for spec in program.parameters.values()]
    shapes = {part.source: part.shape for part in parts}
    known = {*step.names, *shapes, *program.buffers}
    actual = {n: t.shape for n, t in state.items()}
    differing = IncompatibleKeys(
        [n for n in step.names if n not in actual],
        [n for n in actual if n not in known],
    )
    if not strict:
        shapes = {n: shape for n, shape in shapes.items() if n in actual}
        known |= {*actual}
    check_names("the state dict", "step.state_dict", shapes, known, actual)
    check_known(program, state)
    return differing


def by_source(step: HeldState, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, with tied weights also by the name that the program has for them: the
    value of the last of their names, as a module takes it."""
    aliases = step.program.aliases
    own = {aliases.get(name, name): state[name] for name in step.names if name in state}
    return {**state, **own}


@torch.no_grad()
def load_state_dict(step: HeldState, state: Mapping[str, Tensor]) -> None:
    """Take this rank's shards of what `check_state_dict` let pass."""
    program = step.program
    for name, p in step.named_parameters():
        spec = program.parameters[name]
        if (whole := state.get(spec.part.source)) is not None:
            p.copy_(take_shard(whole, spec, program.mesh, step.comm.coords))
    step.set_whole(state)


def remember(
    model: nn.Module, program: Program, buffers: Mapping[str, Tensor]
) -> tuple[list[str], dict[str, Tensor]]:
    """The names of the model's state dict, as its modules hold what is in it; and its
    values that no rank has shards of.

    buffers: with their values, which the model's may lack.
    """
    state = own_state(model)
    if (form := OwnForm.of(model, state)) is not None:
        tensors = held_by_modules(model)
        state = {name: tensors[name] for name in form.names(state)}
    held = set(program.sources)
    held |= {alias for alias, name in program.aliases.items() if name in held}
    whole = {n: buffers.get(n, t) for n, t in state.items() if n not in held}
    unused = {n: t for n, t in whole.items() if not t.is_meta}
    return list(state), {n: t.detach().cpu().clone() for n, t in unused.items()}


def training_state(executor: Executor) -> dict[str, Any]:
    """The state to resume from beside weights; see `Step.training_state`."""
    state = {"steps": executor.steps, "seed": executor.seed}
    if (scale := executor.loss_scale) is None:
        return state
    return {**state, "loss_scale": scale.state_dict()}


def load_training_state(executor: Executor, state: Mapping[str, Any]) -> None:
    """Sets an executor's step count, seed and loss scale to those of a checkpoint."""
    executor.steps, executor.seed = state["steps"], state["seed"]
    if executor.loss_scale and "loss_scale" in state:
        executor.loss_scale.load_state_dict(state["loss_scale"])
