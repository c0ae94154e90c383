"""choose_recompute: of each layer, what is computed again so that a rank's stages fit.

The least extra time within the plan's memory. Of each layer it is known how many bytes
each policy saves and how many seconds it costs; their best combinations are worked out
exactly and taken in the order of their time until one fits. Whether one fits is not
estimated: the stages are differentiated so, and their memory is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import AutoparError
from ..plan import AUTO, RECOMPUTE, Plan, fit_plan
from ..price.account import Account, by_rank, rank_memory
from ..price.cluster import Cluster
from ..price.compiled_cost import activation_budget, count_once, stage_accounts
from ..price.price import compute_part
from ..price.stage_seconds import StageSeconds, part_seconds, stage_seconds
from ..schedule.check_schedule import peak_in_flight
from ..schedule.fit_schedule import on_paper
from ..schedule.footprint import FORWARD, peak_bytes
from ..schedule.memory import OutOfMemory, RankMemory, out_of_memory
from ..schedule.pareto_front import Option, pareto_front
from ..schedule.schedule import Schedule, ScheduleError
from ..shard.parameter_sharding import find_gathered
from ..stage.count_footprint import footprint, residuals_by_layer
from ..stage.differentiate import differentiate
from ..stage.local_stage import LocalStage
from ..stage.split_stages import Stage, Staged

# Layer of the model -> policy.
Choice = dict[str, str]


def again_by_layer(local: LocalStage, plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Seconds in which the backward runs nodes of the forward once more, by the stage's
    own names of its layers; without gathers of parameters, which run anyway."""
    forward = {v.name for node in local.stage.forward for v in node.results}
    device = cluster.device.running(plan.tf32, plan.backend)
    sources = (*local.params, *local.buffers, *local.stage.constants)
    gathered = find_gathered(local.backward, {v.name for v in sources})
    seconds_of: dict[str, float] = {}
    for node in local.backward:
        for v in node.results:
            # Gradients have other names.
            if v.name in forward and v.name not in gathered:
                part = compute_part([node], device)
                took, _ = part_seconds(part, FORWARD, plan.mesh, cluster)
                layer = node.location.layer
                seconds_of[layer] = seconds_of.get(layer, 0.0) + took
                break
    return seconds_of


def choose_recompute(staged: Staged, cluster: Cluster) -> Staged:
    """Complete the plan's `recompute_layers`, if it leaves them to us.

    Raises: OutOfMemory, if it does not fit even with all layers computed again;
    ScheduleError, the same where the schedule is to be made.
    """
    plan = staged.plan
    layers = {layer for stage in staged.stages for layer in stage.layers.values()}
    if plan.recompute != AUTO or layers <= set(plan.recompute_layers):
        return staged
    search = _Search(staged, cluster)
    solved: list[tuple[float, Choice]] = []
    problems: list[AutoparError] = []
    for schedule in search.schedules(problems):
        try:
            solved.append(search.solve(schedule))
        except OutOfMemory as error:
            problems.append(error)
    if not solved:
        raise problems[-1]
    _, choice = min(solved, key=lambda option: option[0])
    complete = {**choice, **plan.recompute_layers}
    return replace(staged, plan=replace(plan, recompute_layers=complete))


