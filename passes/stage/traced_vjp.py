"""The derivative of any op that has none of its own: autograd, traced once.

Each distinct signature (op, shapes, types, constants, which operands want a gradient)
runs once on tensors without data, forward and backward together; the ops that get to
torch's dispatcher below autograd are noted. What autograd calls backward runs backward,
so that no more is kept than autograd keeps. Writes in place are made new values before
that: what they change would not be seen to depend on them. (make_fx notes the same in
ten times the time.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..builder import Builder, needed_nodes
from ..errors import CaptureError
from ..graph import Node, Value, map_values
from ..ops.cotangents import Cotangents
from ..ops.evaluate import function_of
from ..ops.memory import may_alias

# Of what an op makes: a rank's own is made where the rank computes.
PLACEMENT = ("device", "pin_memory", "layout")


@dataclass(frozen=True)
class Template:
    """Forward and backward of one op over placeholder values.

    forward makes `outs` from `xs`; backward makes `grads` from these and `dys`.
    """

    xs: tuple[Value, ...]
    dys: tuple[Value | None, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    outs: tuple[Value | None, ...]
    grads: tuple[Value | None, ...]


def template_of(cts: Cotangents, node: Node) -> Template:
    """The template of a node's signature; traced once for all nodes that share it."""
    wanted = tuple(cts.wanted(v) for v in node.operands)
    places = iter(range(len(node.operands)))
    numbered = map_values(lambda _: _Operand(next(places)), (node.args, node.kwargs))
    args, kwargs = numbered
    types = tuple((v.shape, v.dtype) for v in node.operands)
    try:
        return _trace(node.op, args, tuple(kwargs.items()), types, wanted)
    except Exception as error:
        raise CaptureError(
            f"{node.op} cannot be differentiated: {type(error).__name__}: {error}",
            source=str(node.location),
            fix="detach what needs no gradient, or write it with other operations",
        ) from error


@dataclass(frozen=True)
class _Operand:
    index: int


def traced(
    cts: Cotangents, node: Node, dys: Sequence[Value | None]
) -> list[Value | None]:
    """Instantiate the backward of a node whose template's forward ran before."""
    template = template_of(cts, node)
    bound = cts.bindings[node.results[0].name]
    for own, out, dy in zip(template.dys, node.outs, dys, strict=True):
        if own is not None and out is not None:
            bound[own.name] = dy if dy is not None else cts.zeros(out, node)
    named = {
        grad.name: v.name
        for grad, v in zip(template.grads, node.operands, strict=True)
        if grad is not None
    }
    for inner in template.backward:
        outs = tuple(
            None if v is None else cts.fresh(v, named.get(v.name, node.results[0].name))
            for v in inner.outs
        )
        new = inner.substitute(lambda v: bound[v.name])
        cts.append(Node(new.op, new.args, new.kwargs, outs, node.location))
        for old, fresh in zip(inner.outs, outs, strict=True):
            if old is not None and fresh is not None:
                bound[old.name] = fresh
                if may_alias(new):
                    cts.share(fresh)
    grads = [None if g is None else bound[g.name] for g in template.grads]
    for dy in grads:
        if dy is not None and grads.count(dy) > 1:
            cts.share(dy)
    return grads


def expand_forward(cts: Cotangents, node: Node) -> list[Node]:
    """The forward nodes of a traced op, with the results that its backward keeps."""
    template = template_of(cts, node)
    bound = {x.name: v for x, v in zip(template.xs, node.operands, strict=True)}
    final = {
        t.name: v
        for t, v in zip(template.outs, node.outs, strict=True)
        if t is not None and v is not None
    }
    nodes = []
    for inner in template.forward:
        outs = tuple(
            None if v is None else final.get(v.name) or cts.residual(v, node)
            for v in inner.outs
        )
        new = inner.substitute(lambda v: bound[v.name])
        nodes.append(Node(new.op, new.args, new.kwargs, outs, node.location))
        bound.update(
            (old.name, v)
            for old, v in zip(inner.outs, outs, strict=True)
            if old is not None and v is not None
        )
    for t, v in zip(template.outs, node.outs, strict=True):
        if t is not None and v is not None and bound[t.name] != v:
            # One of its operands, or of its other results.
            same = (bound[t.name],)
            nodes.append(Node("aten.alias.default", same, {}, (v,), node.location))
    cts.bindings[node.results[0].name] = bound
    return nodes


@lru_cache(maxsize=4096)
def _trace(
    op: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    types: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    wanted: tuple[bool, ...],
) -> Template:
    def call(xs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _Operand):
                return xs[arg.index]
            return [fill(a) for a in arg] if isinstance(arg, tuple) else arg

        named = {k: fill(v) for k, v in kwargs}
        return _tensors(function_of(op)(*map(fill, args), **named))

    # On fake tensors ops without meta kernels run too, and statistics of 16 bits are of
    # the type that a CPU gives them.
    if not any(dtype.itemsize == 2 for _, dtype in types):
        with suppress(NotImplementedError):
            return _run(call, types, wanted, "meta")
    with _fake():
        return _run(call, types, wanted, "cpu")


@cache  # it takes longer to make than to trace with
def _fake() -> FakeTensorMode:
    return FakeTensorMode()


