"""All ranks of a program in this process: a few steps, and what came out of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from autopar.checkpoints.memory import Memory
from autopar.passes.capture.exported.buffer_updates import after_step
from autopar.passes.program import Program
from autopar.progress import tell
from autopar.proof.errors import (
    NOISE,
    VerificationFailed,
    relative_error,
    root_mean_square,
)
from autopar.proof.update import Update, Updated, update_rank
from autopar.rank_step import RankStep
from autopar.runtime.comm.comm import Comm
from autopar.runtime.comm.routing_replay import RoutingReplay
from autopar.runtime.comm.virtual import RankError, run_virtual
from autopar.runtime.execute.code_cache import CodeCache
from autopar.runtime.execute.executor import Executor
from autopar.runtime.parameters.gradient_norm import gradient_norm
from autopar.runtime.parameters.shards import is_owner, put_shard, take_shard

NONE: Mapping[str, Tensor] = MappingProxyType({})
AGREE = 1e-6  # relative, of gradients that ranks should have alike


@dataclass(frozen=True)
class StepInputs:
    """weights: whole, by name. batch: whole. replay: what routers are told to choose.
    update: what follows the gradients, if that is run too. masks: whether the step has
    dropout, if the program has."""

    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    replay: RoutingReplay | None = None
    update: Update | None = None
    masks: bool = True


@dataclass(frozen=True)
class StepResult:
    """loss: of all samples. gradients: whole, by name. norm: of all of them, as ranks
    compute it to clip them. evaluated: the loss without dropout, where asked for.
    updated: of each rank what became of an update, where asked for. margin: by how much
    routers preferred others than they were told (`RoutingReplay`). outputs: what the
    model returns beside the loss, of all samples."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    norm: float
    evaluated: Tensor | None = None
    updated: tuple[Updated, ...] = ()
    margin: float | None = None
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class _OfRank:
    loss: Tensor
    shards: Mapping[str, Tensor]
    norm: float
    outputs: Mapping[str, Tensor]
    evaluated: Tensor | None = None
    updated: Updated | None = None


def run_steps(
    program: Program,
    buffers: Mapping[str, Tensor],
    steps: Sequence[StepInputs],
    seed: int = 0,
    evaluate: bool = False,
    compiled: CodeCache | None = None,
) -> list[StepResult]:
    """Runs steps of one executor on each rank, with weights of each step's own.

    What a step leaves behind must not show in the next: gradients, residuals, what was
    computed ahead of the first. evaluate: afterwards, without dropout, each batch too.
    compiled: see `Executor`.
    Raises VerificationFailed when ranks that should agree do not; CommError.
    """
    tell(f"running {program.mesh.size} ranks in this process")
    shared, memory = Watch(), Memory()
    for inputs in steps:
        shared.add("batch field", inputs.batch)
    shared.add("literal", program.literals)

    def body(comm: Comm) -> list[_OfRank]:
        step = _start(program, comm, steps[0].weights, buffers, seed, compiled)
        return _run_rank(step, program, steps, memory, evaluate)

    try:
        by_rank = run_virtual(program.mesh, program.plan.microbatches, body)
    except RankError as error:
        if isinstance(error.__cause__, VerificationFailed):
            raise error.__cause__ from None
        raise
    shared.check()
    check_owners(program)
    joined = [_join(program, ranks) for ranks in zip(*by_rank, strict=True)]
    told = [inputs.replay for inputs in steps]
    return [
        replace(one, margin=c.margin) if c is not None and c.differing else one
        for one, c in zip(joined, told, strict=True)
    ]


