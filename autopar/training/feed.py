"""What a program is fed with: tokens, as the fields that it was compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.models.load import LoadedModel, ModelError
from autopar.passes.program import Program
from autopar.training.data import Data, open_data
from autopar.training.options import RunOptions

LABELS = ("labels", "targets")


@dataclass(frozen=True)
class Feed:
    """Batches of tokens, as the fields that a program was compiled for."""

    data: Data
    program: Program
    shifts_labels: bool

    @classmethod
    def open(cls, program: Program, loaded: LoadedModel, options: RunOptions) -> Feed:
        vocab = loaded.vocab or vocab_of(program)
        return cls(
            open_data(options.data, vocab, options.seed), program, loaded.shifts_labels
        )

    def split(self, fraction: float) -> tuple[Feed, Feed]:
        """To train with, and of the held-out rest of the data."""
        train, held_out = self.data.split(fraction)
        return replace(self, data=train), replace(self, data=held_out)

    @property
    def tokens(self) -> int:
        """In one batch."""
        shapes = [shape for shape, _ in self.program.inputs.values()]
        return shapes[0][0] * shapes[0][1]

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tokens, and as labels those after them (or themselves, if the model shifts).

        Raises ModelError for a field that is neither, nor an attention mask.
        """
        made = {}
        for name, (shape, dtype) in self.program.inputs.items():
            if len(shape) != 2 or not dtype.startswith("int"):
                raise ModelError(
                    f"the model takes '{name}', {dtype}{list(shape)}, but "
                    "`autopar run` has only tokens to give",
                    fix="write the training loop yourself, with autopar.compile",
                )
            kind = getattr(torch, dtype)
            ids, following = self.data.batch(step, *shape)
            if name == "attention_mask":
                made[name] = torch.ones(shape, dtype=kind)
            elif name in LABELS and not self.shifts_labels:
                made[name] = following.to(kind)
            else:
                made[name] = ids.to(kind)
        return made


def vocab_of(program: Program) -> int:
    """The extent of the dim named vocab, without what pads it; some parameter may have
    that too. Raises ModelError if no parameter has it."""
    found = [
        size
        for spec in program.parameters.values()
        for names, sizes in zip(spec.dims, spec.factors, strict=True)
        for name, size in zip(names, sizes, strict=True)
        if name == "vocab"
    ]
    if found:
        return min(found)
    raise ModelError(
        "no parameter of the model has a dim that is its vocabulary",
        fix="write the training loop yourself, with autopar.compile",
    )
