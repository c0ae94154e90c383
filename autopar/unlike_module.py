"""What people look for in a step as if it were their module, and where that is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

from torch import nn

from autopar.passes.errors import AutoparError

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
    "norm's statistics are frozen by .eval() before compiling",
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
                *("get_submodule", "get_parameter", "module", "buffers"),
                *("named_buffers", "get_buffer"),
            ),
            MODULES,
        ),
        **dict.fromkeys(
            ("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), PLACES
        ),
        **dict.fromkeys(("forward", "generate"), OUTPUT),
        "requires_grad_": (
            "what is trained is decided when a step is compiled",
            "call requires_grad_ on the model before",
        ),
        "no_sync": (
            "gradients of several batches add up until zero_grad()",
            "leave no_sync out; or compile with microbatches=8, and pass all at once",
        ),
        "backward": (
            "a step computes gradients with its loss",
            "leave the backward out: they are in .grad after step(**batch)",
        ),
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
    """Raises AutoparError for what `compile` cannot take for a model, or would take
    with other names of its parameters."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"the model is a {kind}",
            fix="give a torch.nn.Module, that nothing was compiled from",
        )
    if kind in WRAPPERS and type(model).__module__.startswith("torch."):
        raise AutoparError(f"the model is wrapped: {kind}", fix=WRAPPERS[kind])


class NotOfAStep(AutoparError, AttributeError):
    """An attribute that modules have, and steps have not."""


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raises AttributeError, with what does the same, where something does."""
    if name in LACKS:
        why, fix = LACKS[name]
        raise NotOfAStep(f"'{name}': {why}", fix=fix)
    kind = type(owner).__name__
    raise AttributeError(f"'{kind}' object has no attribute '{name}'")
