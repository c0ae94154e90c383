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
        held = [p.detach() for p in self.rows.values()]
        whole = _in_one_memory(held)
        self.tensor = torch.stack(held) if whole is None else whole
        if whole is None:
            for p, row in zip(self.rows.values(), self.tensor, strict=True):
                p.data = row

    def rebind(self) -> None:
        """Takes over the values of parameters that were given other memory. Raises:
        ParameterError, for what has not their kind."""
        for (name, p), row in zip(self.rows.items(), self.tensor, strict=True):
            if not p.is_set_to(row):
                check_data(name, p, kind_of(row))
                row.copy_(p.detach())
                p.data = row


def make_stacks(
    program: Program, parameters: Mapping[str, nn.Parameter]
) -> list[Stack]:
    """The tensors of a rank's stages that have several of its parameters as rows."""
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
