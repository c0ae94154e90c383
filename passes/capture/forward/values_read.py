"""Calls by which forward lets values of tensors decide what it computes, in no graph.

What is known is which call gave a number or a number of rows that is not known before
it runs. An error names it, and a way to go without.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import CaptureError
from ..forward.call_model import failed_loss
from ..forward.own_collectives import LEAVE_OUT
from ..forward.user_frames import at_work, raised_at, words_at_work

# In errors of captures that need to know what is in a tensor.
VALUES_READ = (
    "datadependent",
    "dynamicoutputshape",
    "unbacked",
    "symint",
    "symfloat",
    ".numpy() is not supported",
    "rowcount",  # see `passes.capture.forward.guards`
)
UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Python's names for what a user writes otherwise.
SPOKEN = {
    "__bool__": "if, while or bool()",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index or a size",
    "__len__": "len()",
    "item": ".item() or .tolist()",
    "__array__": "a NumPy array",
    "__getitem__": "x[...]",
}
WITHOUT_NUMBERS = (
    "compute with the tensor itself: x * n instead of x * n.item(), n.clamp(min=1) "
    "instead of max(n, 1), torch.where(n > 0, a, b) instead of if, a mask instead of a "
    "length; or pass numbers that are the same in every step in the batch, as Python "
    "values"
)
WITHOUT_ROWS = (
    "keep all rows, and let those count for nothing that are not chosen: "
    "torch.where(mask, x, 0), (x * mask).sum() / mask.sum()"
)

NO_NUMBER = (
    "take it as a tensor, mask.sum(), or of it, .item(), or as a size, x.shape[0]: "
    "len() and int() give Python's own numbers, which may only be compared with 0"
)

CUT = "ask nothing before you cut: rows[:most] gives all rows where there are no more"

CLASSES = (
    "say how many there are, by a number of Python: F.one_hot(x, n), or, if some of x "
    "are n or more, whose rows are to be 0, F.one_hot(x.clamp(max=n), n + 1)[..., :n]"
)

COUNTED = (
    "say how many there are, by a number of Python: F.one_hot(x.flatten(), n).sum(0)"
)

OF_EXPERTS = (
    "go over all experts, and do not ask which or how many rows chose one, as no rows "
    "add nothing: for e in range(experts): rows, place = torch.where(chosen == e); "
    "y[rows] += weight[rows, place, None] * expert[e](x[rows]), for weight and chosen "
    "of topk; or look their weights up, which an axis ep can split: "
    "torch.bmm(w[chosen.flatten()], x.repeat_interleave(k, 0)[..., None]), where w is "
    "one parameter [experts, out, in], x [rows, in], and k are chosen of each row"
)

VALID = (
    "torch looks whether what a distribution is given is valid: give it "
    "validate_args=False"
)
# Code of torch that looks into tensors, as `file:function`, and how to do without.
LOOKS = {
    "transformer.py:_detect_is_causal_mask": (
        "torch's own layers look into their mask to see whether it is causal: "
        "say so, layers(x, mask=..., is_causal=True), or is_causal=False"
    ),
    "functional.py:gaussian_nll_loss": (
        "torch looks whether a variance is negative: write the loss out, "
        "0.5 * (var.log() + (x - y) ** 2 / var).mean()"
    ),
    "distribution.py:__init__": VALID,
    "distribution.py:_validate_sample": VALID,
}


@dataclass(frozen=True)
class Read:
    """A call whose result depends on values. name: of the function. rows: whether its
    number of rows does. experts: whether the code mentions experts. fix: a way to do
    without, if not the usual one."""

    name: str
    source: str
    rows: bool = False
    experts: bool = False
    fix: str = ""

    def error(self, source: str = "") -> CaptureError:
        """The refusal of a shape that depends on values. source: where it is used."""
        if self.name == "one_hot":
            return CaptureError(
                "how many classes one_hot has depends on the values of tensors, but "
                "the shapes of a program are fixed",
                source=source or self.source,
                fix=CLASSES,
            )
        if self.name == "bincount":
            return CaptureError(
                "how many numbers bincount counts depends on the values of tensors, "
                "but the shapes of a program are fixed",
                source=source or self.source,
                fix=COUNTED,
            )
        spoken = SPOKEN.get(self.name, f".{self.name}()")
        at = "" if source in ("", self.source) else f" ({self.source})"
        if self.rows:
            message = (
                f"how many rows {spoken} gives{at} depends on the values of tensors, "
                "but the shapes of a program are fixed"
            )
        else:
            message = (
                f"forward reads numbers out of a tensor by {spoken}{at}, but they are "
                "known only when a program runs"
            )
        fix = WITHOUT_ROWS if self.rows else WITHOUT_NUMBERS
        if self.experts:
            fix = OF_EXPERTS
        fix = self.fix or fix
        return CaptureError(message, source=source or self.source, fix=fix)


def read_by(func: Any, args: Any, result: Any) -> Read | None:
    """The read that a call was, by its result; None of one that is known before, or as
    little as its arguments."""
    read = _read_of(func, result)
    return None if read is None or _is_unknown(args) else read


def _read_of(func: Any, result: Any) -> Read | None:
    name = getattr(func, "__name__", str(func))
    if isinstance(result, UNKNOWN):
        return read_here(name, rows=False)
    if isinstance(result, Tensor):
        return None if has_shape(result) else read_here(name, rows=True)
    if isinstance(result, list | tuple):
        reads = (_read_of(func, x) for x in result[:8])
        return next((r for r in reads if r is not None), None)
    return None


def has_shape(x: Tensor) -> bool:
    """Whether a tensor's shape is known before it runs. The question bypasses the modes
    of a capture, each of which takes longer than the answer."""
    with torch._C.DisableTorchFunction():
        return all(type(n) is int for n in x.shape)


def is_unknown(x: Any) -> bool:
    """Whether the contents of a tensor are unknown in a capture."""
    return isinstance(x, FakeTensor) and x.constant is None


def _is_unknown(arg: Any) -> bool:
    if isinstance(arg, Tensor):
        return not has_shape(arg)
    many = isinstance(arg, list | tuple)
    return any(map(_is_unknown, arg)) if many else isinstance(arg, UNKNOWN)


def tried_by(func: Any, args: Any, error: Exception) -> Read | None:
    """The read that a failed call attempted, by its error."""
    if not reads_values(error) or _is_unknown(args):
        return None
    name = getattr(func, "__name__", str(func))
    return read_here(name, rows="shape" in type(error).__name__.lower())


def read_here(name: str, rows: bool) -> Read:
    """The read by the line that is at work."""
    experts = any("expert" in word.lower() for word in words_at_work())
    return Read(name, at_work(), rows, experts)


def reads_values(error: BaseException) -> bool:
    """Whether torch raised this error because it would need a tensor's contents."""
    text = f"{type(error).__name__} {error}".lower().replace("-", "")
    return any(mark in text for mark in VALUES_READ)


