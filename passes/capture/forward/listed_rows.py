"""`rows.tolist()`, of rows that the data choose, where a list is but an index.

Mixtral's first code in Hugging Face's library, and what was written after it, looks up
rows by lists, `x[None, rows.tolist()]`: that is the tensor itself as an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...replaced import replaced
from ..forward.numbers_present import PresentNumbers
from ..forward.user_frames import asked_by_user
from ..forward.values_read import has_shape, is_unknown, read_here

INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


class ListedRows:
    """The list that `tolist` returns of rows, int64 [n], where n is unknown before a
    program runs. Whatever else Python does with a list raises CaptureError."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def _refuse(self, *_: Any) -> NoReturn:
        raise read_here("item", rows=False).error()

    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __add__ = _refuse
    __getattr__ = __hash__ = _refuse


@contextmanager
def rows_listed(
    hit: Callable[[Tensor], PresentNumbers | None],
    counts: Callable[[Sequence[Any], Tensor], Sequence[Any]],
) -> Iterator[None]:
    """Lets fake tensors, which have no numbers, list rows whose count is unknown as
    `ListedRows`. hit: the numbers of a tensor, if they may be iterated over. counts:
    the list of integers whose count is known."""
    usual = FakeTensor.tolist

    def tolist(x: FakeTensor) -> Any:
        if (numbers := hit(x)) is not None:
            return numbers.tolist()
        with torch._C.DisableTorchFunction():  # who captures need not know of this look
            integers = x.dim() == 1 and x.dtype == torch.int64
        if integers and not has_shape(x) and asked_by_user():
            return ListedRows(x)
        return counts(usual(x), x) if integers and is_unknown(x) else usual(x)

    with replaced(FakeTensor, "tolist", tolist):
        yield


def with_rows(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a call, with listed rows in an index replaced by the rows."""
    if func not in INDEXED:
        return args
    x, index, *values = args
    many = isinstance(index, tuple)
    parts = [
        p.rows if isinstance(p, ListedRows) else p
        for p in (index if many else (index,))
    ]
    return (x, tuple(parts) if many else parts[0], *values)
