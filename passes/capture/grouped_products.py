"""Shapes of torch's grouped products in float32 and float16, which its kernels take.

Its rule of shapes knows bfloat16 alone, and writes a log of errors before it refuses:
`_meta_grouped_mm_common` in torch/_meta_registrations.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _meta_registrations

from ..replaced import replaced

RULE = "_meta_grouped_mm_common"
OF_SHAPES = "_create_grouped_mm_output_tensor"
TAKEN = (torch.float32, torch.float16)


@contextmanager
def shapes_of_grouped_products() -> Iterator[None]:
    """Within, a grouped product has a shape in each dtype that a kernel takes."""
    names = vars(_meta_registrations)
    rule, shapes = names.get(RULE), names.get(OF_SHAPES)
    if rule is None or shapes is None:
        yield
        return

    def wider(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if mat_a.dtype != mat_b.dtype or mat_a.dtype not in TAKEN:
            return rule(mat_a, mat_b, *args, **kwargs)
        return shapes(mat_a, mat_b, kwargs["offs"], kwargs["out_dtype"])

    with replaced(_meta_registrations, RULE, wider):
        yield
