"""Parameters that users change after compiling: what a step follows, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

import torch
from torch import Tensor, nn

from autopar.passes.errors import AutoparError
from autopar.passes.program import Program, dtype_name
from autopar.runtime.parameters.shards import take_shard

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class ParameterError(AutoparError):
    """A parameter that was changed into one that the program was not compiled for."""


def kind_of(x: Tensor) -> Kind:
    return tuple(x.shape), x.dtype, x.device


def check_kind(name: str, p: Tensor, kind: Kind) -> None:
    """Raises ParameterError if it is not what it was compiled for."""
    if kind_of(p) != kind:
        now, before = (
            f"{dtype_name(dtype)}{list(shape)} on {device}"
            for shape, dtype, device in (kind_of(p), kind)
        )
        raise ParameterError(
            f"'{name}' was given {now} as its data, but was compiled for {before}",
            fix="give it a tensor like itself, or load whole tensors by "
            "step.load_state_dict(state)",
        )


def check_data(name: str, p: Tensor, kind: Kind) -> None:
    """Whether a parameter has data of the kind that it had. Raises: ParameterError."""
    check_kind(name, p, kind)
    if not p.is_contiguous():
        raise ParameterError(
            f"'{name}' was given data that is not contiguous",
            fix="p.data = x.contiguous()",
        )


def check_trained(program: Program, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ParameterError if one requires gradients that was compiled without, or has
    hooks on its gradient, which autograd does not compute."""
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ParameterError(
                f"'{name}' has a hook on its gradient, and a step calls none",
                fix="change p.grad after the step: it is complete then",
            )
        if p.requires_grad and not program.parameters[name].trainable:
            raise ParameterError(
                f"'{name}' requires gradients now, but was compiled without",
                fix="unfreeze it before the step is compiled, and freeze it afterwards",
            )


class Originals:
    """The model's own parameters, of which a step has copies: were they changed since?

    coords: of this rank. Keeps none of them alive.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], coords: Mapping[str, int]
    ) -> None:
        self._coords = coords
        self._held = {
            name: (ref(p), p._version, p.data_ptr(), p.requires_grad)
            for name, p in parameters.items()
        }

    def check(self, program: Program, copies: Mapping[str, nn.Parameter]) -> None:
        """Raises ParameterError for a value or flag that the step does not have."""
        alike = {}
        for name, copy in copies.items():
            spec = program.parameters[name]
            source = spec.part.source
            if source not in self._held:
                continue
            original, version, place, trained = self._held[source]
            if (p := original()) is None or p.is_meta:
                continue
            if p.requires_grad not in (trained, copy.requires_grad):
                raise ParameterError(
                    f"requires_grad of the model's '{source}' was changed after it was "
                    "compiled, and the step has a copy of its own",
                    fix=f"call requires_grad_({p.requires_grad}) before autopar.compile"
                    ", or of the step's: dict(step.named_parameters())",
                )
            if (p._version, p.data_ptr()) == (version, place):
                continue
            now = take_shard(p.detach(), spec, program.mesh, self._coords)
            if not torch.equal(now.to(copy.device), copy):  # else it was only moved
                raise ParameterError(
                    f"the model's '{source}' was changed after it was compiled, and "
                    "the step has a copy of its own",
                    fix="change it before autopar.compile, or load it anew: "
                    "step.load_state_dict(model.state_dict())",
                )
            alike[source] = original, p._version, p.data_ptr(), trained
        self._held |= alike