def capture_failed(
    error: Exception, model: nn.Module, fields: Iterable[str], read: Read | None
) -> CaptureError:
    """The error to raise instead of torch's. read: the last one before it."""
    source = raised_at(error)
    text = str(error).strip().splitlines() or [""]
    message = f"could not be captured: {type(error).__name__}: {text[0]}"
    called = failed_loss(error)
    message = f"{'the model' if called is None else 'the loss function'} {message}"
    if "torch.distributed.nn.functional" in text[0]:  # which torch exports nowhere
        return CaptureError(message, source=source, fix=LEAVE_OUT)
    if not reads_values(error):
        fix = called or (
            "the model must run on the batch as it is, given by keyword: "
            f"model({', '.join(f'{name}=...' for name in fields)})"
        )
        return CaptureError(message, source=source, fix=fix)
    if fixes := [LOOKS[place] for place in _functions(error) if place in LOOKS]:
        return CaptureError(message, source=source, fix=fixes[0])
    configs = (getattr(m, "config", None) for m in model.modules())
    chosen = {getattr(c, "_experts_implementation", None) for c in configs}
    # Of Hugging Face, that calls the loop, or what is configured instead.
    if "eager" in chosen and "moe.py:forward" in _functions(error):
        fix = (
            "experts that loop over their tokens have no fixed shapes: give the "
            "model's configuration experts_implementation='batched_mm'"
        )
        return CaptureError(message, source=source, fix=fix)
    return (
        read.error(source)
        if read
        else CaptureError(message, source=source, fix=WITHOUT_NUMBERS)
    )


def _functions(error: BaseException) -> Iterator[str]:
    """All functions that were at work, as `file:function`."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield f"{os.path.basename(code.co_filename)}:{code.co_name}"
        trace = trace.tb_next


def refuse_unknown(args: Any, read: Read | None, source: str) -> None:
    """Raises CaptureError if there is an `Unknown` among the arguments of a call."""
    if isinstance(args, Unknown):
        raise (read or Read(args.name, source)).error()
    if isinstance(args, Mapping):
        args = tuple(args.values())
    if isinstance(args, tuple):
        for arg in args:
            refuse_unknown(arg, read, source)


@dataclass(frozen=True)
class Unknown:
    """A number that is unknown before the program runs. name: of the call that returns
    it. size: torch's expression for it, if it is made of sizes."""

    name: str
    size: Any = None
