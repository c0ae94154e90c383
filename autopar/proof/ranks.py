"""All ranks of a program in this process: a few steps, and what came out of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.choices import Choices
from autopar.runtime.comm import Comm
from autopar.runtime.executor import Executor
from autopar.runtime.gradient_norm import gradient_norm
from autopar.runtime.shards import owns, put_shard, take_shard
from autopar.runtime.virtual import run_virtual
from passes.errors import AutoparError
from passes.program import Program

# A gradient this small, as a share of the model's typical one, is compared as if it
# were this large: a key's bias has none at all, as softmax does not see what it adds,
# and what is computed for it is rounding.
NOISE = 0.1
ANOTHER_MESH = "report this model and mesh; another mesh may be right meanwhile"
AGREE = 1e-6  # relative, of gradients that ranks should have alike


class VerificationFailed(AutoparError):
    """The program does not compute what the model computes."""


@dataclass(frozen=True)
class GivenStep:
    """weights, buffers: whole, by name. batch: whole. choices: what routers are told
    to choose."""

    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    choices: Choices | None = None


@dataclass(frozen=True)
class FoundStep:
    """loss: of all samples. gradients: whole, by name. norm: of all of them, as ranks
    compute it to clip them. evaluated: the loss without dropout, where asked for."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    norm: float
    evaluated: Tensor | None = None


@dataclass
class _OfRank:
    loss: Tensor
    shards: Mapping[str, Tensor]
    norm: float
    evaluated: Tensor | None = None


def run_steps(
    program: Program,
    buffers: Mapping[str, Tensor],
    steps: Sequence[GivenStep],
    seed: int = 0,
    evaluate: bool = False,
) -> list[FoundStep]:
    """Runs steps of one executor on each rank, with weights of each step's own.

    What a step leaves behind must not show in the next: gradients, residuals, what was
    computed ahead of the first. evaluate: afterwards, without dropout, each batch too.
    Raises VerificationFailed when ranks that should agree do not; CommError.
    """

    def body(comm: Comm) -> list[_OfRank]:
        held = local_parameters(program, comm, steps[0].weights)
        executor = Executor(program, comm, held, buffers, seed)
        found = []
        for number, given in enumerate(steps):
            _set_weights(program, comm, held, given.weights)
            comm.choices = given.choices
            loss = executor.step(given.batch)
            scale = executor.loss_scale
            while scale and scale.good == 0 and scale.scale > 1.0:
                executor.steps = number  # once more, with the same dropout masks
                loss = executor.step(given.batch)
            grads = {n: p.grad for n, p in held.items() if p.grad is not None}
            norm = gradient_norm(program, comm, grads).item()
            shards = {n: g.clone() for n, g in grads.items()}
            found.append(_OfRank(loss, shards, norm))
            for p in held.values():
                p.grad = None
        for given, one in zip(steps, found, strict=True) if evaluate else ():
            _set_weights(program, comm, held, given.weights)
            comm.choices = given.choices
            one.evaluated = executor.evaluate(given.batch)
        return found

    lasting = {"buffer": buffers, "literal": program.literals}
    shared = [("batch field", name, x) for s in steps for name, x in s.batch.items()]
    shared += [(w, name, x) for w, held in lasting.items() for name, x in held.items()]
    before = [x._version for _, _, x in shared]
    by_rank = run_virtual(program.mesh, program.plan.microbatches, body)
    for (what, name, x), version in zip(shared, before, strict=True):
        if x._version != version:
            raise VerificationFailed(
                f"a step writes into the {what} '{name}', which is not its own",
                fix=ANOTHER_MESH,
            )
    check_owners(program)
    return [_join(program, ranks) for ranks in zip(*by_rank, strict=True)]


def run_all_ranks(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Any],
    seed: int = 0,
    choices: Choices | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step on the virtual mesh: the loss, and whole gradients by name.

    choices: what routers are told to choose.
    Raises VerificationFailed when ranks that should agree do not.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)}
    step = GivenStep(dict(model.named_parameters()), tensors, choices)
    (found,) = run_steps(program, dict(model.named_buffers()), [step], seed)
    return found.loss, dict(found.gradients)


