"""What a pipeline rank holds in memory, term by term, from accounts."""

from __future__ import annotations

from collections.abc import Sequence

from ..price.account import Account
from ..schedule.memory import OPTIMIZER_STATES


def rank_memory(accounts: Sequence[Account], peak: float) -> dict[str, float]:
    """Bytes on a rank, term -> bytes (Rajbhandari 2020, section 5).

    accounts: of its stages, see `passes.price.estimate.run_accounts`. peak: of
    activations, with messages and what is whole for a step, see `peak_bytes`.
    """
    trained = sum(a.held.trained for a in accounts)
    gathered = sum(a.gathered for a in accounts)
    return {
        "parameters": sum(a.held.parameters for a in accounts),
        "gradients": trained,
        "optimizer": OPTIMIZER_STATES * trained,
        "buffers": sum(a.buffers for a in accounts),
        "gathered": gathered,
        "activations": peak - gathered,
    }
