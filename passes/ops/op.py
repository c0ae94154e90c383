"""op: all that there is to say of one operation, in one declaration.

Passes ask the declaration (`op_of`) and name no op themselves. Of what is not declared,
torch knows enough: elementwise ops have a rule by their tag, others are probed, and
autograd is traced through them. A newcomer is declared in its family's file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from ..atoms import Atoms
from ..graph import OWN, Node, Value, without_overload
from ..graph_text import OURS
from ..mesh import Axes, Split
from ..ops.notation import Role

if TYPE_CHECKING:
    from ..ops.cotangents import Cotangents

OutCotangents = Sequence[Value | None]
# node, cotangents of its outs (None where nothing flows back) -> of its operands
Derivative = Callable[["Cotangents", Node, OutCotangents], list[Value | None]]
# The dims of its operands that a result is linear in, see `passes.ops.linearity`.
Linear = Literal[
    "", "jointly", "in each", "in the first", "in the second", "chosen", "cast"
]
# Results and derivatives are finite where operands are, or always.
Finite = Literal["", "kept", "always"]
# What a result of its operand's shape has at each place, see `Op`.
Elements = Literal["", "same", "cast", "like"]
# What torch.autocast computes in: half the bits, float32, or one dtype for all.
Autocast = Literal["", "low", "wide", "equal"]


class Place(Protocol):
    """The part of `passes.stage.localize.Localizer` that ops use: a rank's position."""

    @property
    def sizes(self) -> Any: ...

    def axes_of(self, v: Value, dim: int) -> tuple[str, ...]:
        """The axes that split a dim of one factor."""

    def position(self, v: Value, dim: int) -> tuple[Split, ...]:
        """The factors of a dim, each its global extent and the axes that split it."""

    def is_varying(self, v: Value, axes: Axes) -> bool:
        """Whether ranks along the axes each do something else with the value."""


class Unite(Protocol):
    """What is known while ops are gone through: `passes.proof.extents`. tensors: value
    name -> its dims, each the atoms it is a product of. computed: of constants, whether
    more was done to them than to count. fixed: atoms that keep their size."""

    atoms: Atoms
    tensors: dict[str, list[list[int]]]
    computed: dict[str, bool]
    fixed: list[int]

    def bind(self, node: Node) -> bool:
        """Unites what the op's rule says, or trials; whether there was one. Without
        one, `align`."""

    def align(self, node: Node) -> None:
        """Unites dims of equal extent at the same place from the right."""

    def sum(self, whole: list[int], parts: list[tuple[list[int], int]]) -> None:
        """A whole is the sum of parts, each with its extent."""

    def index(self, index: Value, x: Value, dim: int) -> None:
        """Unites what an index counts, or chooses, with a value's dim."""

    def add_sum(self, whole: list[int], part: list[int], constant: int) -> None:
        """A whole is a part and a constant."""


class Small(Protocol):
    """A graph whose sizes are made small: `passes.proof.shrink.Shrinker`. compared:
    numbers that are compared with positions or ids, and what these became."""

    compared: dict[int, int]

    def number(self, n: int, node: Node) -> int:
        """A number that positions are compared with, or made by: its place among the
        sizes, those of the node first."""

    def choice(self, n: int, x: Value) -> int:
        """A number that choices are compared with: as far from the last as it was."""

    def leading(self, name: str, dim: int, n: int) -> int:
        """The small size of the first factors of a value's dim, whose product is n."""

    def trailing(self, name: str, dim: int, n: int) -> int | None:
        """The small size of the last factors of a value's dim, if n is their
        product."""


@dataclass(frozen=True)
class Alternative:
    """Another way to split an op than its rule has: an axis splits two dims at once,
    and its ranks exchange what they lack in place of gathering it.

    name: `ring`, as plans write it: `ring:seq`. along: an operand, by number, and its
    dim, which is split as the rule has it. named: which of its factors that is; "": it
    is one and the same as what is split beside it. beside: operands and dims that are
    split with it. constant: operands that no gradient may flow through.
    on_rank: what a rank of an axis runs, of the node in global shapes, in the rank's,
    the axis and its ranks; with it a search can weigh the alternative. None: it cannot.
    """

    name: Role
    along: tuple[int, int]
    beside: tuple[tuple[int, int], ...]
    named: str = ""
    constant: tuple[int, ...] = ()
    on_rank: Callable[[Node, Node, str, int], Node] | None = None


