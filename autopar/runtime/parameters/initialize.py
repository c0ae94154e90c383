"""Local parameters: cut from real weights, or initialised module by module from meta.

A model on the `meta` device is never whole in memory. Each of its modules is made on
the CPU, initialised by its own initialiser, cut into the rank's shards and freed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program
from autopar.runtime.parameters.shards import local_shape, take_shard


class InitializationError(AutoparError):
    """A model on the meta device whose values cannot be made."""


def local_state(
    program: Program, model: nn.Module, rank: int, device: torch.device, seed: int
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The rank's shards of the parameters of its stages, and all buffers, by name:
    those of the model itself, where they are on the device.

    With meta parameters, every rank draws the same values from `seed`. Raises:
    InitializationError, for a module on meta that cannot initialise itself.
    """
    mesh, coords = program.mesh, program.mesh.coords(rank)
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    wanted: dict[str, list[str]] = {}
    for name, spec in program.parameters.items():
        if program.holds(name, rank):
            wanted.setdefault(spec.part.source, []).append(name)
    for source, whole in real_tensors(model, seed):
        if source in program.buffers:
            buffers[source] = whole.detach().to(device)
        for name in wanted.get(source, ()):
            spec = program.parameters[name]
            shard = take_shard(whole.detach(), spec, mesh, coords).to(device)
            parameters[name] = nn.Parameter(shard, requires_grad=spec.trainable)
    # In the order of the program, whatever the order in which modules were made.
    ordered = {
        name: parameters[name] for name in program.parameters if name in parameters
    }
    return ordered, buffers


def empty_state(
    program: Program, model: nn.Module, rank: int, device: torch.device
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The same with parameters that have no values yet.

    Raises: InitializationError, for a buffer on meta.
    """
    coords, parameters = program.mesh.coords(rank), {}
    for name, spec in program.parameters.items():
        if program.holds(name, rank):
            shape = local_shape(spec, program.mesh, coords)
            held = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
            parameters[name] = nn.Parameter(held, requires_grad=spec.trainable)
    buffers = {}
    for name, b in model.named_buffers():
        if name in program.buffers:
            if b.is_meta:
                raise InitializationError(
                    f"buffer '{name}' is on the meta device, and files of weights may "
                    "not have it",
                    fix="make the model in `with autopar.on_meta():`, which leaves "
                    "buffers where they are",
                )
            buffers[name] = b.detach().to(device)
    return parameters, buffers


def real_tensors(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every distinct parameter and buffer with its value, one module at a time."""
    seen: set[int] = set()
    with _own_generator(seed):
        for path, module in model.named_modules():
            table = {**module._parameters, **module._buffers}
            own = {k: t for k, t in table.items() if t is not None}
            fresh = {k: t for k, t in own.items() if id(t) not in seen}
            seen.update(id(t) for t in fresh.values())
            if any(t.is_meta for t in fresh.values()):
                real = _initialized(model, module, path, set(fresh))
            else:
                real = fresh
            for name, tensor in real.items():
                yield f"{path}.{name}" if path else name, tensor


@contextlib.contextmanager
def _own_generator(seed: int) -> Iterator[None]:
    """Draws depend on the seed alone, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU, where modules are made
        yield


def _initialized(
    model: nn.Module, module: nn.Module, path: str, names: set[str]
) -> dict[str, Tensor]:
    """A copy of a single module (without children) on the CPU, with initial values."""
    alone = copy.copy(module)
    alone._modules = {}
    alone._parameters = {
        k: None if p is None else nn.Parameter(_empty(p), requires_grad=p.requires_grad)
        for k, p in module._parameters.items()
    }
    alone._buffers = {
        k: None if b is None else _empty(b) if b.is_meta else b
        for k, b in module._buffers.items()
    }
    lost = [k for k in names if k in module._buffers and module._buffers[k].is_meta]
    initialise = getattr(model, "_init_weights", None)
    with torch.no_grad():
        if hasattr(alone, "reset_parameters"):
            alone.reset_parameters()
        elif initialise is None:
            _refuse(path, sorted(names), module)
        if initialise is not None:
            initialise(alone)
    if lost and not hasattr(alone, "reset_parameters"):
        _refuse(path, lost, module)
    both: Mapping[str, Tensor | None] = {**alone._parameters, **alone._buffers}
    drawn = {k: t for k, t in both.items() if k in names and t is not None}
    for name, tensor in drawn.items():
        if tensor.is_floating_point() and bool(tensor.isnan().all()):
            _refuse(path, [name], module)
    return drawn


def _empty(like: Tensor) -> Tensor:
    """Memory on the CPU that shows whether an initialiser has written to it."""
    made = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return made.fill_(float("nan")) if made.is_floating_point() else made


def _refuse(path: str, names: list[str], module: nn.Module) -> None:
    kind = type(module).__name__
    raise InitializationError(
        f"'{path}.{names[0]}' is on the meta device, and {kind} cannot initialise it",
        fix=f"give {kind} a reset_parameters(), or the model an _init_weights(module), "
        "or load a state dict into a model with real weights",
    )
