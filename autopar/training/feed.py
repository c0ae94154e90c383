"""What a program is fed with: tokens, as the fields that it was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from autopar.models.load import LoadedModel, ModelError
from autopar.passes.program import Program
from autopar.training.data import Corpus, Data, Mixture, open_data
from autopar.training.documents import Reading
from autopar.training.options import RunOptions
from autopar.training.sources import open_tokens
from autopar.training.tokenizer import open_tokenizer

LABELS = ("labels", "targets")
ANY = 1 << 32  # a vocabulary that has all ids


@dataclass(frozen=True)
class Feed:
    """Batches of tokens, as the fields that a program was compiled for."""

    data: Data
    program: Program
    shifts_labels: bool

    @classmethod
    def open(cls, program: Program, loaded: LoadedModel, options: RunOptions) -> Feed:
        vocab = loaded.vocab or vocab_of(program)
        return cls(open_run_data(options, vocab), program, loaded.shifts_labels)

    def split(self, fraction: float) -> tuple[Feed, Feed]:
        """To train with, and of the held-out rest of the data."""
        train, held_out = self.data.split(fraction)
        return replace(self, data=train), replace(self, data=held_out)

    @property
    def tokens(self) -> int:
        """In one batch."""
        shapes = [shape for shape, _ in self.program.inputs.values()]
        return shapes[0][0] * shapes[0][1]

    def warnings(self) -> list[str]:
        """What is odd about the data."""
        found = self.data.sources if isinstance(self.data, Mixture) else [self.data]
        return [
            f"{data.name} has {len(data.tokens)} tokens, fewer than the {self.tokens} "
            "of a batch: each step sees some several times"
            for data in found
            if isinstance(data, Corpus) and len(data.tokens) < self.tokens
        ]

    @property
    def samples(self) -> int:
        """In one batch."""
        return next(iter(self.program.inputs.values()))[0][0]

    def count(self) -> int:
        """How many samples there are, if none overlaps. Raises: DataError."""
        (_, seq), _ = next(iter(self.program.inputs.values()))
        return self.data.count(seq)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Tokens, and as labels those after them (or themselves, if the model shifts).

        Raises ModelError for a field that is neither, nor an attention mask.
        """
        return self._fields(lambda shape: self.data.batch(step, *shape))

    def sequences(self, first: int, count: int) -> dict[str, Tensor]:
        """So many of the samples that do not overlap, in order; else as a batch."""
        return self._fields(lambda shape: self.data.sequences(first, count, shape[1]))

    def _fields(
        self, draw: Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """What `draw` gives for a field's shape, as the fields of the program."""
        made, drawn = {}, dict[tuple[int, ...], tuple[Tensor, Tensor]]()
        for name, (shape, dtype) in self.program.inputs.items():
            if len(shape) != 2 or not dtype.startswith("int"):
                raise ModelError(
                    f"the model takes '{name}', {dtype}{list(shape)}, but "
                    "`autopar run` has only tokens to give",
                    fix="write the training loop yourself, with autopar.compile",
                )
            kind = getattr(torch, dtype)
            if shape not in drawn:
                drawn[shape] = draw(shape)
            ids, following = drawn[shape]
            if name == "attention_mask":
                made[name] = torch.ones(ids.shape, dtype=kind)
            elif name in LABELS and not self.shifts_labels:
                made[name] = following.to(kind)
            else:
                made[name] = ids.to(kind)
        return made


def open_run_data(options: RunOptions, vocab: int = ANY) -> Data:
    """The data that a run's options name; text that no run had before is tokenized.

    Raises: DataError."""
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = open_tokenizer(options.tokenizer, options.document_end)
        tokenizer.check_fits(vocab)
    how = Reading(tokenizer, options.column, options.token_cache)
    read = partial(open_tokens, how=how, bin_dtype=options.bin_dtype)
    return open_data(options.data, vocab, options.seed, read)


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