def _run(
    call: Callable[[Sequence[Tensor]], tuple[Tensor | None, ...]],
    types: Sequence[tuple[tuple[int, ...], torch.dtype]],
    wanted: tuple[bool, ...],
    device: str,
) -> Template:
    """Call an op, then its backward, and read what they called."""

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    xs = [empty(*one) for one in types]
    with _Calls() as calls:
        leaves = [x.detach().requires_grad_(w) for x, w in zip(xs, wanted, strict=True)]
        with torch.enable_grad():
            outs = call(leaves)
    begun = len(calls.made)
    flows = [o is not None and o.requires_grad for o in outs]
    ends = [o for o in outs if o is not None and o.requires_grad]
    dys = [empty(o.shape, o.dtype) for o in ends]
    with calls:
        sources = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(ends, sources, dys, allow_unused=True)
    results: Sequence[Tensor | None] = [*outs, *grads]
    if any(_writes(one.function) for one in calls.made):
        with _Calls() as renewed:
            recorded = partial(
                _replay, calls.made, begun, renewed, [*xs, *dys], results
            )
            results = functionalize(recorded, remove="mutations")(*xs, *dys)
        calls, begun = renewed, renewed.begun
    return _read(calls.made, begun, [*xs, *dys], results, wanted, flows)


@dataclass(frozen=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Calls(TorchDispatchMode):
    """Notes the calls of ops that reach the dispatcher below autograd, in order; begun:
    how many there were before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Call] = []
        self.begun = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.made.append(_Call(func, args, kwargs or {}, result))
        return result


def _replay(
    calls: Sequence[_Call],
    begun: int,
    renewed: _Calls,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor | None],
    *others: Tensor,
) -> list[Tensor | None]:
    """Make the same calls with others in place of the tensors that were given."""
    values = dict(zip(map(id, inputs), others, strict=True))

    def now(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: values[id(x)], tree)

    for number, one in enumerate(calls):
        if number == begun:
            renewed.begun = len(renewed.made)
        result = one.function(*now(one.args), **now(one.kwargs))
        before, after = _tensors(one.result), _tensors(result)
        values.update(zip(map(id, before), after, strict=True))
    if begun == len(calls):
        renewed.begun = len(renewed.made)
    return now(results)


def _writes(function: Any) -> bool:
    """Whether it changes a tensor that it is given."""
    return function._schema.is_mutable


def _read(
    calls: Sequence[_Call],
    begun: int,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor | None],
    wanted: tuple[bool, ...],
    flows: list[bool],
) -> Template:
    """Sorts calls into forward, the first `begun`, and backward. inputs: operands, then
    cotangents. results: the op's, then the gradients of operands that want one."""
    builder = Builder(set())
    sources = [builder.value("given", x.shape, x.dtype) for x in inputs]
    values = dict(zip(map(id, inputs), sources, strict=True))
    for one in calls[:begun]:
        _read_call(one, values, builder)
    forward = [*builder.nodes]
    for one in calls[begun:]:
        _read_call(one, values, builder)
    ended = [None if x is None else values[id(x)] for x in results]
    outs, grads = ended[: len(flows)], iter(ended[len(flows) :])
    flowing = iter(sources[len(wanted) :])
    dys = tuple(next(flowing) if f else None for f in flows)
    all_grads = tuple(next(grads) if w else None for w in wanted)
    ends = {v.name for v in all_grads if v is not None}
    backward = _only_needed(builder.nodes[len(forward) :], ends)
    needed = {v.name for v in outs if v is not None} | _reads(backward) | ends
    return Template(
        tuple(sources[: len(wanted)]),
        dys,
        tuple(_only_needed(forward, needed)),
        tuple(backward),
        tuple(outs),
        all_grads,
    )


def _reads(nodes: Sequence[Node]) -> set[str]:
    return {v.name for n in nodes for v in n.operands}


def _only_needed(nodes: Sequence[Node], needed: set[str]) -> list[Node]:
    kept = needed_nodes(nodes, needed := set(needed))
    outs = ([v if v and v.name in needed else None for v in n.outs] for n in kept)
    return [replace(n, outs=tuple(own)) for n, own in zip(kept, outs, strict=True)]


def _read_call(call: _Call, values: dict[int, Value], builder: Builder) -> None:
    """Append the node of a call. values: by the identity of tensors."""
    if _writes(call.function):
        raise NotImplementedError(f"its derivative writes in place, by {call.function}")

    def read(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: values[id(x)], tree)

    op, results = str(call.function), _tensors(call.result)
    if not any(isinstance(x, Tensor) for x in results):
        return  # it only checks what the op found
    if op in ("aten.detach.default", "aten.alias.default"):
        values[id(call.result)] = read(call.args[0])
        return
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        # A cotangent need not be contiguous as the traced one was.
        op = "aten.reshape.default"
    left = {k: v for k, v in call.kwargs.items() if k not in PLACEMENT}
    args = call.args
    if op == "aten._to_copy.default" and left.keys() == {"dtype"}:
        op, args, left = "aten.to.dtype", (*args, left["dtype"]), {}
    if op == "aten._conj.default" and isinstance(args[0], complex):
        # What a number is that an op was called with, as x * 1j.
        op, args = "aten.full.default", ((), args[0].conjugate())
        left = {"dtype": results[0].dtype}
    outs = tuple(
        builder.value(call.function.overloadpacket.__name__, x.shape, x.dtype)
        if isinstance(x, Tensor)
        else None
        for x in results
    )
    plain = map_values(lambda v: v, read(args))
    builder.nodes.append(Node(op, plain, read(left), outs))
    values |= {id(x): v for x, v in zip(results, outs, strict=True) if v is not None}


def _tensors(result: Any) -> tuple[Any, ...]:
    """The results of an op, as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)
