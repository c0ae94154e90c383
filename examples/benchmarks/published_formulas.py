"""Published formulas of parameters, operations and bytes, found in the traced graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sympy import LT, Expr, Integer, Rational, expand

from autopar.options import make_plan
from autopar.passes.price.symbolic import (
    LAYERS,
    activation_bytes,
    layer_parameters,
    parameters,
    size,
    state_bytes,
    step_flops,
)
from autopar.passes.schedule.check_schedule import check
from autopar.passes.schedule.make_schedule import make_schedule
from autopar.passes.schedule.schedule import add_communication
from examples.benchmarks.published_models import Row, gpt, read

H, A, S, V, B, T = map(size, ("embed", "heads", "seq", "vocab", "batch", "tp"))
L = LAYERS

# arXiv 2104.04473, equations 2 and 3 (with full recomputation), and the model's own
# operations; 2205.05198, equations 1, 2, 4 and section 5.
PARAMETERS = 12 * L * H**2 * (1 + Rational(13, 12) / H + (V + S) / (12 * L * H))
FLOPS_AGAIN = 96 * B * S * L * H**2 * (1 + S / (6 * H) + V / (16 * L * H))
FLOPS = 72 * B * L * S * H**2 * (1 + S / (6 * H) + V / (12 * H * L))
SCORES = 5 * A * S / H
# (sequence parallel, recomputation) -> bytes of a layer on each of T ranks.
ACTIVATIONS = {
    (False, "none"): S * B * H * (10 + 24 / T + SCORES / T),
    (True, "none"): S * B * H * (34 + SCORES) / T,
    (False, "selective"): S * B * H * (10 + 24 / T),
    (True, "selective"): 34 * S * B * H / T,
    (False, "full"): 2 * S * B * H,
}
# What the rows of `korthikanti_memory.csv` call them.
KINDS = {
    "none": (False, "none"),
    "seq": (True, "none"),
    "sel": (False, "selective"),
    "seqsel": (True, "selective"),
    "full": (False, "full"),
}
GIB = 2**30
PER_PARAMETER = 18  # bytes: 2205.05198, figure 1


def megatron(formula: Expr) -> Expr:
    """Substitutes the sizes of Megatron's GPT, whose dims are named apart."""
    sizes = {size("ffn"): 4 * H, size("head_dim"): H / A, size("positions"): S}
    return expand(formula.subs(sizes))


@dataclass(frozen=True)
class Compared:
    """A formula of the graph beside the published one."""

    quantity: str
    derived: Expr
    published: Expr

    @property
    def difference(self) -> Expr:
        return expand(self.derived - self.published)


def formulas() -> list[Compared]:
    of = gpt(hidden=1024, heads=16)
    compared = [
        Compared("parameters", megatron(parameters(of)), PARAMETERS),
        Compared("FLOPs again", megatron(step_flops(of, "full")), FLOPS_AGAIN),
        Compared("FLOPs", megatron(step_flops(of)), FLOPS),
    ]
    for (sequence, recompute), published in ACTIVATIONS.items():
        name = f"activations, tp{' + sp' * sequence}, recompute {recompute}"
        compared.append(Compared(name, _activations(sequence, recompute), published))
    return compared


@cache
def _activations(sequence_parallel: bool, recompute: str) -> Expr:
    plan = make_plan("tp=2", sequence_parallel=sequence_parallel, recompute=recompute)
    return megatron(activation_bytes(gpt(hidden=1024, heads=16), plan))


def memory_row(row: Row) -> float:
    """What the graph's formulas give for a row of `korthikanti_memory.csv`."""
    kind = row["quantity"].rpartition(", ")[2]
    if kind == "param+optimizer":
        # The figure counts the matrices of layers alone: the highest power of `embed`.
        matrices = LT(megatron(layer_parameters(gpt(hidden=1024, heads=16))), H)
        ranks = int(row["tp"]) * int(row["pp"])
        total = matrices * L * PER_PARAMETER / ranks
        return float(total.subs(_sizes(row))) / GIB
    bytes_of = _activations(*KINDS[kind]).subs(_sizes(row))
    if row["unit"] == "% of none":
        return 100 * float(bytes_of / _activations(False, "none").subs(_sizes(row)))
    return float(bytes_of * _layers_in_flight(row)) / GIB


def _sizes(row: Row) -> dict[Expr, Integer]:
    columns = {"layers": L, "hidden": H, "heads": A, "seq": S, "mbs": B, "tp": T}
    return {symbol: Integer(row[name]) for name, symbol in columns.items()}


def _layers_in_flight(row: Row) -> int:
    """Layers times microbatches that the first rank holds, by the schedule itself."""
    ranks, chunks = int(row["pp"]), int(row["vpp"])
    return int(row["layers"]) // (ranks * chunks) * _in_flight(ranks, chunks)


@cache
def _in_flight(ranks: int, chunks: int) -> int:
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = make_schedule(name, ranks, 2 * ranks, chunks)
    return check(add_communication(schedule)).in_flight[0]


def zero_row(row: Row) -> float:
    """Gigabytes on a device, for a row of `zero_table1.csv`."""
    count = Rational(row["params_b"])
    states = state_bytes(count, int(row["zero_stage"]))
    return float(states.subs(size("dp"), int(row["dp"])))


def memory_rows() -> list[tuple[Row, float]]:
    return [(row, memory_row(row)) for row in read("korthikanti_memory")]


def zero_rows() -> list[tuple[Row, float]]:
    return [(row, zero_row(row)) for row in read("zero_table1")]
