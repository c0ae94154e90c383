"""Seconds of runs that nothing is fitted to, with the constants of `published_runs`.

`others.csv` was in view while the models of what each system does were settled;
`held_out.csv` was looked up after that. Each says what ran: Megatron-LM of 2021 (see
`published_runs`); that of Korthikanti 2022 (arXiv:2205.05198) and later, which runs
collectives of the backward beside it, and with sequence parallelism sends each rank's
own share to the next stage; Megatron-DeepSpeed (Smith 2022, arXiv:2201.11990; Le Scao
2022, arXiv:2211.05100), which has neither, nor interleaved stages, and sends all that a
rank holds; FSDP (llm-foundry), which gathers a block while another computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.account import Account, PartCost
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.search.balance_layers import balance_layers
from autopar.passes.search.by_formula import layer_mesh
from autopar.passes.search.recompute_whole import layer_again
from autopar.passes.search.search import accounts_of
from autopar.passes.stage.blocks import BlockMessages
from autopar.planner.planner import make_prices
from examples.benchmarks.published_models import Row, gpt, in_turn, read
from examples.benchmarks.published_runs import (
    UNFITTED,
    Run,
    in_float32,
    overlapped,
)


@dataclass(frozen=True)
class Other:
    """A run, and where it is published."""

    source: str
    run: Run


@cache
def other_runs(table: str = "others", source: str = "") -> tuple[Other, ...]:
    """The runs of a table of that form, of sources whose names begin so."""
    rows = (row for row in read(table) if row["source"].startswith(source))
    return tuple(Other(row["source"], _run(row)) for row in rows)


def _run(row: Row) -> Run:
    candidate, cluster = candidate_of(row), _cluster(row)
    sizes = ("hidden", "heads", "layers", "vocab", "seq")
    of = gpt(*(int(row[name]) for name in sizes), attention=row["attention"])
    sequence_parallel, megatron = row["sp"] == "1", "Megatron-LM" in row["system"]
    prices = make_prices(of, cluster, sequence_parallel=sequence_parallel)
    policy = candidate.recompute if row["recompute"] == "selective" else "none"
    candidate = replace(candidate, recompute=policy)
    split, samples = layer_mesh(candidate.mesh), candidate.samples
    layer = prices(split, policy, False, samples, candidate.shares > 1)
    accounts = accounts_of(candidate, prices)
    if row["system"] == "Megatron-LM":
        accounts = [overlapped(account) for account in accounts]
    if row["recompute"] == "full":
        accounts = [
            account + layer_again(layer) * layers
            for account, layers in zip(accounts, candidate.layers, strict=True)
        ]
    shared = int(row["tp"]) if megatron and not sequence_parallel else 1
    accounts = [a + in_float32(a) for a in in_turn(accounts, shared)]
    if row["system"] == "DeepSpeed":
        accounts = [a + of_bfloat16(a) for a in accounts]
    seconds = float(row["iter_time_s"])
    batch = samples * candidate.microbatches * candidate.data_parallel
    return Run(row["model"], seconds, of, batch, candidate, cluster, tuple(accounts))


def of_bfloat16(account: Account) -> Account:
    """What DeepSpeed's pipelines move beside others' where products are in bfloat16:
    each microbatch's gradients are written (2 bytes of a parameter), read, and added to
    ones of 4 bytes (10), where others add to those of 2 (4); and these are all-reduced,
    with ZeRO's first stage too (`_bf16_reduce_grads` of `deepspeed.runtime.pipe`)."""
    backward, weight = (
        replace(PartCost(), scattered=BlockMessages(bytes=3 * part.scattered.bytes))
        for part in (account.backward, account.weight)  # an all-reduce is two of these
    )
    backward = replace(backward, moved=8 * account.held.trained / 2)
    return Account(backward=backward, weight=weight, pending=account.pending)


def _cluster(row: Row) -> Cluster:
    """Devices that send so many GB a second each out of their node; llm-foundry's
    attention was a Triton kernel of 2023, not that of the table."""
    cluster = UNFITTED.of(cluster_of(f"{row['gpus']}x{row['device']}"))
    cluster = replace(cluster, device=replace(cluster.device, attention=""))
    inside, *network = cluster.levels
    speed = float(row["network_gb"]) * 1e9
    levels = [replace(level, bytes_per_second=speed) for level in network]
    return replace(cluster, levels=(inside, *levels))


def candidate_of(row: Row) -> Candidate:
    """The plan that ran, as a row says it."""
    sizes = [(axis, int(row[axis])) for axis in ("pp", "dp", "tp")]
    chunks = int(row["vpp"])
    stages = dict(sizes)["pp"] * chunks
    # What is before the layers and after them is worth one where they do not divide.
    beside = float(int(row["layers"]) % stages != 0)
    layers = balance_layers(int(row["layers"]), stages, 1.0, beside, beside)
    assert layers is not None, "it ran, so it has layers enough"
    return Candidate(
        Mesh(tuple((axis, n) for axis, n in sizes if n > 1)),
        samples=int(row["mbs"]),
        microbatches=int(row["n_microbatches"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        stages_per_rank=chunks,
        zero=int(row["zero"]),
        recompute=row["recompute"],
        layers=layers,
    )
