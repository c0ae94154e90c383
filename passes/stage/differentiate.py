"""differentiate: a rank's forward of one stage -> its forward and backward.

`join` writes both (`write_backward`). What is kept between them and when collectives
begin comes after that, in `finish`: so one joint serves all policies of recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from ..builder import Builder
from ..graph import Graph, Node, Value, live_in
from ..mesh import TIME
from ..recompute.recompute import Run, recompute
from ..shard.parameter_sharding import (
    find_casts,
    find_gathered,
    gather_again,
    gradient_dtypes,
)
from ..stage.check_stage import check_shapes
from ..stage.fuse import add_together, fuse_bias, materialize_masks
from ..stage.local_stage import LocalStage
from ..stage.localize import Localizer
from ..stage.overlap import (
    await_gradients,
    by_layer,
    gather_ahead,
    pause_before_waits,
    scatter_behind,
    tell_ready,
)
from ..stage.reuse import own_residuals, reuse
from ..stage.runs import find_remade, gather_runs, passed_on
from ..stage.split_backward import find_dependent, split_backward
from ..stage.split_stages import Stage
from ..stage.write_backward import Writer


@dataclass(frozen=True)
class Joint:
    """A stage's forward and backward in the shapes of a rank; all of the forward is
    there for the backward. Fields that `LocalStage` has too are as there.

    sources: values from outside, by field of `LocalStage`. standing: names of what is
    there between steps, or for a whole one. halves: whether the backward is to be
    split; input_half: names of the cotangents that its input half is for. taken: all
    names of values. made: parameter -> its gradient, of a joint that makes these
    instead of adding to `grads`, see `join_both`.
    """

    stage: Stage
    setup: tuple[Node, ...]
    prologue: tuple[Node, ...]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    sources: Mapping[str, tuple[Value, ...]]
    d_sends: tuple[Value | None, ...]
    d_receives: tuple[Value | None, ...]
    loss: Value | None
    seeds: tuple[Value, ...]
    grads: Mapping[str, Value]
    standing: frozenset[str]
    halves: bool
    input_half: frozenset[str]
    taken: frozenset[str]
    made: Mapping[str, Value] = field(default_factory=dict)

    @cached_property
    def run(self) -> Run:
        """The run that policies of recomputation choose from."""
        once = (v for n in self.prologue for v in n.results)
        made = (*once, *self.sources["inputs"], *self.grads.values())
        there = self.standing.union(v.name for v in made)
        stage = self.stage
        return Run(stage.forward, self.forward, self.backward, stage.dims, there)

    @property
    def shared(self) -> Collection[str]:
        """Names that stand for gathered values: in a joint that makes gradients, those
        of whole parameters and their casts."""
        params = self.sources["params"] if self.made else ()
        return {v.name for v in params} | find_casts(self.prologue, params).keys()

    @property
    def graph(self) -> Graph:
        """Returns all parts as one: here the backward reads all of the forward."""
        sources, grads = self.sources, tuple(self.grads.values())
        once = (*self.setup, *self.prologue)
        ends = (*sources["sends"], *sources["outputs"], self.loss, *self.d_receives)
        return Graph(
            (*sources["inputs"], *sources["receives"], *filter(None, self.d_sends)),
            sources["params"],
            (*sources["buffers"], *grads),
            sources["constants"],
            (*once, *self.forward, *self.backward, *self.epilogue),
            tuple(v for v in ends if v is not None),
        )

    def verify(self) -> Joint:
        """Check that everything is made once, and before its use."""
        graph = self.graph.verify()
        check_shapes(graph.nodes, self.stage.dims, self.stage.shardings)
        return self

    def __str__(self) -> str:
        return str(self.graph)


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
    zero: when parameters are gathered and their gradients scattered, see
    `passes.shard.parameter_sharding`.
    halves: whether the backward is split, see `split_backward`.
    scaled: whether the backward starts with the loss's scale instead of 1.
    """
    return finish(join(Draft(stage, sizes, coords, zero, halves, scaled)), policies)


