"""Shapes that torch gets wrong in a capture, or does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._decomp import decompositions

from ...replaced import replaced

# Of grouped products torch's rule of shapes, which knows bfloat16 alone, where kernels
# take two more, and writes a log of errors before it refuses.
RULE = "_meta_grouped_mm_common"
OF_SHAPES = "_create_grouped_mm_output_tensor"
TAKEN = (torch.float32, torch.float16)


@contextmanager
def shapes_of_grouped_products() -> Iterator[None]:
    """Gives grouped products shapes in each dtype that a kernel takes."""
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


@contextmanager
def lstm_states_shaped() -> Iterator[None]:
    """Gives the last states of an LSTM the shapes of the first: torch up to 2.12 adds a
    dim, as it squeezes the batch where it means the step."""
    usual = decompositions.one_layer_lstm

    def one_layer(
        x: Tensor, first: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, last = usual(x, first, *args, **kwargs)
        pairs = zip(last, first, strict=True)
        return out, tuple(state.reshape(like.shape) for state, like in pairs)

    with replaced(decompositions, "one_layer_lstm", one_layer):
        yield
