"""What a pipeline rank holds in memory, term by term, from accounts."""

from __future__ import annotations

from collections.abc import Sequence

from ..price.price import Account
from ..schedule.memory import OPTIMIZER_STATES


def rank_memory(accounts: Sequence[Account], peak: float) -> dict[str, float]:
    """Bytes on a rank, term -> bytes (Rajbhandari 2020, section 5).

    accounts: of its stages, see `passes.price.estimate.run_accounts`. peak: of
    activations, with messages and what is whole for a step, see `peak_bytes`.
    """

    def total(term: str) -> float:
        return sum(a["memory", term] for a in accounts)

    trained, gathered = total("trained"), total("gathered")
    return {
        "parameters": total("parameters"),
        "gradients": trained,
        "optimizer": OPTIMIZER_STATES * trained,
        "buffers": total("buffers"),
        "gathered": gathered,
        "activations": peak - gathered,
    }
