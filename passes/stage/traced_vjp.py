"""The derivative of any op that has none of its own: autograd, traced once.

Each distinct signature (op, shapes, types, constants, which operands want a gradient)
is traced by make_fx on fake tensors, forward and backward together, and sorted into
what runs forward and what runs backward. Writes in place are made new values before
that: what they change would not be seen to depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from ..builder import Builder
from ..errors import CaptureError
from ..graph import Node, Value, map_values
from ..ops.evaluate import function_of
from ..ops.tape import Tape
from ..stage.reuse import may_alias


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


def template_of(tape: Tape, node: Node) -> Template:
    """The template of a node's signature; traced once for all nodes that share it."""
    wanted = tuple(tape.wanted(v) for v in node.operands)
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


def traced(tape: Tape, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
    """Instantiate the backward of a node whose template's forward ran before."""
    template = template_of(tape, node)
    bound = tape.bindings[node.results[0].name]
    for own, out, dy in zip(template.dys, node.outs, dys, strict=True):
        if own is not None and out is not None:
            bound[own.name] = dy if dy is not None else tape.zeros(out, node)
    named = {
        grad.name: v.name
        for grad, v in zip(template.grads, node.operands, strict=True)
        if grad is not None
    }
    for inner in template.backward:
        outs = tuple(
            None
            if v is None
            else tape.fresh(v, named.get(v.name, node.results[0].name))
            for v in inner.outs
        )
        new = inner.substitute(lambda v: bound[v.name])
        tape.append(Node(new.op, new.args, new.kwargs, outs, node.location))
        for old, fresh in zip(inner.outs, outs, strict=True):
            if old is not None and fresh is not None:
                bound[old.name] = fresh
                if may_alias(new):
                    tape.share(fresh)
    grads = [None if g is None else bound[g.name] for g in template.grads]
    for dy in grads:
        if dy is not None and grads.count(dy) > 1:
            tape.share(dy)
    return grads


def expand_forward(tape: Tape, node: Node) -> list[Node]:
    """The forward nodes of a traced op, with the results that its backward keeps."""
    template = template_of(tape, node)
    bound = {x.name: v for x, v in zip(template.xs, node.operands, strict=True)}
    final = {
        t.name: v
        for t, v in zip(template.outs, node.outs, strict=True)
        if t is not None and v is not None
    }
    nodes = []
    for inner in template.forward:
        outs = tuple(
            None if v is None else final.get(v.name) or tape.kept(v, node)
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
    tape.bindings[node.results[0].name] = bound
    return nodes


@lru_cache(maxsize=4096)
def _trace(
    op: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    types: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    wanted: tuple[bool, ...],
) -> Template:
    def call(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _Operand):
                return xs[arg.index]
            return [fill(a) for a in arg] if isinstance(arg, tuple) else arg

        result = function_of(op)(*map(fill, args), **{k: fill(v) for k, v in kwargs})
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    def leaves_of(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.detach().requires_grad_(w) for x, w in zip(xs, wanted, strict=True)]

    def joint(xs: list[torch.Tensor], dys: list[torch.Tensor]) -> list[Any]:
        leaves = leaves_of(xs)
        with torch.enable_grad():
            outs = call(leaves)
        ends = [o for o, f in zip(outs, flows, strict=True) if f]
        sources = [x for x in leaves if x.requires_grad]
        return [*outs, *torch.autograd.grad(ends, sources, dys, allow_unused=True)]

    with FakeTensorMode():
        xs = [torch.empty(shape, dtype=dtype) for shape, dtype in types]
        outs = call(leaves_of(xs))
        flows = [o is not None and o.requires_grad for o in outs]
        dys = [
            torch.empty(o.shape, dtype=o.dtype)
            for o, flow in zip(outs, flows, strict=True)
            if flow and o is not None
        ]
        module = make_fx(joint)(xs, dys)
        if any(map(_writes, module.graph.nodes)):
            module = make_fx(functionalize(module, remove="mutations"))(xs, dys)
    return _read(module, wanted, flows)


def _writes(node: fx.Node) -> bool:
    """Whether it changes a tensor that it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _read(
    module: fx.GraphModule, wanted: tuple[bool, ...], flows: list[bool]
) -> Template:
    """Read the traced graph, and sort its nodes into forward and backward."""
    values: dict[fx.Node, Any] = {}
    builder = Builder(set())
    sources: list[Value] = []
    results: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            fake = node.meta["val"]
            values[node] = builder.value(node.name, fake.shape, fake.dtype)
            sources.append(values[node])
        elif node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
        else:
            assert node.op == "call_function", f"the trace baked in {node.target}"
            if "val" in node.meta:  # else it only checks what the op found
                values[node] = _read_call(node, values, builder)
    outs, grads = results[: len(flows)], iter(results[len(flows) :])
    flowing = iter(sources[len(wanted) :])
    dys = tuple(next(flowing) if f else None for f in flows)
    all_grads = tuple(next(grads) if w else None for w in wanted)
    late = {v.name for v in dys if v is not None}
    forward, backward = [], []
    for n in builder.nodes:
        if any(v.name in late for v in n.operands):
            late.update(v.name for v in n.results)
            backward.append(n)
        else:
            forward.append(n)
    ends = {v.name for v in all_grads if v is not None}
    backward = _only_needed(backward, ends)
    # A gradient that no cotangent is in is made forward: zeros.
    kept = {v.name for v in outs if v is not None} | _reads(backward) | ends
    return Template(
        tuple(sources[: len(wanted)]),
        dys,
        tuple(_only_needed(forward, kept)),
        tuple(backward),
        tuple(outs),
        all_grads,
    )


def _reads(nodes: Sequence[Node]) -> set[str]:
    return {v.name for n in nodes for v in n.operands}


def _only_needed(nodes: Sequence[Node], needed: set[str]) -> list[Node]:
    kept, needed = [], set(needed)
    for node in reversed(nodes):
        if any(v.name in needed for v in node.results):
            outs = tuple(
                v if v is not None and v.name in needed else None for v in node.outs
            )
            kept.append(replace(node, outs=outs))
            needed.update(v.name for v in node.operands)
    return kept[::-1]


def _read_call(node: fx.Node, values: dict[fx.Node, Any], builder: Builder) -> Any:
    if _writes(node):
        raise NotImplementedError(f"its derivative writes in place, by {node.target}")
    args = fx.map_arg(node.args, values.__getitem__)
    if getattr(node.target, "__name__", "") == "getitem":
        return args[0][args[1]]
    op = str(node.target)
    if op in ("aten.detach.default", "aten.alias.default"):
        return args[0]
    kwargs = {
        k: v
        for k, v in fx.map_arg(dict(node.kwargs), values.__getitem__).items()
        if k not in ("device", "pin_memory", "layout")
    }
    fakes = node.meta["val"]
    many = isinstance(fakes, tuple | list)
    outs = tuple(
        builder.value(node.name, f.shape, f.dtype)
        if isinstance(f, torch.Tensor)
        else None
        for f in (fakes if many else (fakes,))
    )
    if op in ("aten.view.default", "aten._unsafe_view.default"):
        # A cotangent need not be contiguous as the traced one was.
        op = "aten.reshape.default"
    plain = map_values(lambda v: v, args)
    builder.nodes.append(Node(op, plain, kwargs, outs))
    return outs if many else outs[0]
