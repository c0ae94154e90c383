"""What users change after compiling: what a step follows, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor, nn

from autopar.passes.capture.forward.unseen import refuse_hooks
from autopar.passes.errors import AutoparError
from autopar.passes.program import ParameterSpec, Program, dtype_name
from autopar.runtime.parameters.shards import take_shard

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class ParameterError(AutoparError):
    """A parameter that was changed into one that the program was not compiled for."""


def kind_of(x: Tensor) -> Kind:
    """Returns the shape, dtype and device that a program is compiled for."""
    return tuple(x.shape), x.dtype, x.device


def check_kind(name: str, p: Tensor, kind: Kind) -> None:
    """Raises ParameterError if it is not what it was compiled for."""
    if kind_of(p) != kind:
        now, before = (
            f"{dtype_name(dtype)}{list(shape)} on {device}"
            for shape, dtype, device in (kind_of(p), kind)
        )
        raise ParameterError(
            f"'{name}' was given {now} as its data, but was compiled for {before}",
            fix="give it a tensor like itself, or load whole tensors by "
            "step.load_state_dict(state)",
        )


def check_data(name: str, p: Tensor, kind: Kind) -> None:
    """Whether a parameter has data of the kind that it had. Raises: ParameterError."""
    check_kind(name, p, kind)
    if not p.is_contiguous():
        raise ParameterError(
            f"'{name}' was given data that is not contiguous",
            fix="p.data = x.contiguous()",
        )


def check_trained(program: Program, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ParameterError if one requires gradients that was compiled without, or has
    hooks on its gradient, which autograd does not compute."""
    for name, p in parameters.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ParameterError(
                f"'{name}' has a hook on its gradient, and a step calls none",
                fix="remove it, and do after the step what it does, as p.grad *= 0.5 "
                "or optimizer.step(): p.grad is complete then",
            )
        if p.requires_grad and not program.parameters[name].trainable:
            raise ParameterError(
                f"'{name}' requires gradients now, but was compiled without",
                fix="unfreeze it before the step is compiled, and freeze it afterwards",
            )


@dataclass(frozen=True)
class Known:
    """A tensor of a model, as it was when it was last looked at."""

    tensor: ref[Tensor]
    version: int
    place: int
    trained: bool

    @classmethod
    def of(cls, x: Tensor) -> Known:
        return cls(ref(x), x._version, x.data_ptr(), x.requires_grad)

    def has_values_of(self, x: Tensor) -> bool:
        """Whether x is the tensor as known, and was not written to."""
        place = x._version, x.data_ptr()
        return self.tensor() is x and place == (self.version, self.place)


@dataclass
class Copied:
    """The tensors that a step has copies of, by name, as they were when both were last
    seen to be alike. updated: whether an optimizer has updated the copies since."""

    tensors: dict[str, Known]
    updated: bool = False

    def unwritten(self) -> dict[str, Tensor]:
        """Returns the parameters that nobody has written into, wherever they are."""
        known = ((name, was, was.tensor()) for name, was in self.tensors.items())
        return {
            name: x
            for name, was, x in known
            if was.trained and x is not None and x._version == was.version
        }

    def renew(self, alike: Mapping[str, Known]) -> None:
        """Notes tensors that were seen to be alike, some of them since others wrote."""
        written = (n for n, now in alike.items() if now.version != self[n].version)
        if any(self[name].trained for name in written):
            self.updated = False
        self.tensors |= alike

    def __getitem__(self, name: str) -> Known:
        return self.tensors[name]


