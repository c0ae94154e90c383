"""Names that people look for in a step as in their module, and what does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn

from autopar.passes.errors import AutoparError

# Without the second half it would begin with the model's weights, which nobody trained.
ANOTHER_STEP = (
    "compile another step for it, and load what was trained: "
    "other.load_state_dict(step.state_dict())"
)
HOOKS = (
    "hooks on modules have no place in a step, which is a program without modules",
    "register hooks on forward before compiling: what they compute is part of the "
    "program; to look at values, let the model return them: "
    'step.evaluate(outputs=("hidden_states.3",), **batch)',
)
MODULES = (
    "a step is a program without modules",
    "step.named_parameters() and step.state_dict() have the names of the model; batch "
    "norm's statistics are frozen by .eval() before compiling; nothing wraps a step, "
    "which sums gradients itself",
)
BUFFERS = (
    "a step has parts of the model's weights, and its buffers are whole",
    "step.state_dict() has them; averages of weights, as of AveragedModel: "
    "step.start_ema(0.999), and step.ema.update() after each optimizer.step()",
)
PLACES = (
    "a step's device and precision are decided",
    'compile with device="cuda:0", or precision="bf16"',
)
OUTPUT = (
    "a step computes a loss",
    "load what step.save_pretrained(folder) or step.state_dict() gives into the model; "
    'or take logits: step.evaluate(outputs=("logits",), **batch)',
)
GRADIENTS_ARE_THERE = "call it of the loss: loss = step(**batch); loss.backward()"
RETURNED = (
    'loss = step(**batch); other outputs: step.evaluate(outputs=("logits",), **batch)'
)
# name -> (why it is not there, what is instead)
LACKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "register_forward_hook",
                "register_forward_pre_hook",
                "register_full_backward_hook",
                "register_full_backward_pre_hook",
            ),
            HOOKS,
        ),
        **dict.fromkeys(
            (
                *("modules", "named_modules", "children", "named_children", "apply"),
                *("get_submodule", "get_parameter", "_modules"),
            ),
            MODULES,
        ),
        **dict.fromkeys(("buffers", "named_buffers", "get_buffer"), BUFFERS),
        **dict.fromkeys(
            ("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), PLACES
        ),
        **dict.fromkeys(("forward", "generate"), OUTPUT),
        "requires_grad_": (
            "what is trained is decided when a step is compiled",
            "call requires_grad_ on the model before",
        ),
        "module": (
            "a step wraps no model, but has parts of its weights",
            "keep the model beside it, and before it is read, on all ranks: "
            "model.load_state_dict(step.state_dict())",
        ),
        "config": (
            "a step is a program, without a configuration",
            "read it from the model that was compiled",
        ),
        "gradient_checkpointing_enable": (
            "what is recomputed is decided by the plan",
            'compile with recompute="full", or devices=..., which finds what must be',
        ),
        "compile": (
            "a step is compiled already",
            'compile with backend="inductor", which fuses what a rank computes',
        ),
        "backward": ("a step computes gradients with its loss", GRADIENTS_ARE_THERE),
    }
)


# What wraps a model, by its class -> what is to be done instead.
WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "DataParallel": "compile model.module: a step shares batches out itself",
        "DistributedDataParallel": "compile model.module: a step sums gradients itself",
        "FullyShardedDataParallel": 'compile the model itself, with "fsdp" in the mesh',
        "OptimizedModule": 'leave torch.compile out, and give backend="inductor"',
    }
)


def check_model_given(model: object) -> None:
    """Raises AutoparError for objects that `compile` cannot take as a model, or whose
    parameters it would know by other names."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"the model is a {kind}",
            fix="give a torch.nn.Module, that nothing was compiled from",
        )
    if kind in WRAPPERS and type(model).__module__.startswith("torch."):
        raise AutoparError(f"the model is wrapped: {kind}", fix=WRAPPERS[kind])
    shown = {id(p) for p in model.parameters()}
    for name, p in nn.Module.named_parameters(model):
        if p.requires_grad and id(p) not in shown:
            raise AutoparError(
                f"{kind}.parameters() leaves out '{name}', which wants a gradient; a "
                "step trains all that do",
                fix="freeze what is not trained, by requires_grad_(False), and let the "
                "model give all of its parameters",
            )


class NotOfAStep(AutoparError, AttributeError):
    """An attribute that modules have, and steps have not."""


class StepLoss(Tensor):
    """The loss that a step returns, []. Its gradients are there: `backward` makes them
    those of what it is called on, as a multiple of the loss."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _backward: Callable[[Tensor | None], None]

    @classmethod
    def of(cls, loss: Tensor, backward: Callable[[Tensor | None], None]) -> StepLoss:
        """backward: is called with the factor of the loss, [], None if that is 1."""
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            made = _Backward.apply(anchor, loss, backward).as_subclass(cls)
        made._backward = backward
        return cast(StepLoss, made)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs.get("gradient") is not None:
            super().backward(*args, **kwargs)
        else:  # without a look at a factor, for which a GPU is waited for
            self._backward(None)

    def __iter__(self) -> NoReturn:
        raise AutoparError("a step returns the loss alone", fix=RETURNED)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("loss", "logits"):
                raise NotOfAStep(
                    f"'{name}': a step returns the loss alone", fix=RETURNED
                )
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    def __float__(self) -> float:
        return float(self.item())  # torch warns of what has a gradient

    def __format__(self, spec: str) -> str:
        return format(self.detach(), spec)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class _Backward(torch.autograd.Function):
    """The loss of a step in the graph of what is computed of it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, backward: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.backward_of_step = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.backward_of_step(grads[0])
        return None, None, None


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raises AttributeError, which names a replacement if there is one."""
    if name in LACKS:
        why, fix = LACKS[name]
        raise NotOfAStep(f"'{name}': {why}", fix=fix)
    kind = type(owner).__name__
    raise AttributeError(f"'{kind}' object has no attribute '{name}'")
