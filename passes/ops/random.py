"""Random numbers, and dropout, that do not depend on the plan.

Each number follows from the seed, the step, which draw of the model it belongs to, and
its position in the whole tensor: a rank draws those of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..graph import Node, resolve
from ..ops import extents, parts
from ..ops.op import Op, Place, to_out

# uniform: in [0, 1). normal: of mean 0 and deviation 1. exponential: of mean 1, none is
# 0. bits: 63 of them, as integers.
Kind = Literal["uniform", "normal", "exponential", "bits"]
# Those of torch's ops that draw numbers, see `draw_of`, and what they heed.
DRAWN = {
    "aten.rand": "size dtype",
    "aten.rand_like": "self dtype",
    "aten.uniform": "self from to",
    "aten.bernoulli": "self p",
    "aten.exponential": "self lambd",
    "aten.randn": "size dtype",
    "aten.randn_like": "self dtype",
    "aten.normal": "mean std size dtype",
    "aten.normal_functional": "self mean std",
    "aten.randint": "low high size dtype",
    "aten.randint_like": "self low high dtype",
}
DRAW = "autopar.draw"
CHANCE = ("autopar.dropout", DRAW)
SIZED = ("aten.rand", "aten.randn", "aten.randint")
# What a rank calls for numbers, and for what a mask of dropout is made of.
DRAWS = ("comm.draw", "comm.dropout_counters")


@dataclass(frozen=True)
class Draw:
    """One of torch's ops that draw: numbers of a kind, and what is done with them.

    steps: torch's ops and their other operand, in order; the result is cast.
    """

    kind: Kind
    steps: tuple[tuple[str, Any], ...] = ()

    @property
    def dtype(self) -> torch.dtype | None:
        """The numbers' own; None: that of the result."""
        if self.kind == "bits":
            return torch.int64
        compared = any(op == "aten.lt" for op, _ in self.steps)
        return torch.float32 if compared else None


def awaits_number(node: Node) -> bool:
    """Whether it draws, and is not numbered yet: all that a model draws is, in order,
    be it read or not."""
    if node.op in CHANCE:
        return node.arg("number") is None
    seeded = torch.Tag.nondeterministic_seeded
    return node.is_aten and seeded in resolve(node.op).tags


def draw_of(name: str, bound: Mapping[str, Any]) -> Draw | None:
    """The draw of an op with such arguments; None if it is not known.

    name: `aten.rand_like`. bound: its arguments by name, torch's defaults among them.
    """
    if name not in DRAWN or bound.get("generator") is not None:
        return None
    kind = name.removeprefix("aten.").removesuffix("_functional").removesuffix("_like")
    if kind == "rand":
        return Draw("uniform")
    if kind == "randn":
        return Draw("normal")
    if kind == "uniform":
        low, high = bound["from"], bound["to"]
        return Draw("uniform", _moved(high - low, low))
    if kind == "normal":
        return Draw("normal", _moved(bound["std"], bound["mean"]))
    if kind == "exponential":
        return Draw("exponential", _moved(1.0 / bound["lambd"], 0.0))
    if kind == "bernoulli":
        return Draw("uniform", (("aten.lt", bound.get("p", bound["self"])),))
    if kind == "randint" and isinstance(bound["high"], int):
        low = bound.get("low", 0)
        span = ("aten.remainder", bound["high"] - low)  # as torch does
        return Draw("bits", (span, *_moved(1, low)))
    return None


def _moved(scale: Any, offset: Any) -> tuple[tuple[str, Any], ...]:
    steps = ("aten.mul", scale, 1), ("aten.add", offset, 0)
    return tuple((op, x) for op, x, nothing in steps if not _is(x, nothing))


def _is(x: Any, number: int) -> bool:
    return isinstance(x, int | float) and x == number


def overload(op: str, operand: Any) -> str:
    """The overload of a step's op for such an operand, as it is captured."""
    number = isinstance(operand, int | float) and op not in ("aten.mul", "aten.add")
    return f"{op}.{'Scalar' if number else 'Tensor'}"


def dropped_on_rank(at: Place, node: Node, local: Node) -> Node:
    """The mask is a function of the global position of each element."""
    return replace(local, op="comm.dropout", args=(*local.args, _position(at, node)))


def drawn_on_rank(at: Place, node: Node, local: Node) -> Node:
    """Draws each number as a function of its global position."""
    args = (*node.named("kind number"), _position(at, node), node.out.dtype)
    return replace(local, op="comm.draw", args=args)


def _position(at: Place, node: Node) -> tuple[Any, ...]:
    x = node.operands[0]
    return tuple(at.position(x, dim) for dim in range(len(x.shape)))


OPS = (
    Op(
        "aten.dropout",
        "input p train",
        elements="like",
        extents=extents.aligned,
        counts=True,
        put_back=parts.reshaped,
    ),
    Op(
        "autopar.dropout",
        "x p number",
        "... -> ...",
        keeps=("mask",),
        on_rank=dropped_on_rank,
    ),
    Op("comm.dropout", "x p number position"),
    Op("comm.dropout_counters", "number position"),
    Op("autopar.kept", "rows cols p", rowwise=True),
    *(
        Op(name, heeds, sizes=to_out("size") if name in SIZED else None)
        for name, heeds in DRAWN.items()
    ),
    # Its operand says of which shape.
    Op(DRAW, "x kind number", "... -> ...", finite="always", on_rank=drawn_on_rank),
    Op("comm.draw", "kind number position dtype", rowwise=True),
)
