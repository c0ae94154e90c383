"""State dicts of models whose hooks give them another form than modules hold.

A fused weight that is stored in its parts, a transposed one, an extra state: only the
model's own `state_dict` makes that form, and only its `load_state_dict` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.agreement.validate import ModelMismatch


def held_by_modules(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones by each of their names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def own_state(model: nn.Module) -> dict[str, Any]:
    """A model's state dict; the very tensors that its modules hold, if it can."""
    if unwrap(type(model).state_dict) is nn.Module.state_dict:
        return dict(model.state_dict(keep_vars=True))
    return dict(model.state_dict())


def _is_same(x: Any, held: Tensor | None) -> bool:
    """Whether x is the tensor that modules hold, or all of its memory, detached."""
    if x is held or held is None or not isinstance(x, Tensor) or x.is_meta:
        return x is held
    facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (x, held)]
    return facts[0] == facts[1]


class OwnForm:
    """What a model's own state dict makes of the tensors that its modules hold.

    It keeps the model, whose hooks may mean it and no copy. Its tensors are others
    while these run, and are then as they were.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @classmethod
    def of(cls, model: nn.Module, state: Mapping[str, Any]) -> OwnForm | None:
        """None if the model's state dict has nothing but what its modules hold."""
        held = held_by_modules(model)
        is_plain = all(_is_same(x, held.get(name)) for name, x in state.items())
        return None if is_plain else cls(model)

    def names(self, state: Mapping[str, Any]) -> list[str]:
        """Names what modules hold: all parameters, and buffers of the state dict."""
        held = held_by_modules(self._model).items()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return [n for n, x in held if n in parameters or _is_same(state.get(n), x)]

    def write(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state dict of a model that holds these tensors, by the modules' names."""
        with self._holding(held):
            return dict(self._model.state_dict())

    def read(
        self, state: Mapping[str, Any], names: Iterable[str], strict: bool
    ) -> tuple[dict[str, Tensor], Any]:
        """Loads a state dict, and returns what modules then hold of these names,
        without what it left unchanged, and the result of `load_state_dict`.

        Raises: ModelMismatch.
        """
        held = held_by_modules(self._model)
        empty = {n: torch.empty_like(held[n], device="meta") for n in names}
        with self._holding(empty):
            try:
                keys = self._model.load_state_dict(dict(state), strict, assign=True)
            except RuntimeError as error:
                raise ModelMismatch(
                    f"the state dict does not fit the model\n{error}",
                    fix="load that of this model, as step.state_dict gave it",
                ) from None
            now = held_by_modules(self._model)
            loaded = {n: now[n].detach() for n in empty if not now[n].is_meta}
        return loaded, keys

    @contextmanager
    def _holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        held = held_by_modules(self._model)
        try:
            self._hold(tensors)
            yield
        finally:
            self._hold({name: held[name] for name in tensors})

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, x in tensors.items():
            module, _, attribute = name.rpartition(".")
            if name in parameters and not isinstance(x, nn.Parameter):
                x = nn.Parameter(x, requires_grad=False)
            setattr(self._model.get_submodule(module), attribute, x)
