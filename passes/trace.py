"""trace: an untouched model and an example batch -> one forward graph that ends in the
loss.

The model is read by `torch.export` (non-strict). Parameters keep the model's own names,
nodes keep the module path and the line of the user's source. Tensors on the `meta`
device are traced as fake ones, so a model need not fit in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.call_model import loss_of
from passes.errors import CaptureError
from passes.functionalize import functionalize
from passes.graph import Builder, Graph, Node, Value, Where

TORCH = os.path.dirname(torch.__file__) + os.sep
# In errors of captures that need to know what is in a tensor.
VALUES_READ = ("datadependent", "dynamicoutputshape", "unbacked")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class Traced:
    """The model's forward, from the batch to the loss.

    aliases: other names of a tied parameter -> the name it has in the graph.
    literals: the values of `graph.constants`.
    trainable: names of the parameters that want a gradient.
    """

    graph: Graph
    aliases: Mapping[str, str]
    literals: Mapping[str, torch.Tensor]
    trainable: frozenset[str]

    def __str__(self) -> str:
        return str(self.graph)


class _LossOf(nn.Module):
    """The model, called by keyword, with only its loss coming out."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, static: dict
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.static = static

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        before = dict(self.model.named_buffers())
        loss = loss_of(self.model, {**batch, **self.static}, self.loss_fn)
        _refuse_new_buffers(before, dict(self.model.named_buffers()))
        return loss


