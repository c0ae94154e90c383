"""autopar: parallel training of an unmodified PyTorch GPT, planned by a compiler.

step = autopar.compile(model, "pp=2,tp=2", microbatches=8)
loss = step(ids=ids, labels=labels)      # forward and backward; gradients are ready
"""

from autopar.gc_paused import gc_paused

with gc_paused():
    from autopar.compiler import compile_offline
    from autopar.models.meta import on_meta
    from autopar.passes.errors import AutoparError
    from autopar.passes.mesh import Mesh
    from autopar.passes.plan import Plan
    from autopar.passes.price.cluster import Cluster, Device, Level
    from autopar.runtime.parameters.by_element import by_element
    from autopar.step import Step, compile
    from autopar.version import VERSION

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
