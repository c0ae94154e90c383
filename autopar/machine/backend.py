"""Chooses the backend of emitted modules: Python, or code that Inductor makes."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from types import MappingProxyType

import torch

from autopar.machine.profile_file import Backends
from autopar.passes.errors import AutoparError
from autopar.passes.plan import AUTO


class BackendError(AutoparError):
    """The backend that was asked for cannot compile here."""


def resolve_backend(
    asked: str, device: torch.device, measured: Backends = MappingProxyType({})
) -> tuple[str, str]:
    """Returns the backend, "eager" or "inductor", and a note for the user or "".

    asked: one of these, or "auto": the one that was measured to be faster; without
    measurements inductor on a GPU, if there is a compiler, and eager on a CPU.
    measured: of this machine, see `autopar.machine.profile_file`. Raises: BackendError.
    """
    missing = missing_compiler(device)
    if asked != AUTO:
        if asked == "inductor" and missing:
            raise BackendError(
                f"backend 'inductor' has no compiler for {device.type}: {missing} is "
                "not installed",
                fix="install it, or use backend 'eager'",
            )
        return asked, ""
    faster = device.type == "cuda"
    if device.type in measured:
        faster = measured[device.type].inductor < measured[device.type].eager
    if not faster:
        return "eager", ""
    if missing:
        return "eager", (
            f"functions run as they are written, and not compiled by Inductor: "
            f"{missing} is not installed"
        )
    return "inductor", ""


def missing_compiler(device: torch.device) -> str:
    """The compiler that Inductor lacks for a device; "" if it lacks none.

    For a CPU a C++ compiler, the one that CXX names or g++; for a GPU triton.
    """
    if device.type != "cpu":
        return "" if find_spec("triton") else "the Python package triton"
    named = os.environ.get("CXX") or "g++"
    return "" if shutil.which(named) else f"the C++ compiler {named}"