def _refuse_new_buffers(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> None:
    """`self.count = self.count + 1` leaves no trace in the exported graph."""
    for name, buffer in before.items():
        if after.get(name) is not buffer:
            raise CaptureError(
                f"forward assigns a new tensor to the model's buffer '{name}', which "
                "has no meaning when ranks run different microbatches",
                fix="keep running statistics out of forward, or freeze them with "
                ".eval()",
            )


def trace(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> Traced:
    """Capture `model(**batch)` down to its loss, for the shapes of the full batch.

    Raises CaptureError when the model cannot be captured, changes one of its
    buffers, or returns no scalar loss.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    static = {k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}
    if not tensors:
        raise CaptureError(
            "the batch holds no tensor", fix="pass the model's inputs by keyword"
        )
    wrapper = _LossOf(model, loss_fn, static)
    with _on_fake_tensors(wrapper, tensors) as examples:
        exported = _export(wrapper, examples)
    return _read(exported, model, list(tensors), _place_of(loss_fn))


@contextlib.contextmanager
def _on_fake_tensors(
    wrapper: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Example inputs to export with; meta parameters become fake ones meanwhile.

    Inputs are cloned since export merges two inputs that are one tensor.
    """
    if not any(t.is_meta for m in wrapper.modules() for t in _own_tensors(m).values()):
        yield {k: v.detach().clone() for k, v in tensors.items()}
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    saved: list[tuple[dict, str, torch.Tensor]] = []
    replaced: dict[int, torch.Tensor] = {}
    for module in wrapper.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None:
                    continue
                if id(old) not in replaced:
                    replaced[id(old)] = _fake_like(old, mode)
                saved.append((table, name, old))
                table[name] = replaced[id(old)]
    try:
        with mode:
            yield {k: torch.empty(v.shape, dtype=v.dtype) for k, v in tensors.items()}
    finally:
        for table, name, old in saved:
            table[name] = old


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    both = {**module._parameters, **module._buffers}
    return {k: v for k, v in both.items() if v is not None}


def _fake_like(old: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def _export(
    wrapper: nn.Module, examples: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(wrapper, (), {"batch": examples}, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the model could not be captured: {_first_lines(error)}",
            source=_user_frame(error),
            fix=_way_out(error, wrapper, examples),
        ) from error


def _way_out(
    error: Exception, wrapper: nn.Module, examples: Mapping[str, torch.Tensor]
) -> str:
    """Either the model reads values of tensors, or it does not run on this batch."""
    text = f"{type(error).__name__} {error}".lower().replace("-", "")
    if any(mark in text for mark in VALUES_READ):
        configs = (getattr(m, "config", None) for m in wrapper.modules())
        chosen = {getattr(c, "_experts_implementation", None) for c in configs}
        if chosen & {"eager"}:
            return (
                "experts that loop over their tokens have no fixed shapes: give the "
                "model's configuration experts_implementation='batched_mm'"
            )
        return (
            "control flow must not depend on tensor values: compute both branches "
            "with torch.where, or pass the choice as a Python value"
        )
    return (
        "the model must run on the batch as it is, given by keyword: "
        f"model({', '.join(f'{name}=...' for name in examples)})"
    )


def _first_lines(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def _user_frame(error: BaseException) -> str:
    """The innermost line outside of torch and of this project."""
    found, trace_ = "", error.__traceback__
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    while trace_ is not None:
        file = trace_.tb_frame.f_code.co_filename
        if not file.startswith((TORCH, here, "<")):
            found = f"{file}:{trace_.tb_lineno}"
        trace_ = trace_.tb_next
    return found


def _place_of(function: Any) -> str:
    """File and line of a function, where it has one."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _read(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    fields: list[str],
    elsewhere: str,
) -> Traced:
    """Turn the exported program into our graph."""
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    trainable = set()
    for name, p in model.named_parameters(remove_duplicate=False):
        canonical = first_name.setdefault(id(p), name)
        if canonical != name:
            aliases[name] = canonical
        elif p.requires_grad:
            trainable.add(name)
    reader = _Reader(elsewhere)
    sources: dict[str, list[Value]] = {k: [] for k in ("input", "param", "buffer", "c")}
    literals: dict[str, torch.Tensor] = {}
    signature = exported.graph_signature
    unread = iter(fields)
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in signature.inputs_to_parameters:
            name = signature.inputs_to_parameters[node.name].removeprefix("model.")
            kind, name = "param", aliases.get(name, name)
        elif node.name in signature.inputs_to_buffers:
            name = signature.inputs_to_buffers[node.name].removeprefix("model.")
            kind = "buffer"
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            kind, name = "c", node.name
            target = signature.inputs_to_lifted_tensor_constants[node.name]
            literals[name] = exported.constants[target]
        else:
            kind, name = "input", next(unread)
            if name in reader.builder.taken:
                raise CaptureError(
                    f"the batch field '{name}' has the name of a parameter or buffer",
                    fix="give the field or the model's attribute another name",
                )
        known = next((v for v in sources[kind] if v.name == name), None)
        if known is not None:  # a tied parameter may come in twice
            reader.values[node] = known
        else:
            sources[kind].append(reader.source(node, name))
    reader.read(exported.graph_module)
    graph = Graph(
        tuple(sources["input"]),
        tuple(sources["param"]),
        tuple(sources["buffer"]),
        tuple(sources["c"]),
        tuple(reader.builder.nodes),
        reader.outputs,
    )
    return Traced(
        functionalize(graph.verify()), aliases, literals, frozenset(trainable)
    )


class _Reader:
    """Walks fx nodes, inlining the sub-graphs of no-grad regions."""

    def __init__(self, elsewhere: str) -> None:
        self.elsewhere = elsewhere  # where code outside of the model comes from
        self.builder = Builder(set())
        self.values: dict[fx.Node, Any] = {}
        self.outputs: tuple[Value, ...] = ()
        self.wheres: dict[tuple[str, str], Where] = {}

    def source(self, node: fx.Node, name: str) -> Value:
        fake = node.meta["val"]
        value = self.builder.value(name, fake.shape, fake.dtype)
        self.values[node] = value
        return value

    def read(self, module: fx.GraphModule) -> Any:
        result = None
        for node in module.graph.nodes:
            if node.op == "output":
                result = fx.map_arg(node.args[0], self.values.__getitem__)
            elif node.op == "get_attr":
                self.values[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                self.values[node] = self.call(node)
        self.outputs = tuple(v for v in _flat(result) if isinstance(v, Value))
        return result

    def call(self, node: fx.Node) -> Any:
        args = tuple(_plain(fx.map_arg(a, self.values.__getitem__)) for a in node.args)
        kwargs = {
            k: _plain(fx.map_arg(v, self.values.__getitem__))
            for k, v in node.kwargs.items()
        }
        target = node.target
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]]
        if str(target) == "wrap_with_set_grad_enabled":
            return self.inline(node, enabled=args[0], body=args[1], operands=args[2:])
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"the captured model calls '{target}', which is no plain operator",
                source=self.where(node).source,
                fix="replace this construct by tensor operations in the model",
            )
        fakes = node.meta.get("val")
        many = isinstance(fakes, tuple | list)
        names = [node.name] + [f"{node.name}_{i}" for i in range(1, 64)]
        outs = tuple(
            self.builder.value(names[i], f.shape, f.dtype)
            if isinstance(f, torch.Tensor)
            else None
            for i, f in enumerate(fakes if many else (fakes,))
        )
        self.builder.nodes.append(
            Node(str(target), args, kwargs, outs, self.where(node))
        )
        return outs if many else outs[0]

    def inline(
        self, node: fx.Node, enabled: bool, body: fx.GraphModule, operands: tuple
    ) -> Any:
        """Copy a no-grad region in; what enters it is detached."""
        where = self.where(node)
        for inner, value in zip(
            body.graph.find_nodes(op="placeholder"), operands, strict=True
        ):
            if (
                not enabled
                and isinstance(value, Value)
                and value.dtype.is_floating_point
            ):
                self.refuse_writes(inner)
                value = self.builder.emit(
                    "aten.detach.default", (value,), value.shape, value.dtype, where
                )
            self.values[inner] = value
        return self.read(body)

    def refuse_writes(self, entering: fx.Node) -> None:
        """Autograd does not see `x.mul_(2)` under no_grad; who reads x later does."""
        for user in entering.users:
            schema = getattr(user.target, "_schema", None)
            if schema is not None and schema.is_mutable:
                raise CaptureError(
                    f"'{user.target}' writes in place under no_grad into a tensor from "
                    "outside of it",
                    source=self.where(user).source,
                    fix="make a new tensor: y = x.mul(2) instead of x.mul_(2)",
                )

    def where(self, node: fx.Node) -> Where:
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        module = path.removeprefix("model").removeprefix(".")
        frames = FRAME.findall(node.meta.get("stack_trace") or "")
        outside = [f for f in frames if not f[0].startswith(TORCH)]
        # Our own wrapper is the outermost frame of every node.
        file, line = outside[-1] if len(outside) > 1 else ("", "")
        source = f"{os.path.basename(file)}:{line}" if file else self.elsewhere
        return self.wheres.setdefault((module, source), Where(module, source))


def _plain(arg: Any) -> Any:
    """Lists (fx's immutable ones too) as tuples; dtypes and devices as they are."""
    if isinstance(arg, list | tuple):
        return tuple(_plain(a) for a in arg)
    return arg


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    else:
        yield tree
