"""Parameters that users change after compiling: what a step follows, and what not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from passes.errors import AutoparError
from passes.program import Program, dtype_name

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class ParameterError(AutoparError):
    """A parameter that was changed into one that the program was not compiled for."""


def kind_of(x: Tensor) -> Kind:
    return tuple(x.shape), x.dtype, x.device


def check_data(name: str, p: Tensor, kind: Kind) -> None:
    """Whether a parameter has data of the kind that it had. Raises: ParameterError."""
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
    if not p.is_contiguous():
        raise ParameterError(
            f"'{name}' was given data that is not contiguous",
            fix="p.data = x.contiguous()",
        )


def check_trained(program: Program, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ParameterError if one requires gradients that was compiled without."""
    for name, p in parameters.items():
        if p.requires_grad and not program.parameters[name].trainable:
            raise ParameterError(
                f"'{name}' requires gradients now, but was compiled without",
                fix="unfreeze it before the step is compiled, and freeze it afterwards",
            )
