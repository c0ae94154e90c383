"""trace: an untouched model and an example batch -> one forward graph that ends in the
loss.

The model is read by `torch.export` (non-strict). Parameters keep the model's own names,
nodes keep the module path and the line of the user's source. Tensors on the `meta`
device are traced as fake ones, so a model need not fit in memory.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..builder import find_reached
from ..capture.exported.buffer_updates import after_step
from ..capture.exported.functionalize import functionalize
from ..capture.exported.order_tables import order_tables
from ..capture.exported.read_export import ExportReader
from ..capture.exported.read_sources import aliases_of, names_of, read_sources
from ..capture.find_repeats import Ran, Watch, with_layers
from ..capture.forward.call_model import only_by_any_keyword
from ..capture.forward.fake_tensors import device_of, on_fake_tensors
from ..capture.forward.guards import Reading
from ..capture.forward.kept_values import KeptValues
from ..capture.forward.lean_export import lean_export
from ..capture.forward.loss_module import LossModule
from ..capture.forward.on_meta import META
from ..capture.forward.torch_shapes import shapes_of_grouped_products
from ..capture.forward.unseen import refuse_hooks
from ..capture.forward.values_read import capture_failed
from ..capture.mixed_precision import Lowering, autocast, keep_wide, parameters_in
from ..capture.read_answers import Answers
from ..capture.rows.choose_rows import remark_on_loops
from ..capture.rows.chosen_rows import keep_all_rows
from ..capture.rows.expert_loops import batch_loops
from ..capture.rows.join_weights import join_weights, remark_on_frozen
from ..capture.rows.rows import OWN_MASKS, has_own_masks
from ..digest import digest
from ..errors import CaptureError
from ..graph import SOURCES, Graph
from ..layers import Layered, NotAlike, Repeats
from ..repeat_layers import Repeater
from ..traced import Traced


def trace(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None = None,
    precision: Lowering = None,
    outputs: Sequence[str] = (),
    metrics: Collection[str] | None = None,
    repeats: Repeats | None = None,
    kept: KeptValues | None = None,
) -> Traced:
    """Capture `model(**batch)` down to its loss, for the shapes of the full batch.

    precision: what the model runs in, as its code may ask for the dtype of autocast.
    outputs: what is wanted beside the loss of what the model returns, by name, see
    `Returned`. metrics: which scalars of a dict come out too; None: all. repeats: of
    layers that do the same, which are captured once. kept: notes what
    forward keeps.
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
    wrapper = LossModule(model, loss_fn, static, outputs, metrics)
    wrapper.kept = kept or wrapper.kept
    traced = repeats and _capture_repeats(wrapper, tensors, precision, repeats)
    traced = traced or _capture_whole(wrapper, tensors, precision)
    names, count = wrapper.beside.names, wrapper.beside.metrics
    traced, differing = batch_loops(traced)
    remarks = remark_on_loops(traced.graph, _place_of(wrapper), differing)
    means = wrapper.unseen.guards.means
    graph = keep_all_rows(traced.graph, traced.autocast.keys(), means)
    _refuse_sources(graph, names)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    trainable = traced.trainable
    remarks += remark_on_frozen(graph, dtypes.get, trainable)
    graph, joined = join_weights(graph, lambda p: (dtypes.get(p), p in trainable))
    for name, (first, *others) in joined.items():
        dtypes[name] = dtypes[first]
        trainable -= {first, *others}
        trainable |= {name} if first in traced.trainable else frozenset()
    graph = keep_wide(graph, dtypes)
    values = wrapper.unseen.known
    known = {name: digest(values.buffers[name]) for name in sorted(values.asked)}
    traced = replace(
        traced,
        graph=graph,
        trainable=trainable,
        joined=joined,
        outputs=(*names, *map(after_step, traced.updated)),
        metrics=count,
    )
    remarks += (OWN_MASKS,) * traced.own_masks
    for noted in (wrapper.unseen.guards, wrapper.compiling, wrapper.kept):
        remarks += (*noted.remarks(),)
    return replace(traced, remarks=remarks, known=known)


def _capture_whole(
    wrapper: LossModule, tensors: Mapping[str, torch.Tensor], precision: Lowering
) -> Traced:
    """Captures the model as it runs eagerly; where no graph has that, as it says that
    it runs within torch.compile."""
    wrapper.unseen.guards.begin()
    try:
        traced = _capture(wrapper, tensors, precision)
    except CaptureError as error:
        if not wrapper.compiling.asked:
            raise
        wrapper.compiling.told = True
        try:
            traced = _capture(wrapper, tensors, precision)
        except CaptureError:
            raise error from None
    return _answers(wrapper, tensors, precision).prove(traced)


def _answers(
    wrapper: LossModule, tensors: Mapping[str, torch.Tensor], precision: Lowering
) -> Answers:
    return Answers(
        wrapper.unseen.guards,
        partial(_capture, wrapper, tensors, precision),
        lambda: wrapper.beside.names,
    )


def _capture(
    wrapper: LossModule,
    tensors: Mapping[str, torch.Tensor],
    precision: Lowering,
    limits: Mapping[str, int] | None = None,
) -> Traced:
    """Captures what the model computes, without writes in place. limits: the most rows
    there can be, see `ChosenRows`."""
    model = wrapper.model
    device = device_of(model)
    while True:
        with (
            parameters_in(model, precision),
            on_fake_tensors(wrapper, tensors, device) as examples,
            autocast(precision, device.type) as dtype,
        ):
            exported = _export(wrapper, examples)
        if wrapper.functions.are_known():
            break
    place = _place_of(wrapper)
    reader = ExportReader(place, device.type, dtype)
    reader.values_read = wrapper.unseen.read
    reader.rows.limits = limits or {}
    return _read(exported, model, list(tensors), reader, wrapper.beside.assigned)


