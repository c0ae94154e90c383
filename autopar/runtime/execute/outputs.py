"""Outputs of a program beside its loss: parts of ranks and microbatches, put together
on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from autopar.passes.mesh import PIPELINE, TIME
from autopar.passes.program import OutputSpec, Program
from autopar.runtime.comm.comm import Comm


class Outputs:
    """The outputs of a step on one rank, as stages make them."""

    def __init__(self, program: Program, comm: Comm) -> None:
        self.program, self.comm = program, comm
        self._parts: defaultdict[int, list[tuple[int, Sequence[Tensor]]]]
        self._parts = defaultdict(list)
        self.counts = [0] * len(program.stages)
        for spec in program.outputs.values():
            self.counts[spec.stage] = max(self.counts[spec.stage], spec.place + 1)
        # What every step tells: scalars, and sums for updates of buffers.
        self.summed = [*list(program.outputs)[: program.metrics], *program.sums]

    def take(
        self, stage: int, microbatch: int, made: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Keeps what forward made for a microbatch, and returns the rest: what goes to
        the next stage, and the loss."""
        if not (count := self.counts[stage]):
            return made
        sends = len(made) - count - (stage == len(self.counts) - 1)
        self._parts[stage].append((microbatch, made[sends : sends + count]))
        return (*made[:sends], *made[sends + count :])

    def shares(self) -> list[Tensor]:
        """Returns this rank's shares of the outputs that every step sums over ranks:
        flat, float64."""
        specs = [self.program.outputs[name] for name in self.summed]
        return [self._sum(spec, torch.float64).flatten() for spec in specs]

    def told(self, summed: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Metrics, and sums for updates of buffers, by name, of shares that are joined
        and summed over all ranks."""
        specs = {name: self.program.outputs[name] for name in self.summed}
        parts = summed.split([prod(spec.shape) for spec in specs.values()])
        whole = {
            name: part.view(spec.shape).to(getattr(torch, spec.dtype))
            for (name, spec), part in zip(specs.items(), parts, strict=True)
        }
        return whole, {name: whole.pop(name) for name in self.program.sums}

    def wholes(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Global tensors, on all ranks, which must all ask for the same."""
        outputs = {}
        for name in names:
            spec = self.program.outputs[name]
            dtype = getattr(torch, spec.dtype)
            summed = torch.uint8 if dtype == torch.bool else dtype
            whole = self._sum(spec, summed)
            self.comm.reduce_ranks_(whole, self.comm.everyone)
            outputs[name] = whole.to(dtype)
        return outputs

    def clear(self) -> None:
        self._parts.clear()

    def _sum(self, spec: OutputSpec, dtype: torch.dtype) -> Tensor:
        """Zeros [global shape] with this rank's share of the output in it."""
        shape = [n for factors in spec.factors for n in factors]
        whole = torch.zeros(shape, dtype=dtype, device=self.comm.device)
        for place, part in self._own(spec):
            whole[place] += part.to(dtype)
        return whole.view(spec.shape)

    def _own(self, spec: OutputSpec) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Parts, each with where it lies; ranks that hold the same, and microbatches,
        give it once."""
        known = {a for dim in spec.slots for axes in dim for a in axes}
        known |= {*spec.pending, PIPELINE}
        coords = self.comm.coords
        if any(i for axis, i in coords.items() if axis not in known):
            return
        for microbatch, made in self._parts[spec.stage]:
            if microbatch and TIME not in known:
                continue
            self.comm.state.microbatch = microbatch
            split = [
                (n, axes)
                for factors, slots in zip(spec.factors, spec.slots, strict=True)
                for n, axes in zip(factors, slots, strict=True)
            ]
            rows = [self.comm.positions(((n, axes),)) for n, axes in split]
            place = torch.meshgrid(*rows, indexing="ij") if rows else ()
            x = made[spec.place]
            assert prod(map(len, rows)) == x.numel(), f"{spec} is here {x.shape}"
            yield place, x.reshape([len(own) for own in rows])