def _run_rank(
    step: RankStep,
    program: Program,
    steps: Sequence[StepInputs],
    memory: Memory,
    evaluate: bool,
) -> list[_OfRank]:
    """Runs the steps on one rank. memory: checkpoints that all ranks write."""
    comm = step.comm
    held, executor = dict(step.named_parameters()), step.executor
    buffers = executor.buffers
    before = {name: buffers[name].clone() for name in program.updates}
    others = {n: x for n, x in buffers.items() if n not in before}
    own = Watch("buffer", others)
    results = []
    for number, inputs in enumerate(steps):
        _set_weights(step, inputs.weights)
        comm.state.replay, executor.state.masks = inputs.replay, inputs.masks
        loss = step(**_batch(program, inputs))
        scale = executor.loss_scale
        while scale and scale.good == 0 and scale.scale > 1.0:
            executor.steps = number  # once more, with the same dropout masks
            loss = step(**_batch(program, inputs))
        grads = {n: p.grad for n, p in held.items() if p.grad is not None}
        shards = {n: g.as_subclass(Tensor).clone() for n, g in grads.items()}
        norm = gradient_norm(program, comm, shards).item()
        names = [n for n in program.outputs if n not in program.sums]
        outputs = executor.outputs.wholes(names)
        outputs |= {after_step(name): buffers[name].clone() for name in before}
        _put_back(buffers, before)
        results.append(_OfRank(loss, shards, norm, outputs))
        own.check()
        if inputs.update is not None:
            results[-1].updated = update_rank(step, inputs.update, memory)
            own = Watch("buffer", others)
        for p in held.values():
            p.grad = None
    for inputs, one in zip(steps, results, strict=True) if evaluate else ():
        _set_weights(step, inputs.weights)
        told = inputs.replay
        comm.state.replay = None if told is None else RoutingReplay(told.told)
        one.evaluated = step.evaluate(**_batch(program, inputs))
        _put_back(buffers, before)
    own.check()
    return results