def local_parameters(
    program: Program, comm: Comm, wholes: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """The rank's shards of the parameters that its stages hold."""
    mine = program.stages_of(comm.rank)
    return {
        name: nn.Parameter(
            _own(program, comm, name, wholes), requires_grad=spec.trainable
        )
        for name, spec in program.parameters.items()
        if set(spec.stages) & set(mine)
    }


def _own(
    program: Program, comm: Comm, name: str, wholes: Mapping[str, Tensor]
) -> Tensor:
    """The rank's shard of a parameter."""
    spec = program.parameters[name]
    whole = wholes[spec.part.source].detach()
    return take_shard(whole, spec, program.mesh, comm.coords)


@torch.no_grad()
def _set_weights(
    program: Program,
    comm: Comm,
    held: Mapping[str, nn.Parameter],
    wholes: Mapping[str, Tensor],
) -> None:
    """Writes into the rank's shards, as an optimizer does."""
    for name, p in held.items():
        p.copy_(_own(program, comm, name, wholes))


# --- what ranks found, joined -------------------------------------------------------


def _join(program: Program, ranks: Sequence[_OfRank]) -> FoundStep:
    """The whole, from what each rank has of one step."""
    _agree("the loss", [one.loss.item() for one in ranks])
    _agree("the norm of gradients", [one.norm for one in ranks])
    first = ranks[0]
    if first.evaluated is not None:
        losses = [one.evaluated.item() for one in ranks if one.evaluated is not None]
        _agree("the loss without dropout", losses)
    noise = NOISE * root_mean_square(g for one in ranks for g in one.shards.values())
    whole: dict[str, Tensor] = {}
    for name, spec in program.parameters.items():
        if spec.trainable and spec.stages:
            shards = [one.shards.get(name) for one in ranks]
            source = spec.part.source
            whole[source] = assemble(program, name, shards, noise, whole.get(source))
    return FoundStep(first.loss, whole, first.norm, first.evaluated)


def _agree(what: str, values: Sequence[float]) -> None:
    if len(set(values)) != 1 and not all(x != x for x in values):
        raise VerificationFailed(
            f"ranks do not agree on {what}: {sorted(set(values))}",
            fix=ANOTHER_MESH,
        )


def check_owners(program: Program) -> None:
    """Each element of a parameter has one rank that answers for it: it is counted once
    in norms, and saved once. Raises VerificationFailed."""
    mesh = program.mesh
    for source, names in program.sources.items():
        shape = program.parameters[names[0]].part.shape
        count = torch.zeros(shape, dtype=torch.int8)
        for name in names:
            spec = program.parameters[name]
            held_by = tuple(program.schedule.stage_to_rank[s] for s in spec.stages)
            for rank in range(mesh.size):
                coords = mesh.coords(rank)
                if owns(spec, mesh, coords, held_by):
                    mine = take_shard(count, spec, mesh, coords)
                    put_shard(count, mine + 1, spec, mesh, coords)
        if not bool((count == 1).all()):
            raise VerificationFailed(
                f"some of '{source}' has no rank that answers for it, or several",
                fix=ANOTHER_MESH,
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
        raise VerificationFailed(
            f"no rank has a gradient of '{name}'",
            fix=ANOTHER_MESH,
        )
    if whole is None:
        whole = torch.full(spec.part.shape, float("nan"), dtype=first.dtype)
    held_by = tuple(program.schedule.stage_to_rank[s] for s in spec.stages)
    for rank, shard in enumerate(shards):
        if shard is not None and owns(spec, mesh, mesh.coords(rank), held_by):
            put_shard(whole, shard, spec, mesh, mesh.coords(rank))
    for rank, shard in enumerate(shards):
        if shard is None:
            continue
        mine = take_shard(whole, spec, mesh, mesh.coords(rank))
        if torch.equal(shard, mine):
            continue
        if not relative_error(shard, mine, noise * mine.numel() ** 0.5) <= AGREE:
            raise VerificationFailed(
                f"rank {rank} has another gradient of '{name}' than its replicas",
                fix=ANOTHER_MESH,
            )
    return whole


# --- errors -------------------------------------------------------------------------


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Over the elements of all tensors."""
    found = [(x.double().square().sum().item(), x.numel()) for x in tensors]
    count = sum(n for _, n in found)
    return (sum(squares for squares, _ in found) / max(count, 1)) ** 0.5


def relative_error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """|got - want| / max(|want|, least), the norms in double precision."""
    norm = torch.linalg.vector_norm
    scale = max(norm(want.double()).item(), least)
    difference = norm(got.double() - want.double()).item()
    return difference / scale if scale else difference
