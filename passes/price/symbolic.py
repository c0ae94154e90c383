"""Costs of a model, as formulas in the sizes of its named dims.

Every tensor dim is a product of named dims; a symbol for each gives every value of the
traced graph a symbolic shape. What counts numbers then counts formulas: operations are
those of `passes.cost.flops`, on the same nodes. A model's layers are alike, so one of
them counts `layers` times, whatever its depth. Symbols are `size("embed")` and so on,
and mesh axes by their names: what an axis splits is divided by `size("tp")`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Protocol, cast

from sympy import Expr, Integer, Symbol, expand

from ..cost import flops
from ..dims.name_dims import Dim, Dims, Named
from ..dims.origins import Origin
from ..graph import Node, Value, live_in
from ..layers import number_in
from ..mesh import DATA
from ..ops.memory import find_owners
from ..ops.op import op_of
from ..plan import Plan, PlanError
from ..shard.propagate import propagate
from ..shard.sharding import Sharding

BACKWARD_PRODUCTS = 2  # products of the backward for one of the forward
MASK_BYTES = 1  # of an element of a dropout's mask
MASK, RESULT = "mask", "result"


class ShortModel(Protocol):
    """A model with few of its layers, its dims named, see `autopar.planner.planner`.

    starts: the module paths at which the first layers begin, ("",) if none are alike.
    """

    @property
    def named(self) -> Named: ...
    @property
    def starts(self) -> tuple[str, ...]: ...


def size(name: str) -> Symbol:
    """The symbol of a named dim, a mesh axis, or of `layers`."""
    return Symbol(name, integer=True, positive=True)


LAYERS = size("layers")
KORTHIKANTI = ("none", "selective", "full")  # policies of recomputation


class Symbols:
    """Symbols of a model's dims. Dims of one name and several sizes are told apart by
    a number behind the name."""

    def __init__(self, named: Named) -> None:
        self.named = named
        known: dict[str, list[int]] = {}
        for dims in named.dims.values():
            for dim in (d for factors in dims for d in factors):
                sizes = known.setdefault(dim.name, [])
                if dim.size not in sizes:
                    sizes.append(dim.size)
        self._sizes = known

    @cached_property
    def values(self) -> Mapping[Symbol, int]:
        """The sizes that the model was traced with."""
        return {
            self._symbol(name, i): n
            for name, sizes in self._sizes.items()
            if not name.isdigit()
            for i, n in enumerate(sizes)
        }

    def _symbol(self, name: str, i: int) -> Symbol:
        return size(name if i == 0 else f"{name}_{i}")

    def of(self, dim: Dim) -> Expr:
        """The symbol of a dim; the extent itself of a numbered one."""
        if dim.name.isdigit():  # the number of equal pieces
            return Integer(dim.size)
        return self._symbol(dim.name, self._sizes[dim.name].index(dim.size))

    def shape(self, dims: Dims, sharding: Sharding | None = None) -> tuple[Expr, ...]:
        """Returns a value's extents, on one rank if its sharding is given."""
        slots = sharding.slots if sharding else [[()] * len(f) for f in dims]
        return tuple(
            prod(
                (
                    self.of(d) / prod(map(size, axes))
                    for d, axes in zip(factors, split, strict=True)
                ),
                start=Integer(1),
            )
            for factors, split in zip(dims, slots, strict=True)
        )

    def value(self, v: Value, dims: Dims, sharding: Sharding | None = None) -> Value:
        """The value with a shape of formulas: its `numel` and `bytes` are formulas."""
        shape = self.shape(dims, sharding)
        return replace(v, shape=cast("tuple[int, ...]", shape))

    def node(self, node: Node) -> Node:
        """The node with symbolic shapes."""

        def of(v: Value) -> Value:
            return self.value(v, self.named.dims[v.name])

        outs = tuple(v and of(v) for v in node.outs)
        return replace(node.substitute(of), outs=outs)


def parameters(short: ShortModel) -> Expr:
    """The number of parameters."""
    return _whole(short, lambda run: _parameters(short, run))


def layer_parameters(short: ShortModel) -> Expr:
    """The number of parameters of one layer."""
    return _parameters(short, 1)


def step_flops(short: ShortModel, recompute: str = "none") -> Expr:
    """Floating point operations of forward and backward over `batch` samples.

    Products only; a multiply-add is two operations, the backward takes twice those of
    the forward, and what is recomputed takes those of the forward again: arXiv
    2104.04473, equation 3, is recompute="full". Causal attention is not discounted.
    Raises PlanError for a policy that the papers do not have.
    """
    _check_policy(recompute)
    again = {"full": _everything, "selective": _has_square}.get(recompute, _nothing)

    def of(run: int | None) -> Expr:
        redone = again if run is not None else _nothing
        return _flops(short, run, 1 + BACKWARD_PRODUCTS, redone)

    return _whole(short, of)


