"""A proof goes on to weights after an update, and to checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from proofs import prove
from torch import Tensor, nn

import autopar
from autopar import held_state
from autopar.checkpoints import checkpoint
from autopar.passes.decode import decode
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import Mesh
from autopar.passes.plan import Plan
from autopar.passes.price.cluster import PLAIN
from autopar.passes.program import ParameterSpec, Program
from autopar.passes.proof_record import WHOLE, Proof
from autopar.proof.ranks import VerificationFailed
from autopar.rank_step import RankStep
from autopar.runtime.agreement.updates import Updates
from autopar.runtime.parameters import gradient_norm, shards
from examples.gpt import Config, build


@pytest.fixture(scope="module")
def tied() -> tuple[nn.Module, dict[str, Tensor], Program]:
    """A weight that two stages hold, shares of optimizers, one that is not trained, one
    that nothing computes with."""
    model, batch = build(Config(2, 8, 2, 4, 11), batch=4)
    model.positions.weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3, 3))
    plan = Plan(Mesh.parse("pp=2,dp=2"), 2, zero=1)
    program = autopar.compile_offline(model, batch, plan, cluster=PLAIN)
    assert program.parameters["tokens.weight"].stages == (0, 1)
    return model, batch, program


@pytest.mark.slow
def test_weights_after_an_update_and_a_checkpoint_are_proved(tied) -> None:
    proof, (_, _, program) = prove(*tied), tied
    assert proof.passed and proof.size == WHOLE
    # Each weight of each rank; of those that are trained two moments and a count.
    held = [
        4 if spec.trainable else 1
        for rank in range(4)
        for spec in program.parameters.values()
        if set(spec.stages) & set(program.stages_of(rank))
    ]
    assert proof.restored == sum(held) + 4  # and the one that is left
    data = json.loads(json.dumps(proof.to_data()))
    assert decode(Proof, data, "the proof", AutoparError) == proof


def update_a_wrong_share(patch: pytest.MonkeyPatch) -> str:
    def wrong(self: Updates, optimizer: torch.optim.Optimizer) -> None:
        before(self, optimizer)
        for name, p in self.parameters.items():
            if name.endswith("up.bias") and p.grad is not None:
                p.grad = p.grad.flip(0)

    before = Updates.before
    patch.setattr(Updates, "before", wrong)
    return "up.bias (after an update|in a checkpoint)'"


def update_twice_what_is_tied(patch: pytest.MonkeyPatch) -> str:
    def wrong(self: Updates, optimizer: torch.optim.Optimizer) -> None:
        before(self, optimizer)
        p = self.parameters.get("tokens.weight")  # or watches a step of a test before
        if p is not None and optimizer.param_groups[0]["params"][0] is p:
            p.data.sub_(p.grad)

    before = Updates.before
    patch.setattr(Updates, "before", wrong)
    return "tokens.weight (after an update|in a checkpoint)'"


def count_replicas_twice(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(gradient_norm, "is_owner", lambda *_: True)
    return "norm"


def give_a_stale_copy(patch: pytest.MonkeyPatch) -> str:
    def start(self: RankStep, *given: Any) -> None:
        begin(self, *given)
        first[id(self)] = take(self)

    begin, take, first = RankStep.start, RankStep.state_dict, dict[int, Any]()
    patch.setattr(RankStep, "start", start)
    patch.setattr(RankStep, "state_dict", lambda self: first[id(self)])
    return "after an update'"


def save_no_moments(patch: pytest.MonkeyPatch) -> str:
    def some(*given: Any) -> dict[Any, Any]:
        found = targets(*given).items()
        return {key: x for key, x in found if key[-1] != "exp_avg_sq"}

    targets = checkpoint.optimizer_targets
    patch.setattr(checkpoint, "optimizer_targets", some)
    return "exp_avg_sq' back from a checkpoint"


def save_moments_of_another_rank(patch: pytest.MonkeyPatch) -> str:
    """Written and read where the other rank's belong: each gets its own back."""

    def wrong(of: Callable[..., dict[Any, Any]]) -> Callable[..., dict[Any, Any]]:
        def found(*given: Any) -> dict[Any, Any]:
            return {key: moved(key, x) for key, x in of(*given).items()}

        return found

    def moved(key: tuple[Any, ...], x: Any) -> Any:
        if "up.bias" not in key[2] or key[3] == "step":
            return x
        if isinstance(x, list):
            return [moved(key, piece) for piece in x]
        (box,) = x.boxes
        start = (x.shape[0] - box.size[0] - box.start[0],)
        return replace(x, boxes=(replace(box, start=start),))

    for name in ("optimizer_pieces", "optimizer_targets"):
        patch.setattr(checkpoint, name, wrong(getattr(checkpoint, name)))
    return "up.bias in a checkpoint'"


def shift_a_share(patch: pytest.MonkeyPatch) -> str:
    def wrong(spec: ParameterSpec, *place: Any) -> list[tuple[int, int]]:
        found = spans(spec, *place)
        if spec.part.source.endswith("up.bias"):
            found = [(max(0, begin - 1), length) for begin, length in found]
        return found

    spans = shards.spans
    patch.setattr(shards, "spans", wrong)
    return "up.bias' back from a checkpoint"


def own_nothing(patch: pytest.MonkeyPatch) -> str:
    def wrong(*given: Any) -> bool:
        return "up.bias" not in given[-1] and is_owner(*given)

    is_owner = held_state.is_owner
    patch.setattr(held_state, "is_owner", wrong)
    return "missing: .*up.bias"


@pytest.mark.matrix(quick=2)
@pytest.mark.parametrize(
    "mutant",
    [
        update_a_wrong_share,
        update_twice_what_is_tied,
        count_replicas_twice,
        give_a_stale_copy,
        save_no_moments,
        save_moments_of_another_rank,
        shift_a_share,
        own_nothing,
    ],
)
def test_a_wrong_update_fails_the_proof(
    tied, mutant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = mutant(monkeypatch)
    with pytest.raises(VerificationFailed, match=says):
        prove(*tied)
