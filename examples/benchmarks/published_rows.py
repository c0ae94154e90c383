"""Rows of published runs: the plan that ran, and the devices that it had.

Of zero bubble's paper (Qi 2023, arXiv:2401.10241, table 4) these are pipelines of as
many stages as ranks: interleaved stages are left out, as two of them have no layer. The
paper does not state the vocabulary. The authors' script (`pretrain_zero_bubble.sh` of
sail-sg/zero-bubble-pipeline-parallelism, 2023) reads a SentencePiece model, which
others who ran it give 32,004 tokens; Megatron-LM pads them to a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.machine.hardware import cluster_of
from autopar.passes.mesh import Mesh
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import Cluster
from autopar.passes.search.balance_layers import balance_layers
from examples.benchmarks.published_models import Row, read

SIZES = ("hidden", "heads", "layers", "vocab", "seq")
ZERO_BUBBLE = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
VOCAB = 32128  # of zero bubble's runs
# Of Megatron-LM's runs of 2021, and what other tables leave out.
USUAL = {
    **{"source": "", "system": "Megatron-LM 2021", "attention": "spelled", "sp": "0"},
    **{"device": "A100-80GB", "network_gb": "25", "recompute": "full", "zero": "0"},
}


def rows_of_runs(table: str) -> Iterator[Row]:
    """Rows of any table of runs, with the columns that `others` has."""
    for row in read(table):
        if table != "zero_bubble":
            yield {**USUAL, **row, "gpus": row.get("n_gpus") or row["gpus"]}
        elif row["samples_per_second"] and row["schedule"] in ZERO_BUBBLE:
            samples = int(row["samples"]) * int(row["microbatches"])
            took = samples / (float(row["samples_per_second"]) * int(row["ranks"]))
            yield {
                **USUAL,
                **dict.fromkeys(("dp", "tp", "vpp"), "1"),
                **row,
                **{"hidden": row["width"], "vocab": str(VOCAB)},
                **{"gpus": row["ranks"], "pp": row["ranks"], "recompute": "none"},
                **{"mbs": row["samples"], "n_microbatches": row["microbatches"]},
                "iter_time_s": repr(took),
            }


def sizes_of(row: Row) -> tuple[int, ...]:
    """The model's, by `SIZES`."""
    return tuple(int(row[name]) for name in SIZES)


def on_network(devices: str, gigabytes: float) -> Cluster:
    """Devices, as `8xH100`, that send so many GB a second each out of their node."""
    cluster = cluster_of(devices)
    inside, *network = cluster.levels
    speed = gigabytes * 1e9
    levels = [replace(level, bytes_per_second=speed) for level in network]
    return replace(cluster, levels=(inside, *levels))


def mesh_of(row: Row) -> Mesh:
    """The mesh that ran."""
    sizes = ((axis, int(row[axis])) for axis in ("pp", "dp", "tp"))
    return Mesh(tuple((axis, n) for axis, n in sizes if n > 1))


def candidate_of(row: Row) -> Candidate:
    """The plan that ran, as a row of `rows_of_runs` says it."""
    chunks = int(row["vpp"])
    stages = int(row["pp"]) * chunks
    # What is before the layers and after them is worth one where they do not divide.
    beside = float(int(row["layers"]) % stages != 0)
    layers = balance_layers(int(row["layers"]), stages, 1.0, beside, beside)
    assert layers is not None, "it ran, so it has layers enough"
    usual = "interleaved" if chunks > 1 else "1f1b"
    return Candidate(
        mesh_of(row),
        samples=int(row["mbs"]),
        microbatches=int(row["n_microbatches"]),
        schedule=ZERO_BUBBLE.get(row.get("schedule", ""), usual),
        stages_per_rank=chunks,
        zero=int(row["zero"]),
        recompute=row["recompute"],
        layers=layers,
    )
