"""differentiate: a rank's forward of one stage -> its forward and backward.

Reverse mode over the local graph, collectives included, so that the backward's
collectives are the transposes of the forward's. Parameter gradients are added up in
place over microbatches; what is pending over mesh axes stays so until the step's end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from passes.cost import flops
from passes.fuse import drop_identities, fuse_bias, spell_masks
from passes.graph import Builder, Node, Value
from passes.localize import Localizer
from passes.name_dims import Dims
from passes.overlap import by_layer, by_size, gather_ahead, scatter_behind
from passes.recompute import recompute
from passes.rest import find_gathered, gather_again
from passes.reuse import reuse
from passes.ring import ATTENTION
from passes.split_backward import GRADIENT, find_dependent, split_backward
from passes.split_stages import Stage
from passes.tape import Tape, ones_like
from passes.traced_vjp import expand_forward, traced
from passes.vjp import DERIVATIVES, forward_nodes


@dataclass(frozen=True)
class LocalStage:
    """What one rank runs of a stage. Shapes are the rank's own.

    setup, prologue, forward: as in `Stage`. backward: from the cotangents of `sends` to
    those of `receives`. epilogue: once a step, after all backwards. saved: what forward
    keeps for backward. grads: parameter, or what is gathered for the whole step, -> the
    buffer that its gradient is added to. text: value name -> its named dims.
    weight_half: None, or the part of the backward that can run later than the rest,
    which is `backward` then; kept: what it needs of the forward and of that.
    """

    stage: Stage
    setup: tuple[Node, ...]
    prologue: tuple[Node, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    params: tuple[Value, ...]
    buffers: tuple[Value, ...]
    constants: tuple[Value, ...]
    inputs: tuple[Value, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    d_sends: tuple[Value | None, ...]
    d_receives: tuple[Value | None, ...]
    loss: Value | None
    saved: tuple[Value, ...]
    weight_half: tuple[Node, ...] | None
    kept: tuple[Value, ...]
    grads: Mapping[str, Value]
    texts: Mapping[str, str]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Of all parts, in the order in which these run."""
        once = (*self.setup, *self.prologue)
        return (*once, *self.forward, *self.whole_backward, *self.epilogue)

    @property
    def whole_backward(self) -> tuple[Node, ...]:
        """Both halves."""
        return (*self.backward, *(self.weight_half or ()))

    @property
    def wholes(self) -> tuple[Value, ...]:
        """Gradients that are whole during a step, and shares of it afterwards."""
        held = {p.name for p in self.params}
        return tuple(g for name, g in self.grads.items() if name not in held)

    @property
    def flops(self) -> int:
        """Of one forward of one microbatch."""
        return sum(flops(n) for n in self.forward)


def differentiate(
    stage: Stage,
    sizes: Mapping[str, int],
    coords: Mapping[str, int],
    policies: Mapping[str, str] = MappingProxyType({}),
    zero: int = 0,
    halves: bool = False,
) -> LocalStage:
    """Localize a stage for the rank at `coords`, and write its backward.

    policies: layer -> what its backward computes again, see `recompute`.
    zero: when parameters are gathered and their gradients scattered, see `rest`.
    halves: whether the backward is split, see `split_backward`.
    """
    local = Localizer(stage.dims, stage.shardings, sizes, coords)
    parts, sources = _localized(stage, local)
    loss = local.value(stage.loss) if stage.loss else None
    forward = fuse_bias(spell_masks(parts["forward"]))
    builder = Builder(set(stage.dims) | {v.name for n in forward for v in n.results})
    standing = {v.name for n in parts["setup"] for v in n.results}
    standing |= {v.name for p in ("params", "buffers", "constants") for v in sources[p]}
    trained = sources["params"]
    if zero == 1:
        trained += _boundary(forward, standing)
    writer = _Writer(builder, stage.differentiable, trained, sizes)
    writer.run_forward(forward)
    d_sends = writer.seed(sources["sends"], loss, halves)
    d_receives = writer.run_backward(sources["receives"])
    writer.run_epilogue()
    writer.drop_dead(d_receives)
    ends = [*sources["sends"], *([loss] if loss else [])]
    if zero in (1, 2):
        parts["prologue"] += writer.take_gathers(standing)
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
        texts=writer.texts(stage),
    )


def _localized(
    stage: Stage, local: Localizer
) -> tuple[dict[str, list[Node]], dict[str, tuple[Value, ...]]]:
    """The stage's nodes and its values from outside, by field, in the rank's shapes."""
    parts = ("setup", "prologue", "forward")
    sources = ("params", "buffers", "constants", "inputs", "receives", "sends")
    return (
        {part: [local.node(n) for n in getattr(stage, part)] for part in parts},
        {part: tuple(map(local.value, getattr(stage, part))) for part in sources},
    )


class _Writer:
    def __init__(
        self,
        builder: Builder,
        differentiable: frozenset[str],
        trained: tuple[Value, ...],
        sizes: Mapping[str, int],
    ) -> None:
        grads = {
            v.name: Value(GRADIENT + v.name, v.shape, v.dtype)
            for v in trained
            if v.name in differentiable
        }
        self.tape = Tape(builder, differentiable, grads, sizes)
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
        self, sends: tuple[Value, ...], loss: Value | None, halves: bool
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
            self.tape.add(loss, ones_like(self.tape, loss, self.through[-1]))
        return tuple(incoming)

    def run_backward(self, receives: tuple[Value, ...]) -> tuple[Value | None, ...]:
        tape = self.tape
        self._transpose(self.through)
        found: list[Value | None] = [None] * len(receives)
        if self.through:
            at = self.through[0]
            found = [tape.take(v, at) if tape.wanted(v) else None for v in receives]
        self.backward, tape.nodes = tape.nodes, []
        return tuple(found)

    def run_epilogue(self) -> None:
        """From the gradients of what is gathered for the whole step to the parameters'.

        The loop stops at them as at parameters, so their makers are left to be done.
        """
        tape = self.tape
        makers = [n for n in self.through if any(map(tape.is_param, n.results))]
        for v in (v for n in makers for v in n.results if tape.is_param(v)):
            tape.add(v, tape.grads[v.name])
            tape.share(tape.grads[v.name])
        self._transpose(self.through if makers else [])
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
                    tape.add(v, dy)

    def drop_dead(self, outputs: tuple[Value | None, ...]) -> None:
        """Keep the backward's nodes that a result or a gradient depends on."""
        parts = drop_identities(self.forward, self.backward, self.epilogue)
        self.forward, backward, epilogue = parts
        self.backward = _alive(backward, {v.name for v in outputs if v is not None})
        self.epilogue = _alive(epilogue, set())

    def take_gathers(self, standing: set[str]) -> list[Node]:
        """Remove from the forward what it makes of parameters by gathering them."""
        makers = {id(n) for n in find_gathered(self.forward, standing).values()}
        taken = [n for n in self.forward if id(n) in makers]
        self.forward = [n for n in self.forward if id(n) not in makers]
        return gather_ahead(taken, standing, by_size, self.tape.builder)

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

    def texts(self, stage: Stage) -> dict[str, str]:
        """Named dims of each value; a cotangent lies as its value does."""
        found = {name: stage.shardings[name].text(d) for name, d in stage.dims.items()}
        for name, text in list(found.items()):
            found[f"d_{name}"] = text.partition("] ")[0].rstrip("]") + "]"
        return found


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
