"""Ops that make tensors of no tensor, or of one's shape alone."""

from __future__ import annotations

from typing import Any

from ..ops import extents, shrunk
from ..ops.op import Elements, Op, to_out


def _sized(heeds: str, *names: str, **more: Any) -> tuple[Op, ...]:
    of_size = to_out("size")
    return tuple(Op(f"aten.{n}", heeds, sizes=of_size, **more) for n in names)


def _like(
    heeds: str, *names: str, elements: Elements = "like", **more: Any
) -> tuple[Op, ...]:
    alike: Any = {"elements": elements, "extents": extents.aligned, "counts": True}
    return tuple(Op(f"aten.{n}", heeds, **alike, **more) for n in names)


CORNER = "... m! n! -> ... m! n!"

OPS = (
    *_sized("size dtype", "empty", "ones", "zeros"),
    *_sized("size fill_value dtype", "full", shrunk=shrunk.filled),
    *_sized(
        "self size dtype", "new_empty", "new_ones", "new_zeros", extents=extents.apart
    ),
    *_sized(
        "self size fill_value dtype",
        "new_full",
        shrunk=shrunk.filled,
        extents=extents.apart,
    ),
    *_like("self dtype", "empty_like", "ones_like", "zeros_like"),
    *_like("self fill_value dtype", "full_like", shrunk=shrunk.filled),
    Op("aten.arange", "start end step dtype", counts=True, shrunk=shrunk.arange),
    Op("aten.eye", shrunk=shrunk.two_sizes),
    Op("aten.scalar_tensor", "s dtype"),
    Op("aten.tril_indices", "row col offset dtype"),
    *_like("self", "lift_fresh_copy", elements="same"),
    *(
        Op(f"aten.{n}", "self diagonal", CORNER, f"default({example})", values="moved")
        for n, example in (("triu", "x(a, b, c), 1"), ("tril", "x(b, b)"))
    ),
)
