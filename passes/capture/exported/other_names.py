"""Other names that torch has for ops, which are called as these are: as NumPy's
(concatenate, multiply), and those of torch.special.

torch/csrc/jit/passes/normalize_ops.cpp has such a list, for TorchScript. Those that
are declared in `passes.ops` need no other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

NAMES = {
    "absolute": "abs",
    **{f"arc{f}": f"a{f}" for f in ("cos", "cosh", "sin", "sinh", "tan", "tanh")},
    "arctan2": "atan2",
    "clip": "clamp",
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("divide", "true_divide"), "div"),
    "fix": "trunc",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "special_digamma": "digamma",
    "special_expit": "sigmoid",
    "special_gammaln": "lgamma",
    **{
        f"special_{f}": f
        for f in ("erf", "erfc", "erfinv", "exp2", "expm1", "i0", "log1p", "logit")
    },
    **{f"special_{f}": f for f in ("logsumexp", "sinc")},
    "special_psi": "digamma",
    "subtract": "sub",
}


@cache
def usual_op(op: Any) -> Any:
    """The op that a name stands for, in place or not; all else as it is."""
    if not isinstance(op, torch._ops.OpOverload):
        return op
    namespace, _, called = op._schema.name.partition("::")
    name = NAMES.get(called.removesuffix("_"))
    if namespace != "aten" or name is None:
        return op
    packet = getattr(torch.ops.aten, name + "_" * called.endswith("_"))
    return getattr(packet, op._overloadname)
