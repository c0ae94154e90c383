"""Whether an optimizer updates each element of a parameter by itself.

Ranks hold parts of parameters, and of the model. An optimizer that looks at more than
one element, as Muon at whole matrices or LBFGS at all parameters, would compute
something else of the parts. Which kind one is, is known of most of torch's own, and
tried of all others.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

Kind = TypeVar("Kind", bound=type[Optimizer])

# Long enough for thresholds under which matrices are treated element by element (128 in
# the paper of Adafactor, Shazeer 2018), and not multiples of a power of two.
SHAPES = {1: (518,), 2: (140, 134)}
LARGER = 22  # the extent of a dim of what has three or more
STEPS = 12
LATEST = 100  # what an option may begin after this number of steps is waited for
RATES = 1e-2, 1.0  # the least and the largest that is tried
APART = 1e-3  # of the largest update: more than rounding, less than another formula


class Reach(Enum):
    """How far an element's update depends on others."""

    ELEMENT = "each element by itself"
    PARAMETER = "a parameter as a whole"
    MODEL = "all parameters together"


KNOWN: dict[type[Optimizer], Reach] = {
    torch.optim.LBFGS: Reach.MODEL,
    torch.optim.Adafactor: Reach.PARAMETER,
    torch.optim.Muon: Reach.PARAMETER,
    **dict.fromkeys(
        (
            torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad,
            torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
            torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
            torch.optim.SparseAdam,
        ),
        Reach.ELEMENT,
    ),
}  # fmt: skip
"""Optimizers that need not be tried. Classes derived from them may do more, and are."""


class Undecided(Exception):
    """The optimizer could not be tried; the text says why."""


def by_element(kind: Kind) -> Kind:
    """Declare that an optimizer updates each element by itself; also as a decorator.

    Needed only where a step cannot find it out by trying.
    """
    KNOWN[kind] = Reach.ELEMENT
    return kind


def reach_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Reach:
    """Try a copy of the optimizer on small tensors and on their halves.

    parameters: of its own, those which it may hold a part of. Each of its groups is
    tried with tensors of as many dims as these. Raises: Undecided.
    """
    if type(optimizer) in KNOWN:
        return KNOWN[type(optimizer)]
    reaches = _tried(optimizer, parameters, _Trial.reach)
    return max([Reach.ELEMENT, *reaches], key=list(Reach).index)


