"""Hints: what the user wants split where, by parameter name.

    hints={"*.mlp.fc.weight": "ffn/tp", "lm_head.weight": "vocab/tp"}

A pattern (shell wildcards) names parameters; `dim/axis` names one of the parameter's
dims, as `autopar inspect` prints them, and the mesh axis that splits it. The ops that
read the parameter are then split along that dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..dims.name_dims import Dim, Factor, Named
from ..errors import HintError, ShardingConflict
from ..graph import Node
from ..plan import Plan
from ..shard.parameter_sharding import find_casts


@dataclass(frozen=True)
class Pins:
    """(parameter, axis) -> the dim that the axis must split, and the hint's text."""

    pins: Mapping[tuple[str, str], tuple[Dim, str]]
    named: Named

    def factor(
        self, axis: str, node: Node, factors: tuple[Factor, ...]
    ) -> Factor | None:
        """The factor that a hint demands of this node, if one does."""
        if not self.pins:
            return None
        for which, v in enumerate(node.operands):
            pin = self.pins.get((v.name, axis))
            if pin is None:
                continue
            dim, hint = pin
            for f in factors:
                if f.dim == dim and any(op == which for op, _, _ in f.operands):
                    if f.role == "whole":
                        break
                    return f
            raise ShardingConflict(
                f"{node.op.split('.')[1]} needs dim '{dim}' of %{v.name} whole, but "
                f"hint {hint} splits it on '{axis}'\n"
                f"  %{v.name}  {v.type}  {self.named.pattern(v)}",
                source=str(node.location),
                fix=f"drop hint {hint}, or split another dim of this parameter",
            )
        return None


def read_hints(named: Named, plan: Plan) -> Pins:
    """Resolve the plan's hints. Raises HintError for one that names nothing."""
    pins: dict[tuple[str, str], tuple[Dim, str]] = {}
    casts = find_casts(named.graph.nodes, named.graph.params)
    for wanted, text in plan.hints.items():
        hint = f"{wanted!r}: {text!r}"
        name, slash, axis = text.partition("/")
        if not slash or not name or not axis:
            raise HintError(
                f"hint {hint} is not of the form 'dim/axis'",
                fix="write for instance 'ffn/tp'",
            )
        if plan.mesh.axis_size(axis) == 1 and axis not in dict(plan.mesh.axes):
            raise HintError(
                f"hint {hint} names axis '{axis}', which mesh '{plan.mesh}' lacks",
                fix=f"use one of {', '.join(dict(plan.mesh.axes))}",
            )
        matches = [
            v
            for v in named.graph.params
            for names in [(v.name, *named.traced.joined.get(v.name, ()))]
            if wanted in names or any(fnmatchcase(n, wanted) for n in names)
        ]
        if not matches:
            raise HintError(
                f"hint {hint} matches no parameter",
                fix=f"names look like {named.graph.params[0].name}",
            )
        for v in matches:
            own = [d for dims in named.dims[v.name] for d in dims if d.name == name]
            if not own:
                raise HintError(
                    f"hint {hint}: {v.name} has no dim '{name}', "
                    f"its dims are {named.pattern(v)}",
                    fix="use one of these names",
                )
            if own[0].size < plan.size(axis):
                raise HintError(
                    f"hint {hint}: dim '{name}' has {own[0].size} elements, fewer "
                    f"than the {plan.size(axis)} ranks of '{axis}'",
                    fix="split another dim",
                )
            if plan.size(axis) > 1:
                copies = [copy for copy, name in casts.items() if name == v.name]
                pins.update(((n, axis), (own[0], hint)) for n in (v.name, *copies))
    return Pins(pins, named)
