"""Whether a model is the one that a program was compiled from, on all ranks alike; and
a batch one that it was compiled for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes.digest import digest
from autopar.passes.errors import AutoparError, BatchError
from autopar.passes.nested import tensors as tensors_in
from autopar.passes.program import Program, dtype_name
from autopar.runtime.comm.comm import Comm
from autopar.unlike_module import ANOTHER_STEP

MOST = 8  # names in a line of an error


class ModelMismatch(AutoparError):
    """The model is not the one that was compiled, or not the same on all ranks."""


def check_model(program: Program, model: nn.Module) -> None:
    """Compare names, shapes and dtypes, and buffers of whose values it asked. Raises
    ModelMismatch that names the first."""
    held: dict[str, Tensor] = dict(model.named_parameters())
    held.update(model.named_buffers())
    fix = "compile the model again, or bring back the one that was compiled"
    for spec in (*program.parameters.values(), *program.buffers.values()):
        if not spec.stages:
            continue
        name, wanted = spec.part.source, spec.part.shape
        if name not in held:
            raise ModelMismatch(
                f"the program was compiled with '{name}', which the model lacks",
                fix=fix,
            )
        shape, dtype = tuple(held[name].shape), dtype_name(held[name].dtype)
        if (shape, dtype) != (wanted, spec.dtype):
            raise ModelMismatch(
                f"'{name}' is {dtype}{list(shape)}, but the program was compiled for "
                f"{spec.dtype}{list(wanted)}",
                fix=fix,
            )
    check_known(program, held)


def check_known(program: Program, state: Mapping[str, Tensor]) -> None:
    """Raises ModelMismatch for buffers whose contents the captured forward depends on,
    if their values in `state` differ."""
    for name, was in program.known.items():
        if name in state and not state[name].is_meta and digest(state[name]) != was:
            raise ModelMismatch(
                f"forward asked what is in the model's buffer '{name}', and goes on as "
                "it said when it was compiled; now it has other values",
                fix="load these values into the model first, and compile it then",
            )


def check_names(
    subject: str,
    maker: str,
    shapes: Mapping[str, Sequence[int]],
    known: Collection[str],
    actual: Mapping[str, Sequence[int]],
) -> None:
    """Compare saved names and shapes with those wanted.

    shapes: of what must be given. known: names of which each may be given. Raises
    ModelMismatch with all that is wrong.
    """
    missing = [name for name in shapes if name not in actual]
    unexpected = [name for name in actual if name not in known]
    wrong = [
        f"{name}: {list(actual[name])} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in actual and tuple(actual[name]) != tuple(shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "shape": wrong}
    problems = [
        f"  {kind}: {', '.join(names[:MOST])}" + " ..." * (len(names) > MOST)
        for kind, names in kinds.items()
        if names
    ]
    if problems:
        raise ModelMismatch(
            "\n".join([f"{subject} does not fit the model", *problems]),
            fix=f"load that of this model, as {maker} gave it",
        )


def check_same(
    model: nn.Module, comm: Comm, program: Program, weights: bool = True
) -> None:
    """Compare the values of all ranks' parameters, and of buffers that the program
    reads, by digests. weights: else the parameters' values are read from elsewhere.

    Weights on meta are drawn from one seed later, and so the same. All ranks must call
    it. Raises ModelMismatch on all of them.
    """
    world = comm.mesh.size
    read = {name for name, spec in program.buffers.items() if spec.stages}
    buffers = {n: x for n, x in model.named_buffers() if n in read}
    held = {**dict(model.named_parameters() if weights else ()), **buffers}
    named = [(n, x) for n, x in held.items() if not x.is_meta]
    if world == 1 or not named:
        return
    sums = torch.zeros(world, len(named), dtype=torch.int64)
    sums[comm.rank] = torch.tensor([digest(x) for _, x in named])
    sums = comm.reduce_ranks_(sums.to(comm.device), comm.everyone).cpu()
    for rank in range(1, world):
        same = sums[rank] == sums[0]
        if not bool(same.all()):
            name = named[int(same.int().argmin())][0]
            raise ModelMismatch(
                f"'{name}' has other values on rank {rank} than on rank 0",
                fix="call torch.manual_seed with one seed on all ranks before the "
                "model is made, and random.seed and numpy.random.seed where it draws "
                "by these; or load the same weights everywhere",
            )


def checked_outputs(outputs: Sequence[str] | None) -> list[str]:
    """Names of outputs that an evaluation is asked for, without the loss, which comes
    anyway. Raises: AutoparError."""
    if isinstance(outputs, str) or not all(isinstance(n, str) for n in outputs or ()):
        raise AutoparError(
            f"outputs={outputs!r}: names are given in a list",
            fix=f'outputs=("{outputs}",)' if isinstance(outputs, str) else "give texts",
        )
    return [name for name in dict.fromkeys(outputs or ()) if name != "loss"]


def fixed_fields(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a batch that are no tensors, whose values are part of what is
    compiled: copies of dicts and lists, which may be written into.

    Raises: BatchError, where they hold numbers of a batch that are not in a tensor.
    """
    fixed = {k: v for k, v in batch.items() if not isinstance(v, Tensor)}
    for name, value in fixed.items():
        is_array = hasattr(value, "__array__")
        if is_array or next(iter(tensors_in(value)), None) is not None:
            kind = type(value).__name__
            raise BatchError(
                f"'{name}' is a {kind}" + ("" if is_array else " with tensors in it"),
                fix=f"pass it as a tensor: {name}=torch.as_tensor({name})"
                if is_array
                else "pass each of them as a field of its own; where forward takes "
                f"them in one, compile a module around the model, with `def forward("
                f"self, **fields): return self.model({name}=fields)`",
            )
    copied = (dict, list, tuple, set)
    return {k: deepcopy(v) if isinstance(v, copied) else v for k, v in fixed.items()}


