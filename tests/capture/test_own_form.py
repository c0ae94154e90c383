"""State dicts of models whose hooks give them another form than their modules hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from models import VOCAB, WIDTH, Block, randomize
from processes import run_ranks
from torch import Tensor, nn

import autopar
from autopar.passes.errors import AutoparError
from autopar.runtime.agreement.validate import ModelMismatch


class InParts(nn.Linear):
    """A fused weight and bias that are stored as those of three layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH)
        self.register_state_dict_post_hook(_in_parts)
        self.register_load_state_dict_pre_hook(_joined)


def _in_parts(
    layer: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    for kind in ("weight", "bias"):
        parts = state.pop(prefix + kind).chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            state[f"{prefix}{name}.{kind}"] = part


def _joined(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for kind in ("weight", "bias"):
        names = [f"{prefix}{p}.{kind}" for p in "qkv"]
        if all(name in state for name in names):
            state[prefix + kind] = torch.cat([state.pop(name) for name in names])


class Transposed(nn.Linear):
    """Stored under the name of its weight is what is not its weight."""

    def __init__(self) -> None:
        super().__init__(96, WIDTH)
        # These mean this very layer, and not what they are given.
        self._register_state_dict_hook(
            lambda _, state, prefix, *rest: state.update(
                {f"{prefix}weight": self.weight.detach().mT}
            )
        )
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *rest: state.update(
                {f"{prefix}weight": state[f"{prefix}weight"].mT}
            )
        )


class Stored(nn.Module):
    """A tied head, buffers of both kinds, an extra state, and layers as above."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCAB, WIDTH), Block()
        self.block.qkv, self.block.down = InParts(), Transposed()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("unstored", torch.full((WIDTH,), 2.0), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) * self.scale * self.unstored
        return F.cross_entropy(self.head(self.block(x)).flatten(0, 1), ids.flatten())


class InPart(Stored):
    """Gives, without any of torch's options, what of it is not to be found elsewhere;
    its prefix is a parameter of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.prefix.sum()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        state = super().state_dict()
        return {name: x for name, x in state.items() if not name.startswith("block")}


def case(kind: type[Stored] = Stored) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (4, 8))
    return Case(randomize(kind()), {"ids": ids}).double()


def train(module: Any, parameters: Any, batch: dict[str, Tensor]) -> None:
    """One step of the model or of what is compiled of it."""
    loss = module(**batch)
    if loss.requires_grad:
        loss.backward()
    torch.optim.SGD(parameters, lr=0.1).step()


def equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x)


def on_rank(folder: Path) -> None:
    own, (model, batch, _) = case().model, case()
    before = {n: (x, x.clone()) for n, x in model.named_parameters()}
    step = autopar.compile(model, "tp=2", example_inputs=batch)
    initial = step.state_dict()
    equal(initial, own.state_dict())
    train(step, step.parameters(), batch)
    trained = step.state_dict()
    step.save(folder)
    train(own, own.parameters(), batch)
    equal(trained, own.state_dict())
    own.load_state_dict(trained)

    step.load_state_dict(initial)
    equal(step.state_dict(), initial)
    step.load(folder)
    equal(step.state_dict(), trained)
    part = {n: x for n, x in initial.items() if n.startswith("block.qkv")}
    part["block.down.weight"] = trained["block.down.weight"]
    keys = step.load_state_dict({**part, "another": torch.zeros(1)}, strict=False)
    assert keys.unexpected_keys == ["another"] and "scale" in keys.missing_keys
    equal(step.state_dict(), {**trained, **part})
    with pytest.raises(ModelMismatch, match="Missing key"):
        step.load_state_dict(part)
    for name, x in model.named_parameters():
        assert x is before[name][0] and torch.equal(x, before[name][1])


def test_a_step_has_the_state_dict_that_the_models_hooks_make(tmp_path: Path) -> None:
    run_ranks(on_rank, 2, tmp_path)


def in_part_on_rank(folder: Path, options: dict[str, Any]) -> None:
    own, (model, batch, _) = case(InPart).model, case(InPart)
    step = autopar.compile(model, example_inputs=batch, **options)
    train(step, step.parameters(), batch)
    trained = step.state_dict()
    train(own, own.parameters(), batch)
    equal(trained, own.state_dict())
    loss = step.evaluate(**batch)
    step.save(folder)
    train(step, step.parameters(), batch)
    step.load(folder)
    equal(step.state_dict(), trained)
    torch.testing.assert_close(step.evaluate(**batch), loss)


@pytest.mark.parametrize("options", [{"mesh": "pp=2"}, {"mesh": "dp=2", "zero": 3}])
def test_what_a_state_dict_leaves_out_is_in_checkpoints(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(in_part_on_rank, 2, tmp_path, options)


def test_parameters_that_a_model_does_not_give_are_not_trained_unnoticed() -> None:
    class Hiding(Stored):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return self.block.parameters(recurse)

    model = Hiding()
    with pytest.raises(AutoparError, match="leaves out 'tokens"):
        autopar.compile(model, "tp=1")
    model.tokens.weight.requires_grad_(False)
    autopar.compile(model, "tp=1")
