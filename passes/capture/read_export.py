"""Reading an exported fx graph: one flat list of nodes, regions copied in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from passes.errors import CaptureError
from passes.graph import Builder, Node, Value, Where

TORCH = os.path.dirname(torch.__file__) + os.sep
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class ExportReader:
    """Walks fx nodes, inlining the sub-graphs of no-grad and autocast regions."""

    def __init__(
        self, elsewhere: str, device: str, precision: torch.dtype | None
    ) -> None:
        self.elsewhere = elsewhere  # where code outside of the model comes from
        self.device, self.precision = device, precision  # precision: where it reads now
        self.autocast: dict[str, torch.dtype] = {}
        self.builder = Builder(set())
        self.values: dict[fx.Node, Any] = {}
        self.outputs: tuple[Value, ...] = ()
        self.wheres: dict[tuple[str, str], Where] = {}
        self.memory: dict[str, int] = {}  # value -> where it lies

    def source(self, node: fx.Node, name: str) -> Value:
        fake = node.meta["val"]
        self.values[node] = self.made(name, fake)
        return self.values[node]

    def made(self, name: str, fake: torch.Tensor) -> Value:
        value = self.builder.value(name, fake.shape, fake.dtype)
        # Of a tensor without data there is no other name for its storage.
        self.memory[value.name] = fake.untyped_storage()._cdata
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
        if str(target) == "wrap_with_autocast":
            device, dtype, enabled, _, body, *operands = args
            return self.inline_autocast(device, dtype, enabled, body, operands)
        if getattr(target, "__module__", "") == "_operator":
            raise CaptureError(
                "the model computes with the value of a tensor (.item(), .tolist()), "
                "on which its shapes would depend",
                source=self.where(node).source,
                fix="keep to shapes that the batch decides: masks instead of lists of "
                "rows, or pass the number as a Python value in the batch",
            )
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(
                f"the captured model calls '{target}', which is no plain operator",
                source=self.where(node).source,
                fix="replace this construct by tensor operations in the model",
            )
        fakes = node.meta.get("val")
        many = isinstance(fakes, tuple | list)
        outs = tuple(
            self.made(f"{node.name}_{i}" if i else node.name, f)
            if isinstance(f, torch.Tensor)
            else None
            for i, f in enumerate(fakes if many else (fakes,))
        )
        self.builder.nodes.append(
            Node(str(target), args, kwargs, outs, self.where(node))
        )
        if self.precision is not None:
            self.autocast.update((v.name, self.precision) for v in outs if v)
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

    def inline_autocast(
        self,
        device: str,
        dtype: torch.dtype | None,
        enabled: bool,
        body: fx.GraphModule,
        operands: list[Any],
    ) -> Any:
        """Copy a region with an autocast of its own in. One that turns autocast off is
        heeded whatever device it names: the model may be meant for another than this.
        """
        outside = self.precision
        if not enabled:
            self.precision = None
        elif device == self.device:
            self.precision = dtype or torch.get_autocast_dtype(device)
        entering = body.graph.find_nodes(op="placeholder")
        self.values.update(zip(entering, operands, strict=True))
        result = self.read(body)
        self.precision = outside
        return result

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
