"""Prices of pipeline stages with any number of layers, from a model of three layers.

A model of equal layers (or equal runs of them) is cut into its first, a middle and its
last layer, and once more with the last two together. Differences give what one more
layer costs; what embedding and loss cost is in the first and the last. Each distinct
layer is compiled once, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from ..cost import Exchange, join_exchanges
from ..dims.name_dims import Named
from ..graph import Node
from ..mesh import PIPELINE, Mesh
from ..plan import Plan
from ..price.account import WHERE, Account, Held, PartLevels, at_ends, in_a_row
from ..price.cluster import Device
from ..price.price import price
from ..price.price_memory import Sharing, held_by_both
from ..shard.cut_weights import cut_weights
from ..shard.insert_collectives import insert_collectives
from ..shard.propagate import propagate
from ..shard.sort_rows import sort_rows
from ..stage.chain import Chain
from ..stage.differentiate import Draft, Joint, finish, join, join_both
from ..stage.split_stages import Stage, cut_stage

POSITIONS = ("first", "middle", "last", "more")


@dataclass(frozen=True)
class LayerPrices:
    """Accounts of stages with one run of layers, of one microbatch.

    price_whole: returns all that there is in a model of `runs` runs, where a weight
    that both ends share counts once: only a rank that has all layers has that. first:
    with what comes before the layers. middle: of layers alone. last: with what comes
    after. more: what another run adds.
    """

    runs: int
    price_whole: Callable[[], Account]
    first: Account | None = None
    middle: Account | None = None
    last: Account | None = None
    more: Account | None = None

    # Not `functools.cache`, whose circles nobody frees while garbage is not collected.
    _known: dict[tuple[bool, int, bool], Account] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _least: dict[tuple[int, bool], Account] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def whole(self) -> Account:
        """What `price_whole` returns, found once."""
        return self.price_whole()

    def stages(self, layers: Sequence[int]) -> list[Account]:
        """The accounts of a pipeline's stages. layers: runs of each."""
        last = len(layers) - 1
        return [self.stage(i == 0, runs, i == last) for i, runs in enumerate(layers)]

    def stage(self, first: bool, runs: int, last: bool) -> Account:
        """A stage with so many runs. first, last: whether it has the model's ends."""
        key = first, runs, last
        if key not in self._known:
            self._known[key] = self._stage(*key)
        return self._known[key]

    def _stage(self, first: bool, runs: int, last: bool) -> Account:
        if first and last and runs == self.runs:
            return self.whole
        begin = self.first if first else self.middle
        end = self.last if last else self.middle
        if runs == 1:
            begin = end = self.first if first else end
        assert begin and end, "such a stage was not priced"
        row = [(at_ends(begin, True, runs == 1), 1)]
        if runs > 2:
            assert self.middle
            row.append((self.middle, runs - 2))
        if runs > 1:
            row.append((at_ends(end, False, True), 1))
        total, counted = row[-1] if last else row[0]
        if first and last:
            total, counted = self.whole, self.runs
        if runs != counted and self.more is not None:
            total = total.plus(self.more, runs - counted)
        account = in_a_row(total, row, self.tied if last else Held())
        return account if first == last else replace(account, tied=self.tied)

    def least(self, runs: int, stages: int) -> Account:
        """No more than so many stages have and take together, found without the whole:
        of one, what comes after the first layer begins; of several, two of them. What
        both ends use counts once, as one rank may have both."""
        one = min(stages, runs) == 1
        if one and self.middle is None:
            return self.whole
        if (runs, one) not in self._least:
            if one:
                least = self.stage(False, runs, True).changed(received=0.0)
            else:
                both = self.stage(True, runs - 1, False) + self.stage(False, 1, True)
                least = both.changed(held=both.held - self.tied)
            self._least[runs, one] = least
        return self._least[runs, one]

    @property
    def tied(self) -> Held:
        """Memory of weights that both ends of the model use, on each end's stage."""
        return self.last.tied if self.last else Held()

    @cached_property
    def parts(self) -> list[Account]:
        """The accounts of a first, a middle and a last run, of those that exist."""
        return [p for p in (self.first, self.middle, self.last) if p is not None]

    @cached_property
    def least_alive(self) -> Mapping[int, tuple[float, float]]:
        """Bytes at least that the backward of a stage has alive at once; and of these,
        beside what forwards saved. By the stage of ZeRO."""
        least_of = {}
        for zero in range(4):
            backwards = [
                (part, [p.of(zero, a) for p in peaks for a in (True, False)])
                for part in self.parts or [self.whole]
                if (peaks := [getattr(part.backward, where) for where in WHERE])
            ]
            least = [
                (min(alive), min(alive) - part.residuals) for part, alive in backwards
            ]
            least_of[zero] = max(x for x, _ in least), min(y for _, y in least)
        return least_of

    @cached_property
    def batch_residuals(self) -> float:
        """Bytes of a run's residuals that grow with the samples, of the run that has
        most."""
        return max(part.batch_residuals for part in self.parts or [self.whole])

    def combine(
        self, other: LayerPrices, of: Callable[[Account, Account], Account]
    ) -> LayerPrices:
        """Prices of what two of equal form have in the same positions."""

        def both(x: Account | None, y: Account | None) -> Account | None:
            return of(x, y) if x and y else None

        parts = (both(getattr(self, n), getattr(other, n)) for n in POSITIONS)
        mine, others = self.price_whole, other.price_whole
        return LayerPrices(self.runs, lambda: of(mine(), others()), *parts)

    def settled(self) -> LayerPrices:
        """The prices with peaks of memory, without the levels of each node."""

        def of(account: Account) -> Account:
            parts = account.microbatch.values()
            return account.with_parts(
                *(p.settled() if isinstance(p, PartLevels) else p for p in parts)
            )

        parts = ((part := getattr(self, n)) and of(part) for n in POSITIONS)
        mine = self.price_whole
        return LayerPrices(self.runs, lambda: of(mine()), *parts)


