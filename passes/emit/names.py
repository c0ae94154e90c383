"""Names that mean something in emitted modules, so that nothing else may have them."""

from __future__ import annotations

import keyword

# Arguments of functions, what they keep, modules that are imported.
RESIDUALS = "residuals"
MODULES = ("torch", "F", "kernels", "aten")
MEANT = ("c", "p", "g", "k", "b", "i", RESIDUALS, "made", *MODULES)
RESERVED = frozenset({*MEANT, *keyword.kwlist, "inf", "range", "reversed", "_"})
# Functions that an executor calls, with tables and collectives.
FORWARD_ENTRIES = ("setup", "prologue", "forward", "epilogue")
BACKWARD_ENTRIES = ("backward", "backward_input", "backward_weight")
ENTRIES = frozenset({*FORWARD_ENTRIES, *BACKWARD_ENTRIES})
