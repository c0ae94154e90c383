"""A rank's part of a model and its optimizer, for checkpoints: pieces to write, and
memory to read into, by the keys that they are saved under.

A parameter of the program may be part of one of the model's: the parts are then pieces
of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.checkpoints.dcp import Key, Piece, Source, State, pack, read
from autopar.checkpoints.stored import Row, stored_by_name
from autopar.runtime.parameters.shards import Box, boxes
from autopar.runtime.parameters.whole_updates import is_cut, refuse_alike

if TYPE_CHECKING:
    from autopar.held_state import HeldState

STATE: Key = ("optimizer", "state")
STACKED: Key = ("optimizer", "stacked")


def model_pieces(step: HeldState) -> State:
    """Returns this rank's shards of parameters and their averages, by the model's
    names; unused parameters are whole, and rank 0 writes them."""
    state: State = {}
    for name, p in step.named_parameters():
        piece = _piece(step, name, p.detach(), step.owns(name))
        _add(state, _saved_key(step, ("model", name)), piece)
    for name, average in step.averages.items():
        piece = _piece(step, name, average, step.owns(name))
        _add(state, _saved_key(step, ("ema", name)), piece)
    for name, value in step.unused.items():
        state["model", name] = [Piece.whole(value, step.comm.rank == 0)]
    return state


def _piece(step: HeldState, name: str, shard: Tensor, written: bool) -> Piece:
    """A tensor that is split as the parameter `name` is."""
    spec = step.program.parameters[name]
    own = boxes(spec, step.program.mesh, step.comm.coords)
    return Piece(spec.part.shape, own, shard, written)


def _saved_key(step: HeldState, key: Key) -> Key:
    """The key with the name of the model's parameter, where it names a part of it."""
    at = 1 if key[0] in ("model", "ema") else 2
    spec = step.program.parameters.get(str(key[at]))
    return key if spec is None else (*key[:at], spec.part.source, *key[at + 1 :])


def _add(state: State, key: Key, piece: Piece) -> None:
    held = state.setdefault(key, [])
    assert isinstance(held, list), f"{key} is a tensor"
    held.append(piece)


def optimizer_pieces(step: HeldState, optimizer: Optimizer) -> State:
    """State of this rank's parameters; numbers, alike on all ranks, by their first."""
    state: State = {}
    held, stored = dict(step.named_parameters()), stored_by_name(step, optimizer)
    for name, entries in stored.items():
        p, owned = held[name], step.owns(name)
        spec = step.program.parameters[name]
        first = owned and not any(step.comm.coords[a] for a in spec.cut_axes)
        first = first and not any(spec.part.start)
        for entry, value in entries.items():
            kind, value = (
                (STACKED, value.value) if isinstance(value, Row) else (STATE, value)
            )
            key = _saved_key(step, (*kind, name, entry))
            if kind == STATE and isinstance(value, Tensor) and value.shape == p.shape:
                _add(state, key, _piece(step, name, value, owned))
            elif not first:
                continue
            elif isinstance(value, Tensor):
                state[key] = [Piece.whole(value)]
            else:
                state[key] = pack(key, value)
    return state


Targets = dict[Key, Piece | bytes]
"""By key, with this rank's own names of parameters: memory to read into, on the CPU;
nothing for what is no tensor."""


def model_targets(step: HeldState, in_place: bool = False) -> Targets:
    """in_place: what lies on the CPU is read into itself, and lost where that fails."""
    targets: Targets = {}
    for name, p in step.named_parameters():
        own = in_place and p.device.type == "cpu"
        shard = p.detach() if own else torch.empty_like(p, device="cpu")
        targets["model", name] = _piece(step, name, shard, False)
    for name, value in step.unused.items():
        targets["model", name] = Piece.whole(torch.empty_like(value))
    return targets


def ema_targets(step: HeldState) -> Targets:
    """Returns empty tensors on the CPU to load averages of weights into, by
    parameter."""
    return {
        ("ema", name): _piece(step, name, torch.empty_like(x, device="cpu"), False)
        for name, x in step.averages.items()
    }


def optimizer_targets(step: HeldState, held: Mapping[Key, Any]) -> Targets:
    """The tensors to load the saved optimizer state of this rank's parameters into."""
    targets: Targets = {}
    by_source: dict[str, list[tuple[Key, str, Any]]] = {}
    for key, value in held.items():
        if (kind := key[:2]) in (STATE, STACKED):
            by_source.setdefault(str(key[2]), []).append((kind, str(key[3]), value))
    for name, p in step.named_parameters():
        part = step.program.parameters[name].part
        for kind, entry, value in by_source.get(part.source, ()):
            own: Key = (*kind, name, entry)
            size = getattr(value, "size", None)
            if size is None:
                targets[own] = b""
            elif kind == STATE and tuple(size) == part.shape:
                shard = torch.empty(p.shape, dtype=value.properties.dtype)
                targets[own] = _piece(step, name, shard, False)
            else:
                like_part = kind == STATE and tuple(size) == tuple(p.shape)
                if like_part and is_cut(step.program, name):
                    refuse_alike(entry, name, p)
                whole = torch.empty(size, dtype=value.properties.dtype)
                targets[own] = Piece.whole(whole)
    return targets


def read_targets(step: HeldState, store: Source, wanted: Targets) -> dict[Key, Any]:
    """Fill the memory; returns all values. What parts of a parameter have in common is
    read once, for each of them a copy."""
    state: State = {}
    for key, value in wanted.items():
        saved = _saved_key(step, key)
        if isinstance(value, bytes):
            state[saved] = value
        elif saved not in state or not _is_whole(value):
            _add(state, saved, value)
    plain = read(store, state, step.comm)
    values: dict[Key, Any] = {}
    for key, value in wanted.items():
        saved = _saved_key(step, key)
        held = state[saved]
        if isinstance(value, bytes) or isinstance(held, bytes):
            values[key] = plain[saved]
        else:
            own = any(value is piece for piece in held)
            values[key] = value.values if own else held[0].values.clone()
    return values


def _is_whole(piece: Piece) -> bool:
    return piece.boxes == (Box.all_of(piece.shape),)
