"""What follows gradients: they are clipped, weights updated, given out, saved, loaded.

All ranks take it by the code that trains (`autopar.rank_step`), and one device by
torch's own. Adam's first update is a gradient's sign, which tells neither its size nor
noise from 0: so its epsilon is here as large as gradients are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.checkpoints.checkpoint import load_from_memory, save_in_memory
from autopar.checkpoints.dcp import Piece, State, read_alone
from autopar.checkpoints.memory import Memory
from autopar.passes.digest import digest
from autopar.proof.errors import (
    NOISE,
    VerificationFailed,
    as_reals,
    relative_error,
    root_mean_square,
    worse,
)
from autopar.rank_step import RankStep

RATE, DECAY = 0.1, 0.1
CLIPPED = 0.5  # to this share of their norm
# What AdamW stores, made as far apart as gradients are.
MOMENTS = {"exp_avg": as_reals, "exp_avg_sq": lambda x: as_reals(x).sqrt()}


@dataclass(frozen=True)
class Update:
    """max_norm: what gradients are clipped to. eps: of AdamW. norm: of the model's
    gradients before. weights: the model's after, whole, by name. moments: what AdamW
    stores, by entry, for those that are trained."""

    max_norm: float
    eps: float
    norm: float
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Updated:
    """errors: by name, of what the state dict has after an update. norm: as clipping
    gave it. saved: errors of what a checkpoint holds, as one rank reads it. restored:
    how many tensors came back from it."""

    errors: Mapping[str, float]
    norm: float
    restored: int
    saved: Mapping[str, float] = field(default_factory=dict)


def update_whole(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> Update:
    """The update on one device. gradients: of those weights that are trained."""
    held = {name: nn.Parameter(w.clone(), False) for name, w in weights.items()}
    for name, gradient in gradients.items():
        held[name].requires_grad_().grad = gradient.clone()
    # Where nothing moves, as a contrast of one sample with no other, nothing must.
    typical = root_mean_square(gradients.values()) or 1.0
    count = sum(g.numel() for g in gradients.values())
    max_norm = CLIPPED * typical * count**0.5
    norm = nn.utils.clip_grad_norm_(held.values(), max_norm)
    optimizer = _optimizer(held.values(), typical)
    optimizer.step()
    after = {name: p.detach() for name, p in held.items()}
    stored = {name: optimizer.state[held[name]] for name in gradients}
    moments = {
        entry: {name: own[entry] for name, own in stored.items()} for entry in MOMENTS
    }
    return Update(max_norm, typical, norm.item(), after, moments)


def update_rank(step: RankStep, update: Update, memory: Memory) -> Updated:
    """The same on a rank that has computed gradients, and a checkpoint.

    All ranks must call it. Raises VerificationFailed where what is saved does not come
    back bitwise, the optimizer's state included; AutoparError.
    """
    norm = step.clip_grad_norm_(update.max_norm)
    optimizer = _optimizer(step.parameters(), update.eps)
    optimizer.step()
    state = step.state_dict()
    errors = {
        name: relative_error(state[name], want) if name in state else 1.0
        for name, want in update.weights.items()
    }
    restored = _save_and_load(step, optimizer, update.eps, memory)
    saved = _saved_errors(step, update, memory) if step.comm.rank == 0 else {}
    return Updated(errors, norm.item(), restored, saved)


def _saved_errors(step: RankStep, update: Update, memory: Memory) -> dict[str, float]:
    """The errors of what is saved and read whole, by name. A rank that writes where
    another should, and reads there too, gets back all that it had."""
    aliases, errors = step.program.aliases, dict.fromkeys(update.weights, 0.0)
    for entry, wanted in {"": update.weights, **update.moments}.items():
        linear = MOMENTS.get(entry, as_reals)
        pieces = {name: Piece.whole(torch.zeros_like(x)) for name, x in wanted.items()}
        state: State = {}
        for name, piece in pieces.items():
            own = aliases.get(name, name)
            of_state = "optimizer", "state", own, entry
            state[of_state if entry else ("model", own)] = [piece]
        read_alone(memory, state)
        noise = NOISE * root_mean_square(map(linear, wanted.values())) if entry else 0.0
        for name, want in wanted.items():
            got, least = linear(pieces[name].values), noise * want.numel() ** 0.5
            errors[name] = worse(errors[name], relative_error(got, linear(want), least))
    return errors


def _save_and_load(
    step: RankStep, optimizer: torch.optim.Optimizer, eps: float, memory: Memory
) -> int:
    """How many tensors come back bitwise, after all were overwritten."""
    save_in_memory(memory, step, optimizer)
    held, training = _held(step, optimizer), step.training_state()
    saved = {name: x.clone() for name, x in held.items()}
    with torch.no_grad():
        for x in held.values():
            x.zero_()
    step.load_training_state({**training, "steps": 0})
    fresh = _optimizer(step.parameters(), eps)
    load_from_memory(memory, step, fresh)
    loaded = _held(step, fresh)
    lost = [
        name
        for name in {**saved, **loaded}
        if name not in saved
        or name not in loaded
        or not _same(saved[name], loaded[name])
    ]
    if step.training_state() != training:
        lost.append("the count of steps")
    if lost:
        raise VerificationFailed(
            f"rank {step.comm.rank} does not get '{lost[0]}' back from a checkpoint as "
            "it was"
        )
    return len(saved)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit; nan equals nan."""
    return torch.equal(a, b) or (
        (a.shape, a.dtype) == (b.shape, b.dtype) and digest(a) == digest(b)
    )


def _optimizer(parameters: Iterable[nn.Parameter], eps: float) -> torch.optim.AdamW:
    """Weights decay, biases and norms do not."""
    held = list(parameters)
    groups = [
        {"params": [p for p in held if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, eps=eps)


def _held(step: RankStep, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors this rank continues from: parameters, optimizer state, and whole
    buffers."""
    held = {**step.unused}
    held |= {f"buffer {name}": x for name, x in step.executor.buffers.items()}
    for name, p in step.named_parameters():
        held[name] = p.detach()
        for entry, x in optimizer.state.get(p, {}).items():
            held[f"{name}.{entry}"] = x
    return held
