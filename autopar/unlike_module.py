"""Names that people look for in a step as in their module, and what does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

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
MODES = (
    "a step has no modes",
    "call step(**batch) to train, and step.evaluate(**batch) without dropout",
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
GRADIENTS_ARE_THERE = "leave the backward out: they are in .grad after step(**batch)"
OF_THE_LOSS_ITSELF = (
    "leave the backward out: gradients of the loss as the step returned it are in "
    ".grad, and add up until zero_grad(). For their mean over several batches compile "
    "with microbatches=4 and pass all at once, or divide in loss_fn"
)
RETURNED = (
    'loss = step(**batch); other outputs: step.evaluate(outputs=("logits",), **batch)'
)
# name -> (why it is not there, what is instead)
LACKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("train", "eval", "training"), MODES),
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
                *("get_submodule", "get_parameter", "module", "_modules"),
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
        "no_sync": (
            "gradients of several batches add up until zero_grad()",
            "leave no_sync out; or compile with microbatches=8, and pass all at once",
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
    """The loss that a step returns, [], of which whoever calls `backward` is told that
    the step did. What is computed of it is a plain tensor; but for a multiple, a sum or
    a mean without a gradient of its own, as loops have them that accumulate."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    computed = False  # it is no more the loss as the step returned it

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(
            "the step that returned this loss has computed its gradients already",
            fix=OF_THE_LOSS_ITSELF if self.computed else GRADIENTS_ARE_THERE,
        )

    def __iter__(self) -> NoReturn:
        raise AutoparError("a step returns the loss alone", fix=RETURNED)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("loss", "logits"):
                raise NotOfAStep(
                    f"'{name}': a step returns the loss alone", fix=RETURNED
                )
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _computed(name: str) -> Callable[..., Any]:
    """An operation of tensors that gives a loss which has been computed of a step's."""
    operation = getattr(Tensor, name)

    def compute(self: StepLoss, *args: Any, **kwargs: Any) -> Any:
        result = operation(self, *args, **kwargs)
        if not isinstance(result, Tensor) or result.requires_grad:
            return result
        result = result.as_subclass(StepLoss)
        result.computed = True
        return result

    return wraps(operation)(compute)


for _name in (
    *("__mul__", "__rmul__", "__truediv__", "__neg__", "mean", "sum"),
    *("__add__", "__radd__", "__sub__", "__rsub__"),
):
    setattr(StepLoss, _name, _computed(_name))


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raises AttributeError, which names a replacement if there is one."""
    if name in LACKS:
        why, fix = LACKS[name]
        raise NotOfAStep(f"'{name}': {why}", fix=fix)
    kind = type(owner).__name__
    raise AttributeError(f"'{kind}' object has no attribute '{name}'")
