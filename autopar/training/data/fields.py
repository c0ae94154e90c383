"""The fields of a batch that follow from its tokens: labels, positions, documents.

A document ends with a token that says so; the first of a sample may have begun before
it. A model that takes the documents of its tokens, or positions that begin anew in
each, masks attention by them in its own way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.local_batches import Inputs
from autopar.models.load import ModelError
from autopar.training.data.tokens import DataError

LABELS = ("labels", "targets")
MASK = ("attention_mask",)
POSITIONS = ("position_ids", "positions")
DOCUMENTS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids")
ROLES = (*LABELS, *MASK, *POSITIONS, *DOCUMENTS)


def check_fields(inputs: Inputs, end: int | None) -> None:
    """Raises ModelError for a field that does not follow from tokens, and DataError if
    documents are asked for, and no token ends them.

    inputs: of a program. end: the token that ends a document, if there is one.
    """
    first = next(iter(inputs.values()))[0]
    for name, (shape, dtype) in inputs.items():
        if len(shape) != 2 or shape != first or not dtype.startswith("int"):
            raise ModelError(
                f"the model takes '{name}', {dtype}{list(shape)}, but "
                "`autopar run` has only tokens to give",
                fix="write the training loop yourself, with autopar.compile",
            )
        if name in DOCUMENTS and end is None:
            raise no_end(f"the model takes '{name}'")
    others = [name for name in inputs if name not in ROLES]
    if len(others) > 1:
        raise ModelError(
            f"the model takes {' and '.join(map(repr, others))}: which are tokens?",
            fix=f"leave tokens one field beside {', '.join(ROLES)}; or write the "
            "training loop yourself, with autopar.compile",
        )


def no_end(problem: str) -> DataError:
    """The error about documents whose last token is unknown."""
    return DataError(
        f"{problem}, but nobody says which token ends a document",
        fix="name it: --document-end TOKEN with --tokenizer, else its id",
    )


def fields_of(
    inputs: Inputs, ids: Tensor, labels: Tensor, end: int | None
) -> dict[str, Tensor]:
    """The fields of a program, each [samples, seq], for token ids and labels. inputs,
    end: as checked."""
    made = {}
    for name, (_, dtype) in inputs.items():
        if name in LABELS:
            value = labels
        elif name in MASK:
            value = torch.ones_like(ids)
        elif name in POSITIONS:
            value = positions_of(ids, end)
        elif name in DOCUMENTS:
            value = documents_of(ids, end)
        else:
            value = ids
        made[name] = value.to(getattr(torch, dtype))
    return made


def begins(ids: Tensor, end: int | None) -> Tensor:
    """Whether a token is the first of another document than that before it, bool
    [samples, seq]."""
    first = torch.zeros_like(ids, dtype=torch.bool)
    if end is not None:
        first[:, 1:] = ids[:, :-1] == end
    return first


def documents_of(ids: Tensor, end: int | None) -> Tensor:
    """The document of each token, counted from 0 in a sample, int64 [samples, seq]."""
    return begins(ids, end).cumsum(1)


def positions_of(ids: Tensor, end: int | None) -> Tensor:
    """The position of each token in its document, or in the sample if documents have no
    end, int64 [samples, seq]."""
    at = torch.arange(ids.shape[1]).expand_as(ids)
    first = torch.where(begins(ids, end), at, 0).cummax(1).values
    return at - first