@dataclass(frozen=True)
class Op:
    """One operation. What is left out is as of an op that nobody knows.

    name: `aten.add`, `autopar.pick` or `comm.all_gather`. form: the overload that
    normal graphs have; derivative and spelling are of that one alone.
    heeds: of torch's ops the arguments that passes read or hand on, of all overloads; a
    value other than torch's default in another one is refused ("": it runs as it is,
    with whatever it is given). Of our own ops all arguments, in order.
    rule: which letters flow through it, see `passes.ops.notation`; by node, where it
    depends on arguments. examples: calls of extents a < b < c < d that prove the rule
    and flops, where x(a, b) is a tensor: `overload(arguments); ...`. alternatives: to
    the rule.
    linear: what sums may pass it, see `passes.ops.linearity`. finite: whether what it
    gives, and its derivative, is finite, see `passes.ops.finite`; else it need not be.
    view: what it shows of its operand without a copy: all of it in another "shape", in
    another "order", as it is ("same"), "copies" of it, or a "part".
    elements: of a result of its operand's shape: the "same" at each place, "cast" to
    another dtype, or "like" them: made of that one alone, or of none.
    values: the integers in its result are those of its first operand, "moved", or some
    are "replaced" by others. selects: whether what its results hold is in its operands,
    where neither `values` nor `elements` says so. looks_up: the arguments that are a
    table, what picks its rows, and the table's dim, or that dim. labels: the argument
    with a loss's classes.
    autocast: what torch.autocast computes it in: "low" precision, "wide" numbers, or
    the dtype that makes operands "equal". lowered: how many operands low precision
    casts, None: all.
    part: of an op that takes or writes a part of one dim: where it begins and ends.
    put_back: what a node, a view, is called with to put what it shows back into its
    operand: of the node, the operand and the new part, the op and its arguments.
    extents: which extents change together, where its rule does not say all. counts:
    whether what it makes of positions is positions, as views do.
    row_by_row: whether each row is by itself, and neither it nor its derivative names
    a number of rows. rowwise: whether it is made in one pass over the rows, though not
    elementwise. is_product: whether time goes there.
    flops: of the forward, a multiply-add counting as two; else one for each element.
    workspace: bytes that are alive while it runs, beside its operands and results.
    weights: names of the arguments whose gradients can wait.
    keeps: what its derivative reads, by Korthikanti 2022 (arXiv:2205.05198, section
    4.1): operands by number, its "result", or a "mask" of its result's size.
    sizes: the node with the sizes among its arguments set to those of its results, of a
    shard or a smaller model. shrunk: the same of a smaller model alone, see
    `passes.ops.shrunk`. on_rank: what a rank runs in its place, which knows where its
    shard begins; of the node in global shapes, and in the rank's.
    derivative: else autograd is traced through it, as where `traced_if` says so.
    forward: the node to run forward, if the derivative needs more results of it.
    formula: what it computes, of an op that torch does not have. on_shard: the same of
    a shard that begins at a global index, which comes first.
    spelling: in Python: `torch.add`, or as a method `.reshape`; "": by its name.
    in_place: the same of its form that writes over the first operand; "": it has none.
    commutes: whether that may as well be the second. called_with: how many arguments
    a collective's call takes, the others being for the compiler. kind: what it moves
    between ranks, as collectives are priced.
    """

    name: str
    heeds: str = ""
    rule: str | Callable[[Node], str | None] | None = None
    examples: str = ""
    alternatives: tuple[Alternative, ...] = ()
    form: str = "default"
    linear: Linear = ""
    finite: Finite | Callable[[Node], Finite] = ""
    view: Literal["", "shape", "order", "same", "copies", "part"] = ""
    elements: Elements = ""
    values: Literal["", "moved", "replaced"] = ""
    selects: bool = False
    looks_up: str = ""
    labels: str = ""
    autocast: Autocast = ""
    lowered: int | None = None
    part: Callable[[Node], tuple[int, int]] | None = None
    put_back: Callable[[Node, Value, Value], tuple[str, tuple[Any, ...]]] | None = None
    extents: Callable[[Unite, Node], None] | None = None
    counts: bool = False
    row_by_row: bool = False
    rowwise: bool = False
    is_product: bool = False
    flops: Callable[[Node], int] | None = None
    workspace: Callable[[Node], int] | None = None
    weights: str | Callable[[Node], str] = ""
    keeps: tuple[int | str, ...] = ()
    sizes: Callable[[Node], Node] | None = None
    shrunk: Callable[[Small, Node, Node], Node] | None = None
    on_rank: Callable[[Place, Node, Node], Node] | None = None
    derivative: Derivative | None = None
    traced_if: Callable[[Cotangents, Node], bool] | None = None
    forward: Callable[[Cotangents, Node], Node] | None = None
    formula: Callable[..., Tensor] | None = None
    on_shard: Callable[..., Tensor] | None = None
    spelling: str = ""
    in_place: str = ""
    commutes: bool = False
    called_with: int | None = None
    kind: str = ""

    @property
    def stays(self) -> bool:
        """Whether its result has each element of its operand at its place."""
        return self.elements in ("same", "cast")

    @property
    def op(self) -> str:
        """The op's name in a node: `aten.add.Tensor`."""
        return self._of(self.name)

    @property
    def op_in_place(self) -> str:
        """The op that writes its result into the first operand: `aten.add_.Tensor`."""
        return self._of(f"{self.name}_")

    def _of(self, name: str) -> str:
        return f"{name}.{self.form}" if name.startswith("aten.") else name


