"""What a pipeline rank of a candidate holds in memory, term by term, from accounts."""

from __future__ import annotations

from collections.abc import Sequence

from ..price.candidate import Candidate
from ..price.price import Account
from ..schedule.memory import OPTIMIZER_STATES

TERMS = ("parameters", "trained", "read", "cast")


def rank_memory(
    accounts: Sequence[Account], candidate: Candidate, activations: float
) -> dict[str, float]:
    """Bytes on a rank with some stages, term -> bytes (Rajbhandari 2020, section 5).

    activations: with messages, what is there by block, and casts of parameters. At the
    begin of a step parameters are whole and in rows; at its end gradients are, beside
    the others' addends and the shares.
    """

    def total(what: str, term: str) -> float:
        return sum(a[what, term] for a in accounts)

    experts = {term: total("experts", term) for term in TERMS}
    others = {term: total("memory", term) - experts[term] for term in TERMS}
    if not candidate.zero:
        shared = [(others, 1), (experts, 1)]
    else:
        shared = [(others, candidate.alike), (experts, candidate.data_parallel)]

    def share(term: str) -> float:
        return sum(held[term] / parts for held, parts in shared)

    def gathered(term: str) -> float:
        return sum(held[term] for held, parts in shared if parts > 1)

    trained, read, cast = map(gathered, ("trained", "read", "cast"))
    activations -= cast  # of shares only shares are cast
    cast_shares = sum(held["cast"] / parts for held, parts in shared if parts > 1)
    # What is gathered is the cast, if there is one.
    step = {1: read + trained, 2: read, 3: cast_shares}.get(candidate.shares, 0.0)
    trains, reads = trained / candidate.blocks, read / candidate.blocks
    least = min(parts for _, parts in shared if parts > 1) if trained else 1
    ends = {1: step + (2 + 1 / least) * trains, 2: step + reads}
    return {
        "parameters": share("parameters"),
        "gradients": share("trained"),
        "optimizer": OPTIMIZER_STATES * share("trained"),
        "buffers": total("memory", "buffers"),
        "gathered": max(step, ends.get(candidate.shares, 0.0) - activations),
        "activations": activations,
    }
