"""autopar: parallel training of an unmodified PyTorch GPT, planned by a compiler.

step = autopar.compile(model, "pp=2,tp=2", microbatches=8)
loss = step(ids=ids, labels=labels)      # forward and backward; gradients are ready
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.gc_paused import gc_paused
from autopar.version import VERSION

if TYPE_CHECKING:
    from autopar.compiler import compile_offline
    from autopar.models.meta import on_meta
    from autopar.passes.errors import AutoparError
    from autopar.passes.mesh import Mesh
    from autopar.passes.plan import Plan
    from autopar.passes.price.cluster import Cluster, Device, Level
    from autopar.runtime.parameters.by_element import by_element
    from autopar.step import Step, compile

__all__ = [
    "AutoparError",
    "Cluster",
    "Device",
    "Level",
    "Mesh",
    "Plan",
    "Step",
    "by_element",
    "compile",
    "compile_offline",
    "on_meta",
]
__version__ = VERSION

# Name -> the module that has it, as a type checker reads it above. It is imported on
# first use: torch takes a second, which the command line's help need not wait for.
_MODULES = {
    "AutoparError": "autopar.passes.errors",
    "Cluster": "autopar.passes.price.cluster",
    "Device": "autopar.passes.price.cluster",
    "Level": "autopar.passes.price.cluster",
    "Mesh": "autopar.passes.mesh",
    "Plan": "autopar.passes.plan",
    "Step": "autopar.step",
    "by_element": "autopar.runtime.parameters.by_element",
    "compile": "autopar.step",
    "compile_offline": "autopar.compiler",
    "on_meta": "autopar.models.meta",
}


def __getattr__(name: str) -> Any:
    """Import a name on its first use (PEP 562); all of ours come with it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    with gc_paused():
        for each, module in _MODULES.items():
            globals()[each] = getattr(import_module(module), each)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
