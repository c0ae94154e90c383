"""trace: an untouched model and an example batch -> one forward graph that ends in the
loss.

The model is read by `torch.export` (non-strict). Parameters keep the model's own names,
nodes keep the module path and the line of the user's source. Tensors on the `meta`
device are traced as fake ones, so a model need not fit in memory.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..capture.call_model import call_model, only_by_any_keyword
from ..capture.chosen_rows import find_loops, keep_all_rows
from ..capture.custom_functions import Functions
from ..capture.flex_attention import flex_as_attention
from ..capture.functionalize import functionalize
from ..capture.guards import are_same
from ..capture.mixed_precision import Lowering, autocast, keep_wide, parameters_in
from ..capture.read_export import ExportReader
from ..capture.unseen import Unseen, refuse_hooks
from ..capture.values_read import capture_failed
from ..errors import CaptureError
from ..graph import Graph, Part, Value


@dataclass(frozen=True)
class Traced:
    """The model's forward, from the batch to the loss, its first output.

    aliases: other names of a tied parameter -> the name it has in the graph.
    literals: the values of `graph.constants`.
    trainable: names of the parameters that want a gradient, and have one.
    autocast: value -> the dtype that torch.autocast had for products where it was made;
    of values made outside of autocast, nothing.
    parts: of parameters that are not the model's own, but parts of them. outputs: names
    of the graph's other outputs, which nothing is trained on. metrics: how many of
    these, the first, are the scalars of a dict of losses. remarks: what the user should
    know of how it was read. asked: of what the model asked whether there is any.
    """

    graph: Graph
    aliases: Mapping[str, str]
    literals: Mapping[str, torch.Tensor]
    trainable: frozenset[str]
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    metrics: int = 0
    remarks: tuple[str, ...] = ()
    asked: tuple[Value, ...] = ()

    @property
    def named_outputs(self) -> dict[str, Value]:
        return dict(zip(self.outputs, self.graph.outputs[1:], strict=True))

    def part(self, v: Value) -> Part:
        """Where a parameter lies in the model's own."""
        return self.parts.get(v.name) or Part(v.name, v.shape, (0,) * len(v.shape))

    def verify(self) -> Traced:
        self.graph.verify()
        return self

    def __str__(self) -> str:
        return str(self.graph)


@dataclass
class _Beside:
    """Names of what comes out beside the loss; metrics come first. Apart from the
    module, whose attributes export puts back."""

    names: tuple[str, ...] = ()
    metrics: int = 0


class _LossOf(nn.Module):
    """The model, called by keyword, with only its loss, metrics and what is wanted
    coming out."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        static: dict,
        wanted: Sequence[str],
        with_metrics: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.static = static
        self.wanted, self.with_metrics = wanted, with_metrics
        self.beside = _Beside()
        self.by_name = False  # see `call_model`
        self.unseen = Unseen()
        self.functions = Functions()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        before = dict(self.model.named_buffers())
        with self.unseen, self.functions.reading(), flex_as_attention():
            fields = {**batch, **self.static}
            returned = call_model(self.model, fields, self.loss_fn, self.by_name)
        _refuse_new_buffers(before, dict(self.model.named_buffers()))
        if not self.with_metrics:
            returned = replace(returned, metrics={})
        beside = returned.select(self.wanted)
        self.beside.names, self.beside.metrics = tuple(beside), len(returned.metrics)
        return (returned.loss, *beside.values())


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
    precision: Lowering = None,
    outputs: Sequence[str] = (),
    metrics: bool = True,
) -> Traced:
    """Capture `model(**batch)` down to its loss, for the shapes of the full batch.

    precision: what the model runs in, as its code may ask for the dtype of autocast.
    outputs: what is wanted beside the loss of what the model returns, by name, see
    `Returned`. metrics: whether the scalars of a dict come out too.
    Raises CaptureError when the model cannot be captured, changes one of its
    buffers, or returns no scalar loss.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    static = {k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}
    if not tensors:
        raise CaptureError(
            "the batch holds no tensor", fix="pass the model's inputs by keyword"
        )
    refuse_hooks(model)
    wrapper = _LossOf(model, loss_fn, static, outputs, metrics)
    traced = _capture(wrapper, tensors, precision)
    if guard := wrapper.unseen.guards.read:
        wrapper.unseen.guards.some = False
        try:
            other = _capture(wrapper, tensors, precision)
        except CaptureError:
            raise guard.error() from None
        if not are_same(traced, other):
            raise guard.error()
    names, count = wrapper.beside.names, wrapper.beside.metrics
    graph, remarks = keep_all_rows(traced.graph), find_loops(traced.graph)
    _refuse_sources(graph, names)
    graph = keep_wide(graph, {name: p.dtype for name, p in model.named_parameters()})
    return replace(traced, graph=graph, outputs=names, metrics=count, remarks=remarks)


def _capture(
    wrapper: _LossOf, tensors: Mapping[str, torch.Tensor], precision: Lowering
) -> Traced:
    """What the model computes, without writes in place."""
    model = wrapper.model
    device = _device(model)
    while True:
        with (
            parameters_in(model, precision),
            _on_fake_tensors(wrapper, tensors, device) as examples,
            autocast(precision, device.type) as dtype,
        ):
            exported = _export(wrapper, examples)
        if wrapper.functions.are_known():
            break
    place = _place_of(wrapper.loss_fn or model.forward)
    reader = ExportReader(place, device.type, dtype)
    reader.values_read = wrapper.unseen.read
    return _read(exported, model, list(tensors), reader)