@torch.no_grad()
def _put_back(buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Gives buffers that a step has written to what they had. What else it leaves
    behind stays, and must not show in the next one."""
    for name, x in before.items():
        buffers[name].copy_(x)


class Watch:
    """Notices that tensors were written into."""

    def __init__(self, kind: str = "", tensors: Mapping[str, Tensor] = NONE) -> None:
        self._seen: list[tuple[str, str, Tensor, int]] = []
        self.add(kind, tensors)

    def add(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self._seen += [(kind, name, x, x._version) for name, x in tensors.items()]

    def check(self) -> None:
        """Raises VerificationFailed."""
        for kind, name, x, version in self._seen:
            if x._version != version:
                raise VerificationFailed(
                    f"a step writes into the {kind} '{name}', which is not its own"
                )


def _start(
    program: Program,
    comm: Comm,
    wholes: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    seed: int,
    compiled: CodeCache | None,
) -> RankStep:
    """The step of a rank, with its own copy of everything."""
    held = local_parameters(program, comm, wholes)
    own = {name: x.clone() for name, x in buffers.items()}
    apart = {n: x for n, x in wholes.items() if n not in program.sources}
    unused = {n: x.detach().clone() for n, x in {**apart, **own}.items()}
    step = RankStep(comm.device)
    names = [*program.sources, *program.aliases, *unused]
    executor = Executor(program, comm, held, own, seed, compiled)
    step.start(executor, names, unused)
    return step


def _batch(program: Program, step: StepInputs) -> dict[str, Tensor]:
    """The fields of the batch that the program reads."""
    return {name: step.batch[name] for name in program.inputs}


def local_parameters(
    program: Program, comm: Comm, wholes: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """The rank's shards of the parameters that its stages hold."""
    return {
        name: nn.Parameter(
            _own(program, comm, name, wholes), requires_grad=spec.trainable
        )
        for name, spec in program.parameters.items()
        if program.holds(name, comm.rank)
    }


def _own(
    program: Program, comm: Comm, name: str, wholes: Mapping[str, Tensor]
) -> Tensor:
    """The rank's shard of a parameter."""
    spec = program.parameters[name]
    whole = wholes[spec.part.source].detach()
    return take_shard(whole, spec, program.mesh, comm.coords)


@torch.no_grad()
def _set_weights(step: RankStep, wholes: Mapping[str, Tensor]) -> None:
    """Writes into the rank's shards, as an optimizer does, and into whole tensors."""
    for name, p in step.named_parameters():
        p.copy_(_own(step.program, step.comm, name, wholes))
    for name, x in step.unused.items():
        if name in wholes:
            x.copy_(wholes[name])


# --- what ranks found, joined -------------------------------------------------------


def _join(program: Program, ranks: Sequence[_OfRank]) -> StepResult:
    """Joins the results that ranks have of one step."""
    _agree("the loss", [one.loss.item() for one in ranks])
    _agree("the norm of gradients", [one.norm for one in ranks])
    first = ranks[0]
    for name, x in first.outputs.items():
        if not all(torch.equal(x, one.outputs[name]) for one in ranks):
            raise VerificationFailed(f"ranks have different values of '{name}'")
    if first.evaluated is not None:
        losses = [one.evaluated.item() for one in ranks if one.evaluated is not None]
        _agree("the loss without dropout", losses)
    updated = tuple(one.updated for one in ranks if one.updated is not None)
    _agree("the norm that gradients are clipped by", [one.norm for one in updated])
    noise = NOISE * root_mean_square(g for one in ranks for g in one.shards.values())
    whole: dict[str, Tensor] = {}
    for name, spec in program.parameters.items():
        if spec.trainable and spec.stages:
            shards = [one.shards.get(name) for one in ranks]
            source = spec.part.source
            whole[source] = assemble(program, name, shards, noise, whole.get(source))
    return StepResult(
        first.loss, whole, first.norm, first.evaluated, updated, None, first.outputs
    )


def _agree(quantity: str, values: Sequence[float]) -> None:
    if len(set(values)) > 1 and not all(x != x for x in values):
        raise VerificationFailed(
            f"ranks do not agree on {quantity}: {sorted(set(values))}"
        )


def check_owners(program: Program) -> None:
    """Checks that each element of a parameter has one owner: it is counted once in
    norms, and saved once. Raises VerificationFailed."""
    mesh = program.mesh
    for source, names in program.sources.items():
        shape = program.parameters[names[0]].part.shape
        count = torch.zeros(shape, dtype=torch.int8)
        for name in names:
            spec = program.parameters[name]
            for rank in range(mesh.size):
                coords = mesh.coords(rank)
                if program.holds(name, rank) and is_owner(program, coords, name):
                    mine = take_shard(count, spec, mesh, coords)
                    put_shard(count, mine + 1, spec, mesh, coords)
        if not bool((count == 1).all()):
            raise VerificationFailed(
                f"some of '{source}' has no rank that answers for it, or several"
            )


def assemble(
    program: Program,
    name: str,
    shards: Sequence[Tensor | None],
    noise: float,
    whole: Tensor | None = None,
) -> Tensor:
    """The whole tensor from the shards of all ranks; replicas must agree, as far as
    elements are above the noise. whole: what other parts of it were put into."""
    spec, mesh = program.parameters[name], program.mesh
    first = next((s for s in shards if s is not None), None)
    if first is None:
        raise VerificationFailed(f"no rank has a gradient of '{name}'")
    if whole is None:
        whole = torch.full(spec.part.shape, float("nan"), dtype=first.dtype)
    for rank, shard in enumerate(shards):
        if shard is not None and is_owner(program, mesh.coords(rank), name):
            put_shard(whole, shard, spec, mesh, mesh.coords(rank))
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        mine = take_shard(whole, spec, mesh, mesh.coords(rank))
        if torch.equal(shard, mine):
            continue
        if not relative_error(shard, mine, noise * mine.numel() ** 0.5) <= AGREE:
            raise VerificationFailed(
                f"rank {rank} has another gradient of '{name}' than its replicas"
            )
    return whole
