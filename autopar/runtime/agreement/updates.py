"""Looks at optimizers when they update a step's parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autopar.passes.digest import digest_of_text
from autopar.passes.errors import AutoparError
from autopar.passes.mesh import PIPELINE
from autopar.passes.program import Program
from autopar.runtime.agreement.moved_parts import watch_collectives
from autopar.runtime.agreement.roll_call import Facts
from autopar.runtime.agreement.watched_functions import watch_functions
from autopar.runtime.parameters.by_element import Reach, Undecided, exchanges, reach_of
from autopar.runtime.parameters.changed import Copied, Known
from autopar.runtime.parameters.shard_gradient import ShardGradient, as_part, no_view
from autopar.runtime.parameters.update_hooks import watch_updates
from autopar.runtime.parameters.whole_updates import WholeUpdates, is_cut

# In a group of an optimizer's state dict: of which part of the parameters it is.
PART = "autopar_part"

FOR_ONE_DEVICE = (
    "use its form for one device: gradients are summed over ranks before; or a mesh "
    "that leaves parameters whole: dp, without zero"
)


class OptimizerError(AutoparError):
    """An optimizer would not compute on shards what it computes on the model."""


class Updates:
    """Watches every `optimizer.step()` of this process for as long as it lives.

    parameters: of a step, on this rank. grads: what `.grad` is set to. originals: the
    model's, from which the step has copies. coords: of this rank.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, nn.Parameter],
        grads: Mapping[str, Tensor],
        originals: Mapping[str, Tensor],
        coords: Mapping[str, int],
    ) -> None:
        self.parameters, self._several = parameters, program.mesh.size > 1
        specs = program.parameters.values()
        split = {a for spec in specs for a in spec.split_axes} | {PIPELINE}
        parts = ((a, n) for a, n in program.mesh.axes if n > 1 and a in split)
        self._part = ", ".join(f"{coords[a]} of {a}={n}" for a, n in parts)
        self._specs = program.parameters
        self._cut = {name for name in program.parameters if is_cut(program, name)}
        mesh, rows = program.mesh, (spec.row for spec in specs if spec.row)
        experts = {a for row in rows for axes in row.slots for a in axes}
        # Whether some ranks have parameters that others have not.
        self.apart = mesh.pipeline_ranks > 1 or any(
            mesh.axis_size(axis) > 1 for axis in experts
        )
        self.partial = self.apart or any(
            program.mesh.axis_size(axis) > 1
            for spec in program.parameters.values()
            for axis in spec.split_axes
        )
        # Optimizers that are given whole parameters.
        self.whole: WeakKeyDictionary[Optimizer, WholeUpdates] = WeakKeyDictionary()
        self._names = {id(p): name for name, p in parameters.items()}
        self._plain = dict(grads)
        self._originals = {id(p): (Known.of(p), name) for name, p in originals.items()}
        self.copied = Copied({})
        # How many parameters each group of an optimizer had when it was looked at.
        self._known: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()
        # Of the updates since the last step.
        self._made: list[tuple[str, dict[str, Any] | None]] = []
        self._groups: Facts = {}
        # Of each, a parameter, and its gradient as it was.
        self._used: list[tuple[Tensor, Tensor, int]] = []
        # During an update: a parameter, its plain gradient, and the one that is shown.
        self._aside: list[tuple[Tensor, Tensor, Tensor]] = []
        self._overflowed = False
        # Returns the norm of the gradients of all ranks together.
        self.norm: Callable[[], Tensor | None] = lambda: None
        # Is called with the parameters that an optimizer updates.
        self.on_update: Callable[[list[Tensor]], None] = lambda params: None
        # During an update that is left out: a group, and what was in it.
        self._left_out: list[tuple[dict[str, Any], dict[str, Any]]] = []
        watch_updates(self)
        watch_functions(self)
        watch_collectives(self)

    @property
    def cut_parameters(self) -> Collection[Tensor]:
        """See `moved_parts`."""
        return self.parameters.values() if self.partial else ()

    @property
    def gradients(self) -> Collection[Tensor]:
        """See `moved_parts`."""
        return self._plain.values() if self._several else ()

    def show(self, overflowed: bool = False) -> None:
        """Shows users their gradients after a step, in tensors of their own, as these
        may be given other memory (`p.grad.data = x`). overflowed: there are none."""
        self._overflowed = overflowed
        for name, plain in self._plain.items():
            p = self.parameters[name]
            if p.grad is plain:
                p.grad = as_part(plain) if self.partial else no_view(plain)

    def before(self, optimizer: Optimizer) -> None:
        """Prepares and checks an update. Raises: OptimizerError."""
        self.after()  # what an update that failed has left
        groups = [group["params"] for group in optimizer.param_groups]
        held = tuple(map(len, groups))
        params = [p for group in groups for p in group]
        names = [self._names.get(id(p)) for p in params]
        if params and not any(names):
            holder = f"{type(optimizer).__name__} holds"
            self.check_originals(
                holder,
                params,
                "step.prepare(optimizer), or make it of step.parameters()",
            )
            return
        self._check_state(optimizer)
        if self._known.get(optimizer) != held:
            self._check_reach(optimizer, [n for n in names if n is not None])
            self._known[optimizer] = held
        _check_scaler()
        self.on_update(params)
        self.copied.updated = True
        self._note(optimizer)
        self._used += [
            (p, p.grad, p.grad._version)
            for p, name in zip(params, names, strict=True)
            if name is not None and p.grad is not None
        ][:1]
        for p, name in zip(params, names, strict=True):
            if name is None or type(p.grad) is not ShardGradient:
                continue
            shown = p.grad
            p.grad = no_view(shown.as_subclass(Tensor))
            self._aside.append((p, p.grad, shown))
        if self._overflowed:
            self._leave_out(optimizer)

    def _leave_out(self, optimizer: Optimizer) -> None:
        """Hides parameters whose gradients overflowed, as `GradScaler` calls no update:
        some optimizers take None for zeros, and decay and move weights, and some
        fail."""
        for group in optimizer.param_groups:
            params = group["params"]
            mine = (id(p) in self._names and p.grad is None for p in params)
            if params and all(mine):
                self._left_out.append((group, dict(group)))
                group["params"] = LeftOut(params)

    def after(self) -> None:
        """Shows gradients as before, after an update."""
        for group, options in self._left_out:
            group.clear()
            group.update(options)  # numbers of updates that it counts too
        self._left_out.clear()
        for p, plain, shown in self._aside:
            if p.grad is plain:
                p.grad = shown
        self._aside.clear()

    def left_gradients(self) -> bool:
        """Whether, before a step, gradients are left that an optimizer has used and
        nobody zeroed. True once for an update."""
        used, self._used = self._used, []
        return any(
            p.grad is g and g._version == version and bool(g.as_subclass(Tensor).any())
            for p, g, version in used
        )

    def name_of(self, p: Tensor) -> str | None:
        """The name of a parameter of the model's own; None: it is none of them."""
        known, name = self._originals.get(id(p), (None, ""))
        return name if known is not None and known.tensor() is p else None

    def norm_of_all(self, grads: list[Tensor]) -> Tensor | None:
        """The norm of all ranks' parts, if these are the gradients of all that is
        trained, of which ranks have parts; None: they are not."""
        if not self.partial:
            return None
        held = [p for p in self.parameters.values() if p.grad is not None]
        trained = {id(p.grad) for p in held if p.requires_grad}
        if not trained <= {*map(id, grads)} <= {id(p.grad) for p in held}:
            return None
        return self.norm()

    # --- what is refused -----------------------------------------------------------

    def check_originals(self, whose: str, params: list[Tensor], fix: str) -> None:
        """Whether they are the model's parameters, and nobody computed gradients."""
        grads = (p.grad.as_subclass(Tensor) for p in params if p.grad is not None)
        if any(grad.any() for grad in grads):
            return
        for p in params:
            if name := self.name_of(p):
                raise OptimizerError(
                    f"{whose} the model's '{name}', of which the step has a copy: "
                    "it would change nothing",
                    fix=fix,
                )

    def check_averaged(self, params: list[Tensor]) -> None:
        """Whether they are the model's parameters, as they were before the updates."""
        known = ((p, *self._originals.get(id(p), (None, ""))) for p in params)
        held = [(p, was, name) for p, was, name in known if was and was.tensor() is p]
        if self._known and held and all(k.has_values_of(p) for p, k, _ in held):
            raise OptimizerError(
                "AveragedModel.update_parameters was given the model, of which a step "
                f"has a copy: nobody has trained its '{held[0][2]}' and the others",
                fix="ema = step.start_ema(0.999), and ema.update() after each update; "
                "or average another copy of the model, which is given what is trained "
                "before: plain.load_state_dict(step.state_dict())",
            )

    def _check_state(self, optimizer: Optimizer) -> None:
        """Checks that an optimizer's state is of this rank's parts, which
        `optimizer.state_dict()` records: shapes alone mostly fit another rank's too."""
        if self._part and optimizer not in self._known:
            optimizer.register_state_dict_post_hook(_note_part(self._part))
            self._check_loaded(optimizer)
        for group in optimizer.param_groups:
            part = group.get(PART, self._part)
            if part != self._part:
                kind = type(optimizer).__name__
                raise OptimizerError(
                    f"the state of {kind} was taken on another rank: it is of part "
                    f"{part}, but this rank has {self._part or 'whole parameters'}",
                    fix="let step.save(folder, optimizer) write it, and "
                    "step.load(folder, optimizer) read it, on any mesh",
                )
        for group in optimizer.param_groups:
            group.pop(PART, None)

    def _check_loaded(self, optimizer: Optimizer) -> None:
        """Checks that an optimizer has no state of whole parameters, as one device
        saves it, for this rank's parts of them."""
        for p, stored in optimizer.state.items():
            if (name := self._names.get(id(p))) not in self._cut:
                continue
            whole, kind = self._specs[name].part.shape, type(optimizer).__name__
            for entry, value in stored.items():
                shape = value.shape if isinstance(value, Tensor) else p.shape
                if shape == whole != p.shape:
                    raise OptimizerError(
                        f"{kind}'s '{entry}' of '{name}' is of all of it, "
                        f"{list(whole)}, but this rank has {list(p.shape)}",
                        fix=f"make {kind} of the model's parameters, load the state, "
                        "and then step.prepare(optimizer), which takes this rank's "
                        "parts; step.save and step.load have it for any mesh",
                    )

    def _check_reach(self, optimizer: Optimizer, names: list[str]) -> None:
        cut = [name for name in names if name in self._cut]
        if not cut and not self.partial:
            return
        kind = type(optimizer).__name__
        fix = (
            "use an optimizer that updates each element by itself, as AdamW, or a mesh "
            "that leaves parameters whole: dp, without zero"
        )
        mine = [self.parameters[n] for n in cut or names]
        apart = self.apart or (cut and optimizer not in self.whole)
        moves = False
        try:
            moves = exchanges(optimizer, mine)
            if apart and moves:
                raise OptimizerError(
                    f"{kind} moves tensors between ranks by itself, as if all had the "
                    "same parameters, but they have different ones",
                    fix=FOR_ONE_DEVICE,
                )
            reach = reach_of(optimizer, mine)
        except Undecided as error:
            raise OptimizerError(
                f"it could not be found out whether {kind} updates each element of a "
                f"parameter by itself, and this rank has parts of them: {error}",
                fix=FOR_ONE_DEVICE
                if moves
                else f"{fix}; if {kind} does, say so: autopar.by_element({kind})",
            ) from error
        if reach is Reach.MODEL:
            raise OptimizerError(
                f"{kind} updates {reach.value}, and no rank has all of them", fix=fix
            )
        if reach is Reach.PARAMETER and cut and optimizer not in self.whole:
            part = self._specs[cut[0]].part
            local = list(self.parameters[cut[0]].shape)
            raise OptimizerError(
                f"{kind} updates {reach.value}, but of '{part.source}' "
                f"{list(part.shape)} this rank has {local}",
                fix="let it have whole parameters while it updates them: "
                f"step.gather_for(optimizer); or {fix}",
            )

    # --- what ranks must have alike ------------------------------------------------

    def _note(self, optimizer: Optimizer) -> None:
        """Options of groups in which are experts alone are those of this rank: others
        have other experts, which may be in another number of groups and optimizers."""
        kind, groups = type(optimizer).__name__, dict(self._groups)
        of_all = []
        for group in optimizer.param_groups:
            named = (self._names.get(id(p), "") for p in group["params"])
            if names := [name for name in named if self._is_of_all(name)]:
                names_and_options = {"parameters": digest_of_text(str(names))}
                of_all.append({**names_and_options, **plain(group)})
        before = sum(options is not None for _, options in self._made)
        again = f" in update {before + 1}" if before else ""
        for i, options in enumerate(of_all):
            groups["options", f"{kind}'s group {i}{again}"] = options
        self._made.append((kind, plain(optimizer.defaults) if of_all else None))
        self._groups = groups

    def _is_of_all(self, name: str) -> bool:
        """Whether all ranks of a stage hold a parameter, or part of it: no expert's."""
        spec = self._specs.get(name)
        return spec is None or spec.row is None

    def facts(self) -> tuple[Facts, Facts]:
        """What all ranks must have alike of the updates since the last call, and what
        those of a stage must.

        All: what the optimizers were made with (None: there is nothing to update here;
        of one of experts alone, or of nothing here: it is for this rank to say).
        Of a stage: the options and names of each group, and what is frozen by now.
        """
        made, groups = sorted(self._made, key=str), dict(self._groups)
        self._made, self._groups = [], {}
        trained = sorted(
            n
            for n in self._plain
            if self.parameters[n].requires_grad and self._is_of_all(n)
        )
        groups["trained", ""] = digest_of_text(str(trained))
        return {("optimizers", ""): made if trained else None}, groups


class LeftOut(list[Tensor]):
    """The parameters of a group in an update that is left out: a loop over them finds
    none, and the first tells its device to those that ask it for that."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _note_part(part: str) -> Callable[[Optimizer, dict[str, Any]], None]:
    def note(_: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group[PART] = part

    return note


def _check_scaler() -> None:
    """Raises OptimizerError where a GradScaler updates: it leaves an update out where
    this rank's gradients overflow, and divides them, whoever scaled their loss."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is not GradScaler.step.__code__:
            continue
        scaler: GradScaler = frame.f_locals["self"]
        if scaler.is_enabled():
            raise OptimizerError(
                f"a GradScaler divides gradients by {scaler.get_scale():g} and looks "
                "at this rank's alone, to leave an update out where they overflow",
                fix="make it with GradScaler(enabled=False), or leave it out: "
                'precision="fp16" scales the loss itself, alike on all ranks',
            )


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that can be compared: numbers, text, and tensors as numbers."""
    values = {}
    for key, value in sorted(options.items()):
        if key in ("params", "param_names", PART):
            continue
        if isinstance(value, Tensor):
            value = value.tolist()
        known = isinstance(value, int | float | str | tuple | list | None)
        values[key] = value if known else type(value).__name__
    return values
