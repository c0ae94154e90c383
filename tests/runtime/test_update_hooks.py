"""Hooks around updates run once an update."""

from __future__ import annotations

from typing import Any

import torch
from models import plain_gpt

from autopar.runtime.parameters.update_hooks import is_nested


class Derived(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


def test_an_update_by_the_class_that_it_is_derived_from_is_the_same() -> None:
    """Torch calls hooks around both, where an optimizer of that class was made too."""
    of = plain_gpt(layers=1)
    step = of.step()
    derived, plain = Derived(step.parameters()), torch.optim.AdamW(step.parameters())
    nested: list[bool] = []
    derived.register_step_pre_hook(lambda o, *_: nested.append(is_nested(o)))
    for optimizer, name in ((derived, "Derived"), (plain, "AdamW")):
        step(**of.batch)
        optimizer.step()
        [updates] = step._updates.facts()[0].values()
        assert [kind for kind, _ in updates] == [name]
        step.zero_grad()
    assert nested == [False, True]