def activation_bytes(short: ShortModel, plan: Plan | None = None) -> Expr:
    """Bytes that one layer keeps of a microbatch on one rank, where every op keeps what
    it needs (`Op.keeps`): the accounting of Korthikanti 2022, equations 1, 2, 4 and 6.

    plan: its mesh, what its axes split, and what is recomputed. A value counts once,
    and as it lies where it is made: what sequence parallelism gathers is gathered again
    in the backward (section 4.2.2). Raises PlanError for a policy that paper has not.
    """
    named, symbols = short.named, Symbols(short.named)
    states = propagate(named, plan).states if plan else {}
    policy = plan.recompute if plan else "none"
    _check_policy(policy)
    total = Integer(0)
    for v, itemsize in _residuals(short, policy):
        dims = named.dims[v.name]
        if not (policy == "selective" and _has_square(dims)):
            total += itemsize * symbols.value(v, dims, states.get(v.name)).numel
    return expand(total)


def _check_policy(policy: str) -> None:
    if policy not in KORTHIKANTI:
        raise PlanError(
            f"there is no formula of what recompute='{policy}' keeps",
            fix=f"use one of {', '.join(KORTHIKANTI)}",
        )


def state_bytes(count: Expr, zero: int, weights: int = 2, optimizer: int = 12) -> Expr:
    """Bytes of parameters, gradients and the optimizer's state on one rank (Rajbhandari
    2020, figure 1): each stage of ZeRO shares out one more of them along dp.

    count: of parameters. weights: bytes of one, and of its gradient. optimizer: bytes
    of its state; 12 for Adam with parameters in 4 bytes beside those of 2.
    """
    shares = (optimizer, weights, weights)  # state, gradients, parameters
    whole = sum(shares[zero:])
    return count * (whole + Integer(sum(shares[:zero])) / size(DATA))


def _residuals(short: ShortModel, policy: str) -> list[tuple[Value, int]]:
    """The residuals of a layer, and bytes of an element. Views are their bases."""
    named = short.named
    nodes = [n for n in named.graph.nodes if _run(short, n.location.module) == 1]
    entering = live_in(nodes)
    owners = find_owners(nodes, {name: name for name in entering})
    values = entering | {v.name: v for n in nodes for v in n.results}
    residuals: dict[str, tuple[Value, int]] = {}

    def keep(v: Value) -> None:
        if named.origins[v.name] is Origin.BOTH:
            root = values[owners.get(v.name, v.name)]
            residuals[root.name] = root, root.dtype.itemsize

    for node in nodes:
        keeps = op_of(node).keeps
        for read in keeps:
            if policy == "full" or (keeps == (0, 1) and not _bilinear(node)):
                continue
            if read == MASK:
                residuals[f"mask of {node.out.name}"] = node.out, MASK_BYTES
            else:
                keep(node.out if read == RESULT else node.operands[cast("int", read)])
    if policy == "full":
        for v in entering.values():
            keep(v)
    return list(residuals.values())


def _bilinear(node: Node) -> bool:
    """Whether both operands are values: a product with a number keeps nothing."""
    return len(node.operands) == 2


# --- Layers ------------------------------------------------------------------------


def _whole(short: ShortModel, of: Callable[[int | None], Expr]) -> Expr:
    """The sum over a model: what is outside of layers, the second layer for each of
    them, and what the last one has more, as where part of a pattern comes after its
    repeats."""
    if len(short.starts) < 2:
        return expand(of(None) + of(0))
    more = of(len(short.starts) - 1) - of(1)
    return expand(of(None) + LAYERS * of(1) + more)


def _run(short: ShortModel, path: str) -> int | None:
    """The number of the layer of the short model that a module is in; None: outside."""
    layers = short.starts[0].rpartition(".")[0]
    if (number := number_in(layers, path)) is None:
        return None
    return sum(int(s.rpartition(".")[2]) <= number for s in short.starts) - 1


def _parameters(short: ShortModel, run: int | None) -> Expr:
    named, symbols = short.named, Symbols(short.named)
    own = (v for v in named.graph.params if _run(short, v.name) == run)
    counts = (symbols.value(v, named.dims[v.name]).numel for v in own)
    return sum(counts, Integer(0))


def _flops(
    short: ShortModel, run: int | None, times: int, again: Callable[[Dims], bool]
) -> Expr:
    """Sums the FLOPs of a run's products; twice those that are recomputed."""
    total = Integer(0)
    named, symbols = short.named, Symbols(short.named)
    for node in named.graph.nodes:
        if op_of(node).is_product and _run(short, node.location.module) == run:
            redone = again(named.dims[node.out.name])
            total += (times + redone) * flops(symbols.node(node))
    return total


def _nothing(_: Dims) -> bool:
    return False


def _everything(_: Dims) -> bool:
    return True


def _has_square(dims: Dims) -> bool:
    """Whether the same dim is there twice, as in scores of attention: what selective
    recomputation leaves out, see `passes.recompute`."""
    keys = [d.key for factors in dims for d in factors]
    return len(set(keys)) < len(keys)