class Draft:
    """A stage in the shapes of a rank, for which backwards are written, see
    `differentiate`."""

    def __init__(
        self,
        stage: Stage,
        sizes: Mapping[str, int],
        coords: Mapping[str, int],
        zero: int = 0,
        halves: bool = False,
        scaled: bool = False,
    ) -> None:
        self.stage, self.sizes, self.zero = stage, sizes, zero
        self.halves, self.scaled = halves, scaled
        local = Localizer(stage.dims, stage.shardings, sizes, coords)
        self.parts, self.sources, self.loss = _localized(stage, local)
        self.forward = fuse_bias(materialize_masks(self.parts["forward"]))
        params = self.sources["params"]
        self.casts = find_casts(self.forward, params)
        self.standing = _standing(self.parts["setup"], self.sources) | self.casts.keys()
        self.dtypes = gradient_dtypes(self.forward, params)

    def writer(self, makes: bool, like: Writer | None = None) -> Writer:
        """One that has taken the forward. makes: gradients, instead of adding to them.
        like: one that has not yet written anything else."""
        forward, stage = self.forward, self.stage
        whole = _boundary(forward, self.standing) if self.zero == 1 else ()
        trained = () if makes else (*self.sources["params"], *whole)
        taken = like.cts.builder.taken if like else stage.dims
        builder = Builder({*taken, *(v.name for n in forward for v in n.results)})
        about = trained, self.sizes, self.dtypes, self.casts
        writer = Writer(builder, stage.differentiable, *about)
        writer.run_forward(forward, like)
        return writer

    def join(self, writer: Writer, makes: bool = False) -> Joint:
        """Has the writer write the rest."""
        parts, sources, loss = self.parts, self.sources, self.loss
        d_sends = writer.seed(sources["sends"], loss, self.halves, self.scaled)
        d_receives = writer.run_backward(sources["receives"])
        made = writer.take_gradients(sources["params"]) if makes else {}
        writer.run_epilogue()
        ends = *sources["sends"], *sources["outputs"], *([loss] if loss else ())
        writer.drop_dead((*d_receives, *made.values()), {v.name for v in ends})
        once = writer.take_once(self.casts, self.standing, gathers=self.zero in (1, 2))
        before = map(writer.with_results, materialize_masks(parts["prologue"]))
        prologue = (*before, *once)
        # The cotangents of what is made of the batch all belong to the input half, so
        # that a first stage, which sends none, has one as long as others.
        batch = (*sources["inputs"], *sources["receives"])
        dependent = find_dependent(batch, (*prologue, *self.forward))
        input_half = {dy.name for x, dy in writer.cotangents.items() if x in dependent}
        return Joint(
            stage=self.stage,
            setup=tuple(map(writer.with_results, parts["setup"])),
            prologue=prologue,
            forward=tuple(writer.forward),
            backward=tuple(writer.backward),
            epilogue=tuple(writer.epilogue),
            sources=sources,
            d_sends=d_sends,
            d_receives=d_receives,
            loss=loss,
            seeds=tuple(writer.seeds),
            grads=writer.cts.grads,
            standing=frozenset(self.standing),
            halves=self.halves,
            input_half=frozenset(input_half),
            taken=frozenset(writer.cts.builder.taken),
            made=made,
        )


def join(draft: Draft) -> Joint:
    """Writes the backward of a stage."""
    return draft.join(draft.writer(False))


def join_both(draft: Draft) -> tuple[Joint, Joint]:
    """The same twice; in the second a microbatch's gradients of parameters are values
    of the backward, as where they are to be scattered, and nothing is added to."""
    usual = draft.writer(False)
    makes = draft.writer(True, usual)
    return draft.join(usual), draft.join(makes, True)


def finish(joint: Joint, policies: Mapping[str, str]) -> LocalStage:
    """Decides which values are kept for the backward, and when waits begin.

    policies: see `differentiate`.
    """
    forward, standing, sources = joint.forward, joint.standing, joint.sources
    handed = (*sources["sends"], *sources["outputs"], joint.loss)
    ends = {v.name for v in handed if v}
    stage = joint.stage
    elsewhere = joint.run.there
    again = recompute(policies, joint.run, ends)
    backward = gather_again(forward, again, standing, joint.shared)
    weight_half: list[Node] = []
    residuals = _residuals(joint, backward, elsewhere)
    if joint.halves:
        received = {v.name for v in joint.d_receives if v}
        backward, weight_half = split_backward(backward, joint.input_half | received)
    weight_residuals = _live_in(weight_half, elsewhere)
    run = forward, backward, weight_half
    again_too = passed_on(run, find_remade(run))
    returned = {v.name for v in (*joint.d_receives, *weight_residuals) if v}
    builder = Builder(set(joint.taken))

    def early(
        nodes: list[Node], keep: Collection[str], entering: Mapping[str, str]
    ) -> list[Node]:
        nodes = gather_ahead(nodes, standing, by_layer, builder)
        nodes = gather_runs(scatter_behind(nodes, keep, by_layer, builder))
        return reuse(nodes, {*keep, *again_too}, entering)

    read_later = {*ends, *(v.name for v in residuals)}
    ahead = gather_runs(gather_ahead(forward, standing, by_layer, builder))
    ahead = reuse(ahead, {*read_later, *again_too})
    own = own_residuals(ahead, residuals, filter(None, handed))
    parts = [early(backward, returned, own)]
    parts += [early(weight_half, (), {})] if joint.halves else []
    parts = [_tell_made(part, joint.made) for part in parts] if joint.made else parts
    epilogue = scatter_behind(joint.epilogue, (), by_layer, builder)
    parts[-1], epilogue = _tell_ready(joint, parts, epilogue)
    return LocalStage(
        stage=stage,
        setup=joint.setup,
        prologue=tuple(pause_before_waits(joint.prologue)),
        forward=tuple(ahead),
        backward=tuple(add_together(parts[0])),
        weight_half=tuple(add_together(parts[1])) if joint.halves else None,
        epilogue=tuple(add_together(epilogue)),
        **sources,
        d_sends=joint.d_sends,
        d_receives=joint.d_receives,
        loss=joint.loss,
        residuals=residuals,
        weight_residuals=weight_residuals,
        grads=joint.grads,
    )


