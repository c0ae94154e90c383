"""A model without its weights, to be captured again for batches of other shapes, and
the loss function that goes with it.

A loss function may read what forward leaves at the model that it was written for, as
`model.aux_loss`: by a closure, a global, or as a method of an object that has the
model. That of a copy reads it at the copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autopar.capture.entries import is_users
from autopar.capture.names_read import codes

LossFn = Callable[..., Any]


def without_weights(
    model: nn.Module, loss_fn: LossFn | None = None
) -> tuple[nn.Module, LossFn | None]:
    """A copy of a model with parameters on meta, and the same buffers; and the loss
    function, which reads the copy where it read the model."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    for p in model.parameters():
        meta = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(meta, requires_grad=p.requires_grad)
    copied = copy.deepcopy(model, memo)
    copies = {id(m): memo[id(m)] for m in model.modules() if id(m) in memo}
    return copied, _reading(loss_fn, copies, {})


def _reading(of: Any, copies: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """A function, method, partial or object that reads copies in place of modules;
    itself, if it reads none of these.

    copies: id of a module -> its copy. known: id -> the result made for it already.
    """
    if id(of) in copies:
        return copies[id(of)]
    if id(of) not in known:
        known[id(of)] = of  # while it is looked at
        known[id(of)] = _changed(of, copies, known)
    return known[id(of)]


def _changed(of: Any, copies: Mapping[int, Any], known: dict[int, Any]) -> Any:
    def reading(value: Any) -> Any:
        return _reading(value, copies, known)

    if isinstance(of, FunctionType):
        return _function(of, reading) if is_users(of) else of
    if isinstance(of, MethodType):
        own = reading(of.__self__)
        return of if own is of.__self__ else MethodType(of.__func__, own)
    if isinstance(of, functools.partial):
        keywords = {name: reading(v) for name, v in of.keywords.items()}
        return functools.partial(reading(of.func), *map(reading, of.args), **keywords)
    if isinstance(of, type | nn.Module) or not is_users(type(of)):
        return of
    held = getattr(of, "__dict__", {})
    others = {name: copies[id(v)] for name, v in held.items() if id(v) in copies}
    if not others:
        return of
    own = copy.copy(of)
    vars(own).update(others)
    return own


def _function(of: FunctionType, reading: Callable[[Any], Any]) -> FunctionType:
    """A function with other values around it, if any is another one: in its closure,
    among its globals, or as defaults."""
    cells = of.__closure__ or ()
    closure = tuple(_cell(cell, reading) for cell in cells)
    named = {name for code in codes(of.__code__) for name in code.co_names}
    globals_ = {name: v for name, v in of.__globals__.items() if name in named}
    others = _others(globals_, reading)
    defaults = tuple(map(reading, of.__defaults__ or ()))
    keywords = _others(of.__kwdefaults__ or {}, reading)
    same = zip((*closure, *defaults), (*cells, *(of.__defaults__ or ())), strict=True)
    if not others and not keywords and all(a is b for a, b in same):
        return of
    variables = {**of.__globals__, **others} if others else of.__globals__
    made = FunctionType(of.__code__, variables, of.__name__, defaults, closure)
    made.__kwdefaults__ = {**(of.__kwdefaults__ or {}), **keywords} or None
    made.__qualname__ = of.__qualname__
    return made


def _others(values: Mapping[str, Any], reading: Callable[[Any], Any]) -> dict[str, Any]:
    """The values, by name, that differ from before."""
    now = {name: reading(v) for name, v in values.items()}
    return {name: v for name, v in now.items() if v is not values[name]}


def _cell(cell: CellType, reading: Callable[[Any], Any]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # a name that has no value yet
        return cell
    now = reading(value)
    return cell if now is value else CellType(now)
