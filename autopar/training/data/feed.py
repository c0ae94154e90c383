"""Feeds a program: tokens, as the fields that it was compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from autopar.models.load import LoadedModel, ModelError
from autopar.passes.program import Program
from autopar.passes.ranges import Range
from autopar.training.data.documents import Reading
from autopar.training.data.epochs import Epochs
from autopar.training.data.fields import (
    DOCUMENTS,
    POSITIONS,
    check_fields,
    fields_of,
    no_end,
)
from autopar.training.data.sources import open_tokens
from autopar.training.data.token_batches import Corpus, Data, Mixture, open_data
from autopar.training.data.tokenizer import Tokenizer, open_tokenizer
from autopar.training.data.tokens import DataError
from autopar.training.options import RunOptions

ANY = 1 << 32  # a vocabulary that has all ids


@dataclass(frozen=True)
class Feed:
    """Batches of tokens, as the fields that a program was compiled for.

    end: the token that ends a document, if it is known.
    """

    data: Data
    program: Program
    shifts_labels: bool
    end: int | None = None

    @classmethod
    def open(cls, program: Program, loaded: LoadedModel, options: RunOptions) -> Feed:
        """Opens the run's tokenizer and data. Raises DataError if documents are kept
        apart by a token that nobody named."""
        vocab = loaded.vocab or vocab_of(program)
        tokenizer = open_run_tokenizer(options)
        data = open_run_data(options, tokenizer, vocab)
        if options.epochs:
            data = Epochs.of(data, options.data, options.seed)
        end = document_end(options, tokenizer, vocab)
        if loaded.packed and end is None:
            raise no_end(f"'{loaded.spec}' keeps documents apart")
        return cls(data, program, loaded.shifts_labels, end)

    def split(self, fraction: float) -> tuple[Feed, Feed]:
        """Splits off the last `fraction` of the data: (to train with, held out)."""
        train, held_out = self.data.split(fraction)
        return replace(self, data=train), replace(self, data=held_out)

    def steps_of(self, epochs: int) -> int:
        """The steps of so many epochs. Raises: DataError, if there are none."""
        samples, seq = self.shape
        assert isinstance(self.data, Epochs), "opened with epochs"
        if steps := self.data.steps(epochs, samples, seq):
            return steps
        raise DataError(
            f"{self.data.name} has {self.data.count(seq)} samples of {seq} tokens, "
            f"which in {epochs} epochs do not make a batch of {samples}",
            fix="compile for a smaller batch, or give more data or more --epochs",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples of a batch, tokens of a sample)."""
        return next(iter(self.program.inputs.values()))[0]

    @property
    def tokens(self) -> int:
        """The number of tokens in one batch."""
        return self.shape[0] * self.shape[1]

    def check_length(self) -> None:
        """Raises DataError for a source with fewer tokens than a batch takes of it."""
        shares: list[tuple[Data, float]] = [(self.data, 1.0)]
        if isinstance(self.data, Mixture):
            weights = self.data.weights
            shares = [*zip(self.data.sources, weights, strict=True)]
        for data, share in shares:
            taken = math.ceil(share * self.tokens)
            if isinstance(data, Corpus) and len(data.tokens) < taken:
                raise DataError(
                    f"{data.name} has {len(data.tokens)} tokens, but each batch takes "
                    f"{taken} of it: it would see some several times",
                    fix="give more data, or compile for a smaller batch",
                )

    @property
    def samples(self) -> int:
        """The number of samples in one batch."""
        return self.shape[0]

    def count(self) -> int:
        """How many samples there are, if none overlaps. Raises: DataError."""
        _, seq = self.shape
        return self.data.count(seq)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step. Raises: DataError; ModelError for fields that do not
        follow from tokens."""
        check_fields(self.program.inputs, self.end)
        samples, seq = self.shape
        return self._fields(*self.data.batch(step, samples, seq))

    def sequences(self, first: int, count: int) -> dict[str, Tensor]:
        """A batch of samples that do not overlap: `count` of them, from `first` on."""
        _, seq = self.shape
        numbers = np.arange(first, first + count)
        return self._fields(*self.data.samples(numbers, seq))

    def _fields(self, ids: Tensor, following: Tensor) -> dict[str, Tensor]:
        labels = ids if self.shifts_labels else following
        return fields_of(self.program.inputs, ids, labels, self.end)


def prepare_data(options: RunOptions) -> None:
    """Tokenize text that no run had before. Raises: DataError."""
    tokenizer = open_run_tokenizer(options)
    open_run_data(options, tokenizer)
    if options.eval_data:
        open_run_data(options.to_evaluate, tokenizer)


def open_run_tokenizer(options: RunOptions) -> Tokenizer | None:
    """Opens the tokenizer that the run's options name, if any."""
    if options.tokenizer is None:
        return None
    return open_tokenizer(options.tokenizer, options.document_end)


def open_run_data(
    options: RunOptions, tokenizer: Tokenizer | None, vocab: int = ANY
) -> Data:
    """The data that a run's options name. Raises: DataError."""
    if tokenizer is not None:
        tokenizer.check_fits(vocab)
    how = Reading(tokenizer, options.column, options.token_cache)
    read = partial(open_tokens, how=how, bin_dtype=options.bin_dtype)
    return open_data(options.data, vocab, options.seed, read)


def document_end(
    options: RunOptions, tokenizer: Tokenizer | None, vocab: int
) -> int | None:
    """The id that ends a document, if that is known. Raises: DataError."""
    if tokenizer is not None or options.document_end is None:
        return None if tokenizer is None else tokenizer.end
    end = Range(0, vocab - 1).parse(options.document_end)
    if end is None:
        raise DataError(
            f"--document-end {options.document_end} is no id of the model, and there "
            "is no tokenizer that knows it",
            fix=f"give {Range(0, vocab - 1)}, or add --tokenizer FOLDER",
        )
    return int(end)


def vocab_of(program: Program) -> int:
    """The extent of the dim named vocab, without what pads it; some parameter may have
    that too. Positions that are given are looked up as tokens are, in a table that has
    fewer. Raises ModelError if no parameter has it."""
    vocabularies = [
        size
        for spec in program.parameters.values()
        for names, sizes in zip(spec.dims, spec.factors, strict=True)
        for name, size in zip(names, sizes, strict=True)
        if name == "vocab"
    ]
    if vocabularies:
        looked_up = {*POSITIONS, *DOCUMENTS} & program.inputs.keys()
        return max(vocabularies) if looked_up else min(vocabularies)
    raise ModelError(
        "no parameter of the model has a dim that is its vocabulary",
        fix="write the training loop yourself, with autopar.compile",
    )
