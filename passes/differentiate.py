"""differentiate: a rank's forward of one stage -> its forward and backward.

Reverse mode over the local graph, collectives included, so that the backward's
collectives are the transposes of the forward's. Parameter gradients are added up in
place over microbatches; what is pending over mesh axes stays so until the step's end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from passes.fuse import drop_identities, fuse_bias, spell_masks
from passes.graph import Builder, Node, Value
from passes.local_stage import LocalStage
from passes.localize import Localizer
from passes.name_dims import Dims
from passes.overlap import by_layer, by_size, gather_ahead, scatter_behind
from passes.recompute import recompute
from passes.rest import find_casts, find_gathered, gather_again, gradient_dtypes
from passes.reuse import reuse
from passes.ring import ATTENTION
from passes.split_backward import GRADIENT, find_dependent, split_backward
from passes.split_stages import Stage
from passes.tape import Tape, seed_of
from passes.traced_vjp import expand_forward, traced
from passes.vjp import DERIVATIVES, forward_nodes


def differentiate(
    stage: Stage,
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
    policies: Mapping[str, str] = MappingProxyType({}),
    zero: int = 0,
    halves: bool = False,
    scaled: bool = False,
) -> LocalStage:
    """Localize a stage for the rank at `coords`, and write its backward.

    policies: layer -> what its backward computes again, see `recompute`.
    zero: when parameters are gathered and their gradients scattered, see `rest`.
    halves: whether the backward is split, see `split_backward`.
    scaled: whether the backward starts with the loss's scale instead of 1.
    """
    local = Localizer(stage.dims, stage.shardings, sizes, coords)
    parts, sources, loss = _localized(stage, local)
    forward = fuse_bias(spell_masks(parts["forward"]))
    builder = Builder(set(stage.dims) | {v.name for n in forward for v in n.results})
    casts = find_casts(forward, sources["params"])
    standing = _standing(parts["setup"], sources) | casts.keys()
    whole = _boundary(forward, standing) if zero == 1 else ()
    trained = (*sources["params"], *whole)
    dtypes = gradient_dtypes(forward, sources["params"])
    writer = _Writer(builder, stage.differentiable, trained, sizes, dtypes, casts)
    writer.run_forward(forward)
    d_sends = writer.seed(sources["sends"], loss, halves, scaled)
    d_receives = writer.run_backward(sources["receives"])
    writer.run_epilogue()
    writer.drop_dead(d_receives)
    ends = [*sources["sends"], *([loss] if loss else [])]
    parts["prologue"] += writer.take_once(casts, standing, gathers=zero in (1, 2))
    writer.make_again(policies, {v.name for v in ends}, stage.dims, standing)
    elsewhere = standing | {v.name for n in parts["prologue"] for v in n.results}
    elsewhere |= {v.name for v in (*sources["inputs"], *writer.tape.grads.values())}
    saved = writer.saved(elsewhere, d_receives)
    if halves:
        batch = (*sources["inputs"], *sources["receives"])
        writer.split(batch, (*parts["prologue"], *forward), d_receives)
    kept = _operands(writer.weight_half, elsewhere)
    returned = {v.name for v in (*d_receives, *kept) if v}
    writer.overlap(standing, returned)
    return LocalStage(
        stage=stage,
        setup=tuple(parts["setup"]),
        prologue=tuple(parts["prologue"]),
        forward=tuple(reuse(writer.forward, {v.name for v in (*saved, *ends)})),
        backward=tuple(reuse(writer.backward, returned)),
        epilogue=tuple(writer.epilogue),
        **sources,
        d_sends=d_sends,
        d_receives=d_receives,
        loss=loss,
        saved=saved,
        weight_half=tuple(reuse(writer.weight_half, ())) if halves else None,
        kept=kept,
        grads=writer.tape.grads,
    )


def _localized(
    stage: Stage, local: Localizer
) -> tuple[dict[str, list[Node]], dict[str, tuple[Value, ...]], Value | None]:
    """The stage's nodes, and its values from outside, by field, in the rank's shapes;
    and its loss."""
    parts = ("setup", "prologue", "forward")
    sources = ("params", "buffers", "constants", "inputs", "receives", "sends")
    return (
        {part: [local.node(n) for n in getattr(stage, part)] for part in parts},
        {part: tuple(map(local.value, getattr(stage, part))) for part in sources},
        local.value(stage.loss) if stage.loss else None,
    )


def _standing(
    setup: Iterable[Node], sources: Mapping[str, Iterable[Value]]
) -> set[str]:
    """Names of what is there between steps: what setup made, and what it is made of."""
    held = (v for p in ("params", "buffers", "constants") for v in sources[p])
    return {v.name for v in (*held, *(v for n in setup for v in n.results))}


class _Writer:
    def __init__(
        self,
        builder: Builder,
        differentiable: frozenset[str],
        trained: tuple[Value, ...],
        sizes: Mapping[str, int],
        dtypes: Mapping[str, torch.dtype],
        casts: Mapping[str, str],
    ) -> None:
        grads = {
            v.name: Value(GRADIENT + v.name, v.shape, dtypes.get(v.name, v.dtype))
            for v in trained
            if v.name in differentiable
        }
        self.tape = Tape(builder, differentiable, grads, sizes, dtypes, casts)
        self.forward: list[Node] = []
        self.backward: list[Node] = []
        self.weight_half: list[Node] = []
        self.epilogue: list[Node] = []
        # Nodes that a gradient flows through, as the backward sees them.
        self.through: list[Node] = []
        self.seeds: list[Value] = []
        # Value -> its cotangent, for those that nodes of `through` make.
        self.cotangents: dict[str, Value] = {}

    def run_forward(self, nodes: list[Node]) -> None:
        for node in nodes:
            if not any(self.tape.wanted(v) for v in node.results):
                self.forward.append(forward_nodes(self.tape, node) or node)
                continue
            if node.op in DERIVATIVES and not self._needs_trace(node):
                node = forward_nodes(self.tape, node) or node
                self.forward.append(node)
            else:
                self.forward += expand_forward(self.tape, node)
            self.through.append(node)

    def _needs_trace(self, node: Node) -> bool:
        """Products of two activations, computed tables, learned masks, scaled sums."""
        if node.op == "aten.matmul.default":
            x, w = node.operands[:2]
            return not (len(w.shape) == 2 and len(x.shape) > 1)
        if node.op == "aten.embedding.default":
            return not self.tape.is_param(node.operands[0])
        if node.op == "aten.add.Tensor":
            return "alpha" in node.kwargs
        if node.op in ("autopar.attention", ATTENTION):
            return any(self.tape.wanted(mask) for mask in node.operands[3:])
        return False

    def seed(
        self,
        sends: tuple[Value, ...],
        loss: Value | None,
        halves: bool,
        scaled: bool,
    ) -> tuple[Value | None, ...]:
        """Start the backward with the cotangents that come in, and the loss's own.

        halves: the next stage, if it is on this rank, may still read what comes in.
        """
        incoming: list[Value | None] = []
        for v in sends:
            if not self.tape.wanted(v):
                incoming.append(None)
                continue
            dy = self.tape.fresh(v)
            incoming.append(dy)
            self.seeds.append(dy)
            if halves:
                self.tape.share(dy)
            self.tape.add(v, dy)
        if loss is not None and self.tape.wanted(loss):
            self.tape.add(loss, seed_of(self.tape, loss, self.through[-1], scaled))
        return tuple(incoming)

    def run_backward(self, receives: tuple[Value, ...]) -> tuple[Value | None, ...]:
        """Down to the cotangents that the stage before waits for: zeros, where this
        one's gradient does not depend on what it received."""
        tape = self.tape
        self._transpose(self.through)
        # A stage may only look at what it hands on: a maximum of the logits.
        at = (self.through or self.forward)[0]
        found = [
            tape.take(v, at) or tape.zeros(v, at) if tape.wanted(v) else None
            for v in receives
        ]
        self.backward, tape.nodes = tape.nodes, []
        return tuple(found)

    def run_epilogue(self) -> None:
        """From the gradients of what is gathered for the whole step to the parameters'.

        The loop stops at them as at parameters, so their makers are left to be done.
        """
        tape = self.tape
        made = [v for n in self.through for v in n.results if v.name in tape.grads]
        for v in made:
            tape.add(v, tape.grads[v.name])
            tape.share(tape.grads[v.name])
        self._transpose(self.through if made else [])
        self.epilogue, tape.nodes = tape.nodes, []

    def _transpose(self, nodes: list[Node]) -> None:
        """Pass the cotangents that are known on, from the last node to the first."""
        tape = self.tape
        for node in reversed(nodes):
            dys = [None if v is None else tape.take(v, node) for v in node.outs]
            for v, dy in zip(node.outs, dys, strict=True):
                if v is not None and dy is not None:
                    self.cotangents[v.name] = dy
            if node.op in DERIVATIVES and not self._needs_trace(node):
                if not any(dys):
                    continue
                found = DERIVATIVES[node.op](tape, node, dys)
            elif any(dys):
                found = traced(tape, node, dys)
            else:
                continue
            for v, dy in zip(node.operands, found, strict=True):
                if dy is None or not tape.wanted(v):
                    continue
                if tape.is_param(v):
                    tape.accumulate(v, "autopar.add_", node, dy)
                else:
                    tape.add(v, tape.cast(dy, v, node))

    def drop_dead(self, outputs: tuple[Value | None, ...]) -> None:
        """Keep the backward's nodes that a result or a gradient depends on."""
        parts = drop_identities(self.forward, self.backward, self.epilogue)
        self.forward, backward, epilogue = parts
        self.backward = _alive(backward, {v.name for v in outputs if v is not None})
        self.epilogue = _alive(epilogue, set())

    def take_once(
        self, casts: Collection[str], standing: set[str], gathers: bool
    ) -> list[Node]:
        """Remove from the forward what it makes of parameters once a step: casts of
        them, and if `gathers`, what is gathered."""
        taken = self._take_out(casts)
        if gathers:
            whole = self._take_out(find_gathered(self.forward, standing))
            taken += gather_ahead(whole, standing, by_size, self.tape.builder)
        return taken

    def _take_out(self, made: Collection[str]) -> list[Node]:
        """Remove from the forward the nodes that make these values."""
        makers = {id(n) for n in self.forward for v in n.results if v.name in made}
        taken = [n for n in self.forward if id(n) in makers]
        self.forward = [n for n in self.forward if id(n) not in makers]
        return taken

    def saved(
        self, elsewhere: set[str], outputs: tuple[Value | None, ...]
    ) -> tuple[Value, ...]:
        """What the backward needs of the forward.

        elsewhere: names of what both can read at any time.
        """
        there = elsewhere | {v.name for v in self.seeds}
        made = there.union(v.name for n in self.backward for v in n.results)
        ends = {v.name: v for v in outputs if v and v.name not in made}
        read = {v.name: v for v in _operands(self.backward, there)}
        return tuple((read | ends).values())

    def make_again(
        self,
        policies: Mapping[str, str],
        ends: Collection[str],
        dims: Mapping[str, Dims],
        standing: Collection[str],
    ) -> None:
        """Make in the backward what is not to be kept for it."""
        forward = self.forward
        self.backward = recompute(policies, forward, self.backward, ends, dims)
        self.backward = gather_again(forward, self.backward, standing)

    def split(
        self,
        batch: Iterable[Value],
        nodes: Iterable[Node],
        outputs: Iterable[Value | None],
    ) -> None:
        """Cut the backward into its input half and its weight half.

        The cotangents of what `nodes` make of the batch all belong to the input half,
        so that a first stage, which sends none, has one as long as others.
        """
        dependent = find_dependent(batch, nodes)
        found = {dy.name for name, dy in self.cotangents.items() if name in dependent}
        found.update(v.name for v in outputs if v)
        self.backward, self.weight_half = split_backward(self.backward, found)

    def overlap(self, standing: Collection[str], returned: Collection[str]) -> None:
        """Let collectives of parameters run while something else is computed."""
        builder = self.tape.builder

        def both(nodes: list[Node], keep: Collection[str]) -> list[Node]:
            nodes = gather_ahead(nodes, standing, by_layer, builder)
            return scatter_behind(nodes, keep, by_layer, builder)

        self.forward = gather_ahead(self.forward, standing, by_layer, builder)
        self.backward = both(self.backward, returned)
        self.weight_half = both(self.weight_half, ())
        self.epilogue = scatter_behind(self.epilogue, (), by_size, builder)


