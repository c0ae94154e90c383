"""Parameters that are rows of one tensor, as the experts of a layer: optimizers update
each of them, stages compute with all at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autopar.passes.program import Program
from autopar.runtime.parameters.changed import check_data, kind_of


class Stack:
    """A tensor [rows, ...], with the memory of which parameters [...] compute from now
    on, by name, in order."""

    def __init__(self, name: str, rows: Mapping[str, nn.Parameter]) -> None:
        self.name, self.rows = name, dict(rows)
        self.tensor = self._joined()

    def rebind(self) -> None:
        """Is of the memory that its rows have now, where they were given other: what
        they had may be somebody's, to give it back. Raises: ParameterError, for what
        has not their kind."""
        if all(map(Tensor.is_set_to, self.rows.values(), self.tensor)):
            return
        for name, p in self.rows.items():
            check_data(name, p, kind_of(self.tensor[0]))
        self.tensor = self._joined()

    def _joined(self) -> Tensor:
        """Rows in one memory: what they have, if it is one; else new."""
        held = [p.detach() for p in self.rows.values()]
        if (whole := _in_one_memory(held)) is not None:
            return whole
        whole = torch.stack(held)
        for p, row in zip(self.rows.values(), whole, strict=True):
            p.data = row
        return whole


def make_stacks(
    program: Program, parameters: Mapping[str, nn.Parameter]
) -> list[Stack]:
    """The tensors of a rank's stages that stack several of its parameters."""
    stacks = []
    for name in program.tensors:
        rows = {n: parameters[n] for n in program.rows_of(name) if n in parameters}
        if rows and name not in rows:
            stacks.append(Stack(name, rows))
    return stacks


def _in_one_memory(rows: list[Tensor]) -> Tensor | None:
    """The tensor that rows are of already, as another program computes with them."""
    first = rows[0]
    size = first.numel() * first.itemsize
    memory = first.untyped_storage().data_ptr()
    together = first.numel() and all(
        row.is_contiguous()
        and row.untyped_storage().data_ptr() == memory
        and row.data_ptr() == first.data_ptr() + i * size
        for i, row in enumerate(rows)
    )
    if not together or first.is_meta:
        return None
    strides = first.numel(), *first.stride()
    return first.as_strided((len(rows), *first.shape), strides)