def _tell_ready(
    joint: Joint, parts: Sequence[Sequence[Node]], epilogue: Sequence[Node]
) -> tuple[list[Node], list[Node]]:
    """The last part of the backward, and the epilogue, with nodes that tell which
    gradients are ready, of those scattered or reduced once a step: gradients of values
    gathered for a step, and those pending on an axis of space."""
    held, shardings = {v.name for v in joint.sources["params"]}, joint.stage.shardings
    wholes = {g.name: g for name, g in joint.grads.items() if name not in held}
    pending = {
        g.name: g
        for name, g in joint.grads.items()
        if name in held and shardings[name].varying - {TIME}
    }
    late = {n.operands[0].name for n in epilogue if not n.results}
    before = {name: v for name, v in pending.items() if name not in late}
    after = {name: v for name, v in pending.items() if name in late}
    epilogue = await_gradients(tell_ready([epilogue], after), wholes)
    return tell_ready(parts, wholes | before), epilogue


def _tell_made(part: Sequence[Node], made: Mapping[str, Value]) -> list[Node]:
    """A part of the backward, which says which of the gradients that it makes are
    ready."""
    results = {v.name: v for n in part for v in n.results}
    return tell_ready([part], {v.name: v for v in made.values() if v.name in results})


def _localized(
    stage: Stage, local: Localizer
) -> tuple[dict[str, list[Node]], dict[str, tuple[Value, ...]], Value | None]:
    """The stage's nodes, and its values from outside, by field, in the rank's shapes;
    and its loss."""
    parts = ("setup", "prologue", "forward")
    sources = (
        "params",
        "buffers",
        "constants",
        "inputs",
        "receives",
        "sends",
        "outputs",
    )
    return (
        {part: [local.node(n) for n in getattr(stage, part)] for part in parts},
        {part: tuple(map(local.value, getattr(stage, part))) for part in sources},
        local.value(stage.loss) if stage.loss else None,
    )


def _standing(
    setup: Iterable[Node], sources: Mapping[str, Iterable[Value]]
) -> set[str]:
    """Names of values that stay between steps: sources and results of setup."""
    held = (v for p in ("params", "buffers", "constants") for v in sources[p])
    return {v.name for v in (*held, *(v for n in setup for v in n.results))}


def _boundary(forward: list[Node], standing: set[str]) -> tuple[Value, ...]:
    """The gathered values that nodes read which gather nothing."""
    gathered = find_gathered(forward, standing)
    makers = {id(node) for node in gathered.values()}
    read = {v.name: v for n in forward if id(n) not in makers for v in n.operands}
    return tuple(v for name, v in read.items() if name in gathered)


def _residuals(
    joint: Joint, backward: Sequence[Node], elsewhere: Collection[str]
) -> tuple[Value, ...]:
    """What the backward needs of the forward.

    elsewhere: names of what both can read at any time.
    """
    there = {*elsewhere, *(v.name for v in joint.seeds)}
    made = there.union(v.name for n in backward for v in n.results)
    ends = {v.name: v for v in joint.d_receives if v and v.name not in made}
    read = {v.name: v for v in _live_in(backward, there)}
    return tuple((read | ends).values())


def _live_in(nodes: Sequence[Node], there: Collection[str]) -> tuple[Value, ...]:
    """What nodes read but do not make, and is not there anyway; each once."""
    return tuple(v for name, v in live_in(nodes).items() if name not in there)
