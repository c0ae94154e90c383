"""The part of a pipeline stage that one rank runs, as `differentiate` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..cost import flops
from ..graph import Graph, Node, Value
from ..stage.check_stage import check_parts, check_shapes, part_graphs
from ..stage.reuse import own_residuals
from ..stage.split_stages import Stage


@dataclass(frozen=True)
class LocalStage:
    """What one rank runs of a stage. Shapes are the rank's own.

    setup, prologue, forward: as in `Stage`. backward: from the cotangents of `sends` to
    those of `receives`. epilogue: once a step, after the backwards; block by block, as
    gradients are ready. residuals: what forward keeps for backward. grads: parameter,
    or what is gathered for the whole step, -> the buffer that its gradient is added to.
    weight_half: None, or the part of the backward that can run later than the rest,
    which is `backward` then; weight_residuals: what it needs of the forward and of
    that.
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
    outputs: tuple[Value, ...]
    loss: Value | None
    residuals: tuple[Value, ...]
    weight_half: tuple[Node, ...] | None
    weight_residuals: tuple[Value, ...]
    grads: Mapping[str, Value]

    @property
    def parts(self) -> dict[str, tuple[Node, ...]]:
        """The nodes of each function of a rank's module, by its name."""
        return {
            "setup": self.setup,
            "prologue": self.prologue,
            "forward": self.forward,
            "backward": self.backward,
            "weight_half": self.weight_half or (),
            "epilogue": self.epilogue,
        }

    @property
    def ends(self) -> tuple[Value, ...]:
        """The values that forward makes for others: sends, outputs, and the loss."""
        return (*self.sends, *self.outputs, *([self.loss] if self.loss else []))

    @property
    def graphs(self) -> list[tuple[str, Graph]]:
        """The graph of each part, see `passes.stage.check_stage`."""
        ends = (*self.ends, *self.residuals, *self.weight_residuals, *self.d_receives)
        return part_graphs(self.parts, self.params, filter(None, ends))

    def verify(self) -> LocalStage:
        """Checks that each part reads what exists, and overwrites only its own
        values."""
        once = [v for n in (*self.setup, *self.prologue) for v in n.results]
        held = (*self.params, *self.buffers, *self.constants, *self.inputs, *once)
        received = tuple(filter(None, self.d_sends))
        sums = (*self.grads.values(), *received)
        readable = {
            **dict.fromkeys(("setup", "prologue"), held),
            "forward": (*held, *self.receives),
            "backward": (*held, *sums, *self.residuals),
            "weight_half": (*held, *self.grads.values(), *self.weight_residuals),
            "epilogue": (*held, *self.grads.values()),
        }
        residuals = own_residuals(self.forward, self.residuals, self.ends)
        check_parts(self.graphs, readable, {v.name for v in sums}, residuals)
        check_shapes(self.nodes, self.stage.dims, self.stage.shardings)
        return self

    def __str__(self) -> str:
        def note(v: Value) -> str:
            return self.texts.get(v.name, "")

        return "\n\n".join(f"# {name}\n{g.text(note)}" for name, g in self.graphs)

    @cached_property
    def texts(self) -> dict[str, str]:
        """Value name -> its named dims; a cotangent lies as its value does."""
        stage = self.stage
        texts = {name: stage.shardings[name].text(d) for name, d in stage.dims.items()}
        for name, text in list(texts.items()):
            texts[f"d_{name}"] = text.partition("] ")[0].rstrip("]") + "]"
        return texts

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Returns the nodes of all parts, in the order in which these run."""
        once = (*self.setup, *self.prologue)
        return (*once, *self.forward, *self.whole_backward, *self.epilogue)

    @property
    def whole_backward(self) -> tuple[Node, ...]:
        """The nodes of both halves of the backward."""
        return (*self.backward, *(self.weight_half or ()))

    @property
    def wholes(self) -> tuple[Value, ...]:
        """The gradients that are whole during a step, and shards afterwards."""
        held = {p.name for p in self.params}
        return tuple(g for name, g in self.grads.items() if name not in held)

    @property
    def flops(self) -> int:
        """Counts the operations of one microbatch's forward."""
        return sum(flops(n) for n in self.forward)