def _refuse_sources(graph: Graph, names: Sequence[str]) -> None:
    sources = {v.name for v in graph.sources}
    for name, v in zip(names, graph.outputs[1:], strict=True):
        if v.name in sources:
            raise CaptureError(
                f"the output '{name}' is no result: it is '{v.name}', which the model "
                "returns as it is",
                fix="leave it out of what is asked for",
            )


def _device(model: nn.Module) -> torch.device:
    """Where the model is traced; parameters on meta become fake ones of the CPU."""
    real = (p.device for p in model.parameters() if not p.is_meta)
    return next(real, torch.device("cpu"))


@contextlib.contextmanager
def _on_fake_tensors(
    wrapper: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Example inputs to export with; meta parameters become fake ones meanwhile.

    Inputs are copied: to where the model is, and because export merges two inputs that
    are one tensor.
    """
    if not any(t.is_meta for m in wrapper.modules() for t in _own_tensors(m).values()):
        yield {k: v.detach().to(device, copy=True) for k, v in tensors.items()}
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
    wrapper: _LossOf, examples: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _export_once(wrapper, examples)
    except CaptureError:
        raise
    except Exception as error:
        read = wrapper.unseen.read
        raise capture_failed(error, wrapper, examples, read) from error


def _export_once(
    wrapper: _LossOf, examples: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    """Export, as `loss_of` calls the model: torch does not go on after an error."""
    try:
        return torch.export.export(wrapper, (), {"batch": examples}, strict=False)
    except TypeError:
        fields = {**examples, **wrapper.static}
        if only_by_any_keyword(wrapper.model, fields, wrapper.loss_fn):
            wrapper.by_name = True
            with contextlib.suppress(TypeError):
                return torch.export.export(
                    wrapper, (), {"batch": examples}, strict=False
                )
        raise


def _place_of(function: Any) -> str:
    """File and line of a function, where it has one."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _aliases(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """The other names of tensors that have several -> the first one."""
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(x), name) for name, x in named}
    return {name: known for name, known in canonical.items() if name != known}


def _module_at(model: nn.Module, path: str) -> nn.Module:
    """The module that has an attribute of this path; the model, if none has."""
    try:
        return model.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return model


def _no_tensor(node: torch.fx.Node, reader: ExportReader) -> CaptureError:
    users = [str(reader.where(user)) for user in node.users]
    return CaptureError(
        "the model computes with an object that is no tensor, such as a generator of "
        f"random numbers ('{node.name}')",
        source=next(iter(users), ""),
        fix="draw random numbers outside of the model, and pass them in the batch",
    )


def _read(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    fields: list[str],
    reader: ExportReader,
) -> Traced:
    """Turn the exported program into our graph."""
    aliases = _aliases(model.named_parameters(remove_duplicate=False))
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    # Of buffers every rank has all, under each of their names, so these are no matter.
    shared = _aliases(model.named_buffers(remove_duplicate=False))
    sources: dict[str, list[Value]] = {k: [] for k in ("input", "param", "buffer", "c")}
    literals: dict[str, torch.Tensor] = {}
    signature = exported.graph_signature
    of_params = signature.inputs_to_parameters  # a new table at each mention
    of_buffers = signature.inputs_to_buffers
    of_constants = signature.inputs_to_lifted_tensor_constants
    known: dict[tuple[str, str], Value] = {}
    unread = iter(fields)
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in of_params:
            name = of_params[node.name].removeprefix("model.")
            kind, name = "param", aliases.get(name, name)
        elif node.name in of_buffers:
            name = of_buffers[node.name].removeprefix("model.")
            kind, name = "buffer", shared.get(name, name)
        elif node.name in of_constants:
            path = of_constants[node.name].removeprefix("model.")
            is_named = path.rpartition(".")[2] in vars(_module_at(model, path))
            kind, name = "c", path if is_named else node.name
            # On the CPU, as all is while compiling.
            literals[name] = exported.constants[of_constants[node.name]].cpu()
        elif not isinstance(node.meta["val"], torch.Tensor):
            raise _no_tensor(node, reader)
        else:
            kind, name = "input", next(unread)
            if name in reader.builder.taken:
                raise CaptureError(
                    f"the batch field '{name}' has the name of a parameter or buffer",
                    fix="give the field or the model's attribute another name",
                )
        if (kind, name) in known:  # what is tied or shared may come in twice
            reader.values[node] = known[kind, name]
        else:
            known[kind, name] = reader.source(node, name)
            sources[kind].append(known[kind, name])
            if kind == "param" and name in trainable:
                reader.flowing[name] = None
    reader.read(exported.graph_module)
    graph = Graph(
        tuple(sources["input"]),
        tuple(sources["param"]),
        tuple(sources["buffer"]),
        tuple(sources["c"]),
        tuple(reader.builder.nodes),
        reader.outputs,
    )
    graph = functionalize(graph.verify(), reader.memory)
    trainable -= _without_gradient(graph)
    traced = Traced(graph, aliases, literals, frozenset(trainable), reader.autocast)
    return replace(traced, asked=tuple(reader.asked))


def _without_gradient(graph: Graph) -> set[str]:
    """Parameters that are read, but of which the loss has no gradient: behind a detach,
    or only by what gives no real numbers. To torch it is None, and no optimizer touches
    them; 0 would be another thing, as to weight decay."""
    reached = {graph.outputs[0].name}
    for node in reversed(graph.nodes):
        kinds = {v.dtype for v in node.results if v.name in reached}
        real = any(kind.is_floating_point or kind.is_complex for kind in kinds)
        if node.op != "aten.detach.default" and real:
            reached.update(v.name for v in node.operands)
    return {v.name for v in graph.params} - reached
