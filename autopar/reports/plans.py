"""The tables of `autopar plan`: the best plan, its runners-up, and their precision."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.machine.measured_cluster import how_priced
from autopar.passes.plan import AUTO, NARROW
from autopar.passes.price.candidate import Candidate
from autopar.passes.price.cluster import TF32, Cluster
from autopar.passes.price.estimate import Estimate
from autopar.passes.search.search import Ranking
from autopar.planner.infeasible import NO_LAYERS, gigabytes
from autopar.planner.planner import ShortModel
from autopar.reports.tables import Table

# Ranks that share parameters in published runs whose prices are right within 5 %: those
# of arXiv:2304.11277; of more (arXiv:2104.04473, table 2) they are up to 34 % off.
CONFIRMED = 512


def precision_notes(
    of: ShortModel, cluster: Cluster, narrow: Estimate | None = None
) -> tuple[str, ...]:
    """Notes the dtype of products, or that half the bits would be faster. narrow: the
    best plan's estimate with "bf16-stream"."""
    tf32 = of.options.get("tf32", False)
    told = ("tf32",) if tf32 else ()
    chosen = of.options.get("precision")
    if narrow is not None:
        told = (
            "layers add to float32, as under torch.autocast; with --precision "
            f"{NARROW} to bfloat16, and the first plan takes "
            f"{narrow.seconds:.4g} s and {gigabytes(narrow.peak)}",
            *told,
        )
    if chosen is not None:
        return (f"precision {chosen}", *told)
    device = cluster.device.running(tf32, AUTO)
    ways = {"--precision bf16": "bfloat16", **({} if tf32 else {"--tf32": TF32})}
    faster = {
        way: f"{device.flops[dtype] / device.flops['float32']:.3g}"
        for way, dtype in ways.items()
        if device.flops.get(dtype, 0.0) > device.flops["float32"]
    }
    if not of.in_float32 or not faster:
        return told
    texts = [f"with {way} up to {times} times as fast" for way, times in faster.items()]
    return (*told, f"the model is in float32: products are {', '.join(texts)}")


def layers_notes(of: ShortModel, cluster: Cluster) -> tuple[str, ...]:
    """Notes by how many chunks the loss is computed; and for several devices, that no
    pipelines were among the candidates."""
    if (chunks := of.options.get("loss_chunks", 1)) > 1:
        told = (f"logits are there for one of {chunks} chunks of positions",)
        return (*told, *_no_pipelines(of, cluster))
    return _no_pipelines(of, cluster)


def _no_pipelines(of: ShortModel, cluster: Cluster) -> tuple[str, ...]:
    if of.layers is not None or cluster.devices == 1:
        return ()
    return (f"no pipelines were tried: {NO_LAYERS}; `compile --mesh pp=2` makes one",)


def plans_table(
    plans: Ranking, cluster: Cluster, title: str, notes: tuple[str, ...] = ()
) -> Table:
    """The best plan and its runners-up."""
    head = ("plan", "s/step", "memory", "idle", "communication", "MFU")
    rows = []
    for e in plans.best:
        rows.append(
            (
                str(e.candidate),
                f"{e.seconds:.4g}",
                gigabytes(e.peak),
                f"{e.bubble:.1%}",
                f"{e.communication / e.seconds:.1%}",
                f"{e.utilisation(cluster):.1%}",
            )
        )
    best = f"the best of {plans.tried} candidates"
    priced = how_priced(plans.best[0], cluster)
    again = recomputed(plans.best[0])
    beyond = _beyond_what_is_known([e.candidate for e in plans.best])
    return Table(title, head, tuple(rows), (best, priced, *again, *beyond, *notes))


def recomputed(e: Estimate) -> tuple[str, ...]:
    """Notes how recompute full differs from running whole layers again."""
    if e.whole_layers is None:
        return ()
    return (
        "recompute full runs again what backwards use, not a layer's last product; "
        "with whole layers, as Megatron-LM and torch's reentrant checkpoints run them, "
        f"a step takes {e.whole_layers:.4g} s",
    )


def _beyond_what_is_known(best: Sequence[Candidate]) -> tuple[str, ...]:
    """A warning of prices that no published run bears out."""
    many = max((c.alike for c in best if c.shares == 3), default=0)
    if many <= CONFIRMED:
        return ()
    return (
        f"with zero 3 parameters are shared by up to {many:,} ranks: published runs of "
        f"it bear out prices up to {CONFIRMED}; compare with --zero 1",
    )