class Originals:
    """A model, of whose parameters and buffers a step has copies: was it changed since
    it was compiled?

    coords: of this rank. It keeps none of them alive.
    """

    def __init__(
        self, model: nn.Module, program: Program, coords: Mapping[str, int]
    ) -> None:
        self._model, self._program, self._coords = ref(model), program, coords
        specs = (*program.parameters.values(), *program.buffers.values())
        held = {spec.part.source for spec in specs}
        tensors = _tensors(model).items()
        self.copied = Copied({name: Known.of(x) for name, x in tensors if name in held})
        self._hooks = _hooks_on_forward(model)
        # What was alike when all was compared last, see `differing`.
        self._compared: list[tuple[int, int, int]] = []

    def written(self) -> bool:
        """Whether one of them was written to since the last look."""
        known = ((own.tensor(), own.version) for own in self.copied.tensors.values())
        return any(x is not None and x._version != version for x, version in known)

    def check(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        trained: bool = False,
    ) -> None:
        """Raises AutoparError for a value, flag or hook that the step does not have.

        parameters, buffers: that it has. trained: since it was compiled.
        """
        if (model := self._model()) is None:
            return
        refuse_hooks(model)
        if new := _hooks_on_forward(model) - self._hooks:
            path, _ = min(new)
            whose = f"the module '{path}'" if path else "the model"
            raise ParameterError(
                f"a hook was put on {whose} after it was compiled, and a step calls "
                "none",
                fix="register it before autopar.compile: what it computes is part of "
                "the program; or let the model return what is to be looked at",
            )
        now, same = _tensors(model), {}
        specs = {**self._program.parameters, **self._program.buffers}
        for name, copy in {**parameters, **buffers}.items():
            spec = specs[name]
            source = spec.part.source
            known, x = self.copied.tensors.get(source), now.get(source)
            if known is None or not spec.stages or (x is not None and x.is_meta):
                continue
            if x is not None and x.requires_grad not in (
                known.trained,
                copy.requires_grad,
            ):
                raise ParameterError(
                    f"requires_grad of the model's '{source}' was changed after it was "
                    "compiled, and the step has a copy of its own",
                    fix=_freeze(x.requires_grad, trainable=spec.trainable),
                )
            if x is None or not self._is_same(x, known, spec, copy):
                raise ParameterError(
                    f"the model's '{source}' was changed after it was compiled, and "
                    "the step has a copy of its own",
                    fix=_load(source, name in buffers, trained),
                )
            same[source] = replace(Known.of(x), trained=known.trained)
        # Of what this rank holds nothing of, another one looks at the values.
        known_sources = self.copied.tensors.keys()
        for source in known_sources & now.keys() - same.keys():
            known = self.copied[source]
            same[source] = replace(Known.of(now[source]), trained=known.trained)
        self.copied.renew(same)

    def differing(self, parameters: Mapping[str, Tensor]) -> str:
        """The name of a parameter that nobody has written into, and of which the step
        has other values; "" if there is none. parameters: of the step."""
        left = self.copied.unwritten()
        both = (*left.values(), *parameters.values())
        versions = [(id(x), x._version, x.data_ptr()) for x in both]
        if versions == self._compared:
            return ""
        for name, copy in parameters.items():
            spec = self._program.parameters[name]
            x = left.get(spec.part.source)
            if x is None or x.is_meta or not spec.stages:
                continue
            if tuple(x.shape) != spec.part.shape:
                continue
            own = take_shard(x.detach(), spec, self._program.mesh, self._coords)
            if not torch.equal(own.to(copy.device), copy.detach().to(own.dtype)):
                return spec.part.source
        self._compared = versions
        return ""

    def _is_same(
        self, x: Tensor, known: Known, spec: ParameterSpec, copy: Tensor
    ) -> bool:
        """Whether it has the values that it had, or those that the step has now: it
        was moved, or given what was trained."""
        if known.has_values_of(x):
            return True
        if tuple(x.shape) != spec.part.shape:
            return False
        own = take_shard(x.detach(), spec, self._program.mesh, self._coords)
        return torch.equal(own.to(copy.device), copy)


def _freeze(trains: bool, trainable: bool) -> str:
    """trains: what was wanted. trainable: whether it can be so in the step."""
    if trains and not trainable:
        return (
            "call requires_grad_(True) before autopar.compile, and until it shall be "
            "trained requires_grad_(False) of the step's: dict(step.named_parameters())"
        )
    return (
        f"call requires_grad_({trains}) before autopar.compile, or of the step's: "
        "dict(step.named_parameters())"
    )


def _load(source: str, is_buffer: bool, trained: bool) -> str:
    if not trained:
        return (
            "change it before autopar.compile, or load it anew: "
            "step.load_state_dict(model.state_dict())"
        )
    if is_buffer:
        return (
            "load it into the step: "
            f"step.load_state_dict({{**step.state_dict(), '{source}': x}})"
        )
    return "change those of the step, which are trained: step.named_parameters()"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _hooks_on_forward(model: nn.Module) -> set[tuple[str, int]]:
    """A module's path and the number of a hook on it, for each."""
    return {
        (path, number)
        for path, module in model.named_modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for number in hooks
    }
