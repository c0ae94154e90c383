"""autopar: parallel training of an unmodified PyTorch GPT, planned by a compiler.

step = autopar.compile(model, "pp=2,tp=2", microbatches=8)
loss = step(ids=ids, labels=labels)      # forward and backward; gradients are ready
"""

import passes as _passes

if not getattr(_passes, "AUTOPAR", False):
    raise ImportError(
        f"'passes' is {_passes.__file__}, which is not the package that autopar needs\n"
        "  fix  rename your own passes.py (or move it out of the import path)"
    )

from autopar.gc_paused import gc_paused

with gc_paused():
    from autopar.compiler import compile_offline
    from autopar.models.meta import on_meta
    from autopar.runtime.parameters.by_element import by_element
    from autopar.step import Step, compile
    from autopar.version import VERSION
    from passes.errors import AutoparError
    from passes.mesh import Mesh
    from passes.plan import Plan
    from passes.price.cluster import Cluster, Device, Level

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
