"""Calling a model as its user does: by keyword, for its loss, and what is beside it."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ...nested import named_tensors
from ..forward.flex_attention import flex_as_attention
from ..forward.function_calls import through_checkpoints


@dataclass(frozen=True)
class Returned:
    """What a call gave.

    loss: a scalar. metrics: the scalars of a dict that are not the loss itself, by
    name. tensors: all that the model and the loss function returned, by dotted path:
    "logits", "hidden_states.3"; of a tuple "0", "1".
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, *results: Any) -> Returned:
        """results: of the model, and of the loss function, which comes last."""
        metrics = find_metrics(results[-1])
        tensors = {name: x for one in results for name, x in named_tensors(one)}
        who = "the loss function" if len(results) > 1 else "the model"
        return cls(find_loss(results[-1], who), metrics, tensors)

    def select(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The metrics, and tensors by name. Raises: CaptureError."""
        for name in names:
            if name not in self.tensors:
                close = difflib.get_close_matches(name, self.tensors, n=3, cutoff=0.5)
                known = ", ".join(map(repr, close or list(self.tensors)[:20]))
                raise CaptureError(
                    f"the model returns no tensor named '{name}'",
                    fix=f"did you mean {known}?" if close else f"it has {known}",
                )
        return {**self.metrics, **{name: self.tensors[name] for name in names}}


def loss_of(
    model: nn.Module,
    fields: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """The scalar loss of `model(**fields)`, or of `loss_fn(model(**fields), fields)`.

    Fields that only the loss function reads (labels, weights) stay out of the model's
    call, also where it takes any keyword but cannot do with them. Checkpoints are run
    through: what is drawn within them could not be drawn a second time. Raises:
    CaptureError, if no single scalar loss comes out.
    """
    with _in_place(model), through_checkpoints():
        return _loss_of(model, fields, loss_fn)


@contextlib.contextmanager
def _in_place(model: nn.Module) -> Iterator[None]:
    """Runs flex_attention as plain attention on CPUs, where it has no gradients."""
    if all(p.device.type == "cpu" for p in model.parameters()):
        with flex_as_attention(), torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def _loss_of(
    model: nn.Module, fields: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> torch.Tensor:
    try:
        return call_model(model, fields, loss_fn).loss
    except TypeError:
        if only_by_any_keyword(model, fields, loss_fn):
            with contextlib.suppress(TypeError):
                return call_model(model, fields, loss_fn, by_name=True).loss
        raise


def call_model(
    model: nn.Module,
    fields: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    by_name: bool = False,
) -> Returned:
    """One call, as of `loss_of`, and all that came back.

    by_name: leave out what the model takes only because it takes any keyword. Raises:
    TypeError then, if the loss function does not read it either.
    """
    if loss_fn is None:
        return Returned.of(model(**fields))
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_any and not by_name:
        output = model(**fields)
        return Returned.of(output, compute_loss(loss_fn, output, fields))
    seen = Batch(fields)
    named = {k: v for k, v in fields.items() if k in parameters}
    output = model(**named)
    returned = Returned.of(output, compute_loss(loss_fn, output, seen))
    unread = fields.keys() - named.keys() - seen.names
    if takes_any and unread:
        raise TypeError(f"nobody reads {', '.join(sorted(unread))}")
    return returned


def compute_loss(loss_fn: Callable[..., Any], output: Any, batch: Any) -> Any:
    """Calls the loss function, in a frame of its own: tracebacks tell its errors from
    those of the model."""
    return loss_fn(output, batch)


def failed_loss(error: BaseException) -> str | None:
    """How the loss function was called that an error came from; None: it came from
    elsewhere."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is compute_loss.__code__:
            output, batch = frame.f_locals["output"], frame.f_locals["batch"]
            return (
                f"loss_fn(output, batch) is called with {describe(output)} and a dict "
                f"of {', '.join(batch)}"
            )
    return None


def only_by_any_keyword(
    model: nn.Module, fields: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> bool:
    """Whether there are fields for the loss function that the model takes only because
    it takes any keyword."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return loss_fn is not None and takes_any and not fields.keys() <= parameters.keys()


class Batch(dict[str, Any]):
    """The fields of a batch, and the names of those that somebody looked at."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def find_loss(result: Any, who: str = "the model") -> torch.Tensor:
    """The scalar loss that was returned: itself, `.loss`, a tuple's scalar, or of a
    dict "loss", or else the sum of its scalars. who: returned it."""
    if isinstance(result, torch.Tensor):
        candidates = [result]
    elif getattr(result, "loss", None) is not None:
        candidates = [result.loss]
    elif isinstance(result, Mapping):
        candidates = [result["loss"]] if result.get("loss") is not None else []
        if metrics := not candidates and find_metrics(result):
            return reduce(torch.add, metrics.values())
    elif isinstance(result, tuple | list):
        candidates = [x for x in result if isinstance(x, torch.Tensor) and x.ndim == 0]
    else:
        candidates = []
    scalars = [x for x in candidates if x.numel() == 1 and x.is_floating_point()]
    if len(scalars) == 1:
        return scalars[0].reshape(())
    raise CaptureError(
        f"{who} returned {describe(result)}, in which there is "
        + ("more than one scalar loss" if scalars else "no scalar loss"),
        fix="let it return the one scalar to be trained, as a mean"
        if who != "the model"
        else "pass the labels in the batch if the model computes its own loss, or give "
        "compile a loss_fn(output, batch) that returns a scalar",
    )


def find_metrics(result: Any) -> dict[str, torch.Tensor]:
    """The scalars of a dict, but for the loss itself."""
    if not isinstance(result, Mapping) or hasattr(result, "loss"):
        return {}
    return {
        name: x.reshape(())
        for name, x in result.items()
        if isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point()
        if name != "loss"
    }


def describe(result: Any) -> str:
    """Describes what a forward returned, for messages: its type, shapes and fields."""
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, Mapping):
        return f"{type(result).__name__} with fields {', '.join(result)}"
    if isinstance(result, tuple | list):
        return f"a {type(result).__name__} of ({', '.join(map(describe, result))})"
    return f"a {type(result).__name__}"