def _boundary(forward: list[Node], standing: set[str]) -> tuple[Value, ...]:
    """What is made by gathering parameters, and read by what is not."""
    gathered = find_gathered(forward, standing)
    makers = {id(node) for node in gathered.values()}
    read = {v.name: v for n in forward if id(n) not in makers for v in n.operands}
    return tuple(v for name, v in read.items() if name in gathered)


def _operands(nodes: Sequence[Node], there: Collection[str]) -> tuple[Value, ...]:
    """What nodes read but do not make, and is not there anyway; each once."""
    made = {v.name for n in nodes for v in n.results}
    read = {v.name: v for n in nodes for v in n.operands}
    return tuple(
        v for name, v in read.items() if name not in made and name not in there
    )


def _alive(nodes: list[Node], needed: set[str]) -> list[Node]:
    """Nodes that a result or a parameter's gradient depends on."""
    kept: list[Node] = []
    for node in reversed(nodes):
        changes = not node.results and _target(node)
        into_grad = bool(changes) and str(changes).startswith(GRADIENT)
        if (
            into_grad
            or changes in needed
            or any(v.name in needed for v in node.results)
        ):
            kept.append(node)
            needed.update(v.name for v in node.operands)
    return kept[::-1]


def _target(node: Node) -> str:
    """What an in-place node writes to: its first operand."""
    return node.operands[0].name