class Way(NamedTuple):
    """How layers are split and run: all that their prices depend on.

    mesh: the axes that a layer is compiled for. halves: of the backward, apart.
    samples: of a microbatch. shares: whether ranks hold shares of parameters between
    steps. context_parallel: how attention works on cp.
    """

    mesh: Mesh
    recompute: str
    halves: bool
    samples: int
    shares: bool = False
    context_parallel: str = "gather"


Prices = Callable[[Way], LayerPrices]


@dataclass(frozen=True)
class Cut:
    """A model of up to three runs of layers, cut in every way that prices come from.

    stages: the whole model; each run by itself, if there are two; and of three the
    last two together. counts: names of what ranks of dp, which the mesh is without,
    add up as well. shares: whether they may hold shares of parameters. deeper: whether
    prices are of models with more runs than three: what these have alive at once is
    found of each run, see `passes.price.account.in_a_row`.
    """

    plan: Plan
    stages: tuple[Stage, ...]
    counts: frozenset[str]
    shares: bool = True
    deeper: bool = False
    _known: dict[tuple[int, bool], Joints] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def last_run(self) -> int:
        """Which of the stages is the last run by itself, of several."""
        return min(3, len(self.stages) - 1)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names in the last run of parameters that the first one uses as well."""
        if not self.stages[1:]:
            return frozenset()
        last, there = self.stages[self.last_run], {*self.stages[1].names.values()}
        return frozenset(v.name for v in last.params if last.names[v.name] in there)

    def joints(self, stage: int, halves: bool) -> Joints:
        """Forward and backward of a stage. halves: of the latter, apart."""
        if (key := (stage, halves)) not in self._known:
            plan, sizes = self.plan, self.plan.sizes
            how = sizes, dict.fromkeys(sizes, 0), plan.zero, halves, plan.scales_loss
            draft = Draft(self.stages[stage], *how)
            both = join_both(draft) if self.shares else (join(draft), None)
            self._known[key] = Joints(*both)
        return self._known[key]


class Joints(NamedTuple):
    """A stage's forward and backward; and where ranks may hold shares, the same with
    gradients that are made."""

    usual: Joint
    makes: Joint | None


def cut_layers(
    named: Named,
    plan: Plan,
    starts: tuple[str, ...],
    shares: bool = True,
    deeper: bool = False,
) -> Cut:
    """Cut a model whose runs of layers begin at the module paths `starts`: three of
    them, or two or one of a model that has no more.

    plan: its mesh and microbatches; its stages do not matter. shares, deeper: see
    `Cut`.
    """
    sharded = propagate(named, plan)
    lowered = sort_rows(insert_collectives(cut_weights(sharded)))
    mesh = Mesh(((PIPELINE, len(starts)), *plan.mesh.stage_axes))
    cuts = starts[1:]
    in_stages = replace(lowered.plan, mesh=mesh, stages_per_rank=1, cuts=cuts)
    chain = Chain(replace(lowered, plan=in_stages))
    ends = [0, *chain.ends_of(cuts)]
    pieces = [(0, 0, ends[-1])]
    if cuts:
        pieces += [(i, *span) for i, span in enumerate(pairwise(ends))]
    if len(cuts) > 1:
        pieces.append((1, ends[1], ends[-1]))
    stages = tuple(cut_stage(chain, *piece) for piece in pieces)
    return Cut(plan, stages, frozenset(sharded.counts), shares, deeper)


def price_cut(
    make_cut: Callable[[], Cut], recompute: str, device: Device, halves: bool
) -> LayerPrices:
    """Prices of a cut, with some of the forward made again; halves: of the backward,
    apart. make_cut: is called again where the whole is priced, which may be later, so
    that prices do not keep it."""

    def of(i: int) -> Account:
        return _price(make_cut(), i, recompute, device, halves)

    cut, whole = make_cut(), cache(partial(of, 0))
    count = len(cut.stages)
    if count == 1:
        return LayerPrices(1, whole)
    ends = (cut.joints(i, halves).usual for i in (1, cut.last_run))
    tied = held_by_both(*ends)
    if count == 3:
        return LayerPrices(2, whole, of(1), last=of(2).changed(tied=tied))
    first, middle, last, together = map(of, range(1, count))
    more = together - last
    return LayerPrices(3, whole, first, middle, last.changed(tied=tied), more)


def _price(
    cut: Cut, stage: int, recompute: str, device: Device, halves: bool
) -> Account:
    plan, joints = replace(cut.plan, recompute=recompute), cut.joints(stage, halves)
    device = device.running(plan.tf32, plan.backend)
    policies = cut.stages[stage].policies(plan)
    local, sharing = finish(joints.usual, policies), None
    if joints.makes:
        tied = cut.tied if stage == cut.last_run else ()
        makes = finish(joints.makes, policies)
        # What is alive at once counts of single runs where there are more of them.
        peaks = not (cut.deeper and stage in (0, len(cut.stages) - 1))
        sharing = Sharing(makes, joints.makes.made, peaks, tied)
    made = [n for n in local.prologue if any(v.name in cut.counts for v in n.results)]
    added = join_exchanges(_added_up(node, local.prologue) for node in made)
    return price(local, device, sharing).changed(counts=added)


def _added_up(node: Node, nodes: Sequence[Node]) -> Exchange:
    """A number that ranks add up, over the axes of the batch that there are. nodes:
    among which it is made and added up."""
    sums = (n for n in nodes if n.op == "comm.all_reduce" and n.operands[0] == node.out)
    added = next(sums, node)
    axes = added.arg("axes") if added.op == "comm.all_reduce" else ()
    return Exchange("all_reduce", axes, 1.0, float(node.results[0].bytes))


def price_layers(
    named: Named, plan: Plan, starts: tuple[str, ...], device: Device, halves: bool
) -> LayerPrices:
    """Cut and price at once, see both."""
    cut = cut_layers(named, plan, starts)
    return price_cut(lambda: cut, plan.recompute, device, halves).settled()