OPS: dict[str, Op] = {}


def declare(*ops: Op) -> None:
    """Adds ops to those that passes know."""
    for op in ops:
        assert op.name not in OPS, f"{op.name} is declared twice"
        OPS[op.name] = op
        if not op.name.startswith("aten."):
            OWN[op.name] = {a: (i, None) for i, a in enumerate(op.heeds.split())}
    declaration.cache_clear()


def op_of(node: Node) -> Op:
    """The declaration of a node's op."""
    return declaration(node.op)


@cache  # passes ask some million times
def declaration(op: str) -> Op:
    """The declaration of an op, with its overload or without: one that says nothing, of
    torch's, or the user's own, that has none."""
    name = without_overload(op)
    if name in OPS:
        return OPS[name]
    assert not name.startswith(OURS), f"{name} is declared nowhere in passes.ops"
    return Op(name=name)


def is_usual(node: Node) -> bool:
    """Whether the node's op has the overload that its declaration speaks of."""
    return node.op == op_of(node).op


def selects(name: str) -> bool:
    """Whether an op rounds nothing, as what its results hold is in its operands, whose
    places it may change. name: without overload."""
    op = declaration(name)
    moves = op.values and not {"accumulate", "reduce"}.intersection(op.heeds.split())
    return op.selects or bool(moves) or op.elements == "same"


def is_view(node: Node) -> bool:
    """Whether the node shows its operand, or a part of it, without a copy."""
    return bool(op_of(node).view)


def shows_all(node: Node) -> bool:
    """Whether a node has the elements of its operand, all and in order: in another
    shape or dtype, or as they are."""
    op = op_of(node)
    return op.view == "shape" or op.stays


def is_method(node: Node) -> bool:
    """Whether the node is a view of its whole operand, written as a method of it."""
    op = op_of(node)
    whole = op.view in ("shape", "order", "copies")
    return whole and is_usual(node) and bool(op.spelling)


def to_out(argument: str) -> Callable[[Node], Node]:
    """An argument that says the shape of the result."""
    return lambda node: node.with_args(**{argument: node.out.shape})
