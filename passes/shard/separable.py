"""Checks that microbatches can share the loss out.

Gradients are added up over them, so each must compute a part of the loss, and none may
need what another one has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..dims.name_dims import Dim, Named
from ..dims.origins import Origin
from ..errors import LOSS, BatchError, LossNotSeparable
from ..graph import Graph, Node, Value
from ..mesh import TIME
from ..ops.op import op_of
from ..shard.op_sharding import PASS, OpSharding
from ..shard.sharding import Sharding
from ..traced import Traced

TOGETHER = (
    "keep samples independent of each other up to the loss, or use microbatches=1; "
    "what compares two samples may have them side by side: r.view(-1, 2)"
)
CUT = (
    "cut along another dim than that of samples, as x.chunk(8, 1) of x [batch, seq, "
    "...], before their rows are flattened; or use microbatches=1"
)


def check_op(
    named: Named, states: Mapping[str, Sharding], node: Node, op_sharding: OpSharding
) -> None:
    """Refuses an op that needs more of an operand than a microbatch has.

    states: of the operands. op_sharding: how microbatches split the op. Raises:
    LossNotSeparable.
    """
    for v in node.operands:
        state = states[v.name]
        if named.origins[v.name] is Origin.INPUT:
            continue
        if state.pending_on(TIME) and op_sharding != PASS:
            raise LossNotSeparable(
                f"{node} needs %{v.name} complete, but each microbatch has only "
                "its share of this sum",
                source=str(node.location),
                fix="let the loss be a sum over samples, divided by what depends "
                "on the batch alone, or use microbatches=1",
                outputs=outputs_of(node.results, named.traced, named.graph),
            )
        if op_sharding is None and state.place(TIME):
            raise LossNotSeparable(
                f"{node} needs the whole batch of %{v.name}, but microbatches "
                "come one after another",
                source=str(node.location),
                fix=CUT if op_of(node).view == "part" else TOGETHER,
                outputs=outputs_of(node.results, named.traced, named.graph),
            )


def outputs_of(values: Iterable[Value], traced: Traced, graph: Graph) -> frozenset[str]:
    """Names of the graph's outputs that are computed of some values, and of the buffers
    that are."""
    names = {v.name for v in values}
    for later in graph.nodes:
        if any(v.name in names for v in later.operands):
            names.update(v.name for v in later.results)
    buffers = {v.name: name for name, g in traced.updates.items() for v in g.inputs}
    named = zip((LOSS, *traced.outputs), graph.outputs, strict=True)
    return frozenset(buffers.get(name, name) for name, v in named if v.name in names)


def check_loss(
    named: Named,
    states: Mapping[str, Sharding],
    op_shardings: Sequence[Mapping[str, OpSharding]],
    microbatches: int,
) -> None:
    """Refuses a loss that every microbatch would compute as a whole: the sum of their
    gradients would be as many times the gradient.

    Raises: LossNotSeparable at the first op that needs samples together, or BatchError
    where there are no samples to share out.
    """
    if states[named.graph.outputs[0].name].pending_on(TIME) == "sum":
        return
    samples = samples_of(named)
    if not any(size > 1 for size in samples.values()):
        shapes = ", ".join(f"'{v.name}' {v.type}" for v in named.graph.inputs)
        raise BatchError(
            f"{microbatches} microbatches have no samples to share out: the first dim "
            f"of what is in the batch is 1 ({shapes})",
            fix="use microbatches=1, or a batch with a first dim that "
            f"{microbatches} divides",
        )
    node = first_whole(named, op_shardings, TIME)
    if node is None:
        raise LossNotSeparable(
            f"the loss does not depend on what {microbatches} microbatches share out",
            fix="use microbatches=1, or let the loss be a sum over samples",
        )
    taken = next(v for v in node.operands if _has(named, v, samples))
    raise LossNotSeparable(
        f"{node} needs all samples of %{taken.name} at once, so that {microbatches} "
        "microbatches cannot share them out",
        source=str(node.location),
        fix=TOGETHER,
    )


def reads_whole(named: Named, dim: Dim) -> bool:
    """Whether an op needs all of a dim, as one does that cuts samples into pieces."""
    return any(
        f.dim == dim and f.role == "whole"
        for node, own in zip(named.graph.nodes, named.factors, strict=True)
        if named.origins[node.results[0].name] is Origin.BOTH
        for f in own
    )


def samples_of(named: Named) -> Mapping[int, int]:
    """The dims of samples in a batch, by their keys -> their sizes."""
    return {
        d.key: d.size
        for v in named.graph.inputs
        for d in (named.dims[v.name][0] if v.shape else ())
    }


def first_whole(
    named: Named, op_shardings: Sequence[Mapping[str, OpSharding]], axis: str
) -> Node | None:
    """The first node that needs samples of different ranks of an axis: of those that
    need all of them, if there is one, else of those that add them up; of these first
    one that reads activations, not the batch alone."""
    samples = samples_of(named)
    first: dict[tuple[bool, bool], Node] = {}
    for node, own, chosen in zip(
        named.graph.nodes, named.factors, op_shardings, strict=True
    ):
        if chosen.get(axis) is not None:
            continue
        roles = {f.role for f in own if f.dim.key in samples} - {"map"}
        lost = not any(_has(named, v, samples) for v in node.results)
        carried = any(_has(named, v, samples) for v in node.operands)
        if carried and (roles or lost):
            origins = [named.origins[v.name] for v in node.operands]
            adds = bool(roles) and "whole" not in roles
            first.setdefault((adds, Origin.BOTH not in origins), node)
    return first[min(first)] if first else None


def _has(named: Named, v: Value, samples: Mapping[int, int]) -> bool:
    """Whether a dim of a value counts samples."""
    return any(d.key in samples for dim in named.dims[v.name] for d in dim)