class _Search:
    """Tries policies: each stage is differentiated once under each set of them."""

    def __init__(self, staged: Staged, cluster: Cluster) -> None:
        self.cluster = cluster
        self.stages, self.plan = staged.stages, staged.plan
        self.known: dict[object, LocalStage] = {}

    def local(self, stage: Stage, choice: Mapping[str, str]) -> LocalStage:
        """A stage on its first rank; what the plan fixes goes before the choice."""
        plan = self.plan
        fixed = {**choice, **plan.recompute_layers}
        policies = {own: fixed[layer] for own, layer in stage.layers.items()}
        key = (stage.text(), *policies.items())
        if key not in self.known:
            sizes = plan.sizes
            first = dict.fromkeys((*sizes, *(axis for axis, _ in plan.mesh.axes)), 0)
            made = (plan.zero, plan.splits_backward, plan.scales_loss)
            self.known[key] = differentiate(stage, sizes, first, policies, *made)
        return replace(self.known[key], stage=stage)

    def uniform(self, stage: Stage, policy: str) -> LocalStage:
        return self.local(stage, dict.fromkeys(stage.layers.values(), policy))

    def accounts(self, locals_: Sequence[LocalStage]) -> list[Account]:
        return stage_accounts(locals_, self.plan, self.cluster)

    def timed(self, accounts: Sequence[Account]) -> list[StageSeconds]:
        return [stage_seconds(a, self.plan.mesh, self.cluster) for a in accounts]

    def fixed_memory(self, schedule: Schedule) -> list[RankMemory]:
        """What stays on each rank, whatever is computed again."""
        locals_ = [self.uniform(stage, RECOMPUTE[0]) for stage in self.stages]
        placement = schedule.stage_to_rank
        counted = count_once(self.accounts(locals_), locals_, placement)
        ranks = by_rank(counted, placement)
        return [RankMemory.of(rank_memory(own)) for own in ranks]

    def schedules(self, problems: list[AutoparError]) -> Iterator[Schedule]:
        """The plan's; one that is to be made as it would be if all layers were alike.

        problems: gets what is in the way of those that cannot be.
        """
        if self.plan.schedule != AUTO or self.plan.order:
            yield self.plan.decided_schedule()
            return
        for policy in RECOMPUTE:
            locals_ = [self.uniform(stage, policy) for stage in self.stages]
            accounts = self.accounts(locals_)
            limits = activation_budget(accounts, locals_, self.plan.memory)
            try:
                took = self.timed(accounts)
                seconds = [t.halves for t in took]
                footprints = [t.footprint for t in took]
                yield fit_plan(self.plan, seconds, footprints, limits, 0.0)
            except ScheduleError as error:
                problems.append(error)

    def solve(self, schedule: Schedule) -> tuple[float, Choice]:
        """Seconds of a step and the choice. Raises OutOfMemory."""
        choice: Choice = {}
        for rank, fixed in enumerate(self.fixed_memory(schedule)):
            choice |= self.solve_rank(schedule, rank, fixed)
        locals_ = [self.local(stage, choice) for stage in self.stages]
        seconds = [took.halves for took in self.timed(self.accounts(locals_))]
        return on_paper(schedule, seconds, 0.0).seconds, choice

    def solve_rank(self, schedule: Schedule, rank: int, fixed: RankMemory) -> Choice:
        """The choice for the layers of one rank's stages. fixed: its other memory."""
        placed = zip(self.stages, schedule.stage_to_rank, strict=True)
        own = [stage for stage, there in placed if there == rank]
        layers = [layer for stage in own for layer in stage.layers.values()]
        policies = [each for stage in own for each in self.options(stage, schedule)]
        need = RankMemory()
        for trade in pareto_front(policies):
            picked = [RECOMPUTE[index] for index in trade.picked]
            choice = dict(zip(layers, picked, strict=True))
            peak = self.peak(schedule, rank, own, choice)
            need = replace(fixed, activations=peak)
            if need.total <= self.plan.memory:
                return choice
        raise out_of_memory(rank, need, need.total - self.plan.memory)

    def options(self, stage: Stage, schedule: Schedule) -> list[list[Option]]:
        """Returns what each policy takes, for each layer of a stage, on its rank."""
        actions = schedule.ranks[schedule.stage_to_rank[stage.index]]
        flying = peak_in_flight(a for a in actions if a.stage == stage.index)
        tried = [self.uniform(stage, policy) for policy in RECOMPUTE]
        residuals = [residuals_by_layer(local) for local in tried]
        spent = [again_by_layer(x, self.plan, self.cluster) for x in tried]
        return [
            [
                Option(seconds.get(layer, 0.0), flying * size.get(layer, 0))
                for seconds, size in zip(spent, residuals, strict=True)
            ]
            for layer in stage.layers
        ]

    def peak(
        self, schedule: Schedule, rank: int, own: Sequence[Stage], choice: Choice
    ) -> int:
        """Bytes of a rank's activations at their peak, exactly."""
        locals_ = [self.local(stage, choice) for stage in own]
        footprints = {x.stage.index: footprint(x) for x in locals_}
        return peak_bytes(schedule, rank, footprints)