def check_wants_none(batch: Mapping[str, Any]) -> None:
    """Raises BatchError for a field that wants a gradient, which would get none."""
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise BatchError(
                f"'{name}' of the batch wants a gradient, and a step computes those of "
                "the model's parameters alone",
                fix="put what computes it into the model, as a module; or, where it is "
                f"not trained, pass {name}.detach()",
            )


def checked_batch(
    program: Program, fixed: Mapping[str, Any], batch: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a batch that has the shapes and dtypes of `program.inputs`.

    fixed: fields that are no tensors, with the values that were compiled; the batch may
    leave them out. Raises: BatchError that names the first field that differs.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
    for name, (shape, dtype) in program.inputs.items():
        if name not in tensors:
            raise BatchError(
                f"the batch has no '{name}'",
                fix=f"pass {', '.join(program.inputs)} by keyword",
            )
        x = tensors[name]
        told = dtype_name(x.dtype)
        if tuple(x.shape) != shape or told != dtype:
            raise BatchError(
                f"'{name}' is {told}{list(x.shape)}, but the step was compiled "
                f"for {dtype}{list(shape)}",
                fix=f"pad the batch to that shape, or {ANOTHER_STEP}"
                if tuple(x.shape) != shape
                else f"pass {name}.to(torch.{dtype}), or {ANOTHER_STEP}",
            )
    for name in batch:
        if name in tensors and name in program.inputs:
            continue
        if name in tensors or name not in fixed:
            raise BatchError(
                f"the step was compiled without '{name}'",
                fix="compile with the same fields as are passed later",
            )
        if batch[name] != fixed[name]:
            raise BatchError(
                f"'{name}' is {batch[name]!r}, but the step was compiled for "
                f"{fixed[name]!r}",
                fix=_for_another(name, batch[name]),
            )
    return tensors


def _for_another(name: str, value: Any) -> str:
    """How a step takes a value that is not the one that it was compiled for."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            "pass a number that changes as a tensor, from the first step on: "
            f"torch.tensor({value!r}); or {ANOTHER_STEP}"
        )
    if isinstance(value, list | tuple):
        return f"leave '{name}' out where forward does not need it; or {ANOTHER_STEP}"
    return ANOTHER_STEP
