"""Reads the sources of an exported program, by the model's own names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ...errors import CaptureError
from ...graph import SOURCES, Value
from ..exported.read_export import ExportReader
from ..forward.own_collectives import is_collective, name_of, refusal

INPUT, PARAM, BUFFER, CONSTANT = SOURCES


def read_sources(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    fields: Iterable[str],
    reader: ExportReader,
) -> tuple[Mapping[str, list[Value]], Mapping[str, torch.Tensor]]:
    """Values by kind, each once, which the reader then knows; and constants by name.

    fields: of the batch, in order. Raises: CaptureError.
    """
    sources: dict[str, list[Value]] = {kind: [] for kind in SOURCES}
    known: dict[tuple[str, str], Value] = {}
    literals: dict[str, torch.Tensor] = {}
    names = _Names(exported, model, iter(fields))
    for node in exported.graph.find_nodes(op="placeholder"):
        kind, name = names.of(node, reader)
        if _is_sparse(node):
            if not node.users:
                continue
            raise CaptureError(
                f"forward reads '{name}', which is a sparse tensor",
                fix="keep it whole: buffer.to_dense()",
            )
        if (kind, name) in known:  # what is tied or shared may come in twice
            reader.values[node] = known[kind, name]
            continue
        known[kind, name] = reader.source(node, name)
        sources[kind].append(known[kind, name])
        if kind == CONSTANT:  # on the CPU, as all is while compiling
            path = names.of_constants[node.name]
            literals[name] = exported.constants[path].cpu()
    return sources, literals


def _is_sparse(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


class _Names:
    """The kind and name of each placeholder. fields: of the batch, not met yet."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        model: nn.Module,
        fields: Iterator[str],
    ) -> None:
        self.model, self.fields = model, fields
        signature = exported.graph_signature  # a new table at each mention
        self.of_params = signature.inputs_to_parameters
        self.of_buffers = signature.inputs_to_buffers
        self.of_constants = signature.inputs_to_lifted_tensor_constants
        self.aliases = aliases_of(model)
        # Every rank has all buffers, under each of their names: these are no matter.
        self.shared = _aliases(model.named_buffers(remove_duplicate=False))

    def of(self, node: torch.fx.Node, reader: ExportReader) -> tuple[str, str]:
        if node.name in self.of_params:
            name = self.of_params[node.name].removeprefix("model.")
            return PARAM, self.aliases.get(name, name)
        if node.name in self.of_buffers:
            name = self.of_buffers[node.name].removeprefix("model.")
            return BUFFER, self.shared.get(name, name)
        if node.name in self.of_constants:
            path = self.of_constants[node.name].removeprefix("model.")
            is_named = path.rpartition(".")[2] in vars(_module_at(self.model, path))
            return CONSTANT, path if is_named else node.name
        if not isinstance(node.meta["val"], torch.Tensor):
            raise _no_tensor(node, reader)
        name = next(self.fields)
        if name in reader.builder.taken:
            raise CaptureError(
                f"the batch field '{name}' has the name of a parameter or buffer",
                fix="give the field or the model's attribute another name",
            )
        return INPUT, name


def names_of(model: nn.Module) -> list[str]:
    """The names of parameters and buffers, in the model's order."""
    named = model.named_parameters, model.named_buffers
    return [name for own in named for name, _ in own(remove_duplicate=False)]


def aliases_of(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters -> the first one."""
    return _aliases(model.named_parameters(remove_duplicate=False))


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
    for user, source in zip(node.users, users, strict=True):
        if is_collective(user.target):  # it has its group as an object
            return refusal(name_of(user.target), None, source)
    return CaptureError(
        "the model computes with an object that is no tensor, such as a generator of "
        f"random numbers ('{node.name}')",
        source=next(iter(users), ""),
        fix="draw random numbers outside of the model, and pass them in the batch",
    )
