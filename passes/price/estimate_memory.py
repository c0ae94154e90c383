"""What a pipeline rank of a candidate holds in memory, term by term, from accounts."""

from __future__ import annotations

from collections.abc import Sequence

from passes.price.candidate import Candidate
from passes.price.price import Account
from passes.schedule.memory import OPTIMIZER_STATES
from passes.stage.overlap import BUCKET


def rank_memory(
    accounts: Sequence[Account], candidate: Candidate, activations: float
) -> dict[str, float]:
    """Bytes on a rank with some stages, term -> bytes (Rajbhandari 2020, section 5).

    activations: with messages, what is there by block, and casts of parameters. At the
    begin of a step parameters are whole and in rows; at its end gradients are, beside
    the others' addends and the shares.
    """

    def total(term: str) -> float:
        return sum(a["memory", term] for a in accounts)

    trained, read, cast = total("trained"), total("read"), total("cast")
    parts, shares = candidate.data_parallel if candidate.zero else 1, candidate.shares
    if shares:
        activations -= cast  # of shares only shares are cast
    # What is gathered is the cast, if there is one.
    step = {1: read + trained, 2: read, 3: cast / parts}.get(shares, 0.0)
    trains, reads = min(trained, BUCKET), min(read, BUCKET)
    ends = {1: step + (2 + 1 / parts) * trains, 2: step + reads}.get(shares, 0.0)
    return {
        "parameters": total("parameters") / parts,
        "gradients": trained / parts,
        "optimizer": OPTIMIZER_STATES * trained / parts,
        "buffers": total("buffers"),
        "gathered": max(step, ends - activations),
        "activations": activations,
    }
