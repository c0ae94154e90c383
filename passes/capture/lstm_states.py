"""The last states of an LSTM have the shapes of the first: torch up to 2.12 gives them
one dim more in a capture, as it squeezes the batch where it means the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._decomp import decompositions

from ..replaced import replaced


@contextmanager
def lstm_states_shaped() -> Iterator[None]:
    """Around a forward that is captured."""
    usual = decompositions.one_layer_lstm

    def one_layer(
        x: Tensor, first: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, last = usual(x, first, *args, **kwargs)
        pairs = zip(last, first, strict=True)
        return out, tuple(state.reshape(like.shape) for state, like in pairs)

    with replaced(decompositions, "one_layer_lstm", one_layer):
        yield