def exchanges(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether it moves tensors between ranks by itself, as one that was written for
    data parallel ranks does; tried as `reach_of` does. Raises: Undecided, if the trial
    fails before anything moves."""
    if type(optimizer) in KNOWN:
        return False
    with _Exchanges() as seen:
        try:
            _tried(optimizer, parameters, _Trial.run)
        except Undecided:
            if not seen.any:
                raise
    return seen.any


class _Exchanges(TorchDispatchMode):
    """Notes collectives, whatever function of torch called them."""

    any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.any |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


T = TypeVar("T")


def _tried(
    optimizer: Optimizer, parameters: Sequence[Tensor], of: Callable[[_Trial], T]
) -> list[T]:
    """Asks of each group and number of dims; chance is left as it was, and functions
    that the optimizer compiles run as they are written."""
    mine = {id(p) for p in parameters}
    results = []
    for group in optimizer.param_groups:
        ranks = {p.ndim: p for p in group["params"] if id(p) in mine and p.ndim}
        for like in ranks.values():
            try:
                with (
                    torch.random.fork_rng(_devices(like)),
                    torch.compiler.set_stance("force_eager"),
                ):
                    results.append(of(_Trial(optimizer, group, like)))
            except Undecided:
                raise
            except Exception as error:
                raise Undecided(f"{type(error).__name__}: {error}") from error
    return results


def _devices(like: Tensor) -> list[torch.device]:
    return [like.device] if like.device.type == "cuda" else []


class _Trial:
    """A group of an optimizer, tried with tensors of as many dims as `like`."""

    def __init__(
        self, optimizer: Optimizer, group: dict[str, Any], like: Tensor
    ) -> None:
        self.optimizer, self.group = optimizer, group
        shape = SHAPES.get(like.ndim) or [LARGER - i for i in range(like.ndim)]
        dtype = torch.promote_types(like.dtype, torch.float32)
        drawn = torch.Generator().manual_seed(0)
        start, slope, always = (torch.randn(*shape, generator=drawn) for _ in range(3))
        # Where each element begins, how its gradient grows with it, and what is added
        # in all steps and in each: sums at right angles to the parameter, which grow
        # and shrink by rows, columns and steps, as what clips them waits for.
        once = [_uneven(shape, drawn) for _ in range(STEPS)]
        rows = (start, slope.abs() / 10, always, *once)
        self.whole = tuple(x.to(like.device, dtype) for x in rows)
        options = [*group.values(), *vars(optimizer).values()]
        awaited = [n for n in options if type(n) is int and n <= LATEST]
        self.steps = STEPS + max([0, *awaited])
        self.numbers: dict[str, float] = {}  # among the options, when it was trained

    def run(self) -> None:
        self.train(self.whole)

    def reach(self) -> Reach:
        whole, start = self.whole, self.whole[0]
        other = tuple(x.flip(0) * 1.5 for x in whole)
        [alone], numbers = self.train(whole), self.numbers
        [beside] = self.train(other)
        if self.numbers != numbers:  # a rate that follows from what it trains
            return Reach.MODEL
        update = float((alone - start).abs().max())
        if not 0 < update < float("inf"):
            raise Undecided(f"it changes parameters by {update}")
        limit = APART * update
        together = torch.stack(self.train(whole, other))
        if bool(((together - torch.stack([alone, beside])).abs() > limit).any()):
            return Reach.MODEL
        for dim, extent in enumerate(start.shape):
            parts = [x.tensor_split([extent // 3], dim) for x in whole]
            halves = [self.train(part)[0] for part in zip(*parts, strict=True)]
            if bool(((torch.cat(halves, dim) - alone).abs() > limit).any()):
                return Reach.PARAMETER
        return Reach.ELEMENT

    def train(self, *rows: tuple[Tensor, ...]) -> list[Tensor]:
        """Parameters after some steps of a fresh copy of the optimizer, in which no
        element's gradient knows of another."""
        trained = [nn.Parameter(start.clone()) for start, *_ in rows]
        optimizer = self.copy(trained)

        def closure() -> Tensor:
            loss = torch.zeros((), device=rows[0][0].device)
            for p, (_, slope, always, *once) in zip(trained, rows, strict=True):
                at, added = p.detach(), always + once[i % STEPS]
                p.grad = slope * at + added
                loss = loss + ((slope * at / 2 + added) * at).sum()
            return loss

        step = type(optimizer).step
        asked = inspect.signature(step).parameters.get("closure")
        closures = [closure] if asked and asked.default is asked.empty else []
        for i in range(self.steps):  # noqa: B007  the closure reads it
            closure()
            step(optimizer, *closures)
        options = optimizer.param_groups[0].items()
        self.numbers = {
            k: float(v)
            for k, v in options
            if isinstance(v, int | float) or (_is_tensor(v) and v.numel() == 1)
        }
        return [p.detach() for p in trained]

    def copy(self, trained: list[nn.Parameter]) -> Optimizer:
        """The optimizer, without what it has stored, for other parameters.

        Not by its own `__getstate__`, which drops what classes add.
        """
        source = self.optimizer
        options = {
            k: copy.deepcopy(v)
            for k, v in self.group.items()
            if k not in ("params", "param_names")
        }
        if (rate := options.get("lr")) is not None:
            first = float(options.get("initial_lr", rate))  # a schedule begins with 0
            tried = min(max(first, RATES[0]), RATES[1])
            options["lr"] = torch.full_like(rate, tried) if _is_tensor(rate) else tried
        known: dict[int, Any] = {
            id(p): trained[0] for group in source.param_groups for p in group["params"]
        }
        known[id(source.state)] = defaultdict(dict)
        known[id(source.param_groups)] = [{**options, "params": trained}]
        attributes = {}
        for name, value in vars(source).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                attributes[name] = OrderedDict[int, Any]()
            elif name != "step":  # a schedule's, which would run the source
                attributes[name] = copy.deepcopy(value, known)
        made: Optimizer = object.__new__(type(source))
        made.__dict__.update(attributes)
        return made


def _uneven(shape: Sequence[int], drawn: torch.Generator) -> Tensor:
    """Numbers of which some rows, some columns ..., or all, are drawn to be large."""
    numbers = torch.randn(*shape, generator=drawn)
    numbers *= torch.randn((), generator=drawn).exp()
    for dim, extent in enumerate(shape):
        sizes = torch.randn(extent, generator=drawn).exp()
        numbers = (numbers.movedim(dim, -1) * sizes).movedim(-1, dim)
    return numbers


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