def run_without_data(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    precision: Lowering,
    outputs: Sequence[str],
    metrics: Collection[str] | None,
    meta: bool,
    watch: Watch,
    reading: Reading = Reading.SOME,
) -> Ran:
    """What a capture would come to, of a forward within a context on fake tensors, or
    those of the meta device. Raises: CaptureError, if it computes by its values or
    calls what has a backward of its own; what forward raises."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    static = {k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}
    wrapper = LossModule(model, loss_fn, static, outputs, metrics)
    wrapper.unseen.guards.reading = reading
    device = device_of(model)
    with (
        parameters_in(model, precision),
        on_fake_tensors(wrapper, tensors, META if meta else device, True) as examples,
        autocast(precision, device.type),
        shapes_of_grouped_products(),
        watch(examples),
    ):
        returned = wrapper(examples)
    unseen = wrapper.unseen
    guards = unseen.guards
    if unseen.read or guards.compared or wrapper.functions.calls:
        raise CaptureError("forward is not of plain operations alone")
    return Ran(wrapper.beside.names, returned, tuple(guards.others()))


def _capture_repeats(
    wrapper: LossModule,
    tensors: Mapping[str, torch.Tensor],
    precision: Lowering,
    repeats: Repeats,
) -> Traced | None:
    """Does what `_capture` does from a capture of few layers; None if that fails."""
    model = wrapper.model

    def capture() -> Traced:
        few = _capture(wrapper, tensors, precision)
        return _answers(wrapper, tensors, precision).prove(few)

    few = with_layers(model, repeats.path, repeats.kept, capture)
    if few is None:
        return None
    try:
        few, _ = batch_loops(few)
        repeater = Repeater(Layered(few.graph, repeats.path, few.literals), repeats)
        graph = repeater.whole(names_of(model), outputs=few.updated)
    except (CaptureError, NotAlike):
        return None
    dtypes = {v: few.autocast.get(of) for v, (of, _) in repeater.origins.items()}
    return replace(
        few,
        graph=graph,
        updated=tuple(repeater.outputs),
        aliases=aliases_of(model),
        trainable=_trainable(model, graph),
        autocast={v: dtype for v, dtype in dtypes.items() if dtype},
    )


def _refuse_sources(graph: Graph, names: Sequence[str]) -> None:
    sources = {v.name for v in graph.sources}
    for name, v in zip(names, graph.outputs[1:], strict=False):
        if v.name in sources:
            raise CaptureError(
                f"the output '{name}' is no result: it is '{v.name}', which the model "
                "returns as it is",
                fix="leave it out of what is asked for",
            )


def _export(
    wrapper: LossModule, examples: dict[str, torch.Tensor]
) -> torch.export.ExportedProgram:
    while True:
        try:
            with warnings.catch_warnings(), lean_export(), shapes_of_grouped_products():
                warnings.simplefilter("ignore")
                return _export_once(wrapper, examples)
        except CaptureError:
            raise
        except Exception as error:
            if not wrapper.unseen.guards.is_check(error):
                read = wrapper.unseen.read
                raise capture_failed(error, wrapper, examples, read) from error


def _export_once(
    wrapper: LossModule, examples: dict[str, torch.Tensor]
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


def _place_of(wrapper: LossModule) -> str:
    """`file:line` of the loss function, or else of the model's forward."""
    function = wrapper.model if wrapper.loss_fn is None else wrapper.loss_fn
    called = type(function).__call__
    called = function.forward if isinstance(function, nn.Module) else called
    written = inspect.unwrap(called)
    code = getattr(function, "__code__", getattr(written, "__code__", None))
    if code is None:
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _read(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    fields: list[str],
    reader: ExportReader,
    assigned: Sequence[str],
) -> Traced:
    """Turn the exported program into our graph. assigned: buffers whose new values are
    its last outputs."""
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    sources, literals = read_sources(exported, model, fields, reader)
    inputs, params, buffers, constants = (tuple(sources[kind]) for kind in SOURCES)
    reader.flowing.update({v.name: None for v in params if v.name in wanted})
    reader.read(exported.graph_module)
    nodes = tuple(reader.builder.nodes)
    graph = Graph(inputs, params, buffers, constants, nodes, reader.outputs)
    functional = functionalize(graph.verify(), reader.memory, wanted, assigned)
    graph, names = order_tables(functional.graph)
    autocast = {names.get(v, v): dtype for v, dtype in reader.autocast.items()}
    asked = tuple(replace(v, name=names.get(v.name, v.name)) for v in reader.asked)
    return Traced(
        graph,
        aliases_of(model),
        literals,
        _trainable(model, graph),
        autocast,
        asked=asked,
        own_masks=has_own_masks(graph),
        updated=tuple(functional.updated),
    )


def _trainable(model: nn.Module, graph: Graph) -> frozenset[str]:
    """The parameters that want a gradient, and have one."""
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    return frozenset(wanted - _without_gradient(graph))


def _without_gradient(graph: Graph) -> set[str]:
    """Parameters that are read, but of which the loss has no gradient. To torch it is
    None, and no optimizer touches them; 0 is another thing, as to weight decay."""
    return {v.name for v in graph.params} - find_reached(graph)
