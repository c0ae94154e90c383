"""Reading an exported fx graph: one flat list of nodes, regions copied in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...builder import Builder
from ...checkpointed import in_checkpoint
from ...errors import CaptureError
from ...graph import Location, Node, Value, layer_of, map_values, values_in
from ...ops.arguments import arguments, call
from ..exported.inline_vmap import plain_region, regions
from ..exported.other_names import usual_op
from ..forward.guards import MARK
from ..forward.own_collectives import collective, is_collective
from ..forward.user_frames import IN_CHECKPOINT, is_written
from ..forward.values_read import UNKNOWN, Read, Unknown, refuse_unknown
from ..rows.choose_rows import ChosenRows

ITEM = torch.ops.aten.item.default
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
        self.values_read: Read | None = None
        # Values that gradients flow through -> their storage; those of parameters have
        # none here: a write to a parameter is another matter.
        self.flowing: dict[str, int | None] = {}
        self.detached = False  # whether it reads a region without gradients
        self.place = ""  # the source line of what it reads
        self.wheres: dict[tuple[str, str], Location] = {}
        self.checkpoints: dict[int, int] = {}  # the number of each, by when it ran
        self.memory: dict[str, int] = {}  # value -> where it lies
        self.rows = ChosenRows(self.builder)
        self.asked: list[Value] = []  # see `passes.capture.forward.guards`

    def source(self, node: fx.Node, name: str) -> Value:
        """Declares an input."""
        fake = node.meta["val"]
        self.values[node] = self.made(name, fake)
        return self.values[node]

    def made(self, name: str, fake: torch.Tensor) -> Value:
        """Returns a new value of a fake tensor's shape and dtype, and notes its
        storage."""
        shape = self.rows.shape(fake)
        assert shape is not None, f"{name} has no shape"
        value = self.builder.value(name, shape, fake.dtype)
        # Of a tensor without data there is no other name for its storage.
        self.memory[value.name] = fake.untyped_storage()._cdata
        return value

    def read(self, module: fx.GraphModule) -> Any:
        """Reads a graph that torch exported, and returns its outputs as values.
        Raises: CaptureError."""
        result = None
        for node in regions(list(module.graph.nodes)):
            if isinstance(node, list):
                self.inline_vmap(module, node)
            elif node.op == "output":
                result = fx.map_arg(node.args[0], self.values.__getitem__)
            elif node.op == "get_attr":
                self.values[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                self.values[node] = self.call(node)
        self.outputs = tuple(v for v in _flat(result) if isinstance(v, Value))
        return result

    def call(self, node: fx.Node) -> Any:
        """Appends the node of a call; returns its results, as values or as numbers that
        the model asked for. Raises: CaptureError for what is no plain operator."""
        if (number := _number(node)) is not None:
            return number
        args = tuple(self.operand(a) for a in node.args)
        kwargs = {k: self.operand(v) for k, v in node.kwargs.items()}
        target = usual_op(node.target)
        if not isinstance(target, torch._ops.OpOverload):
            return self.construct(node, target, args, kwargs)
        if target is MARK and args[1:] == () and not kwargs:
            self.asked.append(args[0])
            return None
        if str(target) == "aten._assert_scalar.default":
            return None
        where = self.where(node)
        if is_collective(target):
            return collective(target, args, where.source)
        if (made := self.rows.choose(node, args, where)) is not None:
            return made
        args, kwargs = self.rows.sized(target, args, kwargs, where)
        refuse_unknown((args, kwargs), self.values_read, where.source)
        if self.detached and _gives_itself(node):
            return args[0]
        fakes = node.meta.get("val")
        if isinstance(fakes, UNKNOWN):
            if isinstance(fakes, torch.SymInt | torch.SymFloat) and target is ITEM:
                self.rows.note_number(fakes, args[0], where)
            return Unknown(target._schema.name.rpartition("::")[2], fakes.node.expr)
        many = isinstance(fakes, tuple | list)
        outs = self.results(node, fakes if many else (fakes,))
        made = Node(str(target), args, kwargs, outs, where)
        self.builder.nodes.append(_with_eps(made))
        self.place = where.source
        self.note_flow(target, args, outs)
        if self.precision is not None:
            self.autocast.update((v.name, self.precision) for v in outs if v)
        return outs if many else outs[0]

    def operand(self, arg: Any) -> Any:
        """An argument of a call, with values for the nodes in it."""
        return _plain(fx.map_arg(arg, self.values.__getitem__))

    def results(self, node: fx.Node, fakes: Iterable[Any]) -> tuple[Value | None, ...]:
        """New values of a call's results, None of those that are no tensors. Raises:
        CaptureError where the data choose a shape."""
        fakes = [fake if isinstance(fake, torch.Tensor) else None for fake in fakes]
        if any(fake is not None and self.rows.shape(fake) is None for fake in fakes):
            read = Read(str(usual_op(node.target)), self.where(node).source)
            raise (self.values_read or read).error()
        names = (f"{node.name}_{i}" if i else node.name for i in range(len(fakes)))
        return tuple(
            None if fake is None else self.made(name, fake)
            for name, fake in zip(names, fakes, strict=True)
        )

    def construct(self, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
        """The results of what is no operator: a part of others, a region, or a number
        made of unknown sizes. Raises: CaptureError for all else."""
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]]
        if str(target) == "wrap_with_set_grad_enabled":
            return self.inline(node, enabled=args[0], body=args[1], operands=args[2:])
        if str(target) == "wrap_with_autocast":
            device, dtype, enabled, _, body, *operands = args
            return self.inline_autocast(device, dtype, enabled, body, operands)
        if isinstance(number := node.meta.get("val"), UNKNOWN):
            return Unknown(getattr(target, "__name__", str(target)), number.node.expr)
        source = self.where(node).source
        if not isinstance(target, torch._ops.HigherOrderOperator):
            refuse_unknown((args, kwargs), self.values_read, source)
        raise CaptureError(
            f"the captured model calls '{target}', which is no plain operator",
            source=source,
            fix="replace this construct by tensor operations in the model",
        )

    def inline(
        self, node: fx.Node, enabled: bool, body: fx.GraphModule, operands: tuple
    ) -> Any:
        """Copy a no-grad region in; what enters it is detached, but what leaves it as
        it entered is not: `x.float()` is x itself, where that is of this type."""
        where = self.where(node)
        outer: dict[str, Value] = {}
        schemas = (getattr(n.target, "_schema", None) for n in body.graph.nodes)
        writes = any(schema.is_mutable for schema in schemas if schema)
        for inner, value in zip(
            body.graph.find_nodes(op="placeholder"), operands, strict=True
        ):
            real = isinstance(value, Value) and (
                value.dtype.is_floating_point or value.dtype.is_complex
            )
            if not enabled and real and (not writes or value.name in self.flowing):
                entered = self.builder.emit(
                    "aten.detach.default", (value,), value.shape, value.dtype, where
                )
                if value.name in self.memory:
                    self.memory[entered.name] = self.memory[value.name]
                outer[entered.name], value = value, entered
            self.values[inner] = value
        outside, self.detached = self.detached, not enabled
        result = self.read(body)
        self.detached = outside
        return map_values(lambda v: outer.get(v.name, v), _plain(result))

    def inline_vmap(self, module: fx.GraphModule, region: list[fx.Node]) -> None:
        """Copy a torch.vmap in. Raises: CaptureError where it is of no plain operators,
        such as regions without gradients."""
        try:
            reads, plain, made = plain_region(module, region)
        except Exception as error:
            raise CaptureError(
                f"torch.vmap cannot be captured here: {type(error).__name__}: {error}",
                source=self.where(region[0]).source,
                fix="call what it maps on all samples at once, as operations broadcast "
                "over dims before those that they work on; and x.detach() for no_grad",
            ) from error
        entering = plain.graph.find_nodes(op="placeholder")
        for inner, node in zip(entering, reads, strict=True):
            self.values[inner] = self.values[node]
        self.values.update(zip(made, self.read(plain), strict=True))

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

    def note_flow(self, target: Any, args: Any, outs: tuple[Value | None, ...]) -> None:
        """Records the values that gradients flow through; refuses a write under no_grad
        into an outer one, which autograd does not see, but later readers do."""
        writes = target._schema.is_mutable and isinstance(args[0], Value)
        place = self.memory.get(args[0].name) if writes else None
        within = self.detached and place is not None
        if within and place in self.flowing.values():
            raise CaptureError(
                f"'{target._schema.name.rpartition('::')[2]}' writes in place under "
                "no_grad into a tensor through which a gradient flows",
                source=self.place,
                fix="x = x + (f(x) - x).detach(), outside of no_grad, has the new "
                "values and the same gradient",
            )
        name = target._schema.name.rpartition("::")[2]
        alone = name == "detach" or name.startswith("new_") or name.endswith("_like")
        if not alone and any(v.name in self.flowing for v in values_in(args)):
            changed = (*outs, args[0]) if writes else outs
            self.flowing.update(
                (v.name, self.memory.get(v.name))
                for v in changed
                if v is not None and (v.dtype.is_floating_point or v.dtype.is_complex)
            )

    def where(self, node: fx.Node) -> Location:
        """The module and the line of the user's source that a node comes from; what a
        checkpoint outside of layers runs is a module by itself."""
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        module = path.removeprefix("model").removeprefix(".")
        frames = FRAME.findall(node.meta.get("stack_trace") or "")
        checkpoints = [int(line) for file, line in frames if file == IN_CHECKPOINT]
        if checkpoints and not layer_of(module):
            number = self.checkpoints.setdefault(checkpoints[0], len(self.checkpoints))
            module = in_checkpoint(number, module)
        outside = [f for f in frames if is_written(f[0])]
        # Our own wrapper is the outermost frame of every node.
        file, line = outside[-1] if len(outside) > 1 else ("", "")
        source = f"{os.path.basename(file)}:{line}" if file else self.elsewhere
        return self.wheres.setdefault((module, source), Location(module, source))


def _with_eps(node: Node) -> Node:
    """The node; a norm without an eps is given torch's, which follows from the dtype of
    its input, so that it is the same where a program is proved in another one."""
    if node.op != "aten.rms_norm.default" or arguments(node)["eps"] is not None:
        return node
    bound = arguments(node)
    dtype = torch.promote_types(bound["input"].dtype, torch.float32)
    args, kwargs = call(node.op, {**bound, "eps": torch.finfo(dtype).eps})
    return replace(node, args=args, kwargs=kwargs)


def _gives_itself(node: fx.Node) -> bool:
    """Whether the result of an operator is its first operand, the same tensor, as of
    `x.to(dtype)` for an x of this dtype: autograd knows no other, and no_grad does not
    detach it."""
    first, out = node.args[:1], node.meta.get("val")
    fakes = [a.meta.get("val") for a in first if isinstance(a, fx.Node)]
    if node.target._schema.is_mutable or not isinstance(out, FakeTensor):
        return False
    if not fakes or not isinstance(x := fakes[0], FakeTensor):
        return False
    if (x.dtype, x.ndim, x.device) != (out.dtype, out.ndim, out.device):
        return False
    fake = partial(fx.map_arg, fn=lambda n: n.meta["val"])
    with out.fake_mode:
        return node.target(*fake(node.args), **fake(node.kwargs)) is x


def _number(node: fx.Node) -> int | float | None:
    """The number that a call gives where torch knows it, as a size that must be another
    one; None of others."""
    number = node.meta.get("val")
    if isinstance(number, torch.SymInt):
        number = number.node.maybe_as_int()
    return number if isinstance(number, int | float) else None


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
